"""Runs a program as a rank whose output goes to a file: FOLDER/<host>-rank<R>.log; that of rank 0 to the screen too.

python -m ddp_examples.core.logged FOLDER MODULE [arguments of the module], as torchrun starts it. (torchrun's own log
files have neither the host nor the global rank in their names.)
"""

import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import List, TextIO

from ddp_examples.core.orphans import die_with_parent
from ddp_examples.core.ranks import Ranks, read_ranks

# Signals are for the rank: tee ends when the rank's output does, so that the last words are not lost.
TEE = "trap '' HUP INT TERM USR1 USR2; exec tee -a \"$0\""


def main(argv: List[str]) -> None:
    folder, module, *arguments = argv
    ranks = read_ranks(os.environ)
    send_output(Path(folder) / f"{socket.gethostname()}-rank{ranks.rank}.log", ranks)
    name_process(ranks)
    die_with_parent(signal.SIGKILL)  # the agent, or the fork server, which dies with it: Slurm may kill it and miss us
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def send_output(path: Path, ranks: Ranks) -> None:
    """Point file descriptors 1 and 2 to the file, so that what C code or a fault handler writes goes there too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if ranks.rank == 0:
        tee = subprocess.Popen(["/bin/sh", "-c", TEE, str(path)], stdin=subprocess.PIPE)
        assert tee.stdin is not None
        target = os.dup(tee.stdin.fileno())
        tee.stdin.close()
    else:
        target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(target, stream.fileno())
        line_by_line(stream)
    os.close(target)


def line_by_line(stream: TextIO) -> None:
    """A file is written in blocks of 8 KB by default: the end would be missing where a rank is killed."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(line_buffering=True)


def name_process(ranks: Ranks) -> None:
    """`rank 3` in ps -o comm, top and launch/watch.sh, where all ranks are otherwise called python."""
    try:
        Path("/proc/self/comm").write_text(f"rank {ranks.rank}")
    except OSError:
        return  # no Linux, or a closed /proc


if __name__ == "__main__":
    main(sys.argv[1:])
