"""The launchers on a real two-node Slurm (tests/cluster); as root, where namespaces and Debian's Slurm are to be had.

What else can go wrong before the ranks start, about 30 ways: tests/loop_cluster.py.
"""

import os
import subprocess
import sys
from typing import Iterator

import pytest
import testbed
from testbed import NODES, Cluster
from torchrun import ROOT

REASON = testbed.lacking()
RUN = ("demo=basic", "backend=gloo", "demo.epochs=1")

pytestmark = pytest.mark.skipif(
    bool(REASON) and testbed.REQUIRE not in os.environ, reason=f"no two-node Slurm: {REASON}"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    assert REASON == "", f"{testbed.REQUIRE} is set, but: {REASON}"
    with testbed.cluster() as running:
        yield running


def check_good(result, logs, ranks):
    """All checks passed, on both hosts, with one log a rank; no process is left."""
    assert result.status == 0, result.output
    assert f"basic: {ranks} ranks on {', '.join(NODES)}" in result.out
    assert "4 of 4 checks passed" in result.out
    assert result.left == []
    names = [path.name for path in logs.glob("*-rank*.log")]
    assert sorted(int(name.rpartition("rank")[2][:-4]) for name in names) == list(range(ranks))
    assert {name.rpartition("-rank")[0] for name in names} == set(NODES)


def check_refused(result, *words):
    """One message, with these words; a status that is not 0; no process left."""
    assert result.status != 0
    assert [line for line in result.output.splitlines() if "ddp-examples:" in line] == [
        line for line in result.output.splitlines() if "ddp-examples:" in line and all(word in line for word in words)
    ]
    assert result.output.count("ddp-examples:") == 1, result.output
    assert result.left == []


def test_from_the_login_host(cluster, tmp_path):
    result = cluster.launch("slurm", "login1", "-N2", "-n2", "--wait", *RUN, cwd=tmp_path)
    [log] = (tmp_path / "runs").glob("*.log")
    check_good(result, log.with_suffix(""), ranks=4)
    assert f"job {log.stem} is submitted" in result.out
    assert "4 of 4 checks passed" in log.read_text()
    [rank_0] = log.with_suffix("").glob("*-rank0.log")
    assert "4 of 4 checks passed" in rank_0.read_text()


def test_inside_a_job_by_ibrun(cluster, tmp_path):
    with cluster.job() as job:  # a shell on the first node, as idev gives
        result = cluster.launch("frontera", NODES[0], "-n1", *RUN, cwd=tmp_path, SLURM_JOB_ID=job)
    check_good(result, tmp_path / "ddp-examples" / "runs" / job, ranks=2)


def test_one_node_of_a_job(cluster, tmp_path):
    with cluster.job() as job:
        result = cluster.launch("slurm", NODES[0], "-N1", "-n1", *RUN, cwd=tmp_path, SLURM_JOB_ID=job)
    assert result.status == 0, result.output
    assert f"basic: 1 rank on {NODES[0]}" in result.out
    assert result.left == []


def test_a_rank_that_can_not_run_gives_the_job_its_status(cluster, tmp_path):
    result = cluster.launch("slurm", "login1", "-N2", "-n1", "--wait", "demo=basic", "backend=nccl", cwd=tmp_path)
    assert result.status == 4, result.output
    assert result.output.count("backend=nccl can't run: 1 ranks but 0 GPUs on c101-001. Use backend=gloo") == 1
    assert result.left == []


def test_mistake_in_a_setting_is_told_before_the_job(cluster, tmp_path):
    result = cluster.launch("slurm", "login1", "-N2", "--wait", "demo.epoch=2", cwd=tmp_path)
    assert result.status == 2
    check_refused(result, "Did you mean demo.epochs?")
    assert list(tmp_path.iterdir()) == []


def test_time_over_the_limit_of_the_queue(cluster, tmp_path):
    result = cluster.launch("slurm", "login1", "-N2", "-p", "rtx-dev", "-t", "05:00:00", *RUN, cwd=tmp_path)
    check_refused(result, "Use -p rtx")


def test_head_that_is_loopback(cluster, tmp_path):
    with cluster.names(NODES[0], c101_001="127.0.1.1"), cluster.job() as job:
        result = cluster.launch("slurm", NODES[0], "-n1", *RUN, cwd=tmp_path, SLURM_JOB_ID=job)
    assert result.status == 4
    check_refused(result, NODES[0], "127.0.1.1", "/etc/hosts")


def test_link_cut_before_the_start(cluster, tmp_path):
    nodes = {"SLURM_JOB_NODELIST": "c101-[001-002]"}
    with cluster.job() as job, cluster.cut(NODES[1]):
        result = cluster.launch("slurm", NODES[0], "-n1", *RUN, cwd=tmp_path, SLURM_JOB_ID=job, **nodes)
    assert result.status == 4
    assert f"scontrol show node {NODES[1]}" in result.err
    assert result.err.count("ddp-examples:") == 1
    assert result.left == []


def test_watch_ends_with_the_job(cluster, tmp_path):
    sbatch = ["sbatch", "--parsable", "--nodes=2", "--output=/dev/null", "--wrap=sleep 15"]
    job = cluster.on("login1", *sbatch, cwd=tmp_path).out.strip()
    result = cluster.on("login1", str(ROOT / "launch" / "watch.sh"), job, cwd=tmp_path)
    assert result.status == 0, result.output
    assert all(f"  {node}  no rank runs here" in result.out for node in NODES)
    assert result.out.endswith(f"job {job} has ended\n")


def test_cluster_is_needed_where_it_is_asked_for(tmp_path):
    """Where DDP_EXAMPLES_REQUIRE_CLUSTER is set a missing cluster is a failure, and no skip."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::test_one_node_of_a_job"]
    env = {**os.environ, testbed.REQUIRE: "1", "PATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 1, done.stdout
    assert f"{testbed.REQUIRE} is set, but" in done.stdout
