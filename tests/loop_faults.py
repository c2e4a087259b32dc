"""Breaks a rank in every way, and prints a table: is the verdict right, how many lines, how long does it take?

python tests/loop_faults.py [--kinds raise,hang] [--ranks 2,4] [--places 0,1,-1] [--times 5] [--torchrun]

Places: the culprit's rank; -1 is the last. Seconds are from the fault to the end of the launcher; 5 s of
them are watch.hang_s for what hangs. (gloo aborts on most of what does not fit together.)
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import List, NamedTuple

from torchrun import Result, forked, torchrun

STEP, HANG_S = 5, 5.0
KINDS = ["raise", "exit", "kill", "hang", "skip", "shape", "unused", "uneven", "nan", "full_disk", "drift", "slow"]
STATUS = {"exit": {7}, "kill": {137}, "slow": {0}, "drift": {1}}
STATUS.update({kind: {1, 134} for kind in ("skip", "shape", "unused")})  # gloo aborts on what does not fit together


class Outcome(NamedTuple):
    """What a run said."""

    rank: str
    step: str
    kind: str
    lines: int
    seconds: float
    faults: List[str]


def start(kind: str, ranks: int, rank: int, bare: bool, folder: Path) -> Result:
    settings = [f"demo.kind={kind}", f"demo.rank={rank}", f"demo.step={STEP}", f"watch.hang_s={HANG_S}"]
    settings += [f"debug={str(kind == 'drift').lower()}"]
    env = {"TMPDIR": str(folder)}
    if bare:
        program = [str(Path(__file__).with_name("timed_faults.py"))]
        return torchrun(ranks, *program, str(folder / "fault"), *settings, env=env, timeout_s=120)
    return forked(ranks, "timed_faults", str(folder / "fault"), *settings, env=env, timeout_s=120)


def seconds_of(began: float, ended: Result, rank: int, folder: Path) -> float:
    """From the fault to the end."""
    records = list(folder.glob(f"ddp-examples-*/rank-{rank}.json"))
    if records:
        return began + ended.seconds - json.loads(records[0].read_text())["time_ns"] / 1e9
    fault = folder / "fault"
    return began + ended.seconds - float(fault.read_text()) if fault.exists() else float("nan")


def outcome(kind: str, rank: int, ended: Result, folder: Path, began: float, bare: bool) -> Outcome:
    """Parse the end of the run; `faults` says what is wrong with it."""
    if kind == "slow":
        found = re.search(r"rank (\d+) on \S+ is slow: .* (\d+) times", ended.out)
        named, step, told, lines = (found[1] if found else "?"), "", "slow" if found else "?", 1
    else:
        verdicts = [json.loads(path.read_text()) for path in folder.glob("ddp-examples-*/verdict.json")]
        verdict = verdicts[0] if len(verdicts) == 1 else {"ranks": ["?"], "step": "?", "kind": "?", "lines": []}
        named = ",".join(map(str, verdict["ranks"]))
        step, told = str(verdict["step"]), verdict["kind"]
        lines = len(ended.err.splitlines())
    seconds = seconds_of(began, ended, rank, folder)
    wrong = []
    if named != str(rank):
        wrong.append(f"names rank {named}")
    if kind != "slow" and step != str(0 if kind == "uneven" else STEP):
        wrong.append(f"names step {step}")
    if told != kind:
        wrong.append(f"names kind {told}")
    right = {int(kind != "slow")} if bare else STATUS.get(kind, {1})  # torchrun's own status is 1 whatever the rank's
    if ended.status not in right:
        wrong.append(f"status {ended.status}")
    if ended.left:
        wrong.append(f"left {len(ended.left)} processes")
    return Outcome(named, step, told, lines, seconds, wrong)


def row(kind: str, ranks: int, place: int, times: int, bare: bool) -> bool:
    rank = place % ranks
    outcomes = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            began = time.time()
            ended = start(kind, ranks, rank, bare, Path(folder))
            outcomes.append(outcome(kind, rank, ended, Path(folder), began, bare))
        if outcomes[-1].faults:
            print(f"--- {kind} {ranks} {rank}: {outcomes[-1].faults}\n{ended.output}", file=sys.stderr, flush=True)
    right = sum(not one.faults for one in outcomes)
    seconds = [one.seconds for one in outcomes if one.seconds == one.seconds] or [float("nan")]
    figures = f"{statistics.median(seconds):7.1f} {max(seconds):7.1f}"
    lines = max(one.lines for one in outcomes)
    print(f"{kind:<10} {ranks:>5} {rank:>7} {right:>4}/{times} {lines:>6} {figures}", flush=True)
    return right == times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--places", default="0,1,-1")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--torchrun", action="store_true")
    options = parser.parse_args()
    print(f"{'kind':<10} {'ranks':>5} {'culprit':>7} {'right':>6} {'lines':>6}  median     max  s from fault to end")
    good = True
    for kind in options.kinds.split(","):
        for ranks in map(int, options.ranks.split(",")):
            places = sorted({place % ranks for place in map(int, options.places.split(","))})
            for place in places:
                good = row(kind, ranks, place, options.times, options.torchrun) and good
    print("all right" if good else "NOT all right")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
