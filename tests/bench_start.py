"""Whole-process time and memory of a run, from the command to its end, by way of starting it.

    python tests/bench_start.py [--ranks 1 4 16] [--pairs 5] [--ways local torchrun bare spawn]

The ways alternate; printed are medians, and ratios to `bare`: torchrun with a 15-line script (bare_ddp.py) of the same
model, data and steps, which checks nothing; it aborts now and then at its end, with gloo, and is run again then.
`local`: launch/local.sh, `torchrun`: torchrun -m ddp_examples.basic, both with all checks. `spawn`:
torch.multiprocessing.spawn of bare_ddp.py. Memory: the largest sum of PSS, sampled every 0.2 s in an extra run.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Dict, List

from torchrun import MARKER, ROOT, processes

SPAWN = """
import socket, sys, torch.multiprocessing as mp
from bare_ddp import spawned
if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    mp.spawn(spawned, (int(sys.argv[1]), port), nprocs=int(sys.argv[1]))
"""


def command(way: str, ranks: int, folder: Path) -> List[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    (folder / "spawn_bare.py").write_text(SPAWN)
    return {
        "local": [str(ROOT / "launch" / "local.sh"), "-n", str(ranks)],
        "torchrun": [*torchrun, f"--nproc-per-node={ranks}", "-m", "ddp_examples.basic"],
        "bare": [*torchrun, f"--nproc-per-node={ranks}", str(ROOT / "tests" / "bare_ddp.py")],
        "spawn": [sys.executable, str(folder / "spawn_bare.py"), str(ranks)],
    }[way]


def start(way: str, ranks: int, folder: Path) -> "tuple[subprocess.Popen[bytes], str]":
    marker = uuid.uuid4().hex
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, MARKER: marker, "PYTHON": sys.executable, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each Python compiles the project again: 0.1 s a rank
    arguments = command(way, ranks, folder)
    return subprocess.Popen(arguments, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE), marker


def seconds(way: str, ranks: int, folder: Path) -> float:
    while True:
        begun = time.perf_counter()
        process, _ = start(way, ranks, folder)
        error = process.communicate()[1].decode()
        if process.returncode == 0:
            return time.perf_counter() - begun
        if way != "bare" or "SIGABRT" not in error:
            raise SystemExit(f"{way} with {ranks} ranks ended with {process.returncode}:\n{error[-2000:]}")
        print(
            f"bare with {ranks} ranks aborted at its end, as bare DDP on gloo does now and then: run again", flush=True
        )


def memory(way: str, ranks: int, folder: Path) -> float:
    """Largest sum of the processes' proportional set sizes, in MiB."""
    process, marker = start(way, ranks, folder)
    most = 0
    while process.poll() is None:
        total = 0
        for pid in processes(marker):
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
        most = max(most, total)
        time.sleep(0.2)
    process.communicate()
    return most / 1024


def wrong_key() -> float:
    """Seconds until launch/local.sh has refused a wrong key, with the environment in place."""
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    begun = time.perf_counter()
    ended = subprocess.run([str(ROOT / "launch" / "local.sh"), "demo.epohs=3"], env=env, capture_output=True)
    if ended.returncode != 2:
        raise SystemExit("the wrong key was not refused")
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=["bare", "local", "torchrun", "spawn"])
    parser.add_argument("--no-memory", action="store_true")
    options = parser.parse_args()
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"wrong key refused after {statistics.median(wrong_key() for _ in range(5)):.2f} s (median of 5)")
        print(f"{'ranks':>5}  {'way':<8}  {'seconds':>7}  {'of bare':>7}  {'PSS MiB':>7}", flush=True)
        for ranks in options.ranks:
            times: Dict[str, List[float]] = {way: [] for way in options.ways}
            for _ in range(options.pairs):
                for way in options.ways:
                    times[way].append(seconds(way, ranks, folder))
            medians = {way: statistics.median(found) for way, found in times.items()}
            for way, median in medians.items():
                ratio = f"{median / medians['bare']:7.2f}" if "bare" in medians else " " * 7
                used = "" if options.no_memory else f"{memory(way, ranks, folder):7.0f}"
                print(f"{ranks:>5}  {way:<8}  {median:7.2f}  {ratio}  {used}", flush=True)


if __name__ == "__main__":
    main()
