"""Stop in time, on all ranks after the same step: on a signal, or before the job's time is up.

with StopRequest(config.stop.before_end_s) as request:
    for step in ...:
        ...
        wish = request.agreed(save_due)  # the same on all ranks
        if wish is Wish.STOP: save, and leave with Exit.LATER
"""

import os
import signal
import threading
import time
from datetime import datetime
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any, Callable, Dict, Mapping, Optional, Type

import torch.distributed as dist

from ddp_examples.core.group import start_max
from ddp_examples.core.job import ask

# To a rank or to the launcher, which passes them on. Batch systems send one of these before the end of a job.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Wish(IntEnum):
    """Of what the ranks wish, the largest is done."""

    NONE = 0
    SAVE = 1
    STOP = 2


class StopRequest:
    """While open, signals are only noted. `before_end_s` seconds before the job's end rank 0 wishes to stop."""

    def __init__(self, before_end_s: float) -> None:
        end = job_end(os.environ) if before_end_s and dist.get_rank() == 0 else None
        self._latest = None if end is None else end - before_end_s
        self._signalled = False
        self._before: Dict[signal.Signals, Any] = {}
        self._answer: Callable[[], float] = lambda: Wish.NONE

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None:
            self._answer()

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        self._signalled = True

    def agreed(self, save: bool = False) -> Wish:
        """What the ranks wished for at the call before this one, the same on all ranks. Collective, after each step.

        The answer has been on its way during a whole step, so nobody waits for it; it costs 0.1 ms.
        """
        answer = Wish(int(self._answer()))
        late = self._latest is not None and time.time() > self._latest
        self._answer = start_max(Wish.STOP if self._signalled or late else Wish.SAVE if save else Wish.NONE)
        return answer


def job_end(env: Mapping[str, str]) -> Optional[float]:
    """When the job's time is up, in seconds since 1970; None: not known, or no job.

    From DDP_JOB_END (seconds since 1970), SLURM_JOB_END_TIME (Slurm 23 and later), or squeue.
    """
    for name in ("DDP_JOB_END", "SLURM_JOB_END_TIME"):
        if env.get(name, "").isdigit():
            return float(env[name])
    job = env.get("SLURM_JOB_ID")
    told = ask("squeue", "-h", "-j", job, "-o", "%e") if job else None
    try:
        return datetime.fromisoformat(told or "").timestamp()
    except ValueError:  # N/A, or no squeue here
        return None
