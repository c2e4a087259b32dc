"""What happens to a run over two nodes, on the two-node Slurm: python tests/loop_nodes.py [WORDS OF A CASE].

By hand, as root. A case is good if the message names the host that is lost within lost_s or hang_s + 10 s, and both
nodes are free afterwards; or if the run goes on after a requeue, and ends as one that was not interrupted.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Callable, Dict, List

from testbed import Cluster, call, cluster
from torchrun import Result

WATCH = ("watch.hang_s=10", "watch.lost_s=10")
LONG = ("-n", "1", "demo=basic", "backend=gloo", "demo.epochs=4000", *WATCH)
NODE_2 = "c101-002"


def running_in(host: str, words: str) -> List[int]:
    """Processes of a host whose command line has these words; hosts differ by their network namespace."""
    holder = call("on", host, "readlink", "/proc/self/ns/net").strip()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if words in command and str((folder / "ns/net").readlink()) == holder:
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def while_it_runs(cluster: Cluster, folder: Path, act: Callable[[], None]) -> Result:
    """Start a run over both nodes, `act` in the middle of it; `seconds` of the result: from then to the verdict."""
    results: List[Result] = []
    with cluster.job() as job:
        launch = threading.Thread(
            target=lambda: results.append(
                cluster.launch(
                    "slurm", "c101-001", *LONG, cwd=folder, SLURM_JOB_ID=job, SLURM_JOB_NODELIST="c101-[001-002]"
                )
            )
        )
        launch.start()
        log = folder / "runs" / job / "c101-001-rank0.log"
        deadline = time.monotonic() + 90
        while not (log.exists() and "epoch 2/" in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        begun = time.time()
        act()
        launch.join()
        call("mend", NODE_2)
        verdict = folder / "runs" / job / "verdict.json"
        seconds = verdict.stat().st_mtime - begun if verdict.exists() else float("inf")
        deadline = time.monotonic() + 60
        while running_in(NODE_2, "ddp_examples") and time.monotonic() < deadline:
            time.sleep(0.5)
        left = [str(pid) for pid in running_in(NODE_2, "ddp_examples")]
    return Result(results[0].status, results[0].out, results[0].err, seconds, left)


def link_cut(cluster: Cluster, folder: Path) -> Result:
    return while_it_runs(cluster, folder, lambda: print(call("cut", NODE_2), end=""))


def tree_killed(cluster: Cluster, folder: Path) -> Result:
    def kill() -> None:
        for pid in running_in(NODE_2, "ddp_examples") + running_in(NODE_2, "forkserver"):
            os.kill(pid, signal.SIGKILL)

    return while_it_runs(cluster, folder, kill)


def stopped(cluster: Cluster, folder: Path) -> Result:
    def stop() -> None:
        for pid in running_in(NODE_2, "forkserver"):
            os.kill(pid, signal.SIGSTOP)

    return while_it_runs(cluster, folder, stop)


def requeued(cluster: Cluster, folder: Path, site: str) -> Result:
    """SIGTERM to a job in mid-run: it saves, leaves with 75, is queued again, or its successor goes on."""
    settings = ("-N2", "-n1", "demo=train", "backend=gloo", "demo.epochs=6", "report=report.json")
    other = folder / "straight"
    other.mkdir()
    straight = cluster.launch(site, "login1", *settings, "--wait", cwd=other)
    cluster.launch(site, "login1", *settings, cwd=folder)
    runs = folder / "runs" if site == "slurm" else folder / "ddp-examples" / "runs"
    deadline, told = time.monotonic() + 240, False
    while time.monotonic() < deadline and not (folder / "report.json").exists():
        logs = [log.read_text() for log in runs.glob("*.log")]
        if not told and any("epoch 2/" in log for log in logs):
            [job] = call("on", "login1", "squeue", "-h", "-t", "R", "-o", "%i").split()
            call("on", "login1", "scancel", "--signal=TERM", job)
            told = True
        time.sleep(0.2)
    cluster.wait_idle()
    ends = [
        json.loads((where / "report.json").read_text())["metrics"]["parameters"]
        if (where / "report.json").exists()
        else where
        for where in (folder, other)
    ]
    said = "\n".join(log.read_text() for log in runs.glob("*.log"))
    return Result(int(ends[0] != ends[1]), said, straight.err, straight.seconds, straight.left)


CASES: Dict[str, Callable[[Cluster, Path], Result]] = {
    "link cut": link_cut,
    "node's processes killed": tree_killed,
    "node's ranks stopped": stopped,
    "requeued": lambda c, f: requeued(c, f, "slurm"),
    "successor, Frontera": lambda c, f: requeued(c, f, "frontera"),
}


def problems(name: str, result: Result) -> List[str]:
    if "requeued" in name or "successor" in name:
        words = ["stopped on request after step", "goes on", "train: ok"]
        return [f"no {word!r}" for word in words if word not in result.out] + ["other parameters"] * result.status
    found = [f"no {NODE_2}"] if NODE_2 not in result.err else []
    found += ["status 0"] if result.status == 0 else []
    found += [f"{result.seconds:.0f} s"] if result.seconds > 25 else []
    return found + [f"left: {process}" for process in result.left]


def main(wanted: str) -> int:
    bad = 0
    with cluster() as running:
        for name, do in CASES.items():
            if wanted not in name:
                continue
            with tempfile.TemporaryDirectory() as folder:
                result = do(running, Path(folder))
            running.wait_idle()
            wrong = problems(name, result)
            bad += bool(wrong)
            verdict = "BAD " if wrong else "good"
            print(f"{verdict} {result.seconds:5.1f} s  status {result.status:3}  {name}  {'; '.join(wrong)}")
            print("      " + (result.err or result.out).strip().replace("\n", "\n      "), flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
