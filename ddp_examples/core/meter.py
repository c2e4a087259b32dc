"""What a person sees of a long run: a live line, metrics.jsonl, TensorBoard; and its speed, honestly counted."""

import contextlib
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

from torch import Tensor

from ddp_examples.core.group import Group
from ddp_examples.core.report import show

WARM_UP = 5  # steps that are not counted: caches are cold, DDP lays out its buckets, compilers compile


class Meter:
    """`meter.stepped(loss, samples)` after each step, `with meter.apart("evaluation"):` around what is no training.

    Only rank 0 writes. `samples` are those of all ranks.
    """

    def __init__(self, group: Group, folder: Path, step: int, last: int, steps_an_epoch: int) -> None:
        self._group, self._step, self._last, self._steps_an_epoch = group, step, last, steps_an_epoch
        self._live = group.is_main and sys.stdout.isatty()
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8") if group.is_main else None
        self._board = _tensorboard(folder) if group.is_main else None
        self._counted_from: Optional[float] = None
        self._until = 0.0  # the end of the last step: what comes after it, final checks for one, is no training
        self._steps = 0
        self._samples = 0
        self._shown = 0.0
        self.apart_s: Dict[str, float] = {}  # seconds that were no training: evaluation, checkpoints

    def stepped(self, loss: Tensor, samples: int) -> None:
        """The mean loss of this rank, looked at now and then, as that waits for the GPU; the samples of all ranks."""
        self._step += 1
        self._steps += 1
        self._until = time.perf_counter() - sum(self.apart_s.values())
        if self._steps == WARM_UP:
            self._counted_from = self._until
        elif self._steps > WARM_UP:
            self._samples += samples
        if self._live and time.perf_counter() - self._shown > 0.2:
            self._shown = time.perf_counter()
            print(f"\r{self.line(loss.item())}\x1b[K", end="", flush=True)

    def line(self, loss: float) -> str:
        speed = self.samples_per_s()
        left = f", {clock((self._last - self._step) / self._steps_per_s())} left" if speed else ""
        epoch = (self._step - 1) // self._steps_an_epoch + 1
        return f"epoch {epoch}  step {self._step}/{self._last}  loss {loss:.4f}  {speed:.0f} samples/s{left}"

    def _seconds(self) -> float:
        return self._until - (self._counted_from or 0)

    def _steps_per_s(self) -> float:
        return (self._steps - WARM_UP) / self._seconds()

    def samples_per_s(self) -> float:
        """Over all ranks, after the first steps, without evaluation and checkpoints; 0 before it is known."""
        return self._samples / self._seconds() if self._samples else 0.0

    def summary(self) -> Dict[str, float]:
        """For the report."""
        apart = {f"{what}_seconds": round(seconds, 3) for what, seconds in self.apart_s.items()}
        return {"samples_per_s": round(self.samples_per_s(), 1), **apart}

    @contextlib.contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """Time that is not counted as training."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.apart_s[what] = self.apart_s.get(what, 0.0) + time.perf_counter() - begun

    def note(self, text: str, **values: float) -> None:
        """A line on the screen that stays, a line in metrics.jsonl, points in TensorBoard."""
        if self._live:
            print("\r\x1b[K", end="")
        show(self._group, text)
        if self._file is not None:
            print(
                json.dumps({"step": self._step, "time": round(time.time(), 3), **values}), file=self._file, flush=True
            )
        for name, value in values.items():
            if self._board is not None:
                self._board.add_scalar(name, value, self._step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def clock(seconds: float) -> str:
    """`2:05:09`, `0:09`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _tensorboard(folder: Path) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))
