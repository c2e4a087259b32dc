"""Who has a TCP port on this machine, from the kernel. Standard library only."""

from pathlib import Path


def owner_of(port: int, proc: Path = Path("/proc")) -> str:
    """`process 1234 (python train.py)`, or what can be said where the process is another user's."""
    inodes = _listening(port, proc)
    for folder in proc.glob("[0-9]*"):
        try:
            links = {str(link.readlink()) for link in (folder / "fd").iterdir()}
        except OSError:
            continue  # another user's, or ended
        if links & {f"socket:[{inode}]" for inode in inodes}:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            return f"process {folder.name} ({command[:80]})"
    return "a process of another user"


def _listening(port: int, proc: Path) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        path = proc / "net" / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":  # LISTEN
                inodes.add(fields[9])
    return inodes
