"""What the watch costs: `python tests/bench_watch.py [RANKS]`: steps per second with it and without, 7 pairs.

The steps are those of basic. A pair is 8 blocks of steps of each kind in turn, in the same ranks: so what else the
machine does meets both alike (pairs of one long block each differed by 30 %). Without: bare torch, no hook, no thread.
Also the time to judge 4,096 ranks, alone and with their beats read from a store; of a note in the trail; of a look.
"""

import json
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Callable, List

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrun import forked

from ddp_examples.basic import build_model, loss_of
from ddp_examples.core.frames import look
from ddp_examples.core.judge import Beat, judge
from ddp_examples.core.progress import Progress
from ddp_examples.core.ranks import Ranks, read_ranks
from ddp_examples.core.trail import Entry, Trail
from ddp_examples.core.watch import Watch
from ddp_examples.core.witness import Witness

STEPS, WARM = 150, 15  # a block, and the steps before it that are not timed
BLOCKS = 8  # of each kind in a pair, in turn
PAIRS = 7


def seconds(ddp: torch.nn.Module) -> float:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x, y = torch.rand(32, 64), torch.randint(10, (32,))
    begin = 0.0
    for step in range(WARM + STEPS):
        if step == WARM:
            dist.barrier()
            begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(ddp, x, y)
        loss.backward()
        loss.item()
        optimizer.step()
    return time.perf_counter() - begin


def with_watch(store: dist.Store) -> float:
    witness = Witness(read_ranks(os.environ), store, hang_s=60, lost_s=30)
    ddp = DistributedDataParallel(build_model())
    witness.progress.see(ddp)
    took = seconds(ddp)
    witness.through()
    witness.close()
    return took


def measure() -> None:
    """What a rank does."""
    ranks = read_ranks(os.environ)
    store = next(iter(dist.rendezvous("env://", ranks.rank, ranks.world_size)))[0]
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.world_size)
    bare = DistributedDataParallel(build_model())
    ratios = []
    for pair in range(PAIRS):
        on = off = 0.0
        for block in range(BLOCKS):
            mine = dist.PrefixStore(f"{pair} {block}", store)
            if block % 2:
                on, off = on + with_watch(mine), off + seconds(bare)
            else:
                off, on = off + seconds(bare), on + with_watch(mine)
        ratios.append(off / on)
        if ranks.rank == 0:
            steps = STEPS * BLOCKS
            print(f"{steps / on:7.1f} steps/s with the watch, {steps / off:7.1f} without: {ratios[-1]:.3f}", flush=True)
    if ranks.rank == 0:
        print(f"{ranks.world_size} ranks, median of {PAIRS} pairs: {statistics.median(ratios):.3f}", flush=True)
    os._exit(0)  # models that outlive their group: see core/group.py


def best_of(times: int, work: Callable[[], object]) -> float:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


def reader_of(beats: List[Beat]) -> Callable[[], object]:
    """What rank 0 does at each look: fetch all beats, of ranks that tell their trail too, and judge."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    for beat in beats:
        store.set(f"{beat.rank}", json.dumps({"tick": 1, **asdict(beat)}))
    watch = Watch(Ranks(0, 0, len(beats), 4, True), Progress(Trail()), None, "bench", 5, 30)
    watch._store = store
    return lambda: watch._judged(store)


def main() -> None:
    tail = [Entry(n, 5, "forward pass", "train.py:9 in train") for n in range(24)]
    beats = [Beat(r, r % 4, f"c{r // 4}", r, 5, 7, True, "train.py:9 in train", tail=tail) for r in range(4096)]
    print(f"judge 4,096 ranks that all wait: {best_of(5, lambda: judge(beats, 5, 30)):.3f} s")
    print(f"a check of 4,096 ranks, read from a store: {best_of(5, reader_of(beats)):.3f} s")
    with tempfile.TemporaryDirectory() as folder:
        trail = Trail(Path(folder) / "trail")
        print(
            f"a note in the trail: {1e6 * best_of(2000, lambda: trail.note('all_reduce float32 [4]', 'a.py:9')):.1f} us"
        )
    print(f"a look at a stack: {1e6 * best_of(2000, lambda: look(sys._getframe())):.1f} us", flush=True)
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    print(forked(ranks, "bench_watch", timeout_s=600).output)


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure()
    else:
        main()
