"""Break one rank on purpose, in one of 12 ways, and see it named.

    launch/local.sh demo=faults demo.kind=hang demo.rank=1 demo.step=5 watch.hang_s=5
    torchrun --nproc_per_node=4 -m ddp_examples.faults demo.kind=skip demo.rank=2

What each kind teaches; all but slow and none end with the status of the fault:

    raise, exit, kill   one rank goes; the others' "Connection closed by peer" is an echo
    hang                it stops outside any collective; the others, who wait in one, are not the cause
    skip, shape         it leaves out a collective, or calls it with another shape: each rank waits for something else
    unused              a parameter gets no gradient: DDP says so one step later, by number; here by name
    uneven              it has one batch more, and would wait for ever in the last one: compared before the loop
    nan, full_disk      an error whose cause lies outside of the line that raises it
    drift               its replica changes silently: the check at the end fails, with debug=true the step itself
    slow                nothing breaks; the report names the rank that all wait for
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ddp_examples.core.config import Config, load_config
from ddp_examples.core.ranks import read_ranks

IN_ALL = False  # demo=all leaves it out: it fails on purpose


@dataclass(frozen=True)
class Params:
    """Types of the keys in conf/demo/faults.yaml, where their values and meanings are."""

    kind: str
    rank: int
    step: int
    steps: int

    def __post_init__(self) -> None:
        kinds = "none raise exit kill hang slow skip shape unused uneven nan drift full_disk"
        if self.kind not in kinds.split():
            raise ValueError(f"demo.kind={self.kind}: one of {kinds.replace(' ', ', ')}")
        if self.rank < 0 or not 1 <= self.step < self.steps <= 40:
            raise ValueError("demo.rank is at least 0, and 1 <= demo.step < demo.steps <= 40 must hold")


if __name__ == "__main__":  # a mistake in the arguments is told now: importing torch takes a second or two on each rank
    load_config(Params, sys.argv[1:], read_ranks(os.environ))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_examples.core import report, verify
from ddp_examples.core.digits import load_digits
from ddp_examples.core.group import Group, process_group


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 10)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, use_all: bool = True) -> Tensor:
        logits: Tensor = self.body(x)
        return logits * self.temperature if use_all else logits


def break_rank(kind: str, net: Net) -> None:
    """In the middle of a step, between the forward and the backward pass."""
    if kind == "raise":
        raise ValueError("on purpose")
    if kind == "exit":
        sys.exit(7)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(3600)
    if kind == "full_disk":
        Path("/dev/full").write_text("a checkpoint", encoding="utf-8")  # every write there says: no space left
    if kind == "drift":
        net.temperature.data.add_(0.01)


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
    train_set, _ = load_digits()
    x, y = (tensor[group.ranks.rank :: group.ranks.world_size] for tensor in train_set.tensors[:2])

    culprit = group.ranks.rank == params.rank
    steps = params.steps + int(culprit and params.kind == "uneven")
    net = Net().to(group.device)
    verify.same_start(steps, net, config)
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        fault = params.kind if culprit and step == params.step else "none"
        if culprit and params.kind == "slow" and step >= params.step:
            time.sleep(0.2)  # a slow disk, a hot processor
        some = slice(8 * step, 8 * step + 8)
        pixels = x[some] * float("nan") if fault == "nan" else x[some]
        optimizer.zero_grad()
        loss = cross_entropy(ddp(pixels.to(group.device), use_all=fault != "unused"), y[some].to(group.device))
        if not loss.isfinite():  # here it is known on which rank; the averaged gradient makes it everyone's
            raise FloatingPointError(f"the loss is {loss.item()}")
        break_rank(fault, net)
        loss.backward()
        if fault != "skip":
            dist.all_reduce(torch.zeros(2, device=group.device) if fault == "shape" else loss.detach().reshape(1))
        optimizer.step()
    report.show(group, f"{steps} steps, loss {loss.item():.4f}")
    return report.finish(group, config, [verify.replicas_identical(net)], {"loss": loss.item()})


if __name__ == "__main__":
    sys.exit(main())
