"""No process outlives the one that started it: the kernel sees to it; and signals end it. Standard library only."""

import ctypes
import os
import signal
import sys

from ddp_examples.core.exits import say

# By default the last two kill a launcher at once; batch systems send them some time before the end.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
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


def leave_on_signals() -> None:
    """Of a launcher, until its ranks are up: one line instead of a traceback. What it has started dies with it."""

    def leave(number: int, _: object) -> None:
        say(f"ended by {signal.Signals(number).name} before the ranks were up")
        os._exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, leave)
