"""The process that launch/local.sh starts once a node: it starts torchrun's agent, and ends with the rank's own status.

python -m ddp_examples.core.node [-n RANKS] [--dry-run] [group=choice | key=value ...]
"""

import os
import signal
import sys
from typing import List

from ddp_examples.core.config import chosen_demo, load_config_of
from ddp_examples.core.exits import Exit, say
from ddp_examples.core.launch import (
    USAGE,
    allowed_cpus,
    gpus_here,
    parse_arguments,
    rank_environment,
    torchrun_arguments,
)
from ddp_examples.core.ranks import Ranks

# Ranks that end so have said why, and the others end so too: there is no culprit to name.
SPOKEN = (Exit.USAGE, Exit.CHECK_FAILED, Exit.UNABLE, Exit.LATER)


def main(argv: List[str]) -> int:
    options, settings = parse_arguments(argv)
    demo = chosen_demo(settings, Ranks())
    if "--help" in settings or "-h" in settings:
        print(f"{USAGE}\n  -n RANKS: default the GPUs of this machine, else 4. --dry-run: print the command only\n")
    load_config_of(demo, settings, Ranks())
    ranks = options.ranks or gpus_here(os.environ) or 4
    arguments = torchrun_arguments(ranks, f"ddp_examples.{demo.name}", settings)
    added = rank_environment(ranks, os.environ, allowed_cpus())
    if options.dry_run:
        command = ["env", *(f"{name}={value}" for name, value in added.items())] if added else []
        print("\n".join([*command, sys.executable, "-m", "torch.distributed.run", *arguments]))
        return Exit.OK
    os.environ.update(added)
    return run_agent(arguments)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
