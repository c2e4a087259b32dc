"""The fork server: a Python that imports torch once a node, and from which the ranks are forked. Imports no torch.

torchrun starts a fresh Python for each rank, and each imports torch: about 1.9 s of CPU a rank.
"""

import io
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import signal
import sys
from pathlib import Path
from unittest.mock import patch

from ddp_examples.core.exits import Exit, say
from ddp_examples.core.last_words import leave_record
from ddp_examples.core.orphans import SIGNALS, die_with_parent
from ddp_examples.core.records import RUN, run_folder

# What a terminal or a batch system may send to all processes of a run. The server must not end by it: that would end
# the ranks (die_with_parent), before they have saved.
HELD_BACK = set(SIGNALS)
MOST_RANKS = 100  # it is sent 2 file descriptors a rank, at most 256 in all: `ValueError: too many fds` with 128 ranks


def can_fork(wanted: str, ranks: int) -> bool:
    """Whether `ranks` ranks of this node come from a fork server; where they can't, a line says so."""
    if wanted == "forkserver" and ranks > MOST_RANKS:
        say(
            f"{ranks} ranks are more than a fork server can start ({MOST_RANKS}); each imports torch for itself, slowly"
        )
    return wanted == "forkserver" and ranks <= MOST_RANKS


def start_server() -> None:
    """Start the server, which goes on to import torch while we do. Its environment is the ranks': set that before."""
    # Before Python 3.9.16 and 3.10.9 the server's socket was an abstract one, open to every user (CVE-2022-42919).
    setattr(multiprocessing.util, "abstract_sockets_supported", False)  # noqa: B010  mypy takes it for a constant
    multiprocessing.set_forkserver_preload(["ddp_examples.core.preload"])
    # Else multiprocessing runs the launcher's module again in each rank: 40 ms of CPU (spawn.get_preparation_data).
    vars(sys.modules["__main__"]).update(__spec__=None, __file__=None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)  # a child has the mask of its parent
    quiet = {"PYTHONWARNINGS": "ignore:resource_tracker"}  # else it complains when the launcher is killed
    with patch.dict(os.environ, quiet):
        multiprocessing.resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)  # the tracker has unblocked SIGINT and SIGTERM
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_rank(folder: str, module: str, *arguments: str) -> None:
    """What a rank does: `python -m module arguments`, as torchrun would have started it; `folder` is the run's."""
    die_with_parent(signal.SIGKILL)  # replaces torch's SIGINT, by which a rank that hangs would live on
    if os.getsid(0) != os.getpid():
        os.setsid()  # as torchrun does: Ctrl-C goes to the agent, which ends the ranks, and not to each of them too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # As under `nohup` or in the background of a shell: the agent passes on the signal that it got, and a rank
        # that ignores it would live on for 30 s, until SIGKILL.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = int(os.environ["RANK"])
    if not run_folder():  # else the launcher that named one has seen to the ranks' output too
        os.environ[RUN] = folder
        _keep_from_screen(Path(folder) / f"rank-{rank}.log")
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    except Exception as error:
        leave_record(error, rank, int(os.environ["LOCAL_RANK"]), 0, "", Path(folder))  # if process_group has not
        sys.exit(int(Exit.ERROR))  # an exception that torch sees would leave its traceback in a file in /tmp
    _leave_group()


class _Screen(io.TextIOWrapper):
    """Python's standard error. faulthandler, which torch enables, asks for the descriptor, and is to use the log."""

    def fileno(self) -> int:
        return 2


def _keep_from_screen(log: Path) -> None:
    """What C code writes to standard error goes to the rank's log: gloo's last words, once a rank, are an echo mostly.

    Python's own standard error stays what it was.
    """
    sys.stderr.flush()
    screen = os.dup(2)
    sys.stderr = _Screen(open(screen, "wb", 0), errors="backslashreplace", write_through=True)  # noqa: SIM115,PTH123
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(file, 2)
    os.close(file)


def _leave_group() -> None:
    """A rank that is through waits until all are, so what its end would have closed is closed here.

    Else the peers of a rank that leaves in the middle, with status 0, would wait for it until their timeout.
    """
    import gc

    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()  # models before the group: see group._close
        dist.destroy_process_group()


if __name__ == "__main__":  # a rank that is not forked
    run_rank(*sys.argv[1:])
