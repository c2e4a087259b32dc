"""Was a process killed for want of memory? The kernel's own counts, where they can be read. Standard library only."""

from contextlib import suppress
from pathlib import Path
from typing import Optional


def kills(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Optional[int]:
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
    """Of a process that SIGKILL has ended."""
    if before is None or now is None:
        return "nobody here counts out-of-memory kills; ask dmesg, or the batch system"
    if now > before:
        return "out of memory: the kernel has killed it. A smaller batch, or fewer ranks on this host"
    return "not for want of memory: its control group counts no out-of-memory kill"
