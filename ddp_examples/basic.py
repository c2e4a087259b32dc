"""DDP training on real digits: replicas stay identical, and the gradient is that of the whole batch.

    torchrun --nproc_per_node=4 -m ddp_examples.basic demo.epochs=4

Every rank holds a copy of the model and trains on its own share of the samples; DDP averages the gradients, so all
copies take the same step. At the end the run checks that it was so, and its exit status tells.
"""

import os
import sys
import time
from dataclasses import dataclass
from typing import Any, List

from ddp_examples.core.config import Config, load_config
from ddp_examples.core.ranks import read_ranks


@dataclass(frozen=True)
class Params:
    """Types of the keys in conf/demo/basic.yaml, where their values and meanings are."""

    epochs: int
    batch_size: int
    lr: float
    show: str

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise ValueError("demo.epochs and demo.batch_size must be at least 1")
        if self.show not in ("none", "steps", "gradients"):
            raise ValueError(f"demo.show={self.show}: none, steps or gradients")


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
from ddp_examples.core.steps import Step, series_of, show_steps, watch_gradients


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


@record  # torchrun's own summary then shows the traceback of the rank that failed
def main() -> int:
    ranks = read_ranks(os.environ)
    config = load_config(Params, sys.argv[1:], ranks)
    with process_group(ranks, **config.group()) as group:
        return train(group, config)  # a function of its own: the model must be gone when the group is closed


def train(group: Group, config: Config) -> int:
    params: Params = config.demo
    report.begin(group, config)
    torch.manual_seed(config.seed)

    train_set, test_set = load_digits()
    sampler: DistributedSampler[Any] = DistributedSampler(
        train_set, seed=config.seed
    )  # rank and world size: from the process group
    loader = DataLoader(train_set, batch_size=params.batch_size, sampler=sampler)
    test_x, test_y = (tensor.to(group.device) for tensor in test_set.tensors[:2])

    model = build_model().to(group.device)
    verify.same_start(len(loader), model, config)  # a rank with one batch more would wait for ever in it
    ddp = DistributedDataParallel(model)  # every rank starts from the parameters of rank 0
    optimizer = torch.optim.SGD(ddp.parameters(), lr=params.lr)
    norms = watch_gradients(ddp) if params.show == "gradients" else None
    steps: List[Step] = []

    for epoch in range(params.epochs):
        sampler.set_epoch(epoch)  # without it each epoch has the order of the first
        seen, losses = [], []
        for x, y, index in loader:
            start = time.perf_counter()
            x, y = x.to(group.device), y.to(group.device)
            optimizer.zero_grad()
            loss = loss_of(ddp, x, y)
            loss.backward()  # here DDP averages the gradients over the ranks
            seen += index.tolist()
            losses.append(loss.item())
            seconds = time.perf_counter() - start  # item() has waited for the device
            steps.append(Step(losses[-1], index.tolist(), seconds, norms() if norms else None))
            if epoch == params.epochs - 1 and len(seen) == len(sampler):
                gradient_check = verify.gradient_is_global(ddp, loss_of, x, y)  # of the last step, before it is taken
            optimizer.step()
        mean_loss = average(sum(losses) / len(losses))
        accuracy = verify.count_right(model, test_x, test_y) / len(test_y)
        report.show(group, f"epoch {epoch + 1}/{params.epochs}  loss {mean_loss:.4f}  test accuracy {accuracy:.4f}")

    show_steps(group, steps, params.show)
    checks = [
        verify.replicas_identical(model),
        gradient_check,
        verify.shards_cover(seen, len(train_set)),
        verify.same_as_alone(model, test_x, test_y),
    ]
    metrics = {"loss": mean_loss, "test_accuracy": accuracy, "series": series_of(steps)}
    return report.finish(group, config, checks, metrics)


if __name__ == "__main__":
    sys.exit(main())
