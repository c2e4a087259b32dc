"""RANK, LOCAL_RANK and WORLD_SIZE -> Ranks. Standard library only."""

import sys
from dataclasses import dataclass
from typing import Dict, Mapping

from ddp_examples.core.exits import Exit, refuse

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # what torchrun sets in every process that it starts


@dataclass(frozen=True)
class Ranks:
    """Who this process is in the run. Without a launcher it is rank 0 of a world of one."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1  # ranks on this node
    launched: bool = False  # a launcher has set the environment


def read_ranks(env: Mapping[str, str]) -> Ranks:
    """Ranks from the environment that torchrun sets: `ranks = read_ranks(os.environ)`.

    With none of RANK, LOCAL_RANK and WORLD_SIZE set it is a world of one. Ends the process with status 2, and the
    reason, if only some are set, one is no number, or not 0 <= local_rank <= rank < world_size.
    LOCAL_WORLD_SIZE is torchrun's too; under a launcher that doesn't set it, this rank knows of local_rank + 1.
    """
    present = [name for name in NAMES if env.get(name, "") != ""]
    if not present:
        return Ranks()
    speaks = env.get("RANK") or env.get("LOCAL_RANK") or "0"
    if len(present) < len(NAMES):
        absent = " and ".join(name for name in NAMES if name not in present)
        have = ", ".join(f"{name}={env[name]}" for name in present)
        refuse(
            Exit.USAGE,
            f"{absent} not set, but {have}: torchrun sets all three. Start with\n"
            "  torchrun --nproc_per_node=4 -m ddp_examples.basic\n"
            f"or, for one rank without a launcher: unset {' '.join(present)}",
            speaks == "0",
        )
    numbers = _numbers(env, speaks == "0")
    ranks = Ranks(
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_world_size=numbers.get("LOCAL_WORLD_SIZE", numbers["LOCAL_RANK"] + 1),
        launched=True,
    )
    if not 0 <= ranks.local_rank <= ranks.rank < ranks.world_size:
        have = ", ".join(f"{name}={numbers[name]}" for name in NAMES)
        refuse(Exit.USAGE, f"{have} can't be: 0 <= LOCAL_RANK <= RANK < WORLD_SIZE does not hold", speaks == "0")
    if not ranks.local_rank < ranks.local_world_size <= ranks.world_size:
        have = f"LOCAL_RANK={ranks.local_rank}, LOCAL_WORLD_SIZE={ranks.local_world_size}"
        refuse(Exit.USAGE, f"{have}, WORLD_SIZE={ranks.world_size} can't be", speaks == "0")
    return ranks


def _numbers(env: Mapping[str, str], speaks: bool) -> Dict[str, int]:
    numbers = {}
    for name in (*NAMES, "LOCAL_WORLD_SIZE"):
        text = env.get(name, "")
        if text == "":
            continue
        try:
            numbers[name] = int(text)
        except ValueError:
            refuse(Exit.USAGE, f"{name}={text} is not a whole number", speaks)
    return numbers


def loopback_interface(platform: str = sys.platform) -> str:
    """Name of the network interface that no other host reaches: Linux says lo, macOS and the BSDs lo0."""
    return "lo" if platform.startswith("linux") else "lo0"
