"""What a training loop needs besides DDP, each piece by itself: precision, schedule, data, evaluation. No trainer."""

import importlib
import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Dict, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, default_collate

from ddp_examples.core.digits import load_digits
from ddp_examples.core.exits import Exit, Refusal, refuse
from ddp_examples.core.group import Group, total
from ddp_examples.core.ranks import Ranks

EVALUATION_BATCH = 256


def check_divides(global_batch: int, ranks: Ranks) -> None:
    """Every rank must get as many samples of a step; else status 2, with the nearest batch that can be shared."""
    world = ranks.world_size
    if global_batch % world:
        fits = max(1, round(global_batch / world)) * world
        message = f"demo.global_batch={global_batch} can't be shared by {world} ranks; demo.global_batch={fits} can"
        refuse(Exit.USAGE, message, speaks=ranks.rank == 0)


def load_data(name: str) -> Tuple[Any, Any]:
    """(train, test): the digits, or what `module:function` returns, datasets of (input, label, ...) with a length."""
    if name == "digits":
        return load_digits()
    module, _, function = name.partition(":")
    try:
        load = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise Refusal(f"demo.data={name}: {error}. It is digits, or module:function, found by PYTHONPATH") from None
    train_set, test_set = load()
    return train_set, test_set


class Precision:
    """Mixed precision: `with precision.autocast():` around the forward pass, then scaled(loss).backward(), step(...).

    "auto" is off on the CPU, bf16 on GPUs that have it (Ampere and later), else fp16 with a loss scaler, without which
    small gradients vanish (Turing, such as Frontera's RTX 5000).
    """

    def __init__(self, wanted: str, device: torch.device) -> None:
        if wanted == "auto":
            capable = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            wanted = "off" if device.type == "cpu" else "bf16" if capable else "fp16"
        self.name, self._device = wanted, device
        self._type = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(wanted)
        self._scaler = torch.amp.GradScaler(device.type, enabled=wanted == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, self._type) if self._type else nullcontext()

    def scaled(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def step(self, optimizer: torch.optim.Optimizer, model: nn.Module, clip: float) -> None:
        """One step of the optimizer, the norm of the gradient at most `clip` (0: not clipped)."""
        self._scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self) -> Dict[str, Any]:
        return dict(self._scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._scaler.load_state_dict(dict(state))


def warm_up_then_cosine(step: int, last: int) -> float:
    """Part of the largest learning rate in `step`, which counts from 0: up in a tenth of all, then down to 0."""
    warm_up = max(1, last // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, last - warm_up)))


def settle(ddp: DistributedDataParallel, sample: Tensor) -> None:
    """A first backward pass that is no step.

    After it DDP lays out its buckets anew, and from 3 ranks on the last bit of a summed gradient depends on where in a
    bucket it lies: without this a run that goes on would differ from one that was never interrupted.
    """
    (ddp(sample.unsqueeze(0)).sum() * 0).backward()
    ddp.zero_grad()


def shifted(x: Tensor, seed: int, step: int, ranks: Ranks) -> Tensor:
    """Images of 8 x 8, [samples, 64], each moved by up to a pixel: more than 1,437 digits are to be learned from.

    What moves where depends on the seed, the step and the place in the global batch, not on the number of ranks, nor on
    a random state that a checkpoint would have to keep.
    """
    random = torch.Generator().manual_seed(seed * 1_000_003 + step)
    moves = torch.randint(-1, 2, (len(x) * ranks.world_size, 2), generator=random)[ranks.rank :: ranks.world_size]
    rows = torch.arange(8) + 1 - moves[:, :1]  # [samples, 8], into the padded image
    columns = torch.arange(8) + 1 - moves[:, 1:]
    padded = nn.functional.pad(x.view(-1, 8, 8), (1, 1, 1, 1))
    samples = torch.arange(len(x)).view(-1, 1, 1)
    return padded[samples, rows.unsqueeze(2), columns.unsqueeze(1)].flatten(1)


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset[Any], group: Group) -> Tuple[float, int]:
    """(part that the model gets right, samples that were counted), over all ranks; each sample once. Collective."""
    was_training = model.training
    model.eval()
    mine = range(group.ranks.rank, len(data), group.ranks.world_size)  # type: ignore[arg-type]
    right = 0
    for start in range(0, len(mine), EVALUATION_BATCH):
        x, y, *_ = default_collate([data[index] for index in mine[start : start + EVALUATION_BATCH]])
        right += int((model(x.to(group.device)).argmax(dim=1).cpu() == y).sum())
    model.train(was_training)
    counted = int(total(len(mine)))
    return total(right) / max(1, counted), counted


def gradient_wait_s(ddp: DistributedDataParallel) -> float:
    """Seconds a step that this rank has waited for gradients when its backward pass was over; 0 before it is known.

    The time of DDP's communication less what overlapped with the backward pass, as torch measures it: the mean of the
    first 10 steps and every 100th (c10d's Logger, torch 2.6 to 2.13). A slow peer, and a slow network, make it rise.
    """
    facts: Dict[str, Any] = ddp._get_ddp_logging_data()
    waited_ns = facts.get("avg_backward_comm_time", 0) - facts.get("avg_backward_compute_comm_overlap_time", 0)
    return float(1e-9 * max(0, waited_ns))


class Timer:
    """due() is true once every `every_s` seconds, on rank 0, whose clock decides for all; 0: never."""

    def __init__(self, group: Group, every_s: float) -> None:
        self._every_s = every_s if group.is_main else 0.0
        self._last = time.monotonic()

    def due(self) -> bool:
        if not self._every_s or time.monotonic() - self._last < self._every_s:
            return False
        self._last = time.monotonic()
        return True


def resized(saved: Optional[Mapping[str, Any]], group: Group, global_batch: int) -> str:
    """A few words, where a run goes on with another number of ranks."""
    was, now = (saved or {}).get("world_size", group.ranks.world_size), group.ranks.world_size
    return "" if was == now else f"; saved by {was} ranks, now {now}, each with {global_batch // now} samples a step"
