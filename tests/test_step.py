"""The launcher's side of a run in a job: status, messages and signals, with a script in place of srun."""

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_examples.core import follow, step, usage
from ddp_examples.core.job import Job
from ddp_examples.core.step import run_step

JOB = Job("17", 0, ("c101-001", "c101-002"))


@pytest.fixture(autouse=True)
def _signals():
    before = {number: signal.getsignal(number) for number in step.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(folder, script):
    """run_step with a shell script; `-m` stands there as in the real command."""
    return run_step(["/bin/bash", "-c", script, "bash", "/env/bin/python", "-m", "x"], folder / "17", JOB)


@pytest.mark.parametrize(
    ("statuses", "srun", "expected"),
    [
        ({}, 0, 0),
        ({"a": 3, "b": 143}, 143, 3),  # a check failed on one node, and srun ended the other
        ({"a": 1, "b": 137}, 137, 137),  # one rank was killed, the other lost it
        ({"a": 143, "b": 1}, 143, 1),
    ],
)
def test_status_is_that_of_the_cause(statuses, srun, expected, tmp_path, capfd):
    words = "; ".join(f"echo {status} >{tmp_path}/17/{host}.status" for host, status in statuses.items())
    assert run(tmp_path, f"{words or ':'}; exit {srun}") == expected
    assert capfd.readouterr().err == ""


def test_words_of_an_earlier_run_do_not_count(tmp_path):
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "a.status").write_text("3\n")
    assert run(tmp_path, "exit 0") == 0


def test_nodes_that_could_not_be_started_are_named(tmp_path, capsys):
    script = "echo 'srun: binding' >&2; echo 'srun: error: Task launch failed on node c101-002: timeout' >&2; exit 233"
    assert run(tmp_path, script) == 4
    err = capsys.readouterr().err
    assert "Task launch failed on node c101-002" in err
    assert "scontrol show node c101-002" in err
    assert "All nodes must see /env/bin/python" in err
    assert "binding" not in err
    assert err.count("ddp-examples:") == 1


def test_what_all_nodes_say_is_said_once(tmp_path, capsys):
    say = "echo 'ddp-examples: ended' >&2; echo warning >&2; "
    assert run(tmp_path, say * 3) == 0
    assert capsys.readouterr().err == "ddp-examples: ended\n" + "warning\n" * 3


def test_a_node_that_failed_takes_the_others_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "GRACE_S", 0.2)
    monkeypatch.setattr(step, "ask", lambda *command: None)  # no scancel
    assert run(tmp_path, f"echo 4 >{tmp_path}/17/a.status; exec sleep 60") == 4


def test_launcher_that_is_killed_takes_srun_with_it(tmp_path):
    code = (
        "import sys; from pathlib import Path; from ddp_examples.core.step import run_step; "
        "from ddp_examples.core.job import Job; "
        f"run_step(['/bin/bash', '-c', 'echo $$ >{tmp_path}/pid; exec sleep 60', 'x', '-m'], Path('{tmp_path}/17'), "
        "Job('17', 0, ('a',)))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code])
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 20
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.kill()
    launcher.wait()
    process = Path("/proc") / pid.read_text().strip()
    while process.exists() and "State:\tZ" not in (process / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_number_of_a_submitted_job():
    assert follow.job_number("-----\nWelcome to TACC\n-> ok\nSubmitted batch job 4242\n") == "4242"
    assert follow.job_number("Submitted nothing") is None


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        (["PENDING 0", "RUNNING 0", "COMPLETED 0"], 0),
        (["FAILED 768"], 3),
        (["TIMEOUT 0"], 1),
        (["CANCELLED 15"], 143),
        (["RUNNING 0", "", "RUNNING 0", "COMPLETED 0"], 0),
        ([""] * follow.UNANSWERED, 1),
    ],
)
def test_following_a_job_ends_as_it_does(answers, status, tmp_path, monkeypatch, capsysbinary):
    log = tmp_path / "17.log"
    monkeypatch.setattr(follow, "POLL_S", 0.0)

    def squeue(*command):
        log.write_bytes(b"line\n" * (6 - len(answers)))
        return answers.pop(0)

    monkeypatch.setattr(follow, "ask", squeue)
    count = 5
    assert follow.follow("17", log) == status
    assert capsysbinary.readouterr().out == b"line\n" * count


def test_gpus_and_who_is_on_them():
    gpus = "0, GPU-a, 97, 1200, 16384\n1, GPU-b, 0, 3, 16384\n"
    lines = usage.gpu_lines(gpus, "GPU-a, 17, 1100\nGPU-a, 18, 90\n", lambda pid: f"rank {pid}")
    assert lines == [
        "GPU 0   97 %    1200 of 16384 MiB  rank 17 (1100 MiB), rank 18 (90 MiB)",
        "GPU 1    0 %       3 of 16384 MiB  nobody",
    ]


def test_cpu_by_rank():
    assert usage.cpu_lines({"rank 10": 0.5, "rank 2": 1.0}) == [
        "rank 2     100 % of a CPU",
        "rank 10     50 % of a CPU",
    ]
    assert usage.cpu_lines({}) == ["no rank runs here"]


def test_look_goes_by_the_site():
    srun = usage.look_command("srun --jobid={job} -w {host}", "17", "c101-001", {})
    assert srun == ["srun", "--jobid=17", "-w", "c101-001", sys.executable, "-m", "ddp_examples.core.usage"]
    ssh = usage.look_command("ssh {host}", "17", "c101-001", {"LD_LIBRARY_PATH": "/a b"})
    assert ssh == [
        "ssh",
        "c101-001",
        f"env 'LD_LIBRARY_PATH=/a b' {shlex.quote(sys.executable)} -m ddp_examples.core.usage",
    ]
