"""How a rank ends: its exit status, and one message from one rank. Standard library only."""

import sys
import time
from enum import IntEnum
from typing import NoReturn


class Exit(IntEnum):
    """Exit status of a rank. The launchers return the rank's own; torchrun returns 1 for each of them but 0."""

    OK = 0
    ERROR = 1
    USAGE = 2  # what was asked for makes no sense: a key, a value, the environment
    CHECK_FAILED = 3  # the run ended, but a check says that its result is wrong
    UNABLE = 4  # this machine can't do it: nccl without GPUs, too few GPUs
    LATER = 75  # stopped on request after saving: go on later (EX_TEMPFAIL of sysexits.h)


class Refusal(Exception):
    """The run can't go on, for a reason that a person can cure: the message says which, and no traceback is shown.

    Raised on every rank alike, inside process_group, which has rank 0 say it.
    """

    status = Exit.ERROR


# As soon as one rank has ended, torchrun ends the others. The silent ones leave so much later than the one that speaks.
SPEAKER_FIRST_S = 5.0


def say(line: str) -> None:
    """Write one line for a person to standard error."""
    print(f"ddp-examples: {line}", file=sys.stderr, flush=True)


def refuse(status: Exit, message: str, speaks: bool = True) -> NoReturn:
    """End this rank with `status`. Every rank finds the same fault, so `speaks` is true on one of them only."""
    if speaks:
        say(message)
    else:
        time.sleep(SPEAKER_FIRST_S)
    raise SystemExit(int(status))
