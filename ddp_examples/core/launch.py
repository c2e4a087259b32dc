"""What is asked for, site and job -> the commands that start the ranks. Pure functions, no torch."""

import argparse
import os
import re
import shlex
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from ddp_examples.core.job import Job, seconds
from ddp_examples.core.ranks import loopback_interface
from ddp_examples.core.site import Site

USAGE = """launch/local.sh [-n RANKS] [--max-restarts N] [--dry-run] [group=choice | key=value ...]
launch/slurm.sh, launch/frontera.sh [-N NODES] [-n RANKS] [-p QUEUE] [-t HH:MM:SS] [-A ACCOUNT] [--max-restarts N]
                                    [--wait] [--dry-run] [site=NAME] [group=choice | key=value ...]
  -N NODES: default 1, in a job all of it     -n RANKS of a node: default its GPUs, else 4
  --max-restarts N: after a failure start all ranks again, at most N times; a demo that saves goes on from there
  --wait: follow the job, end as it ends      --dry-run: print what would be run, run nothing
  launch/slurm.sh --setup, launch/frontera.sh --setup: make the Python environment of the site, once
"""
DEFAULT_RANKS = 4  # of a node without GPUs
SUCCESSOR = "DDP_EXAMPLES_SUCCESSOR"  # environment variable of a job


def parse_arguments(argv: Sequence[str]) -> Tuple[argparse.Namespace, List[str]]:
    """The launcher's own options, and the rest, which are settings for the demo. An option not given is None."""
    parser = argparse.ArgumentParser(prog="ddp-examples", usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("-N", "--nodes", type=positive)
    parser.add_argument("-n", "--ranks", type=positive)
    parser.add_argument("-p", "--queue")
    parser.add_argument("-t", "--time")
    parser.add_argument("-A", "--account")
    parser.add_argument("--max-restarts", type=positive)
    parser.add_argument("--logs")  # set by the launcher for the process of a node
    parser.add_argument("--requeue", action="store_true")  # set in the batch script
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    options, settings = parser.parse_known_args(argv)
    sites = [setting[len("site=") :] for setting in settings if setting.startswith("site=")]
    options.site = sites[-1] if sites else "local"
    return options, [setting for setting in settings if not setting.startswith("site=")]


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number


def gpus_here(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that a rank would see, without torch: device files, less what CUDA_VISIBLE_DEVICES hides."""
    there = len([device for device in devices.glob("nvidia*") if device.name[len("nvidia") :].isdigit()])
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    named = [name for name in visible.split(",") if name.strip() and not name.strip().startswith("-")]
    return min(there, len(named))


def allowed_cpus() -> int:
    """CPUs that this process may use: a batch system often gives fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_environment(
    ranks: int, env: Mapping[str, str], cpus: int, site: Optional[Site] = None, nodes: int = 1
) -> Dict[str, str]:
    """Variables to add for the ranks; what the user has set stays.

    OMP_NUM_THREADS: the CPUs we may use, shared among the ranks. torchrun would set it to 1, with a banner that people
    take for the error. GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: on one node the ranks' sockets listen on loopback;
    without it on the address of the host name, which others can reach.
    """
    added = {"OMP_NUM_THREADS": str(max(1, cpus // ranks)), **(site.environment if site else {})}
    if nodes > 1:  # restarted ranks then don't meet in the store of the attempt before (pytorch#135712)
        added["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    interface = loopback_interface() if nodes == 1 else site.interface if site else ""
    if interface:
        added.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    return {name: value for name, value in added.items() if name not in env}


def torchrun_arguments(ranks: int, module: str, settings: Sequence[str], restarts: int = 0) -> List[str]:
    """Arguments of torch.distributed.run for `ranks` ranks of `module` on this machine.

    --standalone takes a free port, so that two runs at once don't collide. --local-addr: without it torchrun waits for
    ever where the machine's own name does not resolve (pytorch#150532).
    """
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", *_restarts(restarts)]
    return [*options, "--module", module, *settings]


def _restarts(restarts: int) -> List[str]:
    return [f"--max-restarts={restarts}"] if restarts else []


def node_torchrun_arguments(
    site: Site,
    job: Job,
    number: int,
    address: str,
    ranks: int,
    module: str,
    settings: Sequence[str],
    restarts: int = 0,
) -> List[str]:
    """Arguments of torch.distributed.run on node `number` of a job of several nodes; `address`: its own.

    is_host: by itself torchrun compares names, and where the head node has an alias no node feels meant. join_timeout:
    torchrun's own is 600 s. --signals-to-handle: by default SIGUSR1, which batch systems send, leaves the ranks behind.
    """
    is_host = int(number == 0)
    return [
        f"--nnodes={len(job.nodes)}",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={job.run}",
        f"--rdzv-endpoint={job.nodes[0]}:{job.port}",
        f"--rdzv-conf=is_host={is_host},join_timeout={site.startup_timeout_s:.0f}",
        f"--local-addr={address}",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
        *_restarts(restarts),
        "--module",
        module,
        *settings,
    ]


def logged(module: str, settings: Sequence[str], logs: str) -> Tuple[str, List[str]]:
    """The same program with each rank's output in a file of its own in the folder `logs`."""
    return "ddp_examples.core.logged", [logs, module, *settings]


def known_to(torchrun_source: str, arguments: Sequence[str]) -> Tuple[List[str], List[str]]:
    """(arguments that this torchrun knows, options that it lacks), from the text of torch/distributed/run.py.

    Read as text, since importing it takes a second. Only what stands before --module is torchrun's.
    """
    known = set(re.findall(r"\"(--[a-z-]+)\"", torchrun_source))
    end = arguments.index("--module")
    lacking = [argument for argument in arguments[:end] if argument.partition("=")[0] not in known]
    return [argument for argument in arguments if argument not in lacking], lacking


def sbatch_command(
    site: Site, name: str, nodes: int, queue: str, gpus: int, time: str, account: Optional[str], log: str
) -> List[str]:
    """The sbatch command; the script goes to its standard input. --open-mode: a restarted job keeps its log."""
    stop = site.stop_before_end_s
    return [
        "sbatch",
        f"--job-name={name}",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",  # one task a node: it starts the node's ranks
        f"--time={time}",
        *([f"--partition={queue}"] if queue else []),
        *([f"--account={account}"] if account else []),
        *(site.gpu_request.format(gpus=gpus).split() if gpus else []),
        f"--output={log}",
        "--open-mode=append",
        *([f"--signal=TERM@{stop}"] if 0 < 10 * stop <= seconds(time) else []),
        *site.sbatch,
    ]


def batch_script(launcher: str, python: str, arguments: Sequence[str], successor: Sequence[str] = ()) -> str:
    """The launcher again, in the job; `python` is the interpreter that it was called with.

    `successor`: the sbatch command for a job that goes on where this one stops, if the job itself can't be requeued.
    """
    chain = f"export {SUCCESSOR}={shlex.quote(shlex.join(successor))}\n" if successor else ""
    return f"#!/bin/bash\n{chain}PYTHON={shlex.quote(python)} exec {shlex.join([launcher, *arguments])}\n"


def start_command(site: Site, nodes: int, node_arguments: Sequence[str]) -> List[str]:
    """Starts one process on each node; `node_arguments`: the interpreter, and what it gets."""
    return [*shlex.split(site.start.format(nodes=nodes)), *node_arguments]


def node_arguments(
    python: str, site: str, nodes: int, ranks: int, logs: str, settings: Iterable[str], restarts: int = 0
) -> List[str]:
    """The process of a node. One absolute interpreter: on another node PATH may find another one."""
    options = [f"--nodes={nodes}", f"--ranks={ranks}", *_restarts(restarts), f"--logs={logs}", f"site={site}"]
    return [python, "-m", "ddp_examples.core.node", *options, *settings]


def too_many_tasks(tasks: int, nodes: int, ranks: Optional[int]) -> str:
    return (
        f"{tasks} processes were started on {nodes} node{'s' * (nodes > 1)}, and each would start all ranks of its "
        f"node. Type launch/slurm.sh -N {nodes} -n {ranks or DEFAULT_RANKS} ... without srun, ibrun or mpirun before it"
    )


def some_job(nodes: int) -> Job:
    """Stands for a job that is not there yet: its number is 0."""
    return Job("0", 0, tuple(f"node{number}" for number in range(nodes)))


def plan_of_submission(sbatch: Sequence[str], script: str) -> str:
    """What --dry-run prints of it."""
    return f"# on the login node\n{shlex.join(sbatch)} <<'END'\n{script}END\n"


def plan_in_job(
    site: Site,
    name: str,
    job: Job,
    python: str,
    ranks: int,
    logs: str,
    module: str,
    settings: Sequence[str],
    restarts: int = 0,
) -> str:
    """What --dry-run prints of a start in a job."""
    nodes = len(job.nodes)
    command = start_command(site, nodes, node_arguments(python, name, nodes, ranks, logs, settings, restarts))
    module, arguments = logged(module, settings, logs)
    if nodes == 1:
        torchrun, which = torchrun_arguments(ranks, module, arguments, restarts), "the node"
    else:
        torchrun = node_torchrun_arguments(site, job, 0, "<its address>", ranks, module, arguments, restarts)
        which = f"node 0 of {nodes}, after its checks (on the others is_host=0)"
    run = shlex.join([python, "-m", "torch.distributed.run", *torchrun])
    stands = " (0 stands for its number)" * (job.id == "0")
    return f"# in the job{stands}\n{shlex.join(command)}\n\n# by that on {which}\n{run}"
