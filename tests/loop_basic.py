"""Run the basic demo again and again, and count how the runs end: every status must be 0, and nothing be left.

    python tests/loop_basic.py --ranks 2 --runs 200 [--way torchrun | local] [--load]

`torchrun`: bare torchrun -m ddp_examples.basic; `local`: launch/local.sh, whose ranks are forked. --load: a process for
each core keeps it busy all the while. What a run that failed said is printed.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
from contextlib import contextmanager
from typing import Iterator, List

from torchrun import Result, local, torchrun


def once(way: str, ranks: int) -> Result:
    if way == "local":
        return local("-n", str(ranks), timeout_s=600)
    return torchrun(ranks, "-m", "ddp_examples.basic", env={"OMP_NUM_THREADS": "1"}, timeout_s=600)


def spin() -> None:
    while True:
        pass


@contextmanager
def busy_cores(wanted: bool) -> Iterator[None]:
    burners = [multiprocessing.Process(target=spin, daemon=True) for _ in range(len(os.sched_getaffinity(0)) * wanted)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.terminate()
            burner.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--way", choices=["torchrun", "local"], default="torchrun")
    parser.add_argument("--load", action="store_true")
    options = parser.parse_args()
    good: List[float] = []
    with busy_cores(options.load):
        for number in range(1, options.runs + 1):
            result = once(options.way, options.ranks)
            if result.status == 0 and not result.left:
                good.append(result.seconds)
            else:
                print(f"run {number}: status {result.status}, left {result.left}\n{result.output}", flush=True)
    middle = f", median {statistics.median(good):.2f} s" if good else ""
    load = ", all cores busy" if options.load else ""
    print(f"{options.way}, {options.ranks} ranks{load}: {len(good)} of {options.runs} runs ended with 0{middle}")
    return int(len(good) < options.runs)


if __name__ == "__main__":
    sys.exit(main())
