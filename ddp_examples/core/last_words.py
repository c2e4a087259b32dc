"""How a rank leaves that fails. Under our launchers it leaves a record, and they speak; else it speaks itself.

Standard library only.
"""

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import List, Optional, Type

from ddp_examples.core.exits import say
from ddp_examples.core.failure import Failure, failure_of, keep_traceback, read, run_folder, write
from ddp_examples.core.trail import read_trails
from ddp_examples.core.verdict import SPOKEN, Death, conclude

WAIT_S = 1.0  # for the record of the rank that failed first


def own_folder() -> str:
    """A folder for a run that no launcher of ours has started."""
    return tempfile.mkdtemp(prefix="ddp-examples-")


def clear_folder(folder: Path, rank: int) -> None:
    """A run went well: remove what this rank has left in its own_folder, and the folder with the last rank."""
    for path in folder.glob(f"rank-{rank}.*"):
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        folder.rmdir()


def leave_record(error: BaseException, rank: int, local_rank: int, step: int, hint: str, folder: Path) -> None:
    """Record what ends this rank: what it met first. Without a launcher of ours, see to its last words too."""
    if (folder / f"rank-{rank}.json").exists():
        return
    failure = failure_of(error, rank, local_rank, step)
    failure = replace(failure, hint=hint or failure.hint)
    if run_folder():
        write(keep_traceback(error, failure, folder), folder)
        return
    write(failure, folder)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it as soon as one rank is dead: let us finish
    if failure.kind == "refused":  # process_group has rank 0 say why
        return
    if isinstance(error, SystemExit):
        if error.code not in (None, 0, *SPOKEN):
            say("\n".join(conclude(folder, [], _world_size()).lines))
        return

    def speak(kind: Type[BaseException], value: BaseException, trace: Optional[TracebackType]) -> None:
        if value is not error:
            sys.__excepthook__(kind, value, trace)
        elif failure.kind in ("echo", "mismatch"):
            _point_to_cause(failure, folder)
        else:
            sys.__excepthook__(kind, value, trace)
            if read(folder)[0].rank == rank:
                say("\n".join(conclude(folder, [], _world_size()).lines))

    sys.excepthook = speak


def _point_to_cause(echo: Failure, folder: Path) -> None:
    """One line instead of a traceback; where the culprit can't speak, one rank does it in its place."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        cause = next((failure for failure in read(folder) if failure.kind not in ("echo", "mismatch")), None)
        if cause:
            say(f"rank {echo.rank} lost a peer: rank {cause.rank} failed first, {cause.error}")
            return
        if dead_peers(folder):
            break
        time.sleep(0.05)
    with suppress(OSError), (folder / "spoken").open("x"):
        say("\n".join(conclude(folder, dead_peers(folder), _world_size()).lines))


def dead_peers(folder: Path) -> List[Death]:
    """Ranks of this host whose process is gone, and that have left no record."""
    deaths = []
    for rank, (head, _) in sorted(read_trails(folder).items()):
        if head.get("host") == socket.gethostname() and head.get("pid") != os.getpid() and not head.get("left"):
            code = exit_code(int(head["pid"]))
            if code:
                deaths.append(Death(rank, head["local_rank"], head["host"], head["pid"], code, time.time_ns()))
    return deaths


GONE = 1000  # no exit code can be this: its parent has fetched the real one


def exit_code(pid: int) -> int:
    """Of a process of somebody else's: 0 if it lives. proc(5): the last field of stat, for a dead process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return GONE
    if fields[0] not in "ZX":
        return 0
    status = int(fields[-1])
    return -(status & 0x7F) if status & 0x7F else status >> 8


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
