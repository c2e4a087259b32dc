"""demo=all: every demo in turn, each with settings and files of its own, and one status for all."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, List

import pytest
import torch.distributed as dist
from torchrun import run, torchrun

from ddp_examples import __main__ as program
from ddp_examples.core.demos import DemoFile, demos
from ddp_examples.core.exits import Exit
from ddp_examples.core.launch import torchrun_arguments
from ddp_examples.core.ranks import Ranks
from ddp_examples.core.runs import module_of, planned_runs


def test_a_demo_gets_the_keys_that_it_has_and_files_of_its_own(tmp_path: Path) -> None:
    argv = ["demo=all", "demo.microbatches=2", "demo.epochs=3", "seed=5", f"report={tmp_path / 'r.json'}"]
    runs = {one.demo.name: one for one in planned_runs([*argv, f"checkpoint.path={tmp_path}"], Ranks())}
    assert set(runs) == {name for name, demo in demos().items() if demo.in_all}
    assert runs["model_parallel"].config.demo.microbatches == 2
    for name, one in runs.items():
        assert one.config.seed == 5
        assert one.config.demo.epochs == 3
        assert one.config.report == str(tmp_path / f"r.{name}.json")
        assert one.config.checkpoint.path == str(tmp_path / name)
    assert module_of(list(runs.values())) == "ddp_examples"


def test_one_demo_is_left_as_it_is() -> None:
    argv = ["demo=all", "demo=model_parallel", "report=r.json"]  # the last one counts
    (one,) = planned_runs(argv[1:], Ranks())
    assert one.settings == argv[1:]
    assert module_of([one]) == "ddp_examples.model_parallel"


def test_a_key_that_no_demo_has_is_told(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as leaving:
        planned_runs(["demo=all", "demo.epohcs=2"], Ranks())
    assert leaving.value.code == Exit.USAGE
    assert "Did you mean demo.epochs?" in capsys.readouterr().err


def test_help_is_that_of_each_demo(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as leaving:
        planned_runs(["demo=all", "--help"], Ranks())
    assert leaving.value.code == Exit.OK
    assert {"demo.show", "demo.microbatches"} <= set(capsys.readouterr().out.split())


def test_a_demo_that_breaks_on_purpose_is_left_out(tmp_path: Path) -> None:
    quiet, breaks = tmp_path / "quiet.py", tmp_path / "breaks.py"
    quiet.write_text('"""About."""\nIN_ALL = True\n')
    breaks.write_text('"""About."""\nIN_ALL = False  # rank 1 raises\n')
    assert DemoFile(quiet).in_all
    assert not DemoFile(breaks).in_all


def raises() -> int:
    raise ValueError("rank 1 did it")


@pytest.fixture
def some_demos(monkeypatch: pytest.MonkeyPatch) -> Callable[..., List[Any]]:
    """Makes runs of demo=all whose main() are the functions that it is given."""
    monkeypatch.setattr(sys, "argv", ["ddp_examples"])

    def plan(*mains: Callable[[], int]) -> List[Any]:
        runs = planned_runs(["demo=all"], Ranks())[: len(mains)]
        by_name = {f"ddp_examples.{one.demo.name}": SimpleNamespace(main=main) for one, main in zip(runs, mains)}
        monkeypatch.setattr(program.importlib, "import_module", by_name.__getitem__)
        return runs

    return plan


def test_it_goes_on_after_a_failed_check_and_the_first_status_counts(some_demos: Any, capsys: Any) -> None:
    def unable() -> int:
        raise SystemExit(int(Exit.UNABLE))

    runs = some_demos(lambda: Exit.CHECK_FAILED, unable, lambda: Exit.OK)
    assert program.run_all(runs, speaks=True) == Exit.CHECK_FAILED
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line] == ["FAILED,", "FAILED,", "ok"]
    assert "status 3" in out
    assert "status 4" in out


def test_it_ends_where_the_group_is_left_open_or_an_exception_was_raised(some_demos: Any, capsys: Any) -> None:
    def open_group() -> int:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        raise SystemExit(int(Exit.LATER))

    assert program.run_all(some_demos(open_group, lambda: Exit.OK), speaks=True) == Exit.LATER
    dist.destroy_process_group()
    assert capsys.readouterr().out.rstrip().endswith("not run")
    with pytest.raises(ValueError, match="rank 1"):
        program.run_all(some_demos(raises, lambda: Exit.OK), speaks=True)
    out = capsys.readouterr().out
    assert "FAILED, status 1" in out
    assert "not run" in out


def test_every_demo_passes_its_checks_on_two_ranks_in_one_start(tmp_path: Path) -> None:
    settings = ["demo=all", "demo.epochs=1", "report=r.json"]
    ended = torchrun(2, "-m", "ddp_examples", *settings, cwd=tmp_path)
    assert ended.status == 0, ended.output
    names = [name for name, demo in demos().items() if demo.in_all]
    for name, line in zip(names, ended.out.splitlines()[-len(names) :]):
        report = json.loads((tmp_path / f"r.{name}.json").read_text())
        assert report["ok"]
        assert report["world_size"] == 2
        assert report["checks"]
        assert line.split()[:2] == [name, "ok"]
        assert line.endswith(f"r.{name}.json")


def test_the_launcher_starts_the_package(tmp_path: Path) -> None:
    ended = run([sys.executable, "-m", "ddp_examples.core.node", "-n", "2", "--dry-run", "demo=all"], cwd=tmp_path)
    assert ended.out.splitlines()[-6:] == torchrun_arguments(2, "ddp_examples", ["demo=all"])
