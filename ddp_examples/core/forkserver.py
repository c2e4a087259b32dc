"""The fork server: a Python that imports torch once a node, and from which the ranks are forked. Imports no torch.

torchrun starts a fresh Python for each rank, and each imports torch: about 1.9 s of CPU a rank.
"""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import signal
import sys
import traceback

from ddp_examples.core.exits import Exit, say
from ddp_examples.core.orphans import die_with_parent

# What a terminal or Slurm sends to every process of a run: the agent ends its ranks by it, and gives them 30 s to save.
# The server is not to end before, since the ranks die with it.
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # a child has the mask of its parent
    multiprocessing.resource_tracker.ensure_running()  # it unblocks two of them when it starts
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_rank(module: str, *arguments: str) -> None:
    """What a forked rank does: `python -m module arguments`, as torchrun would have started it."""
    die_with_parent(signal.SIGKILL)  # replaces torch's SIGINT, by which a rank that hangs would live on
    os.setsid()  # as torchrun does: Ctrl-C goes to the agent, which ends the ranks, and not to each of them too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # As under `nohup` or in the background of a shell: the agent passes on the signal that it got, and a rank
        # that ignores it would live on for 30 s, until SIGKILL.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    except Exception:
        traceback.print_exc()
        sys.exit(int(Exit.ERROR))  # an exception that torch sees would leave its traceback in a file in /tmp
    _leave_group()


def _leave_group() -> None:
    """A rank that is through waits until all are, so what its end would have closed is closed here.

    Else the peers of a rank that leaves in the middle, with status 0, would wait for it until their timeout.
    """
    import gc

    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()  # models before the group: see group._close
        dist.destroy_process_group()
