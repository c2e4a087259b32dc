"""How a rank leaves that fails. Under our launchers it leaves a record, and they speak; else it speaks itself.

Standard library only.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Optional, Type

from ddp_examples.core.deaths import dead_peers
from ddp_examples.core.exits import say
from ddp_examples.core.failure import Failure, failure_of, is_own, keep_traceback
from ddp_examples.core.records import conclude, leave_failure, read_failures, run_folder
from ddp_examples.core.verdict import SPOKEN

WAIT_S = 1.0  # for the record of the rank that failed first


def leave_record(
    error: BaseException, rank: int, local_rank: int, step: int, hint: str, folder: Path
) -> Optional[Failure]:
    """Record what ends this rank: what it met first. Without a launcher of ours, see to its last words too."""
    if (folder / f"rank-{rank}.json").exists():
        return None
    failure = failure_of(error, rank, local_rank, step)
    failure = replace(failure, hint=hint or failure.hint)
    if run_folder():
        failure = keep_traceback(error, failure, folder)
    leave_failure(failure, folder)
    if not run_folder():
        _see_to_last_words(error, failure, folder)
    return failure


def _see_to_last_words(error: BaseException, failure: Failure, folder: Path) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it as soon as one rank is dead: let us finish
    if failure.kind == "refused":  # process_group has rank 0 say why
        return
    if isinstance(error, SystemExit):
        if error.code not in (None, 0, *SPOKEN):
            speak(folder)
        return

    def at_exit(kind: Type[BaseException], value: BaseException, trace: Optional[TracebackType]) -> None:
        if value is not error:
            sys.__excepthook__(kind, value, trace)
        elif not is_own(failure):
            _point_to_cause(failure, folder)
        elif next(filter(is_own, read_failures(folder)), failure).rank == failure.rank:
            sys.__excepthook__(kind, value, trace)
            speak(folder)
        else:  # often all ranks fail alike, and one traceback is enough
            keep_traceback(error, failure, folder)

    sys.excepthook = at_exit


def speak(folder: Path) -> None:
    """Say the verdict; one rank of each host does."""
    with suppress(OSError), (folder / "spoken").open("x"):
        lines = conclude(folder, dead_peers(folder), int(os.environ.get("WORLD_SIZE", "1"))).lines
        if lines:
            say("\n".join(lines))


def _point_to_cause(echo: Failure, folder: Path) -> None:
    """One line instead of the tracebacks of all who lost a peer; where the culprit can't speak, the verdict."""
    deadline = time.monotonic() + WAIT_S
    cause = next(filter(is_own, read_failures(folder)), None)
    while not cause and not dead_peers(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
        cause = next(filter(is_own, read_failures(folder)), None)
    if not cause:
        speak(folder)
        return
    with suppress(OSError), (folder / "pointed").open("x"):
        say(f"rank {echo.rank} lost a peer: rank {cause.rank} on {cause.host} failed first, {cause.error}")
