"""What debug=true adds to a run; slow: every collective, every parameter and every layer's output is looked at."""

import ctypes
import faulthandler
import hashlib
import os
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler

from ddp_examples.core.exits import SPEAKER_FIRST_S, Exit, say
from ddp_examples.core.records import run_folder

Gather = Callable[[Any], List[Any]]


class DriftError(RuntimeError):
    """A replica's parameters are no longer those of the others."""

    kind = "drift"


def more_checks(models: Any, gather: Gather) -> ExitStack:
    """Debug mode, from before the group is opened until the stack that is returned is closed.

    `models` are the DDP models, as they come to be; `gather` is group.gather.
    """
    stack = ExitStack()
    stack.callback(dist.set_debug_level, dist.get_debug_level())
    stack.callback(torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled())
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # every collective is compared over the ranks before it runs
    torch.autograd.set_detect_anomaly(True)  # a NaN gradient names the forward operation that it comes from
    faulthandler.enable()
    stack.enter_context(patch.object(dist, "Logger", _QuietLogger))
    stack.enter_context(patch.dict(os.environ, flight_recorder(run_folder())))
    stack.enter_context(patch.object(DistributedSampler, "__iter__", _same_epoch_noticed(DistributedSampler.__iter__)))
    stack.callback(register_module_forward_hook(lambda layer, x, y: find_nan(layer, x, y, models)).remove)
    drift = Drift(models, gather)
    stack.callback(register_optimizer_step_pre_hook(drift.before_step).remove)
    stack.callback(register_optimizer_step_post_hook(drift.after_step).remove)
    return stack


class _QuietLogger(dist.Logger):
    """DDP's logger, less what crashes in debug mode.

    With DETAIL, torch wraps the backend, and DDP's constructor takes the wrapper for a ProcessGroupGloo: a segmentation
    fault in c10d::Logger::set_env_variables (torch 2.13; not 2.6). See it: TORCH_DISTRIBUTED_DEBUG=DETAIL, gloo, DDP.
    """

    def set_construction_data_and_log(self, *_: Any) -> None:
        """Facts for a log line; nothing else needs them."""


def flight_recorder(folder: Optional[Path]) -> Dict[str, str]:
    """nccl keeps its last 2,000 collectives, and writes them to a file a rank when one takes too long."""
    file = str((folder or Path.cwd()) / "nccl-trace-rank-")
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # of torch 2.10 or so, and before
    sizes = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    wanted = {**dict.fromkeys(names, file), **dict.fromkeys(sizes, "2000"), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _same_epoch_noticed(original: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
    """Of a DistributedSampler that shuffles: without set_epoch every epoch has the order of the first."""

    def begin(sampler: Any) -> Iterator[int]:
        last = getattr(sampler, "_epoch_before", None)
        if sampler.shuffle and sampler.epoch == last and dist.get_rank() == 0:
            say(
                f"debug: an epoch begins in the same order as the one before (sampler.epoch is still {last}): "
                "call sampler.set_epoch(epoch) before each"
            )
        sampler._epoch_before = sampler.epoch
        return original(sampler)

    return begin


def find_nan(layer: torch.nn.Module, inputs: Any, output: Any, models: Any) -> None:
    """Raise where the first NaN comes up, on the rank that has it; after the next step all would have it."""
    if not isinstance(output, torch.Tensor) or not output.is_floating_point() or not bool(output.isnan().any()):
        return
    known = {module: name for ddp in models for name, module in ddp.module.named_modules()}
    name = known.get(layer, "") or type(layer).__name__
    given = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    whose = "its input has NaN already" if any(bool(x.isnan().any()) for x in given) else "its input has none"
    raise FloatingPointError(f"NaN in the output of layer {name} ({type(layer).__name__}); {whose}")


class Drift:
    """Compares all parameters over the ranks after every step; the odd rank raises."""

    def __init__(self, models: Any, gather: Gather) -> None:
        self._models, self._gather = models, gather
        self._after: Dict[str, str] = {}  # digests of the last step
        self._changed: List[str] = []  # between two steps, so not by an optimizer

    def _digests(self) -> Dict[str, str]:
        return {name: digest(p) for ddp in self._models for name, p in ddp.module.named_parameters()}

    def before_step(self, *_: Any) -> None:
        now = self._digests() if self._after else {}
        self._changed += [name for name in now if self._after.get(name, now[name]) != now[name]]

    def after_step(self, *_: Any) -> None:
        self._after = self._digests()
        odd, why = odd_replicas(self._gather([self._after, self._changed]))
        self._changed = []
        if dist.get_rank() in odd:
            raise DriftError(f"this replica is no longer like the others: {why}")
        if odd:
            time.sleep(SPEAKER_FIRST_S)  # the odd rank speaks, and all are ended then
            raise SystemExit(int(Exit.ERROR))


def odd_replicas(found: List[Tuple[Dict[str, str], List[str]]]) -> Tuple[List[int], str]:
    """(ranks, what is odd): those whose parameters changed outside of a step, else those unlike most."""
    digests = [tuple(theirs.items()) for theirs, _ in found]
    usual, times = Counter(digests).most_common(1)[0]
    if times == len(found):
        return [], ""
    by_hand = [rank for rank, (_, changed) in enumerate(found) if changed]
    if by_hand:
        return by_hand, f"{found[by_hand[0]][1][0]} was changed outside of optimizer.step()"
    odd = [rank for rank, theirs in enumerate(digests) if theirs != usual]
    rank = odd[0]
    name = next(name for name, value in found[rank][0].items() if (name, value) not in usual)
    return (odd if 2 * times > len(found) else list(range(len(found)))), f"{name} differs after optimizer.step()"


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the tensor's bytes: NaN equals NaN, and -0.0 is not 0.0. Through ctypes, for numpy may be absent."""
    flat = tensor.detach().cpu().contiguous()
    size = flat.numel() * flat.element_size()
    return hashlib.sha256((ctypes.c_char * size).from_address(flat.data_ptr()) if size else b"").hexdigest()
