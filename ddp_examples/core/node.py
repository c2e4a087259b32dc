"""The process that the launchers start once a node: it checks the node, starts its ranks, ends with their own status.

python -m ddp_examples.core.node [-n RANKS] [--dry-run] [group=choice | key=value ...]

launch/local.sh starts it on this machine; launch/slurm.sh on each node of a job, with site=NAME, -N and --logs.
"""

from ddp_examples.core.orphans import leave_on_signals

if __name__ == "__main__":
    leave_on_signals()  # now: the imports below take 0.3 s, and Ctrl-C in them would be a traceback

import argparse
import gc
import os
import socket
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import List, NoReturn

from ddp_examples.core.config import Config, ConfigError
from ddp_examples.core.exits import Exit, refuse, say
from ddp_examples.core.forkserver import can_fork, start_server
from ddp_examples.core.hello import UnfitError, meet
from ddp_examples.core.job import Job, first_nodes, read_job, task
from ddp_examples.core.launch import (
    DEFAULT_RANKS,
    USAGE,
    allowed_cpus,
    gpus_here,
    known_to,
    logged,
    node_torchrun_arguments,
    parse_arguments,
    rank_environment,
    too_many_tasks,
    torchrun_arguments,
)
from ddp_examples.core.preflight import describe, gpu_fault, own_name_fault
from ddp_examples.core.ranks import Ranks
from ddp_examples.core.records import RUN
from ddp_examples.core.runs import Run, module_of, planned_runs
from ddp_examples.core.site import Site, load_site


def main(argv: List[str]) -> int:
    options, settings = parse_arguments(argv)
    return on_node(options, settings) if options.logs else on_this_machine(options, settings)


def on_this_machine(options: argparse.Namespace, settings: List[str]) -> int:
    """launch/local.sh."""
    if "--help" in settings or "-h" in settings:
        print(USAGE)
    runs = planned_runs(settings, Ranks())
    of_a_job = (options.queue, options.time, options.account, options.wait, options.site != "local")
    if (options.nodes or 1) > 1 or any(of_a_job):
        refuse(Exit.USAGE, "launch/local.sh starts ranks on this machine. On the nodes of a job: launch/slurm.sh -N 2")
    ranks = options.ranks or gpus_here(os.environ) or DEFAULT_RANKS
    arguments = torchrun_arguments(ranks, module_of(runs), settings, options.max_restarts or 0)
    added = rank_environment(ranks, os.environ, allowed_cpus())
    if options.dry_run:
        command = ["env", *(f"{name}={value}" for name, value in added.items())] if added else []
        print("\n".join([*command, sys.executable, "-m", "torch.distributed.run", *arguments]))
        return Exit.OK
    os.environ.update(added)
    fork = start_server_for(runs[0].config, ranks)
    return _run(arguments, fork)


def start_server_for(config: Config, ranks: int) -> bool:
    """Whether the ranks come from a fork server; it is started then, and goes on to import torch while we go on."""
    fork = can_fork(config.launch.start, ranks)
    if fork:
        start_server()
    return fork


def _run(arguments: List[str], fork: bool) -> int:
    gc.disable()  # until torch is imported: the collections meanwhile find nothing, and take 0.4 s
    from ddp_examples.core.agent import run_agent

    gc.enable()
    return run_agent(arguments, fork)


def on_node(options: argparse.Namespace, settings: List[str]) -> int:
    """One node of a job; launch/slurm.sh has checked the options and the settings."""
    number, tasks = task(os.environ)
    try:
        site, job = load_site(options.site), read_job(os.environ)
        if job is None:
            raise ValueError("--logs is for the processes of a job, and SLURM_JOB_ID is not set")
        job = first_nodes(job, options.nodes)
    except (ConfigError, ValueError) as error:
        refuse(Exit.USAGE, str(error), speaks=number == 0)
    if tasks not in (0, len(job.nodes)) or number >= len(job.nodes):
        refuse(Exit.USAGE, too_many_tasks(tasks, len(job.nodes), options.ranks), speaks=number == 0)
    runs = planned_runs(settings, Ranks(rank=number))
    os.environ.update(rank_environment(options.ranks, os.environ, allowed_cpus(), site, len(job.nodes)))
    os.environ[RUN] = options.logs  # where the ranks leave what the launcher makes its verdict of
    fork = start_server_for(runs[0].config, options.ranks)  # it imports torch while the nodes meet
    try:
        arguments = _checked_arguments(options, runs, settings, site, job, number)
    except UnfitError as error:
        _leave(options.logs, Exit.UNABLE, str(error))
    _leave(options.logs, _run_and_tell(arguments, fork, Path(options.logs)))


def _checked_arguments(
    options: argparse.Namespace, runs: List[Run], settings: List[str], site: Site, job: Job, number: int
) -> List[str]:
    """torchrun's arguments on this node, after its checks. Raises UnfitError."""
    fault = gpu_fault(runs[0].config.backend.name, options.ranks, gpus_here(os.environ))
    module, arguments = logged(module_of(runs), settings, options.logs)
    restarts = options.max_restarts or 0
    if len(job.nodes) == 1:
        if fault:
            raise UnfitError(fault)
        return torchrun_arguments(options.ranks, module, arguments, restarts)
    me = describe(job, number, fault or own_name_fault(site.interface))
    address = meet(job, me, site.startup_timeout_s)
    planned = node_torchrun_arguments(site, job, number, address, options.ranks, module, arguments, restarts)
    known, lacking = known_to(_torchrun_source(), planned)
    if lacking and number == 0:
        say(f"torch {me.torch} has no {', '.join(lacking)}: left out")
    return known


def _torchrun_source() -> str:
    torch = find_spec("torch")
    assert torch is not None
    return (Path(torch.origin or "").parent / "distributed" / "run.py").read_text(encoding="utf-8")


def _run_and_tell(arguments: List[str], fork: bool, logs: Path) -> int:
    try:
        return _run(arguments, fork)
    except Exception as error:
        log = logs / f"{socket.gethostname()}-torchrun.log"
        log.write_text(traceback.format_exc(), encoding="utf-8")
        say(f"torchrun on {socket.gethostname()} failed: {type(error).__name__}: {error}. All of it: {log}")
        return Exit.ERROR


def _leave(logs: str, status: int, message: str = "") -> NoReturn:
    """End with `status`, left in a file too: srun returns the highest one, which may be that of a node it killed."""
    if message:
        say(message)
    if status:
        Path(logs, f"{socket.gethostname()}.status").write_text(f"{int(status)}\n", encoding="utf-8")
    sys.exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
