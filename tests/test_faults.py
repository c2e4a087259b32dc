"""Ranks broken on purpose, and what is said of it. All kinds, ranks and places: tests/loop_faults.py."""

import re
import socket
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler
from torchrun import ROOT, forked, torchrun

from ddp_examples.core.config import build_config
from ddp_examples.core.debug import find_nan, flight_recorder, odd_replicas
from ddp_examples.core.demos import demos
from ddp_examples.core.group import process_group
from ddp_examples.core.ranks import Ranks

WORDS = {
    "raise": "ValueError: on purpose",
    "kill": "SIGKILL",
    "hang": "hangs: not moved",
    "skip": "left out a collective",
    "shape": "another shape",
    "uneven": "batches a rank: 13 here, 12",
}


@pytest.mark.parametrize(
    ("kind", "rank", "status"),
    [("raise", 1, 1), ("kill", 0, 137), ("hang", 0, 1), ("skip", 1, 1), ("shape", 0, 1), ("uneven", 0, 1)],
)
def test_the_verdict_names_rank_step_and_kind(kind: str, rank: int, status: int, tmp_path: Path) -> None:
    settings = [f"demo.kind={kind}", f"demo.rank={rank}", "watch.hang_s=3"]
    ended = forked(2, "ddp_examples.faults", *settings, env={"TMPDIR": str(tmp_path)}, timeout_s=60)
    lines = ended.err.splitlines()
    assert len(lines) <= 10, ended.err
    assert lines[0].startswith(f"ddp-examples: rank {rank} "), ended.err
    assert WORDS[kind] in lines[0]
    assert ("before the first step" if kind == "uneven" else "in step 5") in lines[0]
    assert ended.status == status or (kind in ("skip", "shape") and ended.status == 134), ended.output
    assert not ended.left
    again = lines[-1].split()[-1]
    assert {"verdict.json", f"{socket.gethostname()}-agent.log", f"rank-{rank}.trail"} <= {
        path.name for path in Path(again).iterdir()
    }


@pytest.mark.parametrize(("kind", "word"), [("stop", "SIGSTOP"), ("lock", "holds Python's lock")])
def test_a_rank_that_can_say_nothing_is_lost_in_3_s(kind: str, word: str, tmp_path: Path) -> None:
    ended = forked(2, "failing", kind, env={"TMPDIR": str(tmp_path)}, timeout_s=30)
    assert ended.err.startswith("ddp-examples: rank 1 is lost"), ended.err
    assert word in ended.err
    assert not ended.left
    if kind == "lock":
        log = next(tmp_path.glob("ddp-examples-*/rank-1.log")).read_text()
        assert "failing.py" in log, "where it was, written without Python's lock"


def test_a_run_that_succeeds_leaves_no_folder_and_names_the_straggler(tmp_path: Path) -> None:
    ended = forked(2, "ddp_examples.faults", "demo.kind=slow", env={"TMPDIR": str(tmp_path)}, timeout_s=60)
    assert ended.status == 0, ended.output
    assert re.search(r"^rank 1 on \S+ is slow: .* \d+ times", ended.out, re.MULTILINE)
    assert list(tmp_path.glob("ddp-examples-*")) == []
    assert ended.err == ""


@pytest.mark.parametrize(("kind", "words"), [("raise", "failed first"), ("kill", "failed first"), ("hang", "hangs")])
def test_under_bare_torchrun_the_ranks_say_it(kind: str, words: str, tmp_path: Path) -> None:
    settings = [f"demo.kind={kind}", "watch.hang_s=3"]
    ended = torchrun(2, "-m", "ddp_examples.faults", *settings, cwd=ROOT, env={"TMPDIR": str(tmp_path)})
    said = [line for line in ended.err.splitlines() if line.startswith("ddp-examples: ")]
    assert said[0].startswith(f"ddp-examples: rank 1 {words}"), ended.err
    assert len(said) <= 2, "one line of the rank that followed"
    assert ended.err.index(said[0]) < ended.err.index("ChildFailedError"), "ahead of torchrun's own block"


@pytest.mark.parametrize("argument", ["demo.kind=melt", "demo.step=12", "demo.step=0", "demo.rank=-1"])
def test_a_fault_that_cannot_be_is_refused(argument: str) -> None:
    from ddp_examples.core.config import ConfigError

    demo = demos()["faults"]
    with pytest.raises(ConfigError):
        build_config(demo, demo.params(), [argument])


A, B = {"w": "1", "v": "1"}, {"w": "1", "v": "2"}


@pytest.mark.parametrize(
    ("found", "odd", "why"),
    [
        ([[A, []], [A, []]], [], ""),
        ([[A, []], [B, []], [A, []]], [1], "v differs after optimizer.step()"),
        ([[B, ["v"]], [A, []]], [0], "v was changed outside"),
        ([[A, []], [B, []]], [0, 1], "v differs"),
    ],
)
def test_odd_replicas(found: list, odd: list, why: str) -> None:
    ranks, words = odd_replicas(found)
    assert ranks == odd
    assert why in words


def test_the_first_nan_is_named_by_layer() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ddp = nn.Module()
    ddp.module = net
    x, nan = torch.ones(1, 2), torch.full((1, 2), float("nan"))
    find_nan(net[1], (x,), x, [ddp])
    with pytest.raises(FloatingPointError, match=r"layer 1 \(Linear\); its input has none"):
        find_nan(net[1], (x,), nan, [ddp])
    with pytest.raises(FloatingPointError, match="its input has NaN already"):
        find_nan(net[1], (nan,), nan, [ddp])


def test_debug_mode_notices_a_sampler_without_set_epoch(capfd: pytest.CaptureFixture[str]) -> None:
    before = DistributedSampler.__iter__
    with process_group(Ranks(), "gloo", 20, debug=True):
        sampler = DistributedSampler(range(4), num_replicas=1, rank=0)  # type: ignore[arg-type,var-annotated]
        for epoch in range(2):
            sampler.set_epoch(epoch)
            list(sampler)
        assert "set_epoch" not in capfd.readouterr().err
        list(sampler)
        assert "call sampler.set_epoch(epoch)" in capfd.readouterr().err
    assert DistributedSampler.__iter__ is before


def test_the_flight_recorder_writes_into_the_folder_of_the_run() -> None:
    settings = flight_recorder(Path("/r"))
    assert settings["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == settings["TORCH_FR_DUMP_TEMP_FILE"] == "/r/nccl-trace-rank-"
