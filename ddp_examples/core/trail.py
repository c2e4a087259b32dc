"""What a rank did last, in a file that outlives it: RUN/rank-3.trail. Standard library only.

A gloo peer that meets a wrong shape aborts, the innocent one often before the other; then only such a file can tell who
called what. It is a map in memory (about 1 us an entry), so what is written is kept when the process is killed.
"""

import json
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

NO_GRADIENT = ", no gradient for "  # in an entry: DDP still waits for these parameters
HEAD, SLOT, SLOTS = 2048, 512, 64  # bytes, bytes, entries that are kept


class Entry(NamedTuple):
    """Something that all ranks do in the same order: a collective, a forward pass of DDP, an optimizer step."""

    number: int  # counts from 1
    step: int
    what: str  # "all_reduce float32 [4]", "forward pass", "optimizer step"
    where: str
    usual: str = ""  # what this rank did here before, if never this


@dataclass
class _Done:
    """What was done, and where, after something else."""

    times: int
    text: bytes  # as it goes into the file
    followers: Dict[Tuple[str, str], "_Done"]  # what was done next, by (what, where)


class Trail:
    """`Trail(path).note("all_reduce float32 [4]", "train.py:84 in train")`; without a path in memory only."""

    def __init__(self, path: Optional[Path] = None) -> None:
        size = HEAD + SLOT * SLOTS
        self.number = 0
        self.step = 0
        self._followers: Dict[Tuple[str, str], _Done] = {}  # of the last entry
        self._places: Dict[str, Dict[Tuple[str, str], _Done]] = {}  # followers by what is called where
        self._map = mmap.mmap(-1, size)
        if path is not None:
            with suppress(OSError), path.open("wb") as file:  # without it the run goes on, and tells less
                file.truncate(size)
            with suppress(OSError), path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), size)

    def note(self, what: str, where: str = "") -> None:
        """Called by the main thread as it begins `what`, twice a step and more: what is the same is kept ready."""
        self.number += 1
        done = self._followers.get((what, where)) or self._first(what, where)
        done.times += 1
        self._followers = done.followers
        text = b"%d\t%d\t%b" % (self.number, self.step, done.text)
        start = HEAD + SLOT * (self.number % SLOTS)
        self._map[start : start + len(text)] = text

    def _first(self, what: str, where: str) -> _Done:
        """It has never followed on the entry before: say what has, if that came at least twice."""
        before = self._followers
        usual = max(before, key=lambda done: before[done].times, default=("", ""))
        often = bool(before) and before[usual].times > 1
        if len(before) > 100:  # shapes that change from step to step; below, places without number
            before.clear()
        if len(self._places) > 1000:
            self._places.clear()
        place = f"{what.partition(' ')[0]} {where}"  # not the shape
        done = _Done(1, _text(what, where, ""), self._places.setdefault(place, {}))
        before[what, where] = done
        return replace(done, text=_text(what, where, "".join(usual) if often else ""))

    @property
    def entries(self) -> List[Entry]:
        """The last ones, in order."""
        return _entries(self._map[HEAD:])

    def head(self, facts: Dict[str, Any]) -> None:
        """Called by the watch thread at each look: what it sees of the rank."""
        text = json.dumps(facts).encode()[: HEAD - 1] + b"\n"
        self._map[: len(text)] = text


def read_trail(path: Path) -> Tuple[Dict[str, Any], List[Entry]]:
    """(what the watch thread saw last, the last entries in order) of a rank, dead or alive."""
    try:
        content = path.read_bytes()
    except OSError:
        return {}, []
    head: Dict[str, Any] = {}
    with suppress(ValueError):
        head = json.loads(content[:HEAD].partition(b"\n")[0])
    return head, _entries(content[HEAD:])


def _text(what: str, where: str, usual: str) -> bytes:
    return f"{what[:160]}\t{where[-120:]}\t{usual[:160]}\n".encode()[: SLOT - 40]


def _entries(content: bytes) -> List[Entry]:
    entries = []
    for start in range(0, len(content), SLOT):
        with suppress(ValueError):
            number, step, what, where, usual = (
                content[start : start + SLOT].partition(b"\n")[0].decode(errors="replace").split("\t")
            )
            entries.append(Entry(int(number), int(step), what, where, usual))
    return sorted(entries, key=lambda entry: entry.number)


def read_trails(folder: Path) -> Dict[int, Tuple[Dict[str, Any], List[Entry]]]:
    """read_trail of each rank that has left one in the folder of the run, in rank order: messages list ranks so."""
    paths = {path: path.name[len("rank-") : -len(".trail")] for path in folder.glob("rank-*.trail")}
    ranks = sorted((int(rank), path) for path, rank in paths.items() if rank.isdigit())
    return {rank: read_trail(path) for rank, path in ranks}


def memory_use() -> int:
    """Resident memory of this process in bytes; 0 where /proc does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
