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
import shutil
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple
from unittest.mock import patch

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from ddp_examples.core import rendezvous
from ddp_examples.core.deaths import Death, memory_kills, why_killed
from ddp_examples.core.exits import Exit, say
from ddp_examples.core.forkserver import run_rank
from ddp_examples.core.orphans import SIGNALS
from ddp_examples.core.records import conclude, leave_deaths, own_folder, run_folder
from ddp_examples.core.verdict import SPOKEN

RANK_MODULE = "ddp_examples.core.forkserver"  # run as a program it is a rank that is not forked
LOGGERS = ("torch.distributed.elastic", "torch.distributed.run", "torch.multiprocessing")


def run_agent(arguments: Sequence[str], fork: bool = True) -> int:
    """torch.distributed.run with these arguments; returns the status of the rank that failed first (signal n: 128 + n).

    Run as a program it would return 1 whatever the rank's status was. `fork`: ranks come from the fork server. What
    broke the run is said in at most 10 lines; the rest is in the folder of the run, which is removed after success.
    Where a launcher has named that folder (DDP_EXAMPLES_RUN), it concludes from what the agents of all nodes leave.
    """
    gc.freeze()  # else the interpreter walks all of torch's objects once more at its end: 0.8 s
    options, given = run.parse_args(list(arguments)), run_folder()
    if given:
        return _run_agent(options, fork, given, speaks=False)
    folder = Path(own_folder())
    try:
        return _run_agent(options, fork, folder)
    finally:
        if not (folder / "verdict.json").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _run_agent(options: Any, fork: bool, folder: Path, speaks: bool = True) -> int:
    _log_to(folder / f"{socket.gethostname()}-agent.log")
    if options.standalone:
        _stay_on_loopback(options)
    if options.module:
        options.training_script_args = [str(folder), options.training_script, *options.training_script_args]
        options.training_script = RANK_MODULE
    config, entrypoint, entrypoint_arguments = run.config_from_args(options)
    if fork and options.module:
        config.start_method = "forkserver"
        entrypoint, entrypoint_arguments = run_rank, options.training_script_args
    agents: List[NodeAgent] = []

    def make(*args: Any, **settings: Any) -> NodeAgent:
        agents.append(NodeAgent(*args, **settings))
        agents[0].folder = folder
        return agents[0]

    _running.append(agents)
    try:
        handle_signals()
        with patch.object(api, "LocalElasticAgent", make):  # launch_agent has no argument for it
            api.elastic_launch(config, entrypoint)(*entrypoint_arguments)
    except ChildFailedError as error:
        return _status(error, agents[0], folder, speaks)
    except SignalException as error:
        if agents and agents[0].all_saved():
            return Exit.LATER
        if speaks:
            say(f"ended by {signal.Signals(error.sigval).name}; all ranks are ended")
        return 128 + int(error.sigval)
    return Exit.OK


# Keeps the agent until Python ends: its c10d rendezvous would be finalised in a thread of its own, which then joins
# itself, with a traceback (torch 2.13; see it: SIGTERM to torchrun over two nodes).
_running: List[Any] = []


def handle_signals() -> None:
    """torch handles four of these, and those only once the ranks are up."""
    for number in SIGNALS:
        signal.signal(number, _raise_signal)


def _raise_signal(number: int, _: Any) -> None:
    """Once: a batch system's signal comes by several ways, and the second would cut short the ranks' time to save."""
    for other in set(SIGNALS) - {signal.SIGINT}:
        signal.signal(other, signal.SIG_IGN)
    raise SignalException(f"got signal {number}", signal.Signals(number))


def _status(error: ChildFailedError, agent: "NodeAgent", folder: Path, speaks: bool) -> int:
    """Say what broke the run; returns the status of the rank that did, as a shell would."""
    _, failure = error.get_first_failure()
    why = why_killed(agent.kills_before, memory_kills())
    agent.deaths = [replace(death, why=why) if death.code == -signal.SIGKILL else death for death in agent.deaths]
    if not speaks:
        if agent.deaths:
            leave_deaths(agent.deaths, folder)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    verdict = conclude(folder, agent.deaths, agent.world_size)
    if verdict.lines:
        say("\n".join(verdict.lines))
    codes = {death.rank: death.code for death in agent.deaths}
    culprits = [codes[rank] for rank in verdict.ranks if codes.get(rank)]
    code = culprits[0] if culprits else int(Exit.ERROR) if verdict.lines else failure.exitcode
    return code if code > 0 else 128 - code


def _log_to(file: Path) -> None:
    """torchrun's own words, of which a failure has dozens, go to a file."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(LOGGERS) and name not in LOGGERS:
            logging.getLogger(name).handlers = []
            logging.getLogger(name).propagate = True


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

    folder: Path
    world_size = 0
    _failed_at = -1  # step
    kills_before: Optional[int] = None
    deaths: Sequence[Death] = ()  # of the ranks of this node that ended badly, before we ended the others; first first

    def _start_workers(self, worker_group: WorkerGroup) -> Dict[int, Any]:
        for worker in worker_group.workers:  # a restart: what the attempt before has left
            for path in self.folder.glob(f"rank-{worker.global_rank}.json"):
                path.unlink()
        for name in ("stall.json", "verdict.json"):
            with suppress(FileNotFoundError):  # the agent of another node may have been here
                (self.folder / name).unlink()
        pids: Dict[int, Any] = super()._start_workers(worker_group)
        handle_signals()  # again: torch has put its own there
        self.world_size = worker_group.workers[0].world_size
        self.kills_before = memory_kills()
        self._died: List[Tuple[int, int]] = []  # local rank, time in ns
        if hasattr(os, "pidfd_open"):  # Linux 5.3
            files = {os.pidfd_open(pid): local_rank for local_rank, pid in pids.items()}
            threading.Thread(target=_note_deaths, args=(files, self._died), daemon=True).start()
        return pids

    def _failed_here_before(self) -> bool:
        """At the step at which the attempt before failed too: a third one would not get further."""
        step = conclude(self.folder, self.deaths, self.world_size).step
        before, self._failed_at = self._failed_at, step
        return before == step

    def all_saved(self) -> bool:
        """Whether all ranks have left with "go on later", or were through."""
        context: Any = self._pcontext
        codes = {exit_code(context, local_rank) for local_rank in context.pids()} if context else set()
        return Exit.LATER in codes and codes <= {Exit.LATER, Exit.OK}

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self._wake()
        super()._shutdown(*args, **options)

    def _wake(self) -> None:
        """A rank that is stopped (SIGSTOP) would not see the SIGTERM that torch sends, but the SIGKILL 30 s later."""
        for pid in self._pcontext.pids().values() if self._pcontext else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._died:
            self._wake()
        _accept_os_exit(self._pcontext)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state != WorkerState.FAILED:
            return result
        context: Any = self._pcontext
        died = list(self._died) or [(failure.local_rank, time.time_ns()) for failure in result.failures.values()]
        pids, host = context.pids(), socket.gethostname()
        found = [
            Death(
                worker_group.workers[local].global_rank, local, host, pids[local], exit_code(context, local) or 0, when
            )
            for local, when in died
        ]
        bad = [death for death in found if death.code]  # else it was through when another failed
        self.deaths = bad[:1] + [death for death in bad[1:] if death.code != -signal.SIGTERM]  # torch has sent that
        for first in self.deaths:
            if self._remaining_restarts and (first.code in SPOKEN or self._failed_here_before()):
                self._remaining_restarts = 0
            failure = ProcessFailure(first.local_rank, first.pid, first.code, context.error_files[first.local_rank])
            return RunResult(result.state, failures={first.rank: failure})
        return result


def exit_code(context: Any, local_rank: int) -> Optional[int]:
    """Of a dead rank, from torch's MultiprocessContext (forked) or SubprocessContext."""
    code: Optional[int]
    if hasattr(context, "_pc"):
        code = context._pc.processes[local_rank].exitcode
    else:
        code = context.subprocess_handlers[local_rank].proc.poll()
    return code


def _accept_os_exit(context: Any) -> None:
    """A forked rank that ends by os._exit(0) leaves no return value, and torch (2.13) would wait for it for ever."""
    for local_rank, process in enumerate(context._pc.processes if hasattr(context, "_pc") and context._pc else ()):
        if process.exitcode == 0:
            context._return_values.setdefault(local_rank, None)


def _note_deaths(files: Dict[int, int], deaths: List[Tuple[int, int]]) -> None:
    """Append (local rank, time in ns) for each process as it dies; `files` are pidfds, readable from then on."""
    waiting = select.poll()
    for file in files:
        waiting.register(file, select.POLLIN)
    while files:
        for file, _ in waiting.poll():
            deaths.append((files.pop(file), time.time_ns()))
            waiting.unregister(file)
            os.close(file)
