"""Plans as pure functions, and the launchers as people call them."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Optional

import pytest
from torchrun import ROOT, local, run

from ddp_examples.core.forkserver import MOST_RANKS, can_fork
from ddp_examples.core.launch import gpus_here, parse_arguments, rank_environment, torchrun_arguments
from ddp_examples.core.ranks import loopback_interface
from ddp_examples.core.site import load_site


def test_options_are_split_from_settings() -> None:
    options, settings = parse_arguments(["-n", "3", "demo=basic", "--dry-run", "seed=1"])
    assert (options.ranks, options.dry_run, settings) == (3, True, ["demo=basic", "seed=1"])
    assert parse_arguments(["seed=1"])[0].ranks is None


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_here({}, tmp_path) == 3
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "1,2"}, tmp_path) == 2
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "GPU-abc"}, tmp_path) == 1
    assert gpus_here({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0
    assert gpus_here({}, tmp_path / "none") == 0


def test_torchrun_arguments() -> None:
    assert torchrun_arguments(2, "ddp_examples.basic", ["seed=1"]) == [
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=2",
        "--module",
        "ddp_examples.basic",
        "seed=1",
    ]


def test_cpus_are_shared_among_the_ranks_and_what_is_set_stays() -> None:
    assert rank_environment(4, {}, cpus=16)["OMP_NUM_THREADS"] == "4"
    assert rank_environment(4, {}, cpus=2)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in rank_environment(4, {"OMP_NUM_THREADS": "7"}, cpus=16)
    assert rank_environment(1, {}, 1)["GLOO_SOCKET_IFNAME"] == loopback_interface()
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(1, {}, 1, load_site("slurm"), nodes=2)


def test_more_ranks_than_a_fork_server_can_start_are_spawned_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert can_fork("forkserver", MOST_RANKS)
    assert not can_fork("spawn", 1)
    assert capsys.readouterr().err == ""
    assert not can_fork("forkserver", MOST_RANKS + 1)
    assert f"{MOST_RANKS + 1} ranks" in capsys.readouterr().err


def test_dry_run_prints_the_command_one_argument_a_line(tmp_path: Path) -> None:
    ended = local("--dry-run", "-n", "2", "seed=1", "report=a b.json", cwd=tmp_path, env={"OMP_NUM_THREADS": None})
    assert ended.status == 0, ended.output
    lines = ended.out.splitlines()
    assert lines[0] == "env"
    assert any(line.startswith("OMP_NUM_THREADS=") for line in lines)
    start = lines.index("-m") - 1
    assert Path(lines[start]).is_absolute()
    assert lines[start + 1 :] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=2",
        "--module",
        "ddp_examples.basic",
        "seed=1",
        "report=a b.json",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "0"], "at least 1"),
        (["-n", "x"], "-n"),
        (["--dri-run"], "--dri-run"),
        (["demo.epohs=3"], "demo.epochs"),
        (["demo=basik"], "demo=basic"),
    ],
)
def test_a_mistake_is_said_once_and_ends_with_2(arguments: list, said: str, tmp_path: Path) -> None:
    ended = local(*arguments, cwd=tmp_path)
    assert ended.status == 2
    assert said in ended.err
    assert "Traceback" not in ended.output


def test_a_checkout_in_a_folder_with_a_space_started_from_elsewhere(tmp_path: Path) -> None:
    copy = tmp_path / "a b"
    for name in ("ddp_examples", "conf", "launch"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ("local.sh", "debug.sh"):
        ended = run(
            [str(copy / "launch" / script), "--help"],
            cwd=Path("/"),
            env={"PYTHONPATH": str(copy), "PYTHON": sys.executable},
        )
        assert ended.status == 0, ended.output
        assert str(copy / "conf") in ended.out


def test_a_python_without_the_project_is_not_taken(tmp_path: Path) -> None:
    """has_project looks for this checkout: another one's code would run under this one's conf."""
    script = f'source "{ROOT}/launch/common.sh"; root={tmp_path}; has_project "{sys.executable}" && echo yes || echo no'
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env={**os.environ})
    assert ended.stdout == "no\n"
    script = f'source "{ROOT}/launch/common.sh"; has_project "{sys.executable}" nonsense_module && echo yes || echo no'
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert ended.stdout == "no\n"


def test_the_list_of_demos() -> None:
    ended = run([sys.executable, "-m", "ddp_examples"], cwd=ROOT)
    assert ended.status == 0
    assert "basic" in ended.out
    assert "torchrun --nproc_per_node=4 -m ddp_examples.basic" in ended.out


def test_every_module_is_python_3_9() -> None:
    for path in (ROOT / "ddp_examples").rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 9))


def python_3_9() -> Optional[str]:
    """The oldest Python that is supported, where there is one with omegaconf; DDP_EXAMPLES_PYTHON39 names it."""
    there = [os.environ.get("DDP_EXAMPLES_PYTHON39"), shutil.which("python3.9")]
    there += map(str, (Path.home() / ".pyenv" / "versions").glob("3.9*/bin/python3.9"))
    ask = "import sys, omegaconf; sys.exit(sys.version_info[:2] != (3, 9))"
    good = (name for name in there if name and subprocess.run([name, "-c", ask], capture_output=True).returncode == 0)
    return next(good, None)


@pytest.mark.skipif(python_3_9() is None, reason="no Python 3.9 with omegaconf here")
def test_what_starts_ranks_runs_on_python_3_9(tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(tmp_path), "SCRATCH": str(tmp_path)}
    for arguments, words in (
        (["ddp_examples.core.node", "-n", "2", "--dry-run", "seed=1"], "--nproc-per-node=2"),
        (["ddp_examples.core.submit", "launch/slurm.sh", "-N2", "--dry-run", "site=frontera"], "ibrun -n 2"),
        (["ddp_examples", "demo=train", "--help"], "demo.global_batch"),
    ):
        ended = run([str(python_3_9()), "-m", *arguments], cwd=tmp_path, env=env)
        assert ended.status == 0, ended.output
        assert words in ended.out
