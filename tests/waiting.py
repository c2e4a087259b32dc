"""`waiting`: rank 1 is late by 30 ms in each of 12 steps; prints how long each rank has waited for gradients."""

import os
import time

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_examples.core.group import Group, gather, process_group
from ddp_examples.core.ranks import read_ranks
from ddp_examples.core.training import gradient_wait_s


def train(group: Group) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
    first = gradient_wait_s(ddp)
    for _ in range(12):
        loss = ddp(torch.randn(2, 3)).sum()
        time.sleep(0.03 * group.ranks.rank)
        loss.backward()
    waited = gather([first, gradient_wait_s(ddp)])
    if group.is_main:
        print(waited)


if __name__ == "__main__":
    with process_group(read_ranks(os.environ), "gloo", 60) as opened:
        train(opened)
