"""One owner of a folder at a time, over processes and hosts. Standard library only."""

import fcntl
import json
import os
import socket
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Dict

from ddp_examples.core.exits import Refusal, say

BEAT_S = 10.0  # how often the owner touches its file
STALE_S = 60.0  # an owner on another host that has not done so for so long is gone


class Owner:
    """`owner = Owner.take(folder / ".owner")`, later `owner.release()`. Refusal, if another run owns it.

    On one host the kernel's lock on the file tells, and ends with the process, however that ends. Over hosts that lock
    may not be seen (NFS, Lustre without the flock option), so there the file's time tells.
    """

    def __init__(self, path: Path, file: int) -> None:
        self.path = path
        self._file = file
        self._released = threading.Event()
        self._beat = threading.Thread(target=self._touch, daemon=True, name="owner")
        self._beat.start()

    @classmethod
    def take(cls, path: Path) -> "Owner":
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = _lock(file)
            holder = _read(file)
            if not locked or (holder and not _is_stale(file, holder)):
                raise Refusal(
                    f"checkpoint.path={path.parent} is in use by another run: {_spoken(holder)}."
                    " Give this one another checkpoint.path=..., or end that one"
                )
        except BaseException:
            os.close(file)
            raise
        if holder:
            say(f"checkpoint.path={path.parent}: taken over from a run that is gone: {_spoken(holder)}")
        me = {"host": socket.gethostname(), "pid": os.getpid(), "started": datetime.now().isoformat(timespec="seconds")}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(me).encode(), 0)
        return cls(path, file)

    def release(self) -> None:
        """Leave the folder to the next run. The empty file stays: its removal could be that of the next run's lock."""
        if not self._released.is_set():
            self._released.set()
            self._beat.join()
            os.ftruncate(self._file, 0)
            os.close(self._file)

    def _touch(self) -> None:
        while not self._released.wait(BEAT_S):
            os.utime(self._file)


def _lock(file: int) -> bool:
    """Whether the lock is ours. Where the file system has no locks, the content alone decides."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _read(file: int) -> Dict[str, Any]:
    try:
        holder = json.loads(os.pread(file, 4096, 0) or b"{}")
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_stale(file: int, holder: Dict[str, Any]) -> bool:
    if holder.get("host") == socket.gethostname():
        return True  # we have the lock, so the process that had it is gone
    return time.time() - os.fstat(file).st_mtime > STALE_S


def _spoken(holder: Dict[str, Any]) -> str:
    if not holder:
        return "it has only just begun"
    return f"process {holder.get('pid')} on {holder.get('host')}, started {holder.get('started')}"
