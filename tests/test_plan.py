"""What each site would run for 1, 2 and 16 nodes, word for word: tests/golden/SITE-NODES.txt.

After a change that is meant: DDP_EXAMPLES_GOLDEN=write python -m pytest tests/test_plan.py, and read the difference.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_examples.core import launch, node, submit
from ddp_examples.core.job import Job

GOLDEN = Path(__file__).parent / "golden"
SINFO = "rtx*|2-00:00:00|2|gpu:4|up\nrtx-dev|2:00:00|2|gpu:4(S:0-1)\nbig|1-00:00:00|32|gpu:a100:8\n"
SETTINGS = ["demo=basic", "seed=1"]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """The same facts everywhere: interpreter, folders, CPUs, no GPUs, no job."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PMI_", "OMPI_", "MV2_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("DDP_EXAMPLES_CONF", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    monkeypatch.setattr(node, "allowed_cpus", lambda: 16)
    monkeypatch.setattr(launch, "gpus_here", lambda env: 0)
    monkeypatch.setattr(submit, "ask", lambda *command: SINFO if command[0] == "sinfo" else None)
    return tmp_path


def planned(site, nodes, capsys, folder):
    """All that --dry-run prints, and its status."""
    options = ["--dry-run", "-N", str(nodes), *SETTINGS, f"site={site}"]
    try:
        status = node.main(options) if site == "local" else submit.main(["/code/launch/slurm.sh", *options])
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    return f"{out}{err}status {int(status)}\n".replace(str(folder), "/folder")


@pytest.mark.parametrize("nodes", [1, 2, 16])
@pytest.mark.parametrize("site", ["local", "slurm", "frontera"])
def test_golden(site, nodes, machine, capsys):
    text = planned(site, nodes, capsys, machine)
    golden = GOLDEN / f"{site}-{nodes}.txt"
    if os.environ.get("DDP_EXAMPLES_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()
    assert [path.name for path in machine.iterdir()] == []  # nothing was written


@pytest.mark.parametrize("option", ["-N2", "-prtx", "-t1:00:00", "-Ame", "--wait", "site=slurm"])
def test_what_is_for_jobs_is_refused_on_this_machine(option, machine, capsys):
    with pytest.raises(SystemExit) as stopped:
        node.main(["--dry-run", option, *SETTINGS])
    assert stopped.value.code == 2
    assert "launch/slurm.sh -N 2" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["-N", "17", "-p", "rtx"], ["-t", "49:00:00"], ["-p", "gtx"], ["-t", "soon"]])
def test_frontera_refuses_before_sbatch(options, machine, capsys):
    with pytest.raises(SystemExit) as stopped:
        submit.main(["/code/launch/slurm.sh", "--dry-run", "site=frontera", *options])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_in_a_job_nothing_is_submitted(machine, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "c101-[001-003]")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "rtx")
    assert submit.main(["/code/launch/slurm.sh", "--dry-run", "site=frontera", "-N2", *SETTINGS]) == 0
    out = capsys.readouterr().out
    assert "sbatch" not in out
    assert "ibrun -n 2 /env/bin/python" in out
    assert "--ranks=4" in out  # no GPU is seen here, and the table says that a node of rtx has 4
    assert "--rdzv-id=17-0 --rdzv-endpoint=c101-001:15017" in out


def test_more_nodes_than_the_job_has(machine, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "c101-[001-003]")
    with pytest.raises(SystemExit) as stopped:
        submit.main(["/code/launch/slurm.sh", "--dry-run", "-N4", "site=slurm", *SETTINGS])
    assert stopped.value.code == 2
    assert "-N 4, but job 17 has 3: c101-001, c101-002, c101-003" in capsys.readouterr().err


def test_launcher_started_by_srun_is_refused(machine, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "c101-[001-002]")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(SystemExit) as stopped:
        submit.main(["/code/launch/slurm.sh", "--dry-run", "site=slurm", *SETTINGS])
    assert stopped.value.code == 2
    assert "4 processes were started on 2 nodes" in capsys.readouterr().err


def test_nccl_needs_as_many_gpus_as_ranks(machine, capsys):
    with pytest.raises(SystemExit) as stopped:
        submit.main(["/code/launch/slurm.sh", "--dry-run", "site=frontera", "-n8", "backend=nccl"])
    assert stopped.value.code == 2
    assert "8 ranks, but 4 GPUs" in capsys.readouterr().err


def test_gloo_asks_for_no_gpus(machine, capsys):
    submit.main(["/code/launch/slurm.sh", "--dry-run", "site=slurm", "-n2", "backend=gloo"])
    assert "--gpus" not in capsys.readouterr().out


def test_options_that_torchrun_lacks_are_left_out():
    arguments = ["--nnodes=2", "--signals-to-handle=SIGTERM", "--module", "demo", "--not-for-torchrun"]
    kept, lacking = launch.known_to('parser.add_argument("--nnodes", ...)\n"--module"', arguments)
    assert kept == ["--nnodes=2", "--module", "demo", "--not-for-torchrun"]
    assert lacking == ["--signals-to-handle=SIGTERM"]


def test_a_restarted_job_meets_elsewhere():
    assert Job("17", 0, ("a",)).run != Job("17", 1, ("a",)).run
    assert Job("17", 0, ("a",)).port != Job("17", 1, ("a",)).port
    assert all(1024 < Job(str(number), 0, ("a",)).port < 32768 for number in (0, 1, 31000, 99999999))


@pytest.mark.parametrize(("options", "asked"), [(["--requeue"], [("scontrol", "requeue", "17")]), ([], [])])
def test_run_that_stopped_after_saving_is_queued_again(options, asked, machine, monkeypatch):
    """Where the batch script says so: in a shell of one's own the job must not be taken away."""
    commands = []
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "c101-[001-002]")
    monkeypatch.setattr(submit, "run_step", lambda *arguments: 75)
    monkeypatch.setattr(submit, "ask", lambda *command: commands.append(command) or "")
    monkeypatch.setattr(submit.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert submit.main(["/code/launch/slurm.sh", "site=slurm", *options, *SETTINGS]) == 75
    assert commands == asked


@pytest.mark.parametrize(("before", "given"), [([], 1), (["--dependency=afterany:15", "--dependency=afterany:16"], 0)])
def test_where_a_job_can_not_be_requeued_a_successor_goes_on(before, given, machine, monkeypatch, capsys):
    """With the same script and log, at most --max-restarts times."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "c101-[001-002]")
    monkeypatch.setenv(launch.SUCCESSOR, shlex.join(["sbatch", "--nodes=2", "--output=/a b/%j.log", *before]))
    monkeypatch.setattr(submit, "run_step", lambda *arguments: 75)
    monkeypatch.setattr(submit.shutil, "which", lambda name: f"/usr/bin/{name}")
    submitted = []

    def sbatch(command, input="", **options):
        if command[0] != "sbatch":
            return subprocess.CompletedProcess(command, 1, "", "")
        submitted.append((command, input))
        return subprocess.CompletedProcess(command, 0, "Submitted batch job 18\n", "")

    monkeypatch.setattr(submit.subprocess, "run", sbatch)
    arguments = ["--max-restarts=2", "-N2", "site=frontera", *SETTINGS]
    assert submit.main(["/code/launch/slurm.sh", *arguments]) == 75
    assert len(submitted) == given
    if given:
        [(command, script)] = submitted
        assert command == ["sbatch", "--nodes=2", "--output=/a b/17.log", "--dependency=afterany:17"]
        assert script.endswith(f"exec /code/launch/slurm.sh {shlex.join(arguments)}\n")
        assert shlex.quote(shlex.join(command)) in script
    said = capsys.readouterr().err
    assert ("job 18 goes on when this one has ended" in said) == bool(given)
    assert ("started again 2 times" in said) == (not given)
