"""`failing KIND`: rank 1 breaks in the middle of a training loop, the others go on. os._exit: all end well by that."""

import ctypes
import os
import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_examples.core.group import Group, process_group
from ddp_examples.core.ranks import read_ranks


def fail(kind: str) -> None:
    if kind == "raise":
        raise ValueError("on purpose")
    if kind.startswith("exit"):
        sys.exit(int(kind.split()[1]))
    if kind == "kill":
        os.kill(os.getpid(), 9)
    if kind == "abort":
        os.abort()
    if kind == "leave":
        sys.exit(0)
    if kind == "stop":
        os.kill(os.getpid(), 19)
    if kind == "lock":
        ctypes.PyDLL(None).sleep(3600)  # C code that does not let go of Python's lock


def train(group: Group, kind: str) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
    for step in range(20):
        ddp(torch.randn(2, 3)).sum().backward()
        if step == 5 and group.ranks.rank == 1:
            fail(kind)
        time.sleep(0.02)


if __name__ == "__main__":
    with process_group(read_ranks(os.environ), "gloo", 60, lost_s=3) as opened:
        train(opened, sys.argv[1])
        if sys.argv[1] == "os._exit":
            os._exit(0)
