"""Where a rank is: its step, and what it called, without a line in the user's loop.

Steps are counted by torch's hook on every optimizer, and where DDP's forward pass begins; collectives on the default
group are seen where torch's Python hands them to C++. Not seen: collectives that C++ starts by itself (DDP's own,
functional collectives), and those of other groups; the forward pass stands for DDP's.
"""

import re
import sys
import threading
import time
import weakref
from contextlib import ExitStack
from functools import lru_cache, wraps
from typing import Any, Callable, Dict, Iterable, List, Optional
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_examples.core.frames import is_users, short
from ddp_examples.core.trail import NO_GRADIENT, Trail

# How dist.ProcessGroup calls it -> how the user does, and whether its tensor has the same shape on all ranks.
COLLECTIVES = {
    "allreduce": ("all_reduce", True),
    "allgather": ("all_gather", True),
    "_allgather_base": ("all_gather_into_tensor", True),
    "all_gather_single": ("all_gather_single", True),  # torch 2.13's names for the one before, and two below
    "broadcast": ("broadcast", True),
    "reduce": ("reduce", True),
    "reduce_scatter": ("reduce_scatter", False),
    "_reduce_scatter_base": ("reduce_scatter_tensor", True),
    "reduce_scatter_single": ("reduce_scatter_single", True),
    "gather": ("gather", False),
    "scatter": ("scatter", False),
    "alltoall": ("all_to_all", False),
    "alltoall_base": ("all_to_all_single", False),
    "all_to_all_single": ("all_to_all_single", False),
    "barrier": ("barrier", False),
}


class Progress:
    """`step` counts from 1: n while the n-th step is made, and after it until the next forward pass."""

    def __init__(self, trail: Trail) -> None:
        self.trail = trail
        self.own_s = 0.0  # from the end of a step to the end of the next forward pass: no waiting for others in it
        self.own_steps = 0
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._missing = 0
        self._forward_passes = 0
        self._steps: Dict[int, int] = {}  # by optimizer
        self._made = 0  # by the one that has made most
        self._since: Optional[float] = None
        self._before = 0  # steps that an earlier start of this run has made

    def go_on_from(self, step: int) -> None:
        """The next step is step + 1: `step` have been made before, and what was called until now was none."""
        self._before, self._forward_passes = step, 0
        self.trail.step = step

    @property
    def step(self) -> int:
        return self.trail.step

    def hooks(self) -> ExitStack:
        """Count and note from now until the stack that is returned is closed."""
        hooks = ExitStack()
        hooks.callback(register_optimizer_step_post_hook(self._stepped).remove)
        hooks.enter_context(
            patch.object(DistributedDataParallel, "forward", self._seen(DistributedDataParallel.forward))
        )
        for name, (called, alike) in COLLECTIVES.items():
            original = getattr(dist.ProcessGroup, name, None)
            if original is not None:  # the class: whoever has imported all_reduce from torch.distributed is seen too
                hooks.enter_context(patch.object(dist.ProcessGroup, name, self._noted(original, called, alike)))
        return hooks

    def see(self, ddp: torch.nn.Module) -> None:
        """Ask this DDP model whether its gradients are complete when the next collective begins."""
        self._models.add(ddp)

    def _seen(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of DDP's forward pass. As two hooks of the module it took 8 us a step more: they take torch's slow path."""

        @wraps(original)
        def forward(ddp: Any, *inputs: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(ddp, *inputs, **options)  # evaluation may be one rank's alone
            self._forward_passes += 1
            self.trail.step = self._before + 1 + (self._made or self._forward_passes - 1)
            self.trail.note("forward pass")
            output = original(ddp, *inputs, **options)
            if self._since is not None:
                self.own_s += time.perf_counter() - self._since
                self.own_steps += 1
                self._since = None
            return output

        return forward

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps = self._steps.get(id(optimizer), 0) + 1
        self._steps[id(optimizer)] = steps
        self._made = max(self._made, steps)
        self.trail.step = self._before + self._made
        self.trail.note("optimizer step")
        self._since = time.perf_counter()

    def _without_gradient(self) -> str:
        """After a backward pass that has not reached all parameters, DDP's collective on the others goes on waiting.

        DDP itself tells in the next forward pass, if it comes to that. Some call collectives between the forward and
        the backward pass, where all gradients are missing: seen three times, it is not asked again. Nor is it in a
        backward pass, where a communication hook calls a collective: DDP's Reducer holds the lock that it would take.
        """
        asks = self._missing < 3 and torch._C._current_graph_task_id() == -1
        for model in self._models if asks else ():
            try:
                model.reducer._check_reducer_finalized()  # type: ignore[operator,union-attr]
            except RuntimeError as error:
                self._missing += 1
                return NO_GRADIENT + (", ".join(unused_parameters(error, [model])) or "some parameters")
        return ""

    def _noted(self, original: Callable[..., Any], called: str, alike: bool) -> Callable[..., Any]:
        main = threading.get_ident()

        def call(group: Any, *args: Any, **options: Any) -> Any:
            if group is dist.group.WORLD and threading.get_ident() == main:
                self._since = None  # from here on it may wait
                what = f"{called} {_shape(args)}" if alike else called
                self.trail.note(what + self._without_gradient(), _call_site())
            return original(group, *args, **options)

        return call


def unused_parameters(error: BaseException, models: Iterable[torch.nn.Module]) -> List[str]:
    """Of DDP's `Expected to have finished reduction`: it says indices, a person knows names."""
    found = re.search(r"did not receive grad for rank \d+:((?: \d+)+)", str(error))
    for model in models if found else ():
        inner: torch.nn.Module = model.module  # type: ignore[assignment]
        names = [name for name, parameter in inner.named_parameters() if parameter.requires_grad]
        indices = [int(index) for index in found[1].split()] if found else []
        if max(indices) < len(names):
            return [names[index] for index in indices]
    return []


def _shape(args: Any) -> str:
    """Of the tensor that goes into a collective; it is the last one among its arguments."""
    for argument in reversed(args):
        while isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        if isinstance(argument, torch.Tensor):
            return f"{str(argument.dtype)[len('torch.') :]} {list(argument.shape)}"
    return ""


def _call_site() -> str:
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and not _users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


_users = lru_cache(maxsize=4096)(is_users)
_short = lru_cache(maxsize=4096)(short)
