"""What the watch costs: `python tests/bench_watch.py [RANKS]`: steps per second of basic with it and without, 7 pairs.

Also the time to judge 4,096 ranks, a note in the trail, a look of the thread.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

from torchrun import forked

from ddp_examples.core.judge import Beat, judge
from ddp_examples.core.trail import Entry, Trail
from ddp_examples.core.watch import look

EPOCHS = 60


def steps_per_second(ranks: int, *settings: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        ended = forked(ranks, "ddp_examples.basic", f"demo.epochs={EPOCHS}", f"report={report}", *settings)
        assert ended.status == 0, ended.output
        return EPOCHS * -(-1437 // (32 * ranks)) / float(json.loads(report.read_text())["seconds"])


def best_of(times: int, work: Callable[[], object]) -> float:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    tail = [Entry(n, 5, "forward pass", "train.py:9 in train") for n in range(24)]
    beats = [Beat(r, r % 4, f"c{r // 4}", r, 5, 7, True, "train.py:9 in train", tail=tail) for r in range(4096)]
    print(f"judge 4,096 ranks that all wait: {best_of(5, lambda: judge(beats, 5, 30)):.3f} s")
    trail = Trail(Path(tempfile.mkstemp()[1]))
    print(f"a note in the trail: {1e6 * best_of(2000, lambda: trail.note('all_reduce float32 [4]', 'a.py:9')):.1f} us")
    print(f"a look at a stack: {1e6 * best_of(2000, lambda: look(sys._getframe())):.1f} us")
    ratios = []
    for pair in range(7):
        orders = [("watch.hang_s=60", "watch.lost_s=30"), ("watch.hang_s=0", "watch.lost_s=0")]
        rates = [steps_per_second(ranks, *settings) for settings in (orders if pair % 2 else orders[::-1])]
        on, off = rates if pair % 2 else rates[::-1]
        ratios.append(on / off)
        print(f"{ranks} ranks: {on:7.1f} steps/s with the watch, {off:7.1f} without: {on / off:.3f}", flush=True)
    print(f"median of 7 pairs: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
