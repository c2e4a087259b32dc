"""The report: its keys, its status, and that a reader never sees half of one."""

import json
from pathlib import Path

import pytest

from ddp_examples.core import report
from ddp_examples.core.config import Config, build_config
from ddp_examples.core.demos import demos
from ddp_examples.core.exits import Exit
from ddp_examples.core.group import Group
from ddp_examples.core.verify import Check, at_most

GOOD, BAD = at_most("good", 0, 0), at_most("bad", 2, 1, "rank 3 did it")
KEYS = [
    "demo",
    "ok",
    "world_size",
    "hosts",
    "backend",
    "device",
    "torch",
    "python",
    "started",
    "seconds",
    "config",
    "ranks",
    "checks",
    "metrics",
]


def config_with(*arguments: str) -> Config:
    demo = demos()["basic"]
    return build_config(demo, demo.params(), arguments)


def test_keys_and_status(group: Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new folder" / "r.json"
    assert report.finish(group, config_with(f"report={path}"), [GOOD], {"loss": float("nan")}) == Exit.OK
    written = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert list(written) == KEYS
    assert list(written["ranks"][0]) == ["rank", "local_rank", "host", "pid", "device", "seconds"]
    assert list(written["checks"][0])[:4] == ["name", "measured", "allowed", "passed"]
    assert written["metrics"] == {"loss": "nan"}
    assert written["config"]["demo"]["epochs"] == 8
    assert [file.name for file in path.parent.iterdir()] == ["r.json"]
    assert "basic: ok, 1 of 1 checks passed" in capsys.readouterr().out


def test_a_failed_check_is_named_with_its_detail(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.finish(group, config_with(), [GOOD, BAD], {}) == Exit.CHECK_FAILED
    out = capsys.readouterr().out
    assert "FAILED bad: rank 3 did it" in out
    assert "basic: FAILED, 1 of 2 checks passed" in out


def test_no_check_is_no_success(group: Group) -> None:
    assert report.finish(group, config_with(), [], {}) == Exit.CHECK_FAILED


@pytest.mark.parametrize("path", ["/dev/null/r.json", "/proc/r.json"])
def test_an_unwritable_report_is_one_line_and_status_1(
    group: Group, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.finish(group, config_with(f"report={path}"), [GOOD], {}) == Exit.ERROR
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert path in err


def test_the_old_report_stays_when_the_new_one_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    assert report.write_report({"a": 1}, str(path)) == ""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert "No space left" in report.write_report({"a": 2}, str(path))
    monkeypatch.undo()
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_table_aligns_numbers_to_the_right() -> None:
    assert report.table([["n", "word"], [1, "a"], [100, "bc"]]) == "  n  word\n  1  a\n100  bc"


def test_the_header_says_how_to_start_more(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    report.begin(group, config_with())
    out = capsys.readouterr().out
    assert "basic: 1 rank on" in out
    assert "backend gloo (asked for), device cpu" in out
    assert "torchrun --nproc_per_node=4 -m ddp_examples.basic" in out


def test_a_check_is_what_the_report_says_it_is() -> None:
    assert list(Check.__dataclass_fields__) == ["name", "measured", "allowed", "passed", "detail"]
