"""What a parent or the kernel tells of a process that has died, or says nothing. Standard library only."""

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

from ddp_examples.core.trail import read_trails

GONE = 1000  # no exit code can be this: its parent has fetched the real one


@dataclass(frozen=True)
class Death:
    """The end of a rank. `code` as subprocess has it: negative for a signal; GONE: not known."""

    rank: int
    local_rank: int
    host: str
    pid: int
    code: int
    time_ns: int
    why: str = ""  # of a SIGKILL, as far as the node knows


def dead_peers(folder: Path) -> List[Death]:
    """Ranks of this host whose process is dead; their trails, in the folder of the run, have the pids."""
    deaths = []
    for rank, (head, _) in read_trails(folder).items():
        if head.get("host") == socket.gethostname() and head.get("pid") != os.getpid() and not head.get("left"):
            code = exit_code(int(head["pid"]))
            if code:
                deaths.append(Death(rank, head["local_rank"], head["host"], head["pid"], code, time.time_ns()))
    return deaths


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


def process_state(pid: int) -> str:
    """Why a process of this host says nothing."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "its process is gone"
    state = next((line.split()[1] for line in lines if line.startswith("State:")), "?")
    return {
        "T": "its process is stopped (SIGSTOP): kill -CONT goes on",
        "t": "its process is stopped by a debugger",
        "Z": "its process is dead",
        "D": "its process waits for a disk or the network, in the kernel",
    }.get(state, "its process lives, but C code holds Python's lock: see its rank-*.log")


def memory_kills(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Optional[int]:
    """Out-of-memory kills in our control group so far: memory.events of cgroup v2, memory.oom_control of v1."""
    with suppress(OSError, ValueError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            base = cgroups / "memory" if "memory" in controllers.split(",") else cgroups
            for file in ("memory.events", "memory.oom_control"):
                for folder in (base / path.lstrip("/"), base):
                    count = _count(folder / file)
                    if count is not None:
                        return count
    return None


def _count(file: Path) -> Optional[int]:
    with suppress(OSError, ValueError):
        rows = dict(line.split() for line in file.read_text(encoding="utf-8").splitlines())
        return int(rows["oom_kill"]) if "oom_kill" in rows else None
    return None


def why_killed(before: Optional[int], now: Optional[int]) -> str:
    """Of a process that SIGKILL has ended; `before` and `now`: memory_kills at the start and the end of the run."""
    if before is None or now is None:
        return "nobody here counts out-of-memory kills; ask dmesg, or the batch system"
    if now > before:
        return "out of memory: the kernel has killed it. A smaller batch, or fewer ranks on this host"
    return "not for want of memory: its control group counts no out-of-memory kill"
