"""What each rank did in each step, as a table that shows DDP at work, and as series in the report."""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_examples.core.group import Group, gather
from ddp_examples.core.report import show, table

ROWS = 12  # of the table: with the rest of a run of 4 ranks it fits on a screen
POINTS = 200  # of a series in the report


@dataclass(frozen=True)
class Step:
    """One step of this rank. `norms`: of the gradient before and after averaging, if they were watched."""

    loss: float
    samples: List[int]  # their indices in the set
    seconds: float
    norms: Optional[Tuple[float, float]] = None


def watch_gradients(ddp: DistributedDataParallel) -> Callable[[], Tuple[float, float]]:
    """Returns a function that tells, after backward, the norms of the gradient (before, after averaging).

    DDP gives each bucket of local gradients to a hook, which averages it; this one looks at the bucket, and then does
    what DDP does by itself.
    """
    squares: List[Tensor] = []

    def look_and_average(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:  # DDP insists on these types
        squares.append(bucket.buffer().double().square().sum().cpu())
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the default group

    def norms() -> Tuple[float, float]:
        before = float(sum(squares)) ** 0.5
        squares.clear()
        gradients = [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]
        return before, float(sum(gradient.double().square().sum().cpu() for gradient in gradients)) ** 0.5

    ddp.register_comm_hook(None, look_and_average)
    return norms


def show_steps(group: Group, steps: Sequence[Step], what: str) -> None:
    """Print a table of the first steps, on rank 0; `what` is "steps", "gradients" or "none". Collective."""
    if what == "none":
        return
    count = max(1, ROWS // group.ranks.world_size)
    cell = _of_step if what == "steps" else _of_gradient
    everyones = gather([cell(step) for step in steps[:count]])[:ROWS]
    head, text = HEADS[what]
    rows = [
        ("" if rank else number + 1, rank, *cells)
        for number, by_rank in enumerate(zip(*everyones))
        for rank, cells in enumerate(by_rank)
    ]
    show(group, f"\n{text}\n{table([('step', 'rank', *head), *rows])}")


HEADS = {
    "steps": (
        ("samples", "loss", "ms", "which"),
        "Each rank takes its own part of the samples, and has a loss of its own:",
    ),
    "gradients": (
        ("samples", "norm before", "norm after"),
        "Each rank computes the gradient of its own samples; DDP averages, and then all ranks have the same:",
    ),
}


def _of_step(step: Step) -> Sequence[Any]:
    which = " ".join(map(str, step.samples[:5])) + (" ..." if len(step.samples) > 5 else "")
    return (len(step.samples), f"{step.loss:.4f}", f"{1000 * step.seconds:.1f}", which)


def _of_gradient(step: Step) -> Sequence[Any]:
    before, after = step.norms or (float("nan"), float("nan"))
    return (len(step.samples), f"{before:.6f}", f"{after:.6f}")


def series_of(steps: Sequence[Step]) -> Dict[str, Any]:
    """What `python -m ddp_examples.core.report FILE.json --plot` draws, for metrics["series"]. Collective.

    `{"every": 1, "loss": [[first step's, ...] of rank 0, ...], "step_seconds": likewise}`. Of more than 200 steps only
    every k-th is in it, and "every" is k: the report stays one that a person can open.
    """
    every = max(1, -(-len(steps) // POINTS))
    mine = [[float(f"{value:.5g}") for value in (step.loss, step.seconds)] for step in steps[::every]]
    loss, seconds = zip(*([list(column) for column in zip(*rank)] for rank in gather(mine)))
    return {"every": every, "loss": list(loss), "step_seconds": list(seconds)}
