"""Interrupt the train demo in every way, at random moments; each run must end as the one that was never interrupted.

    python tests/loop_interrupt.py [--times 30] [--ways term,usr1,rank,kill] [--ranks 2]

term, usr1: the signal to the launcher, which ends with 75; rank: SIGKILL to a rank, under --max-restarts=3; kill:
SIGKILL to the launcher. The same command is typed again until it ends with 0. Compared: the fingerprint of the final
parameters, to the last bit. On the two-node Slurm: tests/loop_cluster.py.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Dict, List, Tuple

from torchrun import MARKER, ROOT, processes

WAYS = ["term", "usr1", "rank", "kill"]
EPOCHS = 10
SETTINGS = ["demo=train", f"demo.epochs={EPOCHS}", "checkpoint.every_s=0.5", "report=report.json"]


def start(folder: Path, ranks: int, *more: str) -> "Tuple[subprocess.Popen[bytes], str]":
    marker = uuid.uuid4().hex
    env = {**os.environ, MARKER: marker, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    command = [str(ROOT / "launch" / "local.sh"), "-n", str(ranks), *more, *SETTINGS]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log), marker


def straight(folder: Path, ranks: int) -> str:
    """Fingerprint of the parameters of a run that is not interrupted."""
    process, _ = start(folder, ranks)
    assert process.wait(300) == 0, (folder / "log").read_text()
    return fingerprint(folder)


def fingerprint(folder: Path) -> str:
    parameters: str = json.loads((folder / "report.json").read_text())["metrics"]["parameters"]
    return parameters


def interrupted(folder: Path, ranks: int, way: str, rng: random.Random) -> List[int]:
    """Interrupt once, after some steps, and go on to the end; returns the statuses of the launcher."""
    statuses = []
    process, marker = start(folder, ranks, *["--max-restarts=3"] * (way == "rank"))
    wait_for_epoch(rng.randint(1, EPOCHS - 3), folder, process)  # an epoch takes 0.2 s on one machine, 1 s on another
    time.sleep(rng.uniform(0, 0.3))
    if way == "rank":
        victims = [pid for pid, name in processes(marker).items() if is_rank(pid, name)]
        for pid in victims[-1:]:
            os.kill(pid, signal.SIGKILL)
    else:
        number = {"term": signal.SIGTERM, "usr1": signal.SIGUSR1, "kill": signal.SIGKILL}[way]
        if process.poll() is None:
            process.send_signal(number)
    statuses.append(process.wait(300))
    gone_by = time.monotonic() + 15
    while processes(marker) and time.monotonic() < gone_by:
        time.sleep(0.05)
    assert not processes(marker), processes(marker)
    while statuses[-1] != 0 and len(statuses) < 4:
        process, _ = start(folder, ranks)
        statuses.append(process.wait(300))
    return statuses


def is_rank(pid: int, name: str) -> bool:
    """A forked rank has the fork server as its parent, and sets a session of its own."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return "forkserver" in name and int(fields[3]) == pid


def wait_for_epoch(epoch: int, folder: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while f"epoch {epoch}/" not in (folder / "log").read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError((folder / "log").read_text())
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    rng, right = random.Random(1), 0
    counts: Dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "straight").mkdir()
        wanted = straight(Path(name) / "straight", options.ranks)
        for number in range(options.times):
            way = options.ways.split(",")[number % len(options.ways.split(","))]
            folder = Path(name) / str(number)
            folder.mkdir()
            statuses = interrupted(folder, options.ranks, way, rng)
            same = statuses[-1] == 0 and fingerprint(folder) == wanted
            right += same
            counts[way] = counts.get(way, 0) + same
            print(f"{'same ' if same else 'OTHER'}  {way:<5} statuses {statuses}", flush=True)
            if not same:
                print((folder / "log").read_text())
    print(f"{right} of {options.times} ended with the parameters of the uninterrupted run: {counts}")
    return int(right < options.times)


if __name__ == "__main__":
    sys.exit(main())
