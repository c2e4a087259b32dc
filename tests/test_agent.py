"""The ranks that launch/local.sh starts: forked from one server, closed to others, gone when the launcher is."""

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Dict, List

import pytest
from torchrun import MARKER, ROOT, forked, local, processes, run


@pytest.mark.parametrize(
    ("kind", "status"),
    [("raise", 1), ("exit 7", 7), ("exit 3", 3), ("kill", 137), ("abort", 134), ("leave", 1)],
)
def test_the_status_is_that_of_the_rank_that_failed_first(kind: str, status: int) -> None:
    ended = forked(3, "failing", kind, timeout_s=60)
    assert ended.status == status, ended.output
    assert not ended.left
    if status not in (3,) and kind != "leave":
        assert "rank 1 failed first" in ended.err


def test_ranks_that_end_by_os_exit_are_through() -> None:
    ended = forked(2, "failing", "os._exit", timeout_s=40)
    assert (ended.status, ended.left) == (0, []), ended.output


def test_spawned_ranks_end_with_the_same_status() -> None:
    ended = local("-n", "2", "backend=nccl", "launch.start=spawn")
    assert ended.status == 4 or "nccl" not in ended.output, ended.output


def listening(marker: str) -> Dict[str, List[str]]:
    """Addresses on which the processes of a run listen, from the kernel, by process."""
    found: Dict[str, List[str]] = {}
    for pid in processes(marker):
        try:
            inodes = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                row = line.split()
                if row[3] == "0A" and f"socket:[{row[9]}]" in inodes:
                    found.setdefault(str(pid), []).append(row[1].partition(":")[0])
    return found


def started(*arguments: str, ignoring: str = "") -> "tuple[subprocess.Popen[bytes], str]":
    marker = uuid.uuid4().hex
    prefix = ["bash", "-c", f'trap "" {ignoring}; exec "$@"', "bash"] if ignoring else []
    process = subprocess.Popen(
        [*prefix, str(ROOT / "launch" / "local.sh"), *arguments],
        env={**os.environ, MARKER: marker, "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"epoch 1/"):
            return process, marker
    raise AssertionError("the run did not get to its first epoch")


def wait_until_gone(marker: str, seconds: float) -> Dict[int, str]:
    deadline = time.monotonic() + seconds
    while processes(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    return processes(marker)


def test_sockets_of_a_run_of_4_ranks_are_on_loopback_only() -> None:
    process, marker = started("-n", "4", "demo.epochs=500")
    try:
        addresses = listening(marker)
        assert len(addresses) >= 5, "4 ranks and the store listen"
        assert {address for found in addresses.values() for address in found} <= {
            "0100007F",  # 127.0.0.1, as the kernel writes it
            "00000000000000000000000001000000",  # ::1
        }
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert not wait_until_gone(marker, 10)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGKILL]
)
def test_nothing_is_left_when_the_launcher_gets_a_signal(number: signal.Signals) -> None:
    process, marker = started("-n", "2", "demo.epochs=2000")
    process.send_signal(number)
    output = process.communicate(timeout=30)[0].decode()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in output
    left = wait_until_gone(marker, 10)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_run_that_was_started_ignoring_ctrl_c_ends_by_it_at_once() -> None:
    """As in a shell's background, or under nohup: ranks that ignore SIGINT too would live on for 30 s."""
    process, marker = started("-n", "2", "demo.epochs=2000", ignoring="INT")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert not wait_until_gone(marker, 10)


@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_ctrl_c_before_the_ranks_are_up_is_one_line(seconds: float) -> None:
    """To all processes of the terminal, as it sends it."""
    marker = uuid.uuid4().hex
    process = subprocess.Popen(
        [str(ROOT / "launch" / "local.sh"), "-n", "2", "demo.epochs=2000"],
        env={**os.environ, MARKER: marker, "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=30)[0].decode()
    assert not wait_until_gone(marker, 10)
    assert "Traceback" not in output
    assert len([line for line in output.splitlines() if "SIGINT" in line]) == 1, output
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGKILL])
def test_nothing_is_left_when_bare_torchrun_gets_a_signal(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    marker = uuid.uuid4().hex
    process = subprocess.Popen(
        [*command, "--nproc-per-node=2", "-m", "ddp_examples.basic", "demo.epochs=2000"],
        env={**os.environ, MARKER: marker, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith(b"epoch 1/"))
    process.send_signal(number)
    process.communicate(timeout=30)
    left = wait_until_gone(marker, 10)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_the_server_does_not_initialise_cuda_and_has_no_threads() -> None:
    """A forked process can use neither CUDA nor locks that another thread held."""
    script = (
        "import ddp_examples.core.preload, torch, os, sys\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert os.listdir('/proc/self/task') == [str(os.getpid())]\n"
        "for name in ('torch._dynamo', 'ddp_examples.core.report', 'ddp_examples.core.digits'):\n"
        "    assert name in sys.modules\n"
    )
    ended = run([sys.executable, "-c", script], env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert ended.status == 0, ended.err


def test_a_signal_that_comes_twice_does_not_cut_short_the_ranks_time_to_save(tmp_path: Path) -> None:
    """As from a batch system: to the launcher, and to every process of the job."""
    checkpoints = f"checkpoint.path={tmp_path}/c"
    process, marker = started("-n", "2", "demo=train", "demo.epochs=40", checkpoints)
    for _ in range(2):
        for pid in (process.pid, *processes(marker)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 75, output
    assert "stopped on request after step" in output
    assert not wait_until_gone(marker, 10)
