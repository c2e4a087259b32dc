"""No process outlives the one that started it: the kernel sees to it. Standard library only."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2); Linux only


def die_with_parent(with_signal: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies, also by SIGKILL, also while Python is stuck.

    Elsewhere than on Linux it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), with_signal)
