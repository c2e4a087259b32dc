"""What a checkpoint costs, against a raw write and a raw read of as many bytes, in one run of 2 ranks.

    python tests/bench_checkpoints.py [--megabytes 503] [--rounds 5] [--folder FOLDER]

Each round does all of it in turn; printed are medians, and ratios. `save, sync`: until save() returns, the file being
on disk; `save, async`: the time that training stands still. `load`: verified, and copied into a model, on both ranks at
once; `raw read`: read() of a file as long, on both ranks at once. All files are in the page cache when they are read.
`dcp`: torch.distributed.checkpoint of the same state, on both ranks (its collectives need numpy; left out without).
"""

import argparse
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Callable, Dict, List

from torchrun import FORK, ROOT


def measure(folder: Path, megabytes: int, rounds: int) -> None:
    from ddp_examples.core.group import process_group
    from ddp_examples.core.ranks import read_ranks

    times: Dict[str, List[float]] = {}
    with process_group(read_ranks(os.environ), "gloo", 300) as group:
        size = one_round(folder, megabytes, {})  # warms up
        for _ in range(rounds):
            one_round(folder, megabytes, times)
        if group.is_main:
            show({name: statistics.median(found) for name, found in times.items()}, size)


def one_round(folder: Path, megabytes: int, times: Dict[str, List[float]]) -> int:
    """Append to `times` the seconds of each way; returns the bytes of the model."""
    import torch
    import torch.distributed as dist

    from ddp_examples.core.checkpoints import CheckpointDir, load_model, model_state

    def timed(name: str, work: Callable[..., object], *arguments: object) -> None:
        dist.barrier()
        begun = time.perf_counter()
        work(*arguments)
        times.setdefault(name, []).append(time.perf_counter() - begun)

    side = 1024  # 4.2 MB a layer
    count = max(1, megabytes * 1_000_000 // (4 * side * side))
    model = torch.nn.Sequential(*[torch.nn.Linear(side, side, bias=False) for _ in range(count)])
    size = count * 4 * side * side
    state = {"model": model_state(model), "step": len(times.get("load", []))}

    def load() -> None:
        found = checkpoints.load(torch.device("cpu"))
        assert found is not None
        load_model(model, found["model"])

    if dist.get_rank() == 0:
        timed("raw write", raw_write, folder / "raw", size)
    else:
        dist.barrier()
    timed("raw read", (folder / "raw").read_bytes)
    with CheckpointDir(str(folder / "sync")) as checkpoints:
        timed("save, sync", checkpoints.save, state["step"], state)
        timed("load", load)
    with CheckpointDir(str(folder / "async"), mode="async") as checkpoints:
        timed("save, async", checkpoints.save, state["step"], state)
    if importlib.util.find_spec("numpy"):
        from torch.distributed import checkpoint as dcp

        timed("dcp save", lambda: dcp.save(state, checkpoint_id=folder / "dcp"))
        timed("dcp load", lambda: dcp.load(state, checkpoint_id=folder / "dcp"))
    return size


def raw_write(path: Path, size: int) -> None:
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
        file.write(block[: size % len(block)])
        file.flush()
        os.fsync(file.fileno())


def show(medians: Dict[str, float], size: int) -> None:
    print(f"{size:,} bytes, 2 ranks, medians")
    for name, median in medians.items():
        base = "raw read" if name.endswith(("load", "read")) else "raw write"
        print(f"{name:<12} {median:6.2f} s  {median / medians[base]:5.2f} of {base}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=503)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    folder = Path(options.folder) / f"bench-{uuid.uuid4().hex}"
    folder.mkdir()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-c", FORK, "--standalone", "--nproc-per-node=2", "--module", "bench_checkpoints"]
    arguments = [str(folder), str(options.megabytes), str(options.rounds)]
    try:
        env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run([*command, *arguments], env=env).returncode)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
