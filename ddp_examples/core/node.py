"""The process that launch/local.sh starts once a node: it starts torchrun's agent, and ends with the rank's own status.

python -m ddp_examples.core.node [-n RANKS] [--dry-run] [group=choice | key=value ...]
"""

import os
import sys
from typing import List

from ddp_examples.core.config import chosen_demo, load_config_of
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
from ddp_examples.core.orphans import leave_on_signals
from ddp_examples.core.ranks import Ranks


def main(argv: List[str]) -> int:
    leave_on_signals()
    options, settings = parse_arguments(argv)
    demo = chosen_demo(settings, Ranks())
    if "--help" in settings or "-h" in settings:
        print(f"{USAGE}\n  -n RANKS: default the GPUs of this machine, else 4. --dry-run: print the command only\n")
    config = load_config_of(demo, settings, Ranks())
    ranks = options.ranks or gpus_here(os.environ) or 4
    arguments = torchrun_arguments(ranks, f"ddp_examples.{demo.name}", settings)
    added = rank_environment(ranks, os.environ, allowed_cpus())
    if options.dry_run:
        command = ["env", *(f"{name}={value}" for name, value in added.items())] if added else []
        print("\n".join([*command, sys.executable, "-m", "torch.distributed.run", *arguments]))
        return Exit.OK
    os.environ.update(added)
    fork = can_fork(config.launch.start, ranks)
    if fork:
        start_server()
    from ddp_examples.core.agent import run_agent  # imports torch, while the server does

    return run_agent(arguments, fork)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
