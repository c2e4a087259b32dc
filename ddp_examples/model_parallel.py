"""A model that is split over two devices in each rank, and replicated by DDP.

    torchrun --nproc_per_node=2 -m ddp_examples.model_parallel demo.microbatches=4

Local rank r has GPUs 2r and 2r+1, so half as many ranks as GPUs fit on a node; where these are too few, or there are
none, both parts lie on the CPU. At the end the run checks that the split model computes what it does unsplit.
"""

import os
import sys
import time
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, List, Tuple

from ddp_examples.core.config import Config, load_config
from ddp_examples.core.ranks import read_ranks


@dataclass(frozen=True)
class Params:
    """Types of the keys in conf/demo/model_parallel.yaml, where their values and meanings are."""

    epochs: int
    batch_size: int
    microbatches: int
    lr: float

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError("demo.epochs must be at least 1")
        if not 1 <= self.microbatches <= self.batch_size:
            raise ValueError("demo.microbatches must be at least 1, and at most demo.batch_size")


if __name__ == "__main__":  # a mistake in the arguments is told now: importing torch takes a second or two on each rank
    load_config(Params, sys.argv[1:], read_ranks(os.environ))

import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_examples.core import report, verify
from ddp_examples.core.digits import load_digits
from ddp_examples.core.group import Group, average, process_group
from ddp_examples.core.steps import Step, series_of


class SplitModel(nn.Module):
    """Two parts, each on a device of its own; `model(x)` takes x on the first and answers on the second.

    The batch goes through in micro-batches. GPUs work through their queues on their own, so while the second one has
    micro-batch i, the first one already has i+1; with one micro-batch, one of the two always waits.
    """

    def __init__(self, devices: Tuple[torch.device, torch.device], microbatches: int) -> None:
        super().__init__()
        self.devices, self.microbatches = devices, microbatches
        self.first = nn.Sequential(nn.Linear(64, 32), nn.ReLU()).to(devices[0])
        self.second = nn.Linear(32, 10).to(devices[1])

    def forward(self, x: Tensor) -> Tensor:
        size = -(-len(x) // self.microbatches)
        return torch.cat([self.second(self.first(part).to(self.devices[1])) for part in x.split(size)])

    def unsplit(self) -> nn.Module:
        """A copy of the model as it is now, on the first device."""
        return nn.Sequential(deepcopy(self.first), deepcopy(self.second)).to(self.devices[0])


def two_devices(device: torch.device) -> Tuple[torch.device, torch.device]:
    """The devices of a rank, from its first: a GPU and the next one, or the CPU for both."""
    return (device, torch.device("cuda", device.index + 1)) if device.type == "cuda" else (device, device)


@record  # torchrun's own summary then shows the traceback of the rank that failed
def main() -> int:
    ranks = read_ranks(os.environ)
    config = load_config(Params, sys.argv[1:], ranks)
    with process_group(ranks, **config.group(), devices_per_rank=2) as group:
        return train(group, config)  # a function of its own: the model must be gone when the group is closed


def train(group: Group, config: Config) -> int:
    params: Params = config.demo
    report.begin(group, config)
    devices = two_devices(group.device)
    if devices[0] == devices[1]:
        report.show(group, "  both parts lie on the CPU: that shows how it works, and saves no memory")
    torch.manual_seed(config.seed)

    train_set, test_set = load_digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=config.seed)
    loader = DataLoader(train_set, batch_size=params.batch_size, sampler=sampler)
    test_x, test_y = test_set.tensors[0].to(devices[0]), test_set.tensors[1].to(devices[1])

    model = SplitModel(devices, params.microbatches)
    verify.same_start(len(loader), model, config)
    ddp = DistributedDataParallel(model)  # no device_ids: it leaves the parameters, and the input, where they are
    optimizer = torch.optim.SGD(ddp.parameters(), lr=params.lr)
    steps: List[Step] = []

    for epoch in range(params.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for x, y, index in loader:
            start = time.perf_counter()
            x, y = x.to(devices[0]), y.to(devices[1])
            optimizer.zero_grad()
            loss = cross_entropy(ddp(x), y)
            loss.backward()  # goes back through both devices, and averages the gradients over the ranks
            losses.append(loss.item())
            steps.append(Step(losses[-1], index.tolist(), time.perf_counter() - start))
            if len(steps) == params.epochs * len(loader):
                split_checks = same_as_unsplit(model, x, y)  # of the last step, before it is taken
            optimizer.step()
        mean_loss = average(sum(losses) / len(losses))
        accuracy = verify.count_right(model, test_x, test_y) / len(test_y)
        report.show(group, f"epoch {epoch + 1}/{params.epochs}  loss {mean_loss:.4f}  test accuracy {accuracy:.4f}")

    checks = [*split_checks, verify.replicas_identical(model), parts_in_place(model)]
    metrics = {"loss": mean_loss, "test_accuracy": accuracy, "series": series_of(steps)}
    return report.finish(group, config, checks, metrics)


def same_as_unsplit(model: SplitModel, x: Tensor, y: Tensor) -> List[verify.Check]:
    """After backward: outputs and gradients are those of the unsplit model, on one device, without DDP.

    That one gets the whole global batch at once, so micro-batches and DDP's averaging are checked too.
    Measured: the largest difference of an element on any rank, divided by the largest element. All sum the same float32
    products in another order, which alone makes about 1e-7; 1e-5 is allowed.
    """
    whole = model.unsplit()
    whole_x, whole_y = verify.everyones(x), verify.everyones(y).to(model.devices[0])
    cross_entropy(whole(whole_x), whole_y).backward()
    with torch.no_grad():
        outputs = verify.relative_difference([model(x)], [whole(x)])
    pairs = [(mine.grad, right.grad) for mine, right in zip(model.parameters(), whole.parameters())]
    gradients = verify.relative_difference(*zip(*pairs))
    return [
        verify.on_every_rank("outputs = unsplit model's (relative difference)", outputs, 1e-5),
        verify.on_every_rank("gradients = unsplit model's (relative difference)", gradients, 1e-5),
    ]


def parts_in_place(model: SplitModel) -> verify.Check:
    """Every parameter is on the device of its part. Measured: the parameters, on any rank, that are not."""
    parts = [(model.first, model.devices[0]), (model.second, model.devices[1])]
    strays = sum(parameter.device != device for part, device in parts for parameter in part.parameters())
    return verify.on_every_rank("parameters on the device of their part (strays)", strays, 0)


if __name__ == "__main__":
    sys.exit(main())
