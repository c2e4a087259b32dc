"""torchrun's agent, run in this process: it starts the ranks of this node, and their own exit status comes back."""

import signal
from typing import List

from ddp_examples.core.exits import Exit, say

# Ranks that end so have said why, and the others end so too: there is no culprit to name.
SPOKEN = (Exit.USAGE, Exit.CHECK_FAILED, Exit.UNABLE, Exit.LATER)


def run_agent(arguments: List[str]) -> int:
    """torch.distributed.run in this process; returns the status of the rank that failed first.

    Run as a program it would return 1, whatever the rank's status was.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode not in SPOKEN:
            how = (
                f"signal {signal.Signals(-failure.exitcode).name}"
                if failure.exitcode < 0
                else f"status {failure.exitcode}"
            )
            say(f"rank {rank} failed first, with {how}; {len(error.failures) - 1} others after it")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        say(f"ended by {signal.Signals(error.sigval).name}; all ranks are ended")
        return 128 + error.sigval
    return Exit.OK
