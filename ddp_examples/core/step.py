"""Run the command that starts a process on every node (srun, ibrun), and tell how that ended."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Callable, List, Optional, Set

from ddp_examples.core.exits import Exit, say
from ddp_examples.core.job import Job, ask
from ddp_examples.core.orphans import die_with_parent
from ddp_examples.core.records import clear

GRACE_S = 10.0  # from the first node that has ended badly until the others are told to end; srun does that by itself
TELL_S = 2.0  # from then until its cause is told
KILL_S = 35.0  # from then until they are killed: torchrun gives its ranks 30 s
NOISE = re.compile(r"(srun|slurmstepd|slurmstepd-[^:]*|slurmd|slurmd-[^:]*): ")  # how the others ended, line by line
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run_step(command: List[str], logs: Path, job: Job, tell: Callable[[], None] = lambda: None) -> int:
    """Returns the status of the rank that caused the end; says what is wrong if no node could say so itself.

    `tell` is called when the run has failed, as soon as all nodes can have left what they know of it: the end itself
    can take a minute, where a node does not answer.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("*.status"):  # of an earlier run in this job
        old.unlink()
    clear(logs)
    step = _Step(command, logs, job)
    for number in SIGNALS:
        signal.signal(number, step.on_signal)
    status = step.wait(tell)
    words = sorted((int(file.read_text() or 1) for file in logs.glob("*.status")), key=_cause_first)
    if status and step.signalled:
        if not step.told_by_nodes:
            say(f"ended by {signal.Signals(step.signalled).name}")
        return Exit.LATER if Exit.LATER in words else 128 + step.signalled
    if status and not words:
        say(_not_started(command, step.noise, job))
        return Exit.UNABLE  # srun's own: 233 when it can't launch, 143 or 137 of the tasks that it ended
    return words[0] if status and words else status


def _cause_first(status: int) -> int:
    """A rank that lost its peers ends with 1, one that was ended with 143: the cause is another, if there is one."""
    return {128 + signal.SIGTERM: 2, int(Exit.ERROR): 1}.get(status, 0)


def _not_started(command: List[str], noise: List[str], job: Job) -> str:
    errors = [line for line in noise if "error" in line] or noise
    told = "\n  ".join(errors[:3]) or "it said nothing"
    node = next((node for line in errors for node in job.nodes if node in line), job.nodes[0])
    python = command[command.index("-m") - 1]
    return (
        f"{command[0]} could not start or keep the processes of job {job.id}; it says\n  {told}\n"
        f"Look at the node: scontrol show node {node}. Without it: -N with fewer nodes, or sbatch --exclude={node}. "
        f"All nodes must see {python}; for another: PYTHON=/path/to/python"
    )


class _Step:
    """The running command, in a session of its own, so that a signal can be sent to all of it."""

    def __init__(self, command: List[str], logs: Path, job: Job) -> None:
        self.logs, self.job = logs, job
        self.told_by_nodes: Set[str] = set()
        self.signalled = 0  # the signal that we got
        self.told = 0.0  # when it was told to end
        self.noise: List[str] = []
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # no step goes on without its launcher
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        """Pass on what the nodes say, and what many of them say once; keep back what srun says of it."""
        for line in self.process.stderr or ():
            if NOISE.match(line):
                self.noise.append(line.rstrip())
            elif line not in self.told_by_nodes:
                sys.stderr.write(line)
                sys.stderr.flush()
                self.told_by_nodes.update([line] if line.startswith("ddp-examples: ") else [])

    def on_signal(self, number: int, _: Optional[FrameType]) -> None:
        self.signalled = self.signalled or number
        if not self.told:
            self.end()

    def end(self) -> None:
        """SIGTERM for every process of the job's steps. By scancel: srun would take it as an order to kill them."""
        self.told = time.monotonic()
        if ask("scancel", "--signal=TERM", self.job.id) is None:
            self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait(self, tell: Callable[[], None]) -> int:
        """The exit status. A node that has ended badly takes the others with it, after GRACE_S."""
        failed, told = 0.0, False
        while True:
            try:
                status = self.process.wait(0.2)
                break
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            failed = failed or (now if any(self.logs.glob("*.status")) else 0)
            if failed and not told and now > failed + TELL_S and not self.signalled:
                tell()
                told = True
            if failed and not self.told and now > failed + GRACE_S:
                self.end()
            if self.told and now > self.told + KILL_S:
                self.send(signal.SIGTERM)
        self.reader.join(5)
        if status and not told and not self.signalled:
            tell()
        if self.process.stderr and not self.reader.is_alive():
            self.process.stderr.close()
        return status if status >= 0 else 128 - status
