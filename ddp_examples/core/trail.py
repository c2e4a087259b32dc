"""What a rank did last, in a file that outlives it: RUN/rank-3.trail. Standard library only.

A gloo peer that meets a wrong shape aborts, the innocent one often before the other; then only such a file can tell who
called what. It is a map in memory (about 2 us an entry), so what is written is kept when the process is killed.
"""

import json
import mmap
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, DefaultDict, Dict, List, NamedTuple, Optional, Tuple

NO_GRADIENT = ", no gradient for "  # in an entry: DDP still waits for these parameters
HEAD, SLOT, SLOTS = 2048, 256, 64  # bytes, bytes, entries that are kept


class Entry(NamedTuple):
    """Something that all ranks do in the same order: a collective, a forward pass of DDP, an optimizer step."""

    number: int  # counts from 1
    step: int
    what: str  # "all_reduce float32 [4]", "forward pass", "optimizer step"
    where: str
    usual: str = ""  # what this rank did here before, if never this


class Trail:
    """`Trail(path).note("all_reduce float32 [4]", "train.py:84 in train")`; without a path in memory only."""

    def __init__(self, path: Optional[Path] = None) -> None:
        size = HEAD + SLOT * SLOTS
        self.number = 0
        self.step = 0
        self.entries: List[Entry] = []  # the last ones
        self._followers: DefaultDict[str, Dict[str, int]] = defaultdict(dict)  # after what, what was done how often
        self._before = ""
        self._map = mmap.mmap(-1, size)
        if path is not None:
            with suppress(OSError), path.open("wb") as file:  # without it the run goes on, and tells less
                file.truncate(size)
            with suppress(OSError), path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), size)

    def note(self, what: str, where: str = "") -> None:
        """Called by the main thread as it begins `what`."""
        self.number += 1
        entry = Entry(self.number, self.step, what, where, self._unusual(what, where))
        self.entries.append(entry)
        del self.entries[:-SLOTS]
        text = f"{entry.number}\t{entry.step}\t{what[:80]}\t{where[-60:]}\t{entry.usual[:80]}\n".encode()[:SLOT]
        start = HEAD + SLOT * (self.number % SLOTS)
        self._map[start : start + len(text)] = text

    def _unusual(self, what: str, where: str) -> str:
        """ "" or what has followed on the entry before at least twice, where this one never has."""
        followers = self._followers[self._before]
        if len(self._followers) > 1000:  # places without number: then there is nothing to learn
            self._followers.clear()
        self._before = f"{what.partition(' ')[0]} {where}"  # not the shape, which may change from step to step
        done = what + where
        followers[done] = followers.get(done, 0) + 1
        if followers[done] > 1:
            return ""
        usual = max(followers, key=followers.__getitem__)
        usual = usual if followers[usual] > 1 else ""
        if len(followers) > 100:
            followers.clear()
        return usual

    def head(self, facts: Dict[str, Any]) -> None:
        """Called by the watch thread, once a second: what it sees of the rank."""
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
    entries = []
    for start in range(HEAD, len(content), SLOT):
        with suppress(ValueError):
            number, step, what, where, usual = (
                content[start : start + SLOT].partition(b"\n")[0].decode(errors="replace").split("\t")
            )
            entries.append(Entry(int(number), int(step), what, where, usual))
    return head, sorted(entries, key=lambda entry: entry.number)


def read_trails(folder: Path) -> Dict[int, Tuple[Dict[str, Any], List[Entry]]]:
    """read_trail of each rank that has left one in the folder of the run."""
    paths = {path: path.name[len("rank-") : -len(".trail")] for path in folder.glob("rank-*.trail")}
    return {int(rank): read_trail(path) for path, rank in paths.items() if rank.isdigit()}


def memory_use() -> int:
    """Resident memory of this process in bytes; 0 where /proc does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
