"""torchrun's agent, run in this process: it starts the ranks of this node, and their own exit status comes back.

    start_server()  # core/forkserver.py: it imports torch while this module does
    status = run_agent(["--standalone", "--nproc-per-node=4", "--module", "ddp_examples.basic", "seed=1"])

Arguments, rendezvous, environment, log files, restarts and signals are torchrun's. What depends on the inside of torch
(2.6 to 2.13) is here and in rendezvous.py.
"""

import gc
import logging
import os
import select
import signal
import threading
from typing import Any, Dict, List, Optional, Sequence
from unittest.mock import patch

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from ddp_examples.core import rendezvous
from ddp_examples.core.exits import Exit, say
from ddp_examples.core.forkserver import run_rank

# Ranks that end so have said why, and the others end so too: there is no culprit to name.
SPOKEN = (Exit.USAGE, Exit.CHECK_FAILED, Exit.UNABLE, Exit.LATER)


def run_agent(arguments: Sequence[str], fork: bool = True) -> int:
    """torch.distributed.run with these arguments; returns the status of the rank that failed first (signal n: 128 + n).

    Run as a program it would return 1 whatever the rank's status was. `fork`: ranks come from the fork server.
    """
    gc.freeze()  # else the interpreter walks all of torch's objects once more at its end: 0.8 s
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)  # torch's agent logs 10 to 30 lines of its own stack for a rank that fails
    options = run.parse_args(list(arguments))
    if options.standalone:
        _stay_on_loopback(options)
    config, entrypoint, entrypoint_arguments = run.config_from_args(options)
    if fork and options.module:
        config.start_method = "forkserver"
        entrypoint, entrypoint_arguments = run_rank, [options.training_script, *options.training_script_args]
    agents: List[NodeAgent] = []

    def make(*args: Any, **settings: Any) -> NodeAgent:
        agents.append(NodeAgent(*args, **settings))
        return agents[0]

    try:
        with patch.object(api, "LocalElasticAgent", make):  # launch_agent has no argument for it
            api.elastic_launch(config, entrypoint)(*entrypoint_arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code not in SPOKEN:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
            say(f"rank {rank} failed first, with {how}")
        return code if code > 0 else 128 - code
    except SignalException as error:
        if agents and agents[0].all_saved():
            return Exit.LATER
        say(f"ended by {signal.Signals(error.sigval).name}; all ranks are ended")
        return 128 + int(error.sigval)
    return Exit.OK


def _stay_on_loopback(options: Any) -> None:
    """One node: nothing that another user or host can reach."""
    rendezvous.register()
    options.standalone = False
    options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = rendezvous.NAME, rendezvous.ADDRESS, str(os.getpid())


class NodeAgent(LocalElasticAgent):
    """torchrun's agent, which also knows the order in which ranks died.

    It polls every 0.1 s, and within that time a rank's death has ended its peers: of 6 kinds of failure of rank 1 of 3,
    torch 2.13 named rank 0 in 5. The kernel tells at once.
    """

    def _start_workers(self, worker_group: WorkerGroup) -> Dict[int, Any]:
        pids: Dict[int, Any] = super()._start_workers(worker_group)
        self._deaths: List[int] = []  # local ranks
        if hasattr(os, "pidfd_open"):  # Linux 5.3
            files = {os.pidfd_open(pid): local_rank for local_rank, pid in pids.items()}
            threading.Thread(target=_note_deaths, args=(files, self._deaths), daemon=True).start()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state != WorkerState.FAILED:
            return result
        context: Any = self._pcontext
        for local_rank in self._deaths:
            code = exit_code(context, local_rank)
            if code:  # else it was through when another failed
                first = ProcessFailure(local_rank, context.pids()[local_rank], code, context.error_files[local_rank])
                return RunResult(result.state, failures={worker_group.workers[local_rank].global_rank: first})
        return result

    def all_saved(self) -> bool:
        """Whether all ranks have left with "go on later", or were through."""
        context: Any = self._pcontext
        codes = {exit_code(context, local_rank) for local_rank in context.pids()} if context else set()
        return Exit.LATER in codes and codes <= {Exit.LATER, Exit.OK}


def exit_code(context: Any, local_rank: int) -> Optional[int]:
    """Of a dead rank, from torch's MultiprocessContext (forked) or SubprocessContext."""
    code: Optional[int]
    if hasattr(context, "_pc"):
        code = context._pc.processes[local_rank].exitcode
    else:
        code = context.subprocess_handlers[local_rank].proc.poll()
    return code


def _note_deaths(files: Dict[int, int], deaths: List[int]) -> None:
    """Append the local rank of each process as it dies; `files` are pidfds, readable from then on."""
    waiting = select.poll()
    for file in files:
        waiting.register(file, select.POLLIN)
    while files:
        for file, _ in waiting.poll():
            deaths.append(files.pop(file))
            waiting.unregister(file)
            os.close(file)
