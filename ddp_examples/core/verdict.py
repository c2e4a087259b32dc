"""The last thing on the screen of a run that broke: at most 10 lines a person can act on. Standard library only."""

import signal
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ddp_examples.core.deaths import GONE, Death
from ddp_examples.core.exits import Exit
from ddp_examples.core.failure import Failure, is_own
from ddp_examples.core.frames import short
from ddp_examples.core.judge import Stall, odd_one
from ddp_examples.core.trail import Entry

# Ranks that end so have said why, and all end so: there is no culprit to name.
SPOKEN = (Exit.USAGE, Exit.CHECK_FAILED, Exit.UNABLE, Exit.LATER)
GRACE_NS = 50_000_000  # a rank has a record before it dies, so an older death has none; by so much clocks may differ

UNUSED_HINT = (
    "{names} got no gradient: use it in the loss, or DistributedDataParallel(..., find_unused_parameters=True)"
)
TRY = {
    "unused": "use it in the loss, or DistributedDataParallel(..., find_unused_parameters=True)",
    "shape": "all ranks must call the same collectives with the same shapes; debug=true stops at the wrong call itself",
    "skip": "all ranks must call the same collectives in the same order; look for an `if` or `continue` before it",
    "uneven": "DistributedSampler and drop_last=True give each rank as many batches; "
    "torch.distributed.algorithms.join.Join accepts a difference",
    "nan": "debug=true names the layer and the rank; a lower learning rate, or look at the samples of that step",
    "full_disk": "free some space: df -h . and df -i .",
    "memory": "a smaller batch, or fewer ranks on this host",
    "hang": "the stacks of all ranks are in rank-*.log; if so long a pause is right: watch.hang_s=600",
    "stall": "all ranks wait, for different things or for the network; debug=true names calls that don't fit together",
    "left": "it ended its loop early: as many steps on every rank, or torch.distributed.algorithms.join.Join",
}


@dataclass(frozen=True)
class Verdict:
    """What broke the run. Without `lines` there is nothing to add to what the ranks have said."""

    kind: str
    ranks: List[int]
    step: int
    lines: List[str]


Trails = Dict[int, Tuple[Dict[str, Any], List[Entry]]]


def decide(
    failures: Sequence[Failure],
    deaths: Sequence[Death],
    trails: Trails,
    stall: Optional[Stall],
    world_size: int,
    mismatch: bool = False,
) -> Verdict:
    """From all that is known after the end: records, deaths (in their order), trails, the watch's finding.

    `mismatch`: some rank's log says that collectives did not fit together; with that gloo aborts, often the innocent.
    """
    if stall is not None:
        _, entries = trails.get(stall.ranks[0], ({}, []))
        if stall.kind == "lost" and entries:  # nearer to its end than what it last told
            stall = replace(stall, step=entries[-1].step)
        return _of_stall(stall, world_size)
    wordless = [death for death in deaths if death.code and death.rank not in {f.rank for f in failures}]
    first_death, first_own = next(iter(wordless), None), next(filter(is_own, failures), None)
    if first_own and (first_death is None or first_own.time_ns <= first_death.time_ns + GRACE_NS):
        return _of_failure(first_own, failures, deaths, world_size)
    if first_death is None or (mismatch and first_death.code == -signal.SIGABRT):
        found = _from_trails(trails, world_size)
        if found:
            return found
    if first_death:
        return _of_death(first_death, failures, trails, world_size)
    return (
        _of_place(failures, trails, world_size)
        or _of_silent(failures, trails, world_size)
        or _of_echo(failures, world_size)
    )


def _of_failure(cause: Failure, failures: Sequence[Failure], deaths: Sequence[Death], world_size: int) -> Verdict:
    if cause.kind == "refused":
        return Verdict("refused", [cause.rank], cause.step, [])
    status = next((death.code for death in deaths if death.rank == cause.rank), 1)
    if cause.kind == "exit" and status in SPOKEN and not any(failure.kind == "echo" for failure in failures):
        return Verdict("exit", [cause.rank], cause.step, [])
    lines = [
        f"rank {cause.rank} failed first, {step_words(cause.step)}: {cause.error}",
        f"  at {cause.where}" if cause.where else "",
        f"  on host {cause.host} (local rank {cause.local_rank}, pid {cause.pid})",
        _followers(1, world_size),
        _try(cause.hint or TRY.get(cause.kind, "")),
        f"  traceback: {short(cause.log)}" if cause.log else "",
    ]
    return Verdict(cause.kind, [cause.rank], cause.step, [line for line in lines if line])


def _of_death(death: Death, failures: Sequence[Failure], trails: Trails, world_size: int) -> Verdict:
    if death.code in SPOKEN and not any(failure.kind == "echo" for failure in failures):
        return Verdict("exit", [death.rank], 0, [])
    head, entries = trails.get(death.rank, ({}, []))
    step = entries[-1].step if entries else int(head.get("step", 0))
    how = f"signal {signal.Signals(-death.code).name}" if death.code < 0 else f"status {death.code}"
    how = how if death.code != GONE else "no word: its process is gone"
    memory = f", {head['memory'] / 2**20:.0f} MB of memory" if head.get("memory") else ""
    lines = [
        f"rank {death.rank} failed first, with {how}, {step_words(step)}",
        f"  on host {death.host} (local rank {death.local_rank}, pid {death.pid}{memory})",
        f"  {death.why}" if death.why else "",
        f"  last seen at {head['where']}" if head.get("where") else "",
        _followers(1, world_size),
    ]
    kind = "kill" if death.code < 0 or death.code == GONE else "exit"
    return Verdict(kind, [death.rank], step, [line for line in lines if line])


def _of_stall(stall: Stall, world_size: int) -> Verdict:
    many, seconds = len(stall.ranks) > 1, f"{stall.seconds:.0f} s"
    who = f"rank{'s' * many} {some(stall.ranks)}"
    what = {
        "hang": f"hang{'s' * (not many)}: not moved for {seconds}",
        "lost": f"{'are' if many else 'is'} lost: silent for {seconds}",
        "skip": "left out a collective, or made one too many",
        "unused": f"{'have' if many else 'has'} parameters that got no gradient, so DDP waits for them",
        "shape": f"call{'s' * (not many)} a collective with another shape",
        "left": f"left early, {seconds} ago",
        "stall": f"wait for each other for {seconds}",
    }[stall.kind]
    lines = [
        f"{who} {what}, {step_words(stall.step)}",
        f"  {stall.detail}" if stall.detail else "",
        f"  on host {stall.host} (local rank {stall.local_rank}, pid {stall.pid})",
        *_side_by_side(stall.groups),
        _followers(len(stall.ranks), world_size),
        _try(f"ping {stall.host}" if stall.detail.startswith("host ") else TRY.get(stall.kind, "")),
    ]
    return Verdict(stall.kind, stall.ranks, stall.step, [line for line in lines if line])


def _from_trails(trails: Trails, world_size: int) -> Optional[Verdict]:
    odd = odd_one({rank: entries for rank, (_, entries) in trails.items()})
    if odd is None:
        left = [rank for rank, (head, _) in trails.items() if head.get("left")]
        if not left or len(left) == len(trails):
            return None
        odd = ("left", left, int(trails[left[0]][0].get("step", 0)), [])
    kind, ranks, step, groups = odd
    head = trails[ranks[0]][0]
    place = (str(head.get("host", "")), int(head.get("local_rank", 0)), int(head.get("pid", 0)))
    return _of_stall(Stall(kind, ranks, step, 0, groups, *place), world_size)


def _of_place(failures: Sequence[Failure], trails: Trails, world_size: int) -> Optional[Verdict]:
    """Collectives have timed out before the watch did: the rank that was not in one is the cause."""
    told = {failure.rank for failure in failures}
    heads = {rank: head for rank, (head, _) in trails.items() if rank not in told and head.get("waiting") is False}
    ranks = [rank for rank, head in heads.items() if head["age_s"] > 1 and not head["left"]]
    if not ranks or "imed out" not in failures[0].error:
        return None
    head = heads[ranks[0]]
    groups = [(ranks, f"{head['where']}, step {head['step']}")]
    place = (head["host"], head["local_rank"], head["pid"])
    return _of_stall(Stall("hang", ranks, head["step"], head["age_s"], groups, *place), world_size)


def _of_silent(failures: Sequence[Failure], trails: Trails, world_size: int) -> Optional[Verdict]:
    """The others have lost peers, and some rank has said nothing at all, nor its parent: all of its node was killed."""
    told = {failure.rank for failure in failures}
    silent = [rank for rank in trails if rank not in told and not trails[rank][0].get("left")]
    if not failures or not silent or len(trails) < world_size:
        return None
    head, entries = trails[silent[0]]
    step = entries[-1].step if entries else int(head.get("step", 0))
    lines = [
        f"rank{'s' * (len(silent) > 1)} {some(silent)} went without a word, {step_words(step)}",
        f"  on host {head.get('host')} (local rank {head.get('local_rank')}, pid {head.get('pid')}): killed there,"
        " with the process that started it, or the host is down",
        f"  last seen at {head['where']}" if head.get("where") else "",
        _followers(len(silent), world_size),
    ]
    return Verdict("kill", silent, step, [line for line in lines if line])


def _of_echo(failures: Sequence[Failure], world_size: int) -> Verdict:
    """Nobody said why: it is on another node, or a process was killed where no launcher of ours looks."""
    if not failures:
        return Verdict("unknown", [], 0, [])
    first = failures[0]
    ranks = [failure.rank for failure in failures]
    lines = [
        f"{'ranks' if len(ranks) > 1 else 'rank'} {some(ranks)} lost a peer, {step_words(first.step)}: {first.error}",
        f"  at {first.where}, on host {first.host}",
        "  which rank went first is told on its own node",
    ]
    return Verdict("echo", ranks, first.step, lines)


def step_words(step: int) -> str:
    return f"in step {step}" if step else "before the first step"


def some(ranks: Sequence[int]) -> str:
    """`0, 2, 3`, and no more than fit into a line."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _followers(culprits: int, world_size: int) -> str:
    others = world_size - culprits
    ranks = f"other {others} ranks" if others > 1 else "other rank"
    return f"  the {ranks} only followed" if others > 0 else ""


def _try(hint: str) -> str:
    return f"  try: {hint}" if hint else ""


def _side_by_side(groups: Sequence[Tuple[Sequence[int], str]]) -> List[str]:
    shown = [f"  {'ranks' if len(ranks) > 1 else 'rank'} {some(ranks)}: {what}" for ranks, what in groups[:3]]
    return [*shown, f"  and {len(groups) - 3} other places"] if len(groups) > 3 else shown
