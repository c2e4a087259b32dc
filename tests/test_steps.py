"""What the steps of a run look like: the table of demo.show, the series in the report, and the picture of them."""

import json
import re
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrun import torchrun

from ddp_examples.basic import Params
from ddp_examples.core import plot, report
from ddp_examples.core.exits import Exit
from ddp_examples.core.group import Group
from ddp_examples.core.steps import ROWS, Step, series_of, show_steps, watch_gradients


def test_norms_are_of_the_gradient(group: Group) -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    norms = watch_gradients(ddp)
    for _ in range(2):  # the second step must not have the first one's in it
        ddp.zero_grad()
        ddp(torch.rand(5, 3)).square().sum().backward()
        right = torch.cat([parameter.grad.flatten() for parameter in ddp.parameters()]).norm().item()
        assert norms() == pytest.approx((right, right))


def test_two_ranks_have_gradients_of_their_own_before_averaging_and_one_after(tmp_path: Path) -> None:
    settings = ["demo.show=gradients", "demo.epochs=1", "report=r.json"]
    ended = torchrun(2, "-m", "ddp_examples.basic", *settings, cwd=tmp_path)
    assert ended.status == 0, ended.output
    rows = re.findall(r"([01])  +32  ([\d.]+) +([\d.]+)$", ended.out, re.MULTILINE)
    assert len(rows) == ROWS
    for (first, before_0, after_0), (second, before_1, after_1) in zip(rows[::2], rows[1::2]):
        assert (first, second) == ("0", "1")
        assert before_0 != before_1
        assert after_0 == after_1
    series = json.loads((tmp_path / "r.json").read_text())["metrics"]["series"]
    assert [len(values) for values in series["loss"]] == [23, 23]  # 1,437 samples in steps of 64
    assert series["loss"][0] != series["loss"][1]


def test_the_table_is_at_most_a_screen_and_names_samples(group: Group, capsys: pytest.CaptureFixture) -> None:
    steps = [Step(0.5, list(range(32)), 0.002) for _ in range(100)]
    show_steps(group, steps, "steps")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == ROWS + 3
    assert lines[-1].split()[:4] == [str(ROWS), "0", "32", "0.5000"]
    assert lines[-1].endswith("0 1 2 3 4 ...")
    show_steps(group, steps, "none")
    assert capsys.readouterr().out == ""


def test_show_is_one_of_three() -> None:
    with pytest.raises(ValueError, match=r"demo\.show=gradient: none, steps or gradients"):
        Params(1, 1, 0.1, "gradient")


def test_a_long_series_is_thinned(group: Group) -> None:
    series = series_of([Step(number, [], 1e-3) for number in range(450)])
    assert series["every"] == 3
    assert series["loss"][0][:3] == [0, 3, 6]
    assert [len(values) for values in (series["loss"][0], series["step_seconds"][0])] == [150, 150]
    assert series_of([Step(1.0, [], 1e-3)]) == {"every": 1, "loss": [[1.0]], "step_seconds": [[1e-3]]}


def test_a_list_of_numbers_is_one_line_of_the_report(tmp_path: Path) -> None:
    written = {"values": [1, -2.5, 3e-7], "texts": ["[\n1,\n2]"], "empty": [], "nested": [[1, 2], [3]]}
    assert report.write_report(written, str(tmp_path / "r.json")) == ""
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text) == written
    assert len(text.splitlines()) == 11


def run_of(ranks: int, losses: List[List[Any]]) -> Dict[str, Any]:
    """A report with what the picture needs; rank 1 is slow."""
    seconds = [
        [0.01 * (1 + (rank == 1)) + 0.001 * (step % 3) for step in range(len(losses[0]))] for rank in range(ranks)
    ]
    return {
        "demo": "basic",
        "ok": True,
        "world_size": ranks,
        "hosts": ["c196-011", "c196-012"],
        "backend": "nccl",
        "device": "cuda",
        "seconds": 1.0,
        "ranks": [],
        "checks": [{"name": "a", "passed": True, "measured": 0, "allowed": 0, "detail": ""}],
        "metrics": {"series": {"every": 1, "loss": losses, "step_seconds": seconds}},
    }


def differing(ranks: int) -> List[List[Any]]:
    return [[2 / (1 + step) + 0.01 * rank for step in range(50)] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_nothing_in_the_picture_overlaps_or_is_cut_off(ranks: int) -> None:
    pytest.importorskip("matplotlib")
    figure = plot.figure_of(run_of(ranks, differing(ranks)))
    figure.canvas.draw()
    left, right = (axes.get_tightbbox() for axes in figure.axes)
    assert 0 <= left.x0 < left.x1 < right.x0 < right.x1 <= figure.bbox.width
    headline = figure._suptitle.get_window_extent()
    assert max(left.y1, right.y1) <= headline.y0
    assert headline.x1 <= figure.bbox.width
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    if ranks > 1:
        assert "rank 1 is the slowest, 21 ms" in figure.axes[1].get_title("left")


def test_ranks_can_be_told_apart_without_colour() -> None:
    pytest.importorskip("matplotlib")
    axes = plot.figure_of(run_of(8, differing(8))).axes[0]
    lines = {(line.get_linestyle(), line.get_marker()) for line in axes.get_lines()}
    assert len(lines) == 9  # and the mean
    same = plot.figure_of(run_of(2, [[2.0, 1.0, "nan"]] * 2)).axes[0]
    assert [text.get_text() for text in same.get_legend().get_texts()] == ["loss, same on all ranks"]


def test_a_picture_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "r.json", tmp_path / "a b.png"
    file.write_text(json.dumps(run_of(4, differing(4))))
    assert report.main([str(file), "--plot", str(picture)]) == Exit.OK
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "a b.png written" in capsys.readouterr().out
    for ending, said in [("nothing/a.png", "No such file"), ("a.xyz", "xyz")]:
        with pytest.raises(SystemExit) as leaving:
            report.main([str(file), "--plot", str(tmp_path / ending)])
        assert leaving.value.code == Exit.USAGE
        assert said in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = tmp_path / "r.json"
    file.write_text(json.dumps(run_of(2, differing(2))))
    with pytest.raises(SystemExit) as leaving:
        report.main([str(file), "--plot", "out.png"])
    assert leaving.value.code == Exit.USAGE
    assert "pip install 'ddp-examples[plot]'" in capsys.readouterr().err
    assert report.main([str(file)]) == Exit.OK  # the tables need nothing
    assert "1 of 1 checks passed" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "{", "[]", '{"demo": "basic"}'])
def test_what_is_no_report_is_told(content: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "r.json"
    if content is not None:
        file.write_text(content)
    for options in ([], ["--plot", "out.png"]):
        with pytest.raises(SystemExit) as leaving:
            report.main([str(file), *options])
        assert leaving.value.code == Exit.USAGE
        assert "is no report of a run" in capsys.readouterr().err
