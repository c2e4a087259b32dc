"""What a Slurm job knows of itself: its nodes, and which of them this process is on. Standard library only."""

import re
import socket
import subprocess
from dataclasses import dataclass, replace
from typing import List, Mapping, Optional, Sequence, Tuple

# A task's own number and their count, by who started it. SLURM_PROCID last: under an mpirun that srun has started it is
# the number of mpirun's helper, and a shell by ssh, or the batch script, has it as 0.
NUMBERS = (
    ("PMI_RANK", "PMI_SIZE"),  # ibrun, Intel MPI, MPICH
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
PORTS = (15000, 31000)  # below Linux' ephemeral ports, which start at 32768


@dataclass(frozen=True)
class Job:
    """A job, or the first nodes of one."""

    id: str
    restarts: int
    nodes: Tuple[str, ...]
    queue: str = ""

    @property
    def run(self) -> str:
        """Name of this start of the job: a restarted one must not meet what is left of the last."""
        return f"{self.id}-{self.restarts}"

    @property
    def port(self) -> int:
        """Where its nodes meet, on the first node. Jobs on one node at once get different ones."""
        low, high = PORTS
        return low + (int(re.sub(r"\D", "", self.id) or 0) + self.restarts) % (high - low)


def read_job(env: Mapping[str, str]) -> Optional[Job]:
    """The job that this process runs in, or None. ValueError if its nodes can't be found out.

    A shell that came by ssh may know the number of its job alone; then squeue is asked for the nodes.
    """
    number = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
    if not number:
        return None
    nodes = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ask("squeue", "-h", "-j", number, "-o", "%N")
    if not nodes:
        raise ValueError(
            f"SLURM_JOB_ID={number}, but SLURM_JOB_NODELIST is not set and squeue on {socket.gethostname()} "
            f"does not tell the nodes. If the job has ended: unset SLURM_JOB_ID"
        )
    restarts = int(env.get("SLURM_RESTART_COUNT") or 0)
    return Job(number, restarts, tuple(expand(nodes)), env.get("SLURM_JOB_PARTITION", ""))


def first_nodes(job: Job, count: Optional[int]) -> Job:
    """The first `count` nodes of the job; None: all. ValueError if it has fewer."""
    if count and count > len(job.nodes):
        raise ValueError(f"-N {count}, but job {job.id} has {len(job.nodes)}: {', '.join(job.nodes)}")
    return replace(job, nodes=job.nodes[:count])


def expand(nodes: str) -> List[str]:
    """Names in Slurm's compressed list, by scontrol, or without it where there is none (a container)."""
    return (ask("scontrol", "show", "hostnames", nodes) or "").split() or expand_nodes(nodes)


def ask(*command: str) -> Optional[str]:
    """What a command of Slurm prints, or None if it can't be had."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def expand_nodes(text: str) -> List[str]:
    """`c101-[001-002,007],c196-011` -> `["c101-001", "c101-002", "c101-007", "c196-011"]`."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(parts) != text:
        raise ValueError(f"{text} is not a list of nodes as Slurm writes them")
    return [name for part in parts for name in _expand_part(part)]


def _expand_part(part: str) -> List[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    return [head + number + end for number in _numbers(inside) for end in _expand_part(tail)]


def _numbers(ranges: str) -> List[str]:
    """`001-003,7` -> `["001", "002", "003", "7"]`."""
    found = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()):
            raise ValueError(f"[{ranges}] is not a range of node numbers")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def task(env: Mapping[str, str]) -> Tuple[int, int]:
    """(own number, number of tasks) as the starter of this process says; what nobody says is 0."""
    for number, count in NUMBERS:
        if env.get(number, "").isdigit():
            return int(env[number]), int(env.get(count) or 0)
    return 0, 0


def seconds(time: str) -> float:
    """A time limit as Slurm writes them: `30` (minutes), `MM:SS`, `HH:MM:SS`, `D-HH[:MM[:SS]]`, `infinite`."""
    if time in ("", "infinite", "UNLIMITED"):
        return float("inf")
    days, dash, clock = time.rpartition("-")
    if not re.fullmatch(r"\d+(:\d+){0,2}", clock) or (dash and not days.isdigit()):
        raise ValueError(f"{time} is not a time limit; write HH:MM:SS")
    numbers = [int(number) for number in clock.split(":")]
    units: Sequence[int] = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units))
