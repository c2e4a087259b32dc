"""An exception that ends a rank, as a record: its kind, and where the user's code was. Standard library only."""

import errno
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterator, Optional

from ddp_examples.core.exits import Refusal
from ddp_examples.core.frames import user_frame

# What gloo, nccl and the store say on a rank that has lost a peer: an echo, not the cause. In torch 2.6 and 2.13.
ECHOES = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection was likely closed",
    "Connection closed",
    "remote process exited",
    "Timed out waiting",
    "timed out",
    "Timeout waiting",
    "recvValue failed",
    "failed to recv",
    "Connection refused",
)
# What torch says on some rank, not always the odd one, when calls don't fit together. gloo aborts with the first.
MISMATCHES = ("expected size", "Detected mismatch between collectives", "EnforceNotMet")
UNUSED = "Expected to have finished reduction in the prior iteration"


@dataclass(frozen=True)
class Failure:
    """The end of one rank. `step` counts from 1, as the optimizer does; 0: before the first one."""

    rank: int
    local_rank: int
    host: str
    pid: int
    time_ns: int  # since 1970
    step: int
    kind: str  # raise, exit, echo, mismatch, unused, uneven, nan, full_disk, memory, refused, interrupt
    error: str  # as the last line of a traceback
    where: str  # innermost frame of the user's own code: "train.py:84 in step"
    log: str = ""  # file with the traceback
    hint: str = ""


class StartError(RuntimeError):
    """The ranks were not given the same; raised on the odd one, before the first step."""

    def __init__(self, name: str, value: object, usual: object) -> None:
        super().__init__(f"{name}: {value} here, {usual} on the others")
        self.kind = "uneven" if name == "batches a rank" else "differs"


def failure_of(error: BaseException, rank: int, local_rank: int, step: int) -> Failure:
    """The record of an exception that ends this rank in `step`."""
    kind = kind_of(error)
    return Failure(
        rank=rank,
        local_rank=local_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        time_ns=time.time_ns(),
        step=max(1, step - 1) if kind == "unused" else step,  # DDP notices one forward pass later
        kind=kind,
        error=_words(error),
        where=user_frame(error.__traceback__),
        hint=_hint(error),
    )


def is_own(failure: Failure) -> bool:
    """Not what a rank meets because of another one."""
    return failure.kind not in ("echo", "mismatch")


def kind_of(error: BaseException) -> str:
    """A word for what the exception is about; "echo": this rank only lost a peer."""
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, KeyboardInterrupt):
        return "interrupt"
    if isinstance(error, Refusal):
        return "refused"
    text = str(error)
    if type(error).__name__ == "MainRankError" or any(map(_is_echo, _chain(error))):
        return "echo"
    if isinstance(error, RuntimeError) and UNUSED in text:
        return "unused"
    if isinstance(error, RuntimeError) and any(words in text for words in MISMATCHES):
        return "mismatch"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "full_disk"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "memory"
    if isinstance(error, FloatingPointError) or "returned nan values" in text:
        return "nan"
    return str(getattr(error, "kind", "raise"))


def _is_echo(error: BaseException) -> bool:
    """torch raises RuntimeError (of which its DistError is one); a ConnectionError is of the user's own connections."""
    text = str(error)
    mismatch = any(words in text for words in MISMATCHES)
    return isinstance(error, RuntimeError) and not mismatch and any(words in text for words in ECHOES)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that it was raised from, or in the handling of."""
    seen: Optional[BaseException] = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"left with status {error.code if isinstance(error.code, int) else 1}"
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300].rstrip(": ")


def _hint(error: BaseException) -> str:
    """What only the exception knows about what to try."""
    if isinstance(error, OSError) and error.filename and kind_of(error) == "full_disk":
        return f"{error.filename} could not be written: df -h {Path(str(error.filename)).parent}"
    return str(getattr(error, "hint", ""))


def keep_traceback(error: BaseException, failure: Failure, folder: Path) -> Failure:
    """Write the traceback to the rank's log instead of the screen; returns the record that names it."""
    log = folder / f"rank-{failure.rank}.log"
    try:
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exception(type(error), error, error.__traceback__, file=file)
    except OSError:
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
        return failure
    return replace(failure, log=str(log))
