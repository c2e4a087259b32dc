"""Ranks whose output goes to files of their own, as on the nodes of a job: forked, and each a fresh Python."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Iterator, Tuple

import pytest
from torchrun import FORK, MARKER, ROOT, forked, processes

LOGGED = "ddp_examples.core.logged"
HOST = socket.gethostname()
SPAWN = FORK.replace("start_server()\n", "").replace("argv[1:])", "argv[1:], fork=False)")


def wait_for(done, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(params=[FORK, SPAWN], ids=["forked", "spawned"])
def saving(request, tmp_path: Path) -> Iterator[Tuple["subprocess.Popen[bytes]", str]]:
    """An agent with two ranks of tests/saving.py that are up, in a process group of its own, and its marker."""
    marker = uuid.uuid4().hex
    python_path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    arguments = ["--standalone", "--nproc-per-node=2", "--module", LOGGED, str(tmp_path), "saving", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", request.param, *arguments],
        env={**os.environ, MARKER: marker, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.up"))) == 2)
        yield process, marker
    finally:
        process.kill()
        process.wait()
        wait_for(lambda: not processes(marker), seconds=10)


def test_each_rank_has_a_file_and_the_screen_is_that_of_rank_0(tmp_path: Path) -> None:
    ended = forked(2, LOGGED, str(tmp_path), "ddp_examples.basic", "backend=gloo", "demo.epochs=1")
    assert ended.status == 0, ended.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{HOST}-rank0.log", f"{HOST}-rank1.log"]
    assert "4 of 4 checks passed" in ended.out
    assert (tmp_path / f"{HOST}-rank0.log").read_text() == ended.output
    assert ended.left == []


def test_a_signal_to_every_process_lets_the_ranks_save(saving, tmp_path: Path) -> None:
    """Before a time limit Slurm sends SIGTERM to all processes of a step: the fork server must outlive the ranks."""
    process, _ = saving
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == 75
    assert len(list(tmp_path.glob("*.saved"))) == 2
    assert (tmp_path / f"{HOST}-rank1.log").read_text() == "rank 1 is up\n"


def test_ranks_end_with_an_agent_that_is_killed(saving) -> None:
    process, marker = saving
    process.kill()
    wait_for(lambda: not processes(marker), seconds=10)
