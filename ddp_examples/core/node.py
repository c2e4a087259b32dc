"""The process that launch/local.sh starts once a node: it starts torchrun's agent, and ends with the rank's own status.

python -m ddp_examples.core.node [-n RANKS] [--dry-run] [group=choice | key=value ...]
"""

import gc
import os
import sys
from typing import List

from ddp_examples.core.exits import Exit
from ddp_examples.core.forkserver import can_fork, start_server
from ddp_examples.core.launch import (
    USAGE,
    allowed_cpus,
    gpus_here,
    parse_arguments,
    rank_environment,
    torchrun_arguments,
)
from ddp_examples.core.ranks import Ranks
from ddp_examples.core.runs import module_of, planned_runs


def main(argv: List[str]) -> int:
    options, settings = parse_arguments(argv)
    if "--help" in settings or "-h" in settings:
        print(f"{USAGE}\n  -n RANKS: default the GPUs of this machine, else 4. --dry-run: print the command only\n")
    runs = planned_runs(settings, Ranks())
    ranks = options.ranks or gpus_here(os.environ) or 4
    arguments = torchrun_arguments(ranks, module_of(runs), settings)
    added = rank_environment(ranks, os.environ, allowed_cpus())
    if options.dry_run:
        command = ["env", *(f"{name}={value}" for name, value in added.items())] if added else []
        print("\n".join([*command, sys.executable, "-m", "torch.distributed.run", *arguments]))
        return Exit.OK
    os.environ.update(added)
    fork = can_fork(runs[0].config.launch.start, ranks)
    if fork:
        start_server()
    gc.disable()  # until torch is imported: the collections meanwhile find nothing, and take 0.4 s
    from ddp_examples.core.agent import run_agent  # imports torch, while the server does

    gc.enable()
    return run_agent(arguments, fork)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
