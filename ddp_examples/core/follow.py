"""Follow a job from the login node: its log on the screen, its exit status in the end. Standard library only."""

import os
import re
import sys
import time
from pathlib import Path
from typing import Optional, Tuple

from ddp_examples.core.exits import Exit, say
from ddp_examples.core.job import ask

POLL_S = 2.0  # squeue asks the one controller that all users share
UNANSWERED = 5  # that many times in a row, and the job is forgotten, not the controller busy
LIVING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "STAGE_OUT", "SUSPENDED")


def job_number(sbatch: str) -> Optional[str]:
    """The job's number in what sbatch prints; sites put banners around it."""
    found = re.search(r"^Submitted batch job (\d+)", sbatch, re.MULTILINE)
    return found.group(1) if found else None


def follow(job: str, log: Path) -> int:
    """Print the log as it grows until the job has ended; returns its exit status. Ctrl-C leaves the job alone."""
    place, asked, unanswered = 0, 0.0, 0
    state, status = "PENDING", 0
    try:
        while state in LIVING:
            time.sleep(0.2)
            place = _print_from(log, place)
            if time.monotonic() - asked > POLL_S:
                now, status = _state(job)
                unanswered = unanswered + 1 if now == "UNKNOWN" else 0
                state = now if unanswered in (0, UNANSWERED) else state
                asked = time.monotonic()
    except KeyboardInterrupt:
        say(f"job {job} goes on. Its log: {log}; to end it: scancel {job}")
        return 128 + 2
    time.sleep(0.2)  # the last lines, over a network file system
    _print_from(log, place)
    if state not in ("COMPLETED", "FAILED"):
        say(f"job {job} has ended as {state}, see {log}")
    return status or (Exit.OK if state == "COMPLETED" else Exit.ERROR)


def _print_from(log: Path, place: int) -> int:
    """Print the log from byte `place` on; returns where it ends."""
    try:
        with log.open("rb") as file:
            file.seek(place)
            new = file.read()
    except OSError:  # not there yet
        return place
    sys.stdout.buffer.write(new)
    sys.stdout.flush()
    return place + len(new)


def _state(job: str) -> Tuple[str, int]:
    """(state, exit status); Slurm forgets a job some minutes after its end (MinJobAge)."""
    answer = ask("squeue", "-h", "-t", "all", "-j", job, "-O", "State:30,exit_code:30")
    words = (answer or "").split()
    if len(words) < 2:
        return "UNKNOWN", 0
    code = os.waitstatus_to_exitcode(int(words[1]))
    return words[0], code if code >= 0 else 128 - code
