"""Who has a TCP port on this machine, from the kernel. Standard library only."""

import contextlib
from pathlib import Path
from typing import Set

LISTEN = "0A"  # state in /proc/net/tcp


def owner_of(port: int) -> str:
    """`process 1234 (python train.py)`, or what can be said where the process is another user's."""
    wanted = {f"socket:[{inode}]" for inode in _listening(port)}
    for folder in Path("/proc").glob("[0-9]*"):
        if wanted & _links(folder / "fd"):
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            return f"process {folder.name} ({command[:80]})"
    return "a process of another user"


def _links(folder: Path) -> Set[str]:
    """Where a process's file descriptors lead; those that can be read."""
    try:
        links = list(folder.iterdir())
    except OSError:  # another user's, or ended
        return set()
    found = set()
    for link in links:
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(str(link.readlink()))
    return found


def _listening(port: int) -> Set[str]:
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == LISTEN:
                inodes.add(fields[9])
    return inodes
