"""The folder of a run: what its ranks, their watches and agents leave there, and how it is read. Standard library only.

    rank-3.json        what ended rank 3 (failure.Failure)
    rank-3.trail       what rank 3 did last, kept when it is killed (trail.py)
    rank-3.log         its traceback, its stack where it stood still, what C code wrote to standard error
    HOST-agent.log     torchrun's own words
    HOST.deaths        how the ranks of that node ended, as their parent saw it (deaths.Death); of several nodes
    stall.json         what the watches found (judge.Stall)
    verdict.json       what was said in the end (verdict.Verdict)

The launchers name the folder in DDP_EXAMPLES_RUN, and agents and ranks then leave the last word to them.
"""

import json
import os
import shlex
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, TypeVar

from ddp_examples.core.deaths import Death
from ddp_examples.core.failure import MISMATCHES, Failure
from ddp_examples.core.judge import Stall
from ddp_examples.core.trail import read_trails
from ddp_examples.core.verdict import Verdict, decide

RUN = "DDP_EXAMPLES_RUN"  # environment variable: the folder of the run
T = TypeVar("T")


def run_folder() -> Optional[Path]:
    """The folder of this run, if a launcher has named one."""
    folder = os.environ.get(RUN)
    return Path(folder) if folder else None


def own_folder() -> str:
    """A folder for a run that no launcher has named one for."""
    return tempfile.mkdtemp(prefix="ddp-examples-")


def clear(folder: Path) -> None:
    """Remove what an earlier run has left in the folder; its logs stay."""
    for pattern in ("rank-*.json", "rank-*.trail", "*.deaths", "stall.json", "verdict.json"):
        for path in folder.glob(pattern):
            path.unlink()


def clear_rank(folder: Path, rank: int) -> None:
    """A run went well: remove what this rank has left in its own_folder, and the folder with the last rank."""
    for path in folder.glob(f"rank-{rank}.*"):
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        folder.rmdir()


def leave_failure(failure: Failure, folder: Path) -> None:
    _leave(asdict(failure), folder / f"rank-{failure.rank}.json")


def read_failures(folder: Path) -> List[Failure]:
    """In the order of their times."""
    found = [_read(path, lambda facts: Failure(**facts)) for path in folder.glob("rank-*.json")]
    return sorted((failure for failure in found if failure), key=lambda failure: failure.time_ns)


def leave_deaths(deaths: Sequence[Death], folder: Path) -> None:
    """What the agent of a node tells the launcher, which makes one verdict of all nodes."""
    _leave([asdict(death) for death in deaths], folder / f"{deaths[0].host}.deaths")


def read_deaths(folder: Path) -> List[Death]:
    """Of all nodes, in the order of their times."""
    found = [_read(path, lambda rows: [Death(**row) for row in rows]) for path in folder.glob("*.deaths")]
    return sorted((death for deaths in found for death in deaths or []), key=lambda death: death.time_ns)


def leave_stall(stall: Stall, folder: Path) -> None:
    _leave(asdict(stall), folder / "stall.json")


def read_stall(folder: Path) -> Optional[Stall]:
    return _read(folder / "stall.json", lambda facts: Stall(**facts))


def read_verdict(folder: Path) -> Optional[Verdict]:
    return _read(folder / "verdict.json", lambda facts: Verdict(**facts))


def conclude(folder: Path, deaths: Sequence[Death], world_size: int) -> Verdict:
    """Decide from what lies in the folder, and leave the verdict there."""
    mismatch = any(map(_tells_mismatch, folder.glob("*rank*.log")))
    mismatch = mismatch or not any(folder.glob("*agent.log"))  # not our launcher: what gloo said is not in the logs
    verdict = decide(read_failures(folder), deaths, read_trails(folder), read_stall(folder), world_size, mismatch)
    if verdict.lines:
        again = f"  again: python -m ddp_examples.core.watch {shlex.quote(str(folder))}"
        verdict = Verdict(verdict.kind, verdict.ranks, verdict.step, [*verdict.lines[:9], again])
        _leave(asdict(verdict), folder / "verdict.json")
    return verdict


def _tells_mismatch(log: Path) -> bool:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20000))
        end = file.read()
    return any(words.encode() in end for words in MISMATCHES)


def _leave(facts: Any, path: Path) -> None:
    """Whole or not at all; the disk may be what has failed."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with suppress(OSError):
        part.write_text(json.dumps(facts), encoding="utf-8")
        part.replace(path)


def _read(path: Path, make: Callable[[Any], T]) -> Optional[T]:
    try:
        return make(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
