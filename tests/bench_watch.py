"""What the watch costs: `python tests/bench_watch.py [RANKS]`: steps per second with it and without, 7 pairs.

The steps are those of basic. `watch`: as a run has it. `trail`: watch.hang_s=0 and watch.lost_s=0, so steps and
collectives are noted, but no thread looks. `bare`: torch alone. A pair is 12 blocks of steps of each kind in turn, in
the same ranks. The first 100 steps of a block are not timed: while a thread starts, any, the scheduler moves the ranks
about (an idle one more cost 120 us a step of 1.2 ms in the first 50 ms, and nothing after 150 steps; 2 cores).
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

STEPS, WARM = 300, 100  # a block, and the steps before it that are not timed
BLOCKS = 12  # of each kind in a pair, in turn
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


def bare(_: dist.Store) -> float:
    return seconds(DistributedDataParallel(build_model()))


def trail(store: dist.Store) -> float:
    return watch(store, hang_s=0, lost_s=0)


def watch(store: dist.Store, hang_s: float = 60, lost_s: float = 30) -> float:
    witness = Witness(read_ranks(os.environ), store, hang_s, lost_s)
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
    kinds = [bare, trail, watch]
    ratios = []
    for pair in range(PAIRS):
        took = dict.fromkeys(kinds, 0.0)
        for block in range(BLOCKS):
            first = block % len(kinds)
            for kind in kinds[first:] + kinds[:first]:
                took[kind] += kind(dist.PrefixStore(f"{pair} {block} {kind.__name__}", store))
        ratios.append([took[trail] / took[watch], took[bare] / took[watch]])
        if ranks.rank == 0:
            speeds = ", ".join(f"{kind.__name__} {STEPS * BLOCKS / took[kind]:.0f}" for kind in kinds)
            print(f"steps/s: {speeds}; watch to trail {ratios[-1][0]:.3f}, to bare {ratios[-1][1]:.3f}", flush=True)
    if ranks.rank == 0:
        to_trail, to_bare = (statistics.median(column) for column in zip(*ratios))
        print(
            f"{ranks.world_size} ranks, medians of {PAIRS}: to trail {to_trail:.3f}, to bare {to_bare:.3f}", flush=True
        )
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
    reader = Watch(Ranks(0, 0, len(beats), 4, True), Progress(Trail()), None, "bench", 5, 30)
    reader._store = store
    return lambda: reader._judged(store)


def main() -> None:
    tail = [Entry(n, 5, "forward pass", "train.py:9 in train") for n in range(24)]
    beats = [Beat(r, r % 4, f"c{r // 4}", r, 5, 7, True, "train.py:9 in train", tail=tail) for r in range(4096)]
    print(f"judge 4,096 ranks that all wait: {best_of(5, lambda: judge(beats, 5, 30)):.3f} s")
    print(f"a check of 4,096 ranks, read from a store: {best_of(5, reader_of(beats)):.3f} s")
    with tempfile.TemporaryDirectory() as folder:
        notes = Trail(Path(folder) / "trail")
        took = best_of(2000, lambda: notes.note("all_reduce float32 [4]", "a.py:9"))
        print(f"a note in the trail: {1e6 * took:.1f} us")
    print(f"a look at a stack: {1e6 * best_of(2000, lambda: look(sys._getframe())):.1f} us", flush=True)
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    print(forked(ranks, "bench_watch", timeout_s=600).output)


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure()
    else:
        main()
