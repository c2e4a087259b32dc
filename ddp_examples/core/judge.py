"""Who holds the others up? Pure functions of what every rank has last told. Standard library only."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple

from ddp_examples.core.trail import NO_GRADIENT, Entry

Group = Tuple[List[int], str]  # ranks, and what they do


@dataclass(frozen=True)
class Beat:
    """What a rank's watch last told, as the reader sees it."""

    rank: int
    local_rank: int
    host: str
    pid: int
    step: int
    age_s: float  # since its main thread last moved
    waiting: bool  # in a collective
    where: str  # innermost frame of the user's own code
    left: bool = False  # it has closed its process group
    silent_s: float = 0  # since the reader last saw it change
    tail: List[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class Stall:
    """The finding: `ranks` hold up the others since `seconds`; `groups` side by side, the culprits first."""

    kind: str  # hang, skip, shape, unused, left, lost, stall
    ranks: List[int]
    step: int
    seconds: float
    groups: List[Group]
    host: str = ""
    local_rank: int = 0
    pid: int = 0
    detail: str = ""


def judge(beats: Sequence[Beat], hang_s: float, lost_s: float) -> Optional[Stall]:
    """None while some rank moves and all tell. hang_s, lost_s: seconds, 0: not looked for. O(ranks)."""
    here = [beat for beat in beats if not beat.left]
    lost = [beat for beat in here if lost_s and beat.silent_s >= lost_s]
    if lost:
        return _lost(lost, beats)
    if not here or not hang_s or any(beat.age_s + beat.silent_s < hang_s for beat in here):
        return None
    seconds = min(beat.age_s + beat.silent_s for beat in here)
    busy = _culprits_by_place(here)
    if busy:
        return _stall("hang", busy, busy[0].step, seconds, _places(busy, here))
    left = [beat for beat in beats if beat.left]
    if left:
        groups = [([beat.rank for beat in left], "have left the group"), *_places([], here)]
        return _stall("left", left, left[0].step, seconds, groups)
    if any(not beat.tail and beat.silent_s < 2 * hang_s for beat in here):
        return None  # its last word is from before it stood still; the next one tells more
    odd = odd_one({beat.rank: beat.tail for beat in here})
    if odd is None:
        return _stall("stall", here, here[0].step, seconds, _places([], here))
    kind, ranks, step, groups = odd
    return _stall(kind, [beat for beat in here if beat.rank in ranks], step, seconds, groups)


def _culprits_by_place(here: Sequence[Beat]) -> List[Beat]:
    """Waiting in a collective is a symptom, not waiting there is the cause.

    With nccl all may be in code of their own, as a collective is waited for at the next `.item()`: then those count
    that have done the least.
    """
    busy = [beat for beat in here if not beat.waiting]
    if len(busy) < len(here):
        return busy
    done = {beat.rank: (beat.step, beat.tail[-1].number if beat.tail else 0) for beat in busy}
    return [beat for beat in busy if done[beat.rank] == min(done.values())]


def _lost(lost: List[Beat], beats: Sequence[Beat]) -> Stall:
    """All ranks of a host are silent: the host is lost."""
    seconds = max(beat.silent_s for beat in lost)
    gone = {beat.rank for beat in lost}
    hosts = sorted({beat.host for beat in lost})
    whole = [host for host in hosts if all(beat.rank in gone for beat in beats if beat.host == host and not beat.left)]
    others = [beat for beat in beats if beat.rank not in gone and not beat.left]
    detail = f"host {', '.join(whole)} is lost" if whole and others else ""
    return _stall("lost", lost, lost[0].step, seconds, _places(lost, [*lost, *others]), detail)


def _stall(
    kind: str, culprits: Sequence[Beat], step: int, seconds: float, groups: List[Group], detail: str = ""
) -> Stall:
    first = culprits[0]
    ranks = [beat.rank for beat in culprits]
    return Stall(kind, ranks, step, seconds, groups, first.host, first.local_rank, first.pid, detail)


def _places(culprits: Sequence[Beat], all_ranks: Sequence[Beat]) -> List[Group]:
    """Ranks grouped by where they are and what they last called, those of `culprits` first."""
    named = {beat.rank for beat in culprits}
    groups: Dict[Tuple[bool, str], List[int]] = {}
    for beat in all_ranks:
        call = f" ({beat.tail[-1].what})" if beat.waiting and beat.tail and beat.tail[-1].where == beat.where else ""
        groups.setdefault((beat.rank not in named, f"{beat.where}{call}, step {beat.step}"), []).append(beat.rank)
    return [(ranks, place) for (_, place), ranks in sorted(groups.items())]


def odd_one(tails: Dict[int, List[Entry]]) -> Optional[Tuple[str, List[int], int, List[Group]]]:
    """(kind, ranks, step, groups) of those who did something else than the others; None if nobody did.

    `tails` are the last entries of each rank. All ranks make the same ones in the same order, until one doesn't.
    """
    by_number = {rank: {entry.number: entry for entry in tail} for rank, tail in tails.items() if tail}
    if len(by_number) < 2:
        return None
    first = max(min(entries) for entries in by_number.values())
    last = min(max(entries) for entries in by_number.values())
    for number in range(first, last + 1):
        now = {rank: entries[number] for rank, entries in by_number.items() if number in entries}
        if len({entry.what for entry in now.values()}) > 1:
            return _parted(now)
    return _ahead(by_number, last)


def _parted(now: Dict[int, Entry]) -> Tuple[str, List[int], int, List[Group]]:
    """The majority is right; of two halves, the one that does what it used to do here."""
    usual, times = Counter(entry.what for entry in now.values()).most_common(1)[0]
    odd = [rank for rank, entry in now.items() if entry.what != usual]
    if 2 * times <= len(now):
        unlike_before = [rank for rank, entry in now.items() if entry.usual]
        odd = unlike_before if 0 < len(unlike_before) < len(now) else list(now)
    names = {entry.what.partition(" ")[0] for entry in now.values()}
    step = min(entry.step for entry in now.values())
    without = [rank for rank, entry in now.items() if NO_GRADIENT in entry.what]
    if 0 < len(without) < len(now):
        return "unused", without, step, _calls(now, without)
    return "shape" if len(names) == 1 else "skip", odd, step, _calls(now, odd)


def _ahead(by_number: Dict[int, Dict[int, Entry]], last: int) -> Optional[Tuple[str, List[int], int, List[Group]]]:
    """Some have gone on while the others wait in a call that makes no entry, as DDP's own: the fewer are odd."""
    now = {rank: entries[last + 1] for rank, entries in by_number.items() if last + 1 in entries}
    behind = [rank for rank in by_number if rank not in now]
    if not now:
        return None
    unlike_before = [rank for rank, entry in now.items() if entry.usual]
    odd = behind if len(behind) < len(now) else unlike_before or list(now)
    step = min(entry.step for entry in now.values())
    before = by_number[behind[0]][last]
    groups = [*_calls(now, list(now)), (behind, f"still in what follows on {before.what} of step {before.step}")]
    without = [rank for rank, entry in now.items() if NO_GRADIENT in entry.what]
    kind, odd = ("unused", without) if without else ("skip", odd)
    return kind, odd, step, sorted(groups, key=lambda group: group[0][0] not in odd)


def _calls(now: Dict[int, Entry], first: Sequence[int]) -> List[Group]:
    named = set(first)
    groups: Dict[Tuple[bool, str], List[int]] = {}
    for rank, entry in now.items():
        place = f" at {entry.where}" if entry.where else ""
        groups.setdefault((rank not in named, f"{entry.what}{place}"), []).append(rank)
    return [(ranks, call) for (_, call), ranks in sorted(groups.items())]
