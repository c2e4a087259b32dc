"""Proofs that a distributed run did what it should. Each returns a Check, the same on every rank, and is collective."""

import dataclasses
import hashlib
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_examples.core.debug import digest
from ddp_examples.core.exits import SPEAKER_FIRST_S, Exit
from ddp_examples.core.failure import StartError
from ddp_examples.core.group import all_gather, gather, total


@dataclass(frozen=True)
class Check:
    """What was `measured`, and how much of it is `allowed`; `detail` says where it went wrong."""

    name: str
    measured: float
    allowed: float
    passed: bool
    detail: str = ""


def at_most(name: str, measured: float, allowed: float, detail: str = "") -> Check:
    """A check that passes if measured <= allowed (so NaN fails); the detail is kept when it fails."""
    passed = measured <= allowed
    return Check(name, measured, allowed, passed, "" if passed else detail)


def same_start(batches: int, model: nn.Module, config: Any) -> None:
    """Before the loop, and before DDP: all ranks have as many batches, the same parameters, the same settings.

    `config` is a dataclass. Collective. A rank that was given something else than most raises StartError; the others
    wait until they are ended. Of two halves it is the one with more batches, which would wait for ever in the last one,
    or the one without rank 0.
    """
    facts: Dict[str, Any] = {"batches a rank": batches}
    facts.update((name, f"{str(p.dtype)[6:]} {list(p.shape)}") for name, p in model.named_parameters())
    facts.update(_flat(dataclasses.asdict(config)))
    if len(set(gather(hashlib.sha256(repr(facts).encode()).hexdigest()))) == 1:
        return
    everyones: List[Dict[str, Any]] = gather(facts)
    name = next(name for theirs in everyones for name in theirs if len({str(o.get(name)) for o in everyones}) > 1)
    values = [theirs.get(name) for theirs in everyones]
    usual = _usual(values)
    rank = dist.get_rank()
    if values[rank] == usual:
        time.sleep(SPEAKER_FIRST_S)
        raise SystemExit(int(Exit.ERROR))
    raise StartError(name, values[rank], usual)


def _usual(values: Sequence[Any]) -> Any:
    """The value of most; of two halves the smaller number, else rank 0's."""
    value, times = Counter(values).most_common(1)[0]
    if 2 * times > len(values):
        return value
    return min(values) if all(isinstance(value, int) for value in values) else values[0]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Dict[str, Any]:
    flat: Dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: str(value)})
    return flat


def replicas_identical(model: nn.Module) -> Check:
    """Parameters and buffers are the same on all ranks, to the last bit. Measured: ranks unlike the majority."""
    odd: Dict[int, str] = {}
    digests = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    whole = hashlib.sha256("".join(digests.values()).encode()).hexdigest()
    if len(set(gather(whole))) > 1:  # the names go around only when there is something to name
        everyones = gather(digests)
        for name in digests:
            by_rank = [theirs.get(name) for theirs in everyones]
            usual = Counter(by_rank).most_common(1)[0][0]
            for rank, mine in enumerate(by_rank):
                if mine != usual:
                    odd.setdefault(rank, name)
    detail = "; ".join(f"rank {rank} differs first in {name}" for rank, name in sorted(odd.items()))
    return at_most("replicas identical (ranks that differ)", len(odd), 0, detail)


def fingerprint(value: Any) -> str:
    """SHA-256 of a state: tensors by their bytes, containers by their contents."""
    if isinstance(value, Tensor):
        return digest(value)
    if isinstance(value, Mapping):
        parts = ["mapping", *(f"{key!r}:{fingerprint(item)}" for key, item in value.items())]
    elif isinstance(value, (list, tuple)):
        parts = ["sequence", *(fingerprint(item) for item in value)]
    else:
        parts = [type(value).__name__, repr(value)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def same(name: str, mine: Any, other: Any) -> Check:
    """Two things that a rank holds, such as fingerprints, are equal on each rank. Measured: ranks where not."""
    unequal = [rank for rank, equal in enumerate(gather(mine == other)) if not equal]
    return at_most(f"{name} (ranks where not)", len(unequal), 0, f"not on rank {', '.join(map(str, unequal))}")


def gradient_is_global(
    ddp: nn.Module, loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor], x: Tensor, y: Tensor
) -> Check:
    """After backward: DDP's gradient is the gradient of the whole global batch, computed by one process without DDP.

    `x` and `y` are this rank's part, `loss_of(model, x, y)` the mean loss over it; parts have equal sizes on all ranks.
    Measured: the largest difference of an element, on any rank, divided by the largest element of the gradient. Both
    sum the same float32 products in another order, which alone makes about 1e-7; 1e-5 is allowed.
    """
    module: nn.Module = ddp.module  # type: ignore[assignment]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    whole_loss = loss_of(module, everyones(x), everyones(y))
    whole = torch.autograd.grad(whole_loss, parameters)  # does not touch .grad, and DDP does not see it
    difference = relative_difference([parameter.grad for parameter in parameters], whole)
    return on_every_rank("gradient = whole batch's (relative difference)", difference, 1e-5)


def on_every_rank(name: str, mine: float, allowed: float) -> Check:
    """A check that passes if what each rank has measured is at most `allowed`. Measured: the largest. Collective."""
    by_rank = gather(mine if mine == mine else float("inf"))  # NaN compares as smaller than everything
    worst = max(range(len(by_rank)), key=lambda rank: by_rank[rank])
    return at_most(name, by_rank[worst], allowed, f"largest on rank {worst}")


def relative_difference(mine: Sequence[Optional[Tensor]], right: Sequence[Tensor]) -> float:
    """Largest difference of an element, divided by the largest element; tensors of a pair may be on two devices."""
    largest = max(float(tensor.abs().max()) for tensor in right)
    return max(_difference(*pair) for pair in zip(mine, right)) / max(largest, 1e-30)


def _difference(mine: Optional[Tensor], right: Tensor) -> float:
    difference = float("inf") if mine is None else float((mine - right.to(mine.device)).abs().max())
    return difference if difference == difference else float("inf")  # NaN, as above


def everyones(part: Tensor) -> Tensor:
    """The parts of all ranks, of equal shape, in rank order, as one tensor."""
    return torch.cat(all_gather(part.contiguous()))


def shards_cover(seen: Sequence[int], size: int) -> Check:
    """The samples `seen` by the ranks in one epoch are disjoint, and together the whole set of `size` samples.

    All ranks must take as many, so where the world size does not divide `size`, DistributedSampler repeats the first
    few: so many repeats are right, and no others. Measured: samples that are missing or repeated beyond that.
    """
    shards: List[List[int]] = gather(list(seen))
    padding = -size % len(shards)
    times = Counter(index for shard in shards for index in shard)
    missing, foreign = len(set(range(size)) - times.keys()), len(times.keys() - set(range(size)))
    repeats = sum(times.values()) - len(times)
    wrong = missing + foreign + abs(repeats - padding)
    detail = f"{missing} missing, {foreign} not of the set, {repeats} repeated where {padding} fill up the last step"
    return at_most("shards disjoint, and cover the set (samples)", wrong, 0, detail)


def count_right(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """How many of the samples the model classifies right, together over all ranks.

    Rank r takes samples r, r + world size, ...: each sample once, without the repeats of a DistributedSampler, so the
    number is the same for any number of ranks.
    """
    part = slice(dist.get_rank(), None, dist.get_world_size())
    return int(total(right_of(model, x[part], y[part])))


@torch.no_grad()
def right_of(model: nn.Module, x: Tensor, y: Tensor) -> int:
    was_training = model.training
    model.eval()
    right = int((model(x).argmax(dim=1) == y).sum())
    model.train(was_training)
    return right


def same_as_alone(model: nn.Module, x: Tensor, y: Tensor) -> Check:
    """count_right over all ranks is what each rank counts alone on the whole set. Measured: the largest difference."""
    together = count_right(model, x, y)
    alone = gather(right_of(model, x, y))
    detail = f"{together} right together; alone: " + ", ".join(
        f"rank {rank} {right}" for rank, right in enumerate(alone)
    )
    return at_most(
        "test accuracy independent of ranks (samples)", max(abs(right - together) for right in alone), 0, detail
    )
