"""Steps per second of the train demo against a hand-written DDP loop of the same model, batches and schedule.

    python tests/bench_train.py [--pairs 7] [--epochs 4]

2 ranks; the two alternate in the same processes, the order changing from pair to pair. Of both the first epoch is not
counted, nor are evaluation and checkpoints.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, List

from torchrun import FORK, ROOT


def bare(epochs: int, config: Any) -> float:
    """Samples a second over all ranks."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    from ddp_examples.core.digits import load_digits
    from ddp_examples.core.ranks import read_ranks
    from ddp_examples.core.training import shifted, warm_up_then_cosine
    from ddp_examples.train import Net

    params, ranks = config.demo, read_ranks(os.environ)
    data = load_digits()[0]
    sampler = DistributedSampler(data)
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=params.lr, weight_decay=params.weight_decay)
    loader = DataLoader(data, params.global_batch // ranks.world_size, sampler=sampler, drop_last=True)
    step, counted, begun = 0, 0, 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        if epoch == 1:
            dist.barrier()
            begun, counted = time.perf_counter(), step
        for x, y, _ in loader:
            for group in optimizer.param_groups:
                group["lr"] = params.lr * warm_up_then_cosine(step, epochs * len(loader))
            loss = cross_entropy(ddp(shifted(x, 0, step, ranks)), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), params.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return (step - counted) * params.global_batch / (time.perf_counter() - begun)


def measure(folder: Path, pairs: int, epochs: int) -> None:
    from ddp_examples import train
    from ddp_examples.core import meter
    from ddp_examples.core.config import load_config
    from ddp_examples.core.group import process_group
    from ddp_examples.core.ranks import read_ranks

    meter.WARM_UP = 29  # the first epoch
    ranks, ratios = read_ranks(os.environ), []  # type: ignore[var-annotated]
    for pair in range(pairs + 1):
        settings = [f"demo.epochs={epochs}", f"checkpoint.path={folder}/{pair}", f"report={folder}/{pair}.json"]
        config = load_config(train.Params, settings, ranks)
        speeds = {}
        for way in ("bare", "train") if pair % 2 else ("train", "bare"):
            with process_group(ranks, **config.group()) as group:
                if way == "bare":
                    speeds[way] = bare(epochs, config)
                else:
                    train.run(group, config)
                    speeds[way] = json.loads((folder / f"{pair}.json").read_text())["metrics"]["samples_per_s"]
        if pair:  # the first one warms up
            ratios.append(speeds["train"] / speeds["bare"])
            if ranks.rank == 0:
                steps = {way: f"{speed / config.demo.global_batch:.1f} steps/s" for way, speed in speeds.items()}
                print(f"RESULT {steps}  ratio {ratios[-1]:.3f}", flush=True)
    if ranks.rank == 0:
        print(f"RESULT median of {pairs} pairs: {statistics.median(ratios):.3f} of the bare loop's speed", flush=True)


def main(argv: List[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", FORK, "--standalone", "--nproc-per-node=2", "--module", "bench_train"]
        arguments = [folder, str(options.pairs), str(options.epochs)]
        done = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True)
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith("RESULT")) + done.stderr[-2000:])
    return done.returncode


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main(sys.argv[1:]))
