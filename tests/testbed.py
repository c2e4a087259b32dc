"""The two-node Slurm of tests/cluster, for tests: start it, run commands on its hosts, break it, mend it."""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional

from torchrun import ROOT, Result, run

SCRIPT = ROOT / "tests" / "cluster" / "cluster"
FOLDER = Path("/tmp/ddp-examples-cluster")
LOCK = Path("/tmp/ddp-examples-cluster.lock")  # host names and links are one set a machine: one cluster at a time
NODES = ("c101-001", "c101-002")
REQUIRE = "DDP_EXAMPLES_REQUIRE_CLUSTER"  # set: what the cluster needs must be there, no test of it is skipped


def lacking() -> str:
    """Why the cluster can't be started here, or ""."""
    if os.geteuid() != 0:
        return "not root"
    programs = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare")
    absent = [name for name in programs if not shutil.which(name)]
    if absent:
        return f"no {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge iproute2)"
    trial = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True)
    return f"no namespaces: {trial.stderr.strip()}" if trial.returncode else ""


@contextlib.contextmanager
def cluster() -> Iterator["Cluster"]:
    """The running cluster, and gone afterwards."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        call("down")  # what a killed test run left
        call("up")
        try:
            yield Cluster()
        finally:
            call("down")


def call(*arguments: str) -> str:
    done = subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass
class Cluster:
    """`cluster.on("login1", "sinfo")`."""

    def on(self, host: str, *command: str, timeout_s: float = 120, cwd: Optional[Path] = None, **env: str) -> Result:
        """Run a command on a host to its end; processes that it leaves on any host are found and ended."""
        variables = {"PYTHON": sys.executable, "SRUN_CONTAINER": None, **env}
        return run([str(SCRIPT), "on", host, *command], cwd=cwd, env=variables, timeout_s=timeout_s)

    def launch(self, site: str, host: str, *arguments: str, cwd: Path, **env: str) -> Result:
        """launch/slurm.sh or launch/frontera.sh on a host; SCRATCH is `cwd`."""
        return self.on(host, str(ROOT / "launch" / f"{site}.sh"), *arguments, cwd=cwd, SCRATCH=str(cwd), **env)

    @contextlib.contextmanager
    def job(self) -> Iterator[str]:
        """The number of a job on both nodes without a step, which is what idev gives."""
        said = call("on", "login1", "salloc", "--no-shell", "-N2", "-n2", "--partition=rtx-dev", "--quiet")
        found = call("on", "login1", "squeue", "-h", "-t", "R", "-o", "%i").split()
        assert found, said
        try:
            yield found[0]
        finally:
            call("on", "login1", "scancel", *found)
            self.wait_idle()

    def wait_idle(self, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while call("on", "login1", "sinfo", "-h", "-N", "-p", "rtx", "-o", "%T").split() != ["idle", "idle"]:
            assert time.monotonic() < deadline, call("on", "login1", "sinfo", "-N", "-l")
            time.sleep(0.2)

    @contextlib.contextmanager
    def names(self, host: str, **changed: str) -> Iterator[None]:
        """Other addresses in a host's /etc/hosts, "" for none: `names("c101-002", c101_002="127.0.1.1")`."""
        path = FOLDER / f"hosts.{host}"
        before = path.read_text()
        lines = before.splitlines()
        for name, address in changed.items():
            name = name.replace("_", "-")
            lines = [line for line in lines if not re.search(rf"\b{name}$", line)]
            lines += [f"{address} {name}"] if address else []
        path.write_text("\n".join(lines) + "\n")  # in place: the file is mounted over /etc/hosts
        try:
            yield
        finally:
            path.write_text(before)

    @contextlib.contextmanager
    def cut(self, host: str) -> Iterator[None]:
        call("cut", host)
        try:
            yield
        finally:
            call("mend", host)

    @contextlib.contextmanager
    def replaced(self, host: str, path: Path, by: Path) -> Iterator[None]:
        """On one host, another file or folder at `path`."""
        call("on", host, "mount", "--bind", str(by), str(path))
        try:
            yield
        finally:
            call("on", host, "umount", "--lazy", str(path))
