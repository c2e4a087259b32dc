"""basic as people start it, and basic broken on purpose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrun import ROOT, debug, forked, local, run, torchrun

CHECKS = ["replicas identical", "gradient = whole batch's", "shards disjoint, and cover", "test accuracy independent"]


def report_of(path: Path) -> dict:
    return json.loads(path.read_text())


def test_torchrun_with_4_ranks(tmp_path: Path) -> None:
    ended = torchrun(4, "-m", "ddp_examples.basic", "report=r.json", cwd=tmp_path)
    assert ended.status == 0, ended.output
    assert not ended.left
    report = report_of(tmp_path / "r.json")
    assert [name for name in CHECKS if any(name in check["name"] for check in report["checks"])] == CHECKS
    assert all(check["passed"] for check in report["checks"])
    assert report["world_size"] == 4
    assert [row["rank"] for row in report["ranks"]] == [0, 1, 2, 3]
    assert report["metrics"]["test_accuracy"] > 0.8
    lines = [line for line in ended.out.splitlines() if line.strip()]
    assert len(lines) == len(set(lines)), "a line was said twice, so perhaps once a rank"


@pytest.mark.parametrize("ranks", [2, 3])
def test_fewer_ranks_by_local_sh(ranks: int, tmp_path: Path) -> None:
    ended = local("-n", str(ranks), "demo.epochs=2", "report=r.json", cwd=tmp_path)
    assert ended.status == 0, ended.output
    assert not ended.left
    assert report_of(tmp_path / "r.json")["world_size"] == ranks


def test_alone_it_listens_on_loopback_at_most(tmp_path: Path) -> None:
    """The sockets of the process in state LISTEN (0A), looked up while it trains."""
    script = """
import os, runpy, sys
from pathlib import Path
from ddp_examples.core import verify

def listening():
    mine = {str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]

def look(model, check=verify.replicas_identical):
    print("LISTENING", listening())
    return check(model)

verify.replicas_identical = look
sys.argv = ["basic", "demo.epochs=1"]
runpy.run_module("ddp_examples.basic", run_name="__main__", alter_sys=True)
"""
    ended = run([sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert ended.status == 0, ended.output
    # gloo opens one even here; 0100007F is 127.0.0.1 as the kernel writes it
    assert "LISTENING []" in ended.out or "LISTENING ['0100007F']" in ended.out
    assert "More: torchrun --nproc_per_node=4 -m ddp_examples.basic" in ended.out


def test_broken_on_purpose(tmp_path: Path) -> None:
    """Each break is caught, by the check that is there for it; whole, nothing is."""
    kinds = ["whole", "module", "scaled", "drift", "shard", "repeats"]
    ended = forked(2, "broken", str(tmp_path), *kinds)
    assert ended.status == 3, ended.output
    failed = {
        kind: [
            check["name"].partition(" (")[0]
            for check in report_of(tmp_path / f"{kind}.json")["checks"]
            if not check["passed"]
        ]
        for kind in kinds
    }
    assert failed["whole"] == []
    assert failed["module"] == [
        "replicas identical",
        "gradient = whole batch's",
        "test accuracy independent of ranks",
    ]
    assert failed["scaled"] == ["gradient = whole batch's"]
    assert failed["drift"][0] == "replicas identical"  # and what follows from it
    assert failed["shard"] == ["shards disjoint, and cover the set"]
    assert failed["repeats"] == ["test accuracy independent of ranks"]
    details = {check["name"]: check["detail"] for check in report_of(tmp_path / "drift.json")["checks"]}
    assert "2.bias" in details["replicas identical (ranks that differ)"]
    assert "FAILED replicas identical" in ended.out


def test_a_failed_check_ends_with_3(tmp_path: Path) -> None:
    ended = run(
        [sys.executable, "-m", "broken", str(tmp_path), "scaled"],
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
    )
    assert ended.status == 3, ended.output


def test_accuracy_of_the_same_weights_does_not_depend_on_the_number_of_ranks() -> None:
    printed = {forked(ranks, "evaluate").out for ranks in (1, 2, 3, 4)}
    assert len(printed) == 1
    assert "test accuracy 0." in printed.pop()


def test_a_wrong_key_under_torchrun_is_said_once(tmp_path: Path) -> None:
    ended = torchrun(3, "-m", "ddp_examples.basic", "demo.epohs=3", cwd=tmp_path)
    assert ended.status == 1  # torchrun's own
    assert ended.output.count("Did you mean demo.epochs?") == 1
    assert "exitcode  : 2" in ended.output


def test_debug_mode_runs_and_breakpoint_works(tmp_path: Path) -> None:
    script = ROOT / "launch" / "debug.sh"
    ended = subprocess.run(
        [str(script), "demo.epochs=1"],
        input="",
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONBREAKPOINT": "0"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert debug("demo.epochs=0").status == 2


def test_pdb_opens_where_the_error_was_raised(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import ddp_examples.core.digits as d\n"
        "def broken():\n    answer = 42\n    raise ValueError('on purpose')\n"
        "d.load_digits = broken\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "ddp_examples", "--pdb", "demo=basic"],
        input="p answer\nq\n",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert "(Pdb) 42" in ended.stdout, ended.stdout + ended.stderr
    assert "ValueError: on purpose" in ended.stderr
    assert ended.returncode == 1


def test_nccl_without_a_gpu_ends_with_4(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ended = local("-n", "2", "backend=nccl", cwd=tmp_path)
    assert ended.status == 4
    assert ended.output.count("backend=nccl can't run") == 1
    assert "backend=gloo" in ended.output
