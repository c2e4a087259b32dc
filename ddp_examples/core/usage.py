"""What the GPUs of a node do, or without GPUs the CPUs by rank; launch/watch.sh shows it for all nodes of a job.

python -m ddp_examples.core.usage                  this node, once
python -m ddp_examples.core.usage watch [JOB] [site=NAME]   every node of the job, every 5 s, until it ends
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Mapping, Sequence

from ddp_examples.core.config import ConfigError
from ddp_examples.core.exits import Exit, refuse
from ddp_examples.core.job import ask, expand
from ddp_examples.core.site import load_site

EVERY_S = 5.0
GPUS = (
    "nvidia-smi",
    "--format=csv,noheader,nounits",
    "--query-gpu=index,uuid,utilization.gpu,memory.used,memory.total",
)
PROCESSES = ("nvidia-smi", "--format=csv,noheader,nounits", "--query-compute-apps=gpu_uuid,pid,used_memory")


def here() -> List[str]:
    """Lines on this node."""
    gpus = ask(*GPUS)
    if gpus is None:
        return cpu_lines(_cpu_of_ranks(seconds=1.0))
    return gpu_lines(gpus, ask(*PROCESSES) or "", _name)


def gpu_lines(gpus: str, processes: str, name_of: Callable[[int], str]) -> List[str]:
    """A line a GPU, from nvidia-smi's two answers."""
    lines = []
    users: Dict[str, List[str]] = {}
    for uuid, pid, mebibytes in _fields(processes, 3):
        users.setdefault(uuid, []).append(f"{name_of(int(pid))} ({mebibytes} MiB)")
    for index, uuid, use, used, total in _fields(gpus, 5):
        who = ", ".join(users.get(uuid, ["nobody"]))
        lines.append(f"GPU {index}  {use:>3} %  {used:>6} of {total} MiB  {who}")
    return lines


def cpu_lines(shares: Dict[str, float]) -> List[str]:
    """A line a rank, from its CPU seconds a second: 1 is one core."""
    rows = sorted(shares.items(), key=lambda row: int(row[0].split()[-1]))
    return [f"{name:<8}  {100 * share:4.0f} % of a CPU" for name, share in rows] or ["no rank runs here"]


def _fields(text: str, count: int) -> Iterable[List[str]]:
    rows = ([field.strip() for field in line.split(",")] for line in text.splitlines())
    return (row for row in rows if len(row) == count)


def _name(pid: int) -> str:
    """`rank 3`, as a rank calls itself (core/logged.py), or the program's name."""
    try:
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()}, pid {pid}"
    except OSError:
        return f"pid {pid}"


def _cpu_of_ranks(seconds: float) -> Dict[str, float]:
    before = _cpu_times()
    time.sleep(seconds)
    return {name: spent - before[name] for name, spent in _cpu_times().items() if name in before}


def _cpu_times() -> Dict[str, float]:
    """CPU seconds of the ranks here. Those in another network namespace are on another host, as far as they know."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "comm").read_text().strip()
            if name.startswith("rank ") and (process / "ns/net").readlink() == Path("/proc/self/ns/net").readlink():
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def watch(arguments: Sequence[str]) -> int:
    """Every node of the job until it ends; of the newest job of this user if none is named."""
    names = [argument for argument in arguments if "=" not in argument]
    site = [argument[len("site=") :] for argument in arguments if argument.startswith("site=")]
    try:
        look = load_site(site[-1] if site else "slurm").look
    except ConfigError as error:
        refuse(Exit.USAGE, str(error))
    mine = ask("squeue", "-h", "--me", "-t", "R", "-S", "-i", "-o", "%i")
    job = next(iter(names or (mine or "").split()), os.environ.get("SLURM_JOB_ID", ""))
    if not job:
        refuse(Exit.USAGE, "no job of yours is running. When it is: launch/watch.sh JOB; all jobs: squeue --me")
    while True:
        state, _, nodes = (ask("squeue", "-h", "-j", job, "-o", "%T %N") or "").partition(" ")
        if state not in ("RUNNING", "PENDING", "CONFIGURING"):
            print(f"job {job} has ended" if state in ("", "COMPLETING", "COMPLETED") else f"job {job}: {state}")
            return Exit.OK
        print(f"{time.strftime('%H:%M:%S')}  job {job}" + ("" if nodes else f": {state}"), flush=True)
        for line in _everywhere(look, job, expand(nodes) if nodes else []):
            print(line, flush=True)
        time.sleep(EVERY_S)


def _everywhere(look: str, job: str, hosts: Sequence[str]) -> Iterable[str]:
    """`here` on all hosts at once."""
    running = [
        subprocess.Popen(look_command(look, job, host, os.environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        for host in hosts
    ]
    for host, process in zip(hosts, running):
        for line in (process.communicate()[0].decode() or "no answer").splitlines():
            yield f"  {host}  {line}"


def look_command(look: str, job: str, host: str, env: Mapping[str, str]) -> List[str]:
    """The command that shows a host. By ssh the words go through a shell there, which has not loaded our modules."""
    libraries = env.get("LD_LIBRARY_PATH")
    remote = ["env", f"LD_LIBRARY_PATH={libraries}"] if libraries else []
    remote += [sys.executable, "-m", "ddp_examples.core.usage"]
    command = shlex.split(look.format(job=job, host=host))
    return [*command, shlex.join(remote)] if command[0] == "ssh" else [*command, *remote]


def main(argv: List[str]) -> int:
    if argv[:1] == ["watch"]:
        try:
            return watch(argv[1:])
        except KeyboardInterrupt:
            return 128 + 2
    print("\n".join(here()))
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
