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
from typing import Any, Callable, Dict, List, Mapping, Optional, Type

import torch.distributed as dist

from ddp_examples.core.group import start_max
from ddp_examples.core.job import ask

# To a rank or to the launcher, which passes them on. Batch systems send one of these before the end of a job.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Asking at each step cost 2 ranks on 2 busy cores 0.4 ms, 7 % of a step of 5.5 ms (the threads of gloo that it wakes).
EVERY_S = 0.1
MOST_STEPS = 100  # should steps of 1 ms suddenly take seconds, a wish is heard in minutes, not in hours


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
        self._signalled = self._save = False
        self._before: Dict[signal.Signals, Any] = {}
        self._answer: Optional[Callable[[], List[float]]] = None  # to the question that is on its way
        self._steps = 0  # since the last question
        self._next = 1  # it is asked again after so many
        self._asked = time.monotonic()

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None and self._answer is not None:
            self._answer()

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        self._signalled = True

    def agreed(self, save: bool = False) -> Wish:
        """What the ranks wish for, the same on all of them, each wish once. Collective, to be called after each step.

        The ranks ask one another every 0.1 s, at each step if it takes longer, and hear the answer one step later:
        it has been on its way during a whole step, so nobody waits for it.
        """
        self._save = self._save or save
        self._steps += 1
        answer = Wish.NONE
        if self._answer is not None:
            wish, steps = self._answer()
            answer, self._next, self._answer = Wish(int(wish)), int(-steps), None
        if self._steps >= self._next:
            self._ask()
        return answer

    def _ask(self) -> None:
        """The largest wish; and the next question when the slowest rank's 0.1 s are over, by its last steps."""
        now = time.monotonic()
        late = self._latest is not None and time.time() > self._latest
        wish = Wish.STOP if self._signalled or late else Wish.SAVE if self._save else Wish.NONE
        fit = int(self._steps * EVERY_S / max(now - self._asked, 1e-9))
        self._answer = start_max(wish, -min(max(fit, 1), MOST_STEPS))
        self._steps, self._asked, self._save = 0, now, False


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
