"""Every way to fail before the ranks start, on the two-node Slurm: python tests/loop_cluster.py [WORDS OF A CASE].

By hand, as root, about 4 minutes. For each case the seconds, the status and all that was said; a case is good if it
ends within 60 s with a status that is not 0, one message with the words it must have, and no process left.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable, Dict, List, Tuple

from testbed import FOLDER, SCRIPT, Cluster, cluster
from torchrun import Result

Case = Tuple[Callable[[Cluster, Path], Result], Tuple[str, ...]]  # what is done, what must be in the message
RUN = ("-n", "1", "demo=basic", "backend=gloo", "demo.epochs=2")
STUCK = """'[[ $PMI_RANK$SLURM_PROCID == 1 ]] && sleep 300; exec "$@"' stuck"""
PORT_HOLDER = (
    "import socket,sys,time; s=socket.create_server(('', int(sys.argv[1]))); print('up', flush=True); time.sleep(300)"
)


def in_job(cluster: Cluster, folder: Path, *arguments: str, site: str = "slurm", **env: str) -> Result:
    """As in idev: a shell on the first node."""
    with cluster.job() as job:
        return cluster.launch(site, "c101-001", *RUN, *arguments, cwd=folder, SLURM_JOB_ID=job, **env)


def own_site(folder: Path, text: str) -> Dict[str, str]:
    (folder / "conf" / "site").mkdir(parents=True)
    (folder / "conf" / "site" / "own.yaml").write_text(text)
    return {"DDP_EXAMPLES_CONF": str(folder / "conf")}


def never_comes(cluster: Cluster, folder: Path, starter: str) -> Result:
    return in_job(cluster, folder, "site=own", **own_site(folder, f"start: {starter} bash -c {STUCK}\n"))


def bad_names(cluster: Cluster, folder: Path, host: str, site: str = "slurm", **changed: str) -> Result:
    with cluster.names(host, **changed):
        return in_job(cluster, folder, site=site)


def port_taken(cluster: Cluster, folder: Path, site: str) -> Result:
    with cluster.job() as job:
        holder = subprocess.Popen(
            [str(SCRIPT), "on", "c101-001", sys.executable, "-c", PORT_HOLDER, str(15000 + int(job))],
            stdout=subprocess.PIPE,
        )
        try:
            holder.stdout.readline()
            return cluster.launch(site, "c101-001", *RUN, cwd=folder, SLURM_JOB_ID=job)
        finally:
            holder.kill()
            holder.wait()


def link_cut(cluster: Cluster, folder: Path, host: str, site: str = "slurm") -> Result:
    with cluster.job() as job, cluster.cut(host):
        nodes = {"SLURM_JOB_NODELIST": "c101-[001-002]"}
        return cluster.launch(site, "c101-001", *RUN, cwd=folder, SLURM_JOB_ID=job, **nodes)


def lost_controller(cluster: Cluster, folder: Path) -> Result:
    with cluster.job() as job, cluster.cut("c101-001"):
        return cluster.launch("slurm", "c101-001", *RUN, cwd=folder, SLURM_JOB_ID=job)


def other_torch(cluster: Cluster, folder: Path, site: str) -> Result:
    metadata = Path(str(importlib.metadata.distribution("torch")._path)) / "METADATA"
    other = folder / "METADATA"
    other.write_text(
        metadata.read_text().replace(f"Version: {importlib.metadata.version('torch')}", "Version: 2.5.1", 1)
    )
    with cluster.replaced("c101-002", metadata, other):
        return in_job(cluster, folder, site=site)


def no_interpreter(cluster: Cluster, folder: Path) -> Result:
    nothing = folder / "nothing"
    nothing.mkdir()
    with cluster.replaced("c101-002", Path(sys.prefix), nothing):
        return in_job(cluster, folder)


def several_tasks(cluster: Cluster, folder: Path, *starter: str) -> Result:
    with cluster.job() as job:
        launcher = str(Path(__file__).parents[1] / "launch" / "slurm.sh")
        return cluster.on("c101-001", *starter, launcher, *RUN, cwd=folder, SLURM_JOB_ID=job)


def without(cluster: Cluster, folder: Path, program: str, *arguments: str, job: bool) -> Result:
    """PATH has every program but one."""
    tools = folder / "tools"
    tools.mkdir()
    for place in ("/usr/bin", "/bin", str(FOLDER / "bin"), str(Path(sys.executable).parent)):
        for path in Path(place).iterdir():
            if path.name != program and not (tools / path.name).exists():
                (tools / path.name).symlink_to(path)
    launcher = str(Path(__file__).parents[1] / "launch" / "slurm.sh")
    command = ("env", f"PATH={tools}", launcher, *RUN, *arguments)
    if not job:
        return cluster.on("login1", *command, cwd=folder)
    with cluster.job() as number:
        return cluster.on("c101-001", *command, cwd=folder, SLURM_JOB_ID=number)


SRUN = "srun --nodes={nodes} --ntasks={nodes} --kill-on-bad-exit=1 --overlap"
CASES: Dict[str, Case] = {
    "second node never comes": (lambda c, f: never_comes(c, f, SRUN), ("c101-002", "startup_timeout_s")),
    "second node never comes, ibrun": (lambda c, f: never_comes(c, f, "ibrun -n {nodes}"), ("c101-002",)),
    "own name of the second does not resolve": (
        lambda c, f: bad_names(c, f, "c101-002", c101_002=""),
        ("c101-002", "resolve", "/etc/hosts"),
    ),
    "own name of the head does not resolve": (
        lambda c, f: bad_names(c, f, "c101-001", c101_001=""),
        ("c101-001", "resolve", "/etc/hosts"),
    ),
    "own name of the head does not resolve, ibrun": (
        lambda c, f: bad_names(c, f, "c101-001", "frontera", c101_001=""),
        ("c101-001", "resolve", "/etc/hosts"),
    ),
    "head does not resolve on the second": (
        lambda c, f: bad_names(c, f, "c101-002", c101_001=""),
        ("c101-001", "c101-002", "/etc/hosts"),
    ),
    "head is loopback on itself": (
        lambda c, f: bad_names(c, f, "c101-001", c101_001="127.0.1.1"),
        ("c101-001", "127.0.1.1", "/etc/hosts"),
    ),
    "head is loopback on itself, ibrun": (
        lambda c, f: bad_names(c, f, "c101-001", "frontera", c101_001="127.0.1.1"),
        ("c101-001", "127.0.1.1", "/etc/hosts"),
    ),
    "head is loopback on the second": (
        lambda c, f: bad_names(c, f, "c101-002", c101_001="127.0.1.1"),
        ("c101-002", "127.0.1.1", "/etc/hosts"),
    ),
    "head not reachable from the second": (
        lambda c, f: bad_names(c, f, "c101-002", c101_001="10.77.0.99"),
        ("c101-002 can't reach c101-001",),
    ),
    "port taken": (lambda c, f: port_taken(c, f, "slurm"), ("c101-001", "in use by process")),
    "port taken, ibrun": (lambda c, f: port_taken(c, f, "frontera"), ("c101-001", "in use by process")),
    "link of the second cut before start": (lambda c, f: link_cut(c, f, "c101-002"), ("c101-002", "scontrol")),
    "link of the second cut before start, ibrun": (
        lambda c, f: link_cut(c, f, "c101-002", "frontera"),
        ("c101-002", "scontrol"),
    ),
    "link of the head cut before start": (lambda c, f: link_cut(c, f, "c101-001"), ("c101-00", "scontrol")),
    "link cut, and the job's nodes are not told": (
        lost_controller,
        ("c101-001", "unset SLURM_JOB_ID"),
    ),
    "another torch on the second": (lambda c, f: other_torch(c, f, "slurm"), ("c101-002", "2.5.1", "PYTHON=")),
    "another torch on the second, ibrun": (lambda c, f: other_torch(c, f, "frontera"), ("c101-002", "2.5.1")),
    "no interpreter on the second": (no_interpreter, ("c101-002", "PYTHON=")),
    "srun -n 4 around the launcher": (
        lambda c, f: several_tasks(c, f, "srun", "-n4", "--overlap", "--overcommit"),
        ("4 processes", "without srun"),
    ),
    "ibrun around the launcher": (lambda c, f: several_tasks(c, f, "ibrun", "-n", "2"), ("2 processes", "ibrun")),
    "time over the queue's limit": (
        lambda c, f: c.launch("slurm", "login1", *RUN, "-N2", "-t", "05:00:00", "-p", "rtx-dev", cwd=f),
        ("2:00:00", "Use -p rtx"),
    ),
    "time over the queue's limit, Frontera": (
        lambda c, f: c.launch("frontera", "login1", *RUN, "-N2", "-t", "50:00:00", "-p", "rtx", cwd=f),
        ("48:00:00",),
    ),
    "nodes over the queue's limit, Frontera": (
        lambda c, f: c.launch("frontera", "login1", *RUN, "-N4", "-p", "rtx-dev", cwd=f),
        ("2 nodes", "Use -p rtx"),
    ),
    "unknown queue": (
        lambda c, f: c.launch("slurm", "login1", *RUN, "-N2", "-p", "gpu", cwd=f),
        ("-p gpu", "rtx-dev"),
    ),
    "no sbatch": (lambda c, f: without(c, f, "sbatch", job=False), ("sbatch", "launch/local.sh")),
    "no srun": (lambda c, f: without(c, f, "srun", job=True), ("no srun",)),
}
WORKS: Dict[str, Case] = {  # what does without: the job's list of nodes is then expanded here
    "no scontrol": (lambda c, f: without(c, f, "scontrol", job=True), ("4 of 4 checks passed", "c101-001, c101-002")),
}


def problems(result: Result, words: Tuple[str, ...], fails: bool) -> List[str]:
    said = [line for line in result.output.splitlines() if line.startswith("ddp-examples: ")]
    found = [f"no {word!r}" for word in words if word not in result.output]
    found += [f"{len(said)} messages"] if fails and len(said) != 1 else []
    found += ["status 0"] if fails and result.status == 0 else []
    found += [f"status {result.status}"] if not fails and result.status else []
    found += ["more than 60 s"] if result.seconds > 60 else []
    return found + [f"left: {process}" for process in result.left]


def main(wanted: str) -> int:
    bad = 0
    with cluster() as running:
        for name, (do, words) in {**CASES, **WORKS}.items():
            if wanted not in name:
                continue
            with tempfile.TemporaryDirectory() as folder:
                result = do(running, Path(folder))
            running.wait_idle()
            wrong = problems(result, words, name in CASES)
            bad += bool(wrong)
            verdict = "BAD " if wrong else "good"
            print(f"{verdict} {result.seconds:5.1f} s  status {result.status:3}  {name}  {'; '.join(wrong)}")
            print("      " + result.output.strip().replace("\n", "\n      "), flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
