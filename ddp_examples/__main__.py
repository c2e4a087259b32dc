"""`python -m ddp_examples` lists the demos; `... demo=basic [key=value ...]` runs one, demo=all each in turn."""

import importlib
import os
import pdb
import sys
import time
import traceback
from typing import List, NoReturn, Sequence, Tuple

from ddp_examples.core.demos import demos
from ddp_examples.core.exits import Exit
from ddp_examples.core.ranks import read_ranks
from ddp_examples.core.runs import Run, planned_runs


def main(argv: List[str]) -> NoReturn:
    ranks = read_ranks(os.environ)
    if not argv or argv in (["--help"], ["-h"]):
        if ranks.rank == 0:
            print(listing(), flush=True)
        sys.exit(0)
    debugger = argv[0] == "--pdb"
    runs = planned_runs(argv[debugger:], ranks)  # before a demo, and with it torch, is imported
    try:
        sys.exit(run_demo(runs[0]) if len(runs) == 1 else run_all(runs, speaks=ranks.rank == 0))
    except Exception:
        if not debugger:
            raise
        traceback.print_exc()
        pdb.post_mortem()
        sys.exit(Exit.ERROR)


def run_demo(run: Run) -> int:
    sys.argv[1:] = run.settings
    return int(importlib.import_module(f"ddp_examples.{run.demo.name}").main())


def run_all(runs: Sequence[Run], speaks: bool) -> int:
    """Each run in turn, in a process group of its own; then a line for each, and the first status that is not 0.

    It goes on after a demo that has closed its group, whatever its status was; else the ranks could not meet again.
    """
    ended: List[Tuple[int, float]] = []
    try:
        for run in runs:
            start = time.time()
            ended.append((Exit.ERROR, 0.0))  # so it stays if an exception goes through here
            status = status_of(run)
            ended[-1] = status, time.time() - start
            if sys.modules["torch.distributed"].is_initialized():
                break
            if speaks:
                print(flush=True)
    finally:
        if speaks:
            print(summary(runs, ended), flush=True)
    return next((status for status, _ in ended if status), 0)


def status_of(run: Run) -> int:
    try:
        return run_demo(run)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else Exit.ERROR


def summary(runs: Sequence[Run], ended: Sequence[Tuple[int, float]]) -> str:
    """A line for each demo: how it ended, how long it took, where its report is."""
    width = max(len(run.demo.name) for run in runs)
    lines = []
    for run, (status, seconds) in zip(runs, ended):
        verdict = "ok" if status == Exit.OK else f"FAILED, status {status}"
        lines.append(f"{run.demo.name:<{width}}  {verdict:<16}  {seconds:5.1f} s  {run.config.report or ''}".rstrip())
    return "\n".join(lines + [f"{run.demo.name:<{width}}  not run" for run in runs[len(ended) :]])


def listing() -> str:
    """The demos, a line each, and how to start one."""
    width = max(map(len, demos()))
    lines = [f"  {name:<{width}}  {demo.about}" for name, demo in demos().items()]
    return "\n".join(
        [
            "Demos of distributed data parallel that prove what they show:",
            *lines,
            "",
            "Start one:",
            "  torchrun --nproc_per_node=4 -m ddp_examples.basic   four ranks on this machine",
            "  python -m ddp_examples demo=basic                   one rank, no launcher",
            "  python -m ddp_examples demo=basic --help            its settings",
            "  launch/local.sh demo=all                            each of them in turn",
        ]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
