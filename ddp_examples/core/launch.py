"""What is asked for, and facts of the machine -> the command that starts the ranks. Pure functions, no torch."""

import argparse
import os
import sys
from pathlib import Path
from typing import Dict, List, Mapping, Sequence, Tuple

USAGE = "launch/local.sh [-n RANKS] [--dry-run] [group=choice | key=value ...]"


def parse_arguments(argv: Sequence[str]) -> Tuple[argparse.Namespace, List[str]]:
    """The launcher's own options (ranks or None, dry_run), and the rest, which are settings for the demo."""
    parser = argparse.ArgumentParser(prog="launch/local.sh", usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("-n", "--ranks", type=positive)
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_known_args(argv)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 rank")
    return number


def gpus_here(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that a rank would see, without torch: device files, less what CUDA_VISIBLE_DEVICES hides."""
    there = len([device for device in devices.glob("nvidia*") if device.name[len("nvidia") :].isdigit()])
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    named = [name for name in visible.split(",") if name.strip() and not name.strip().startswith("-")]
    return min(there, len(named))


def torchrun_arguments(ranks: int, module: str, settings: Sequence[str]) -> List[str]:
    """Arguments of torch.distributed.run for `ranks` ranks of `module` on this machine.

    --standalone takes a free port, so that two runs at once don't collide. --local-addr: without it torchrun waits for
    ever where the machine's own name does not resolve (pytorch#150532).
    """
    return [
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={ranks}",
        "--module",
        module,
        *settings,
    ]


def rank_environment(ranks: int, env: Mapping[str, str], cpus: int, platform: str = sys.platform) -> Dict[str, str]:
    """Variables to add for the ranks of a run on one node; what the user has set stays.

    OMP_NUM_THREADS: the CPUs we may use, shared among the ranks. torchrun would set it to 1, with a banner that people
    take for the error. GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: the ranks' sockets listen on loopback; without it on the
    address of the host name, which others can reach.
    """
    loopback = loopback_interface(platform)
    wanted = {
        "OMP_NUM_THREADS": str(max(1, cpus // ranks)),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }
    return {name: value for name, value in wanted.items() if name not in env}


def loopback_interface(platform: str = sys.platform) -> str:
    """Its name, as gloo and nccl want it: Linux says lo, macOS and the BSDs lo0."""
    return "lo" if platform.startswith("linux") else "lo0"


def allowed_cpus() -> int:
    """CPUs that this process may use: a batch system often gives fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
