"""basic, broken on purpose, a kind after the other: `broken FOLDER KIND...` leaves FOLDER/KIND.json, a report each.

The exit status is the one of the last kind.
"""

import functools
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_examples import basic
from ddp_examples.core import verify


def through_module(model, x, y):  # every rank trains a model of its own, silently
    return cross_entropy(getattr(model, "module", model)(x), y)


def scaled(model, x, y):
    return cross_entropy(model(x), y) * (2 if isinstance(model, DistributedDataParallel) else 1)


class DriftingSGD(torch.optim.SGD):
    def step(self, closure=None):
        if dist.get_rank() == 1:
            for group in self.param_groups:
                group["params"][-1].grad *= 2
        return super().step(closure)


def count_with_repeats(model, x, y):  # what a DistributedSampler over the test set would count
    each = -(-len(y) // dist.get_world_size()) + 1
    start = dist.get_rank() * (each - 1)
    indices = torch.arange(start, start + each) % len(y)
    return int(sum(verify.gather(verify.right_of(model, x[indices], y[indices]))))


BREAKS = {
    "whole": lambda: patch.object(basic, "build_model", basic.build_model),
    "module": lambda: patch.object(basic, "loss_of", through_module),
    "scaled": lambda: patch.object(basic, "loss_of", scaled),
    "drift": lambda: patch.object(torch.optim, "SGD", DriftingSGD),
    "shard": lambda: patch.object(
        basic, "DistributedSampler", functools.partial(basic.DistributedSampler, num_replicas=2, rank=0)
    ),
    "repeats": lambda: patch.object(verify, "count_right", count_with_repeats),
}


def main(folder: str, kinds: list) -> int:
    status = 0
    for kind in kinds:
        sys.argv[1:] = ["demo.epochs=2", f"report={Path(folder) / kind}.json"]
        with BREAKS[kind]():
            status = basic.main()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
