"""A real training run that can be killed, stopped, preempted and resized, and goes on where it was.

    torchrun --nproc_per_node=4 -m ddp_examples.train
    launch/local.sh -n 2 demo=train demo.epochs=40 checkpoint.every_s=60      # goes on, on 2 ranks

Ctrl-C ends it. SIGTERM, SIGUSR1 or SIGUSR2, to a rank or the launcher, and the nearing end of the job's time make all
ranks save after the same step and leave with status 75; the next start goes on with the very next batch. This file is
meant to be copied: put your model and your data in place of these.
"""

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Dict

from ddp_examples.core.config import Config, load_config
from ddp_examples.core.ranks import read_ranks


@dataclass(frozen=True)
class Params:
    """Types of the keys in conf/demo/train.yaml, where their values and meanings are."""

    epochs: int
    global_batch: int
    micro_batch: int
    lr: float
    weight_decay: float
    clip: float
    precision: str
    compile: bool
    data: str
    bucket_cap_mb: float
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    comm_hook: str

    def __post_init__(self) -> None:
        if min(self.epochs, self.global_batch, self.micro_batch) < 1:
            raise ValueError("demo.epochs, demo.global_batch and demo.micro_batch must be at least 1")
        if self.precision not in ("auto", "off", "bf16", "fp16"):
            raise ValueError(f"demo.precision={self.precision}: one of auto, off, bf16, fp16")
        if self.comm_hook not in ("none", "fp16", "bf16", "powersgd"):
            raise ValueError(f"demo.comm_hook={self.comm_hook}: one of none, fp16, bf16, powersgd")


if __name__ == "__main__":  # a mistake in the arguments is told now: importing torch takes a second or two on each rank
    load_config(Params, sys.argv[1:], read_ranks(os.environ))

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_examples.core import report, training, verify
from ddp_examples.core.checkpoints import CheckpointDir, load_model, model_state, same_run
from ddp_examples.core.exits import Exit, Refusal
from ddp_examples.core.group import Group, average, process_group
from ddp_examples.core.meter import Meter
from ddp_examples.core.stop import StopRequest, Wish


class Net(nn.Module):
    """Three convolutions on 8 x 8 pixels. No BatchNorm: its statistics would depend on the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.classes = nn.Linear(64 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        classes: Tensor = self.classes(self.features(x.view(-1, 1, 8, 8)).flatten(1))
        return classes


@record  # torchrun's own summary then shows the traceback of the rank that failed
def main() -> int:
    ranks = read_ranks(os.environ)
    config = load_config(Params, sys.argv[1:], ranks)
    training.check_divides(config.demo.global_batch, ranks)
    with process_group(ranks, **config.group()) as group:
        return run(group, config)  # a function of its own: the model must be gone when the group is closed


def run(group: Group, config: Config) -> int:
    params: Params = config.demo
    report.begin(group, config)
    train_set, test_set = training.load_data(params.data)
    share = params.global_batch // group.ranks.world_size  # samples of this rank in a step
    steps_an_epoch = len(train_set) // params.global_batch  # the cut batch at the end is left out
    last = params.epochs * steps_an_epoch
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=config.seed)

    torch.manual_seed(config.seed)
    model = Net().to(group.device)
    verify.same_start(steps_an_epoch, model, config)
    ddp = wrap(model, params)
    # eps: with torch's 1e-8 a last bit of a tiny gradient becomes a step; then losses on 1 and 4 ranks differ by 1e-4.
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=params.lr, weight_decay=params.weight_decay, eps=1e-6)
    precision = training.Precision(params.precision, group.device)
    training.settle(ddp, train_set[0][0].to(group.device))

    with CheckpointDir(config.checkpoint.path, config.checkpoint.keep, config.checkpoint.mode) as checkpoints:
        saved = checkpoints.load(group.device)
        step = restore(saved, config, model, optimizer, precision) if saved else 0
        group.progress.go_on_from(step)
        words = training.resized(saved, group, params.global_batch)
        report.show(group, f"  checkpoints in {checkpoints.path}, {step} of {last} steps done{words}")
        meter = Meter(group, checkpoints.path, step, last, steps_an_epoch)
        timer = training.Timer(group, config.checkpoint.every_s)
        with StopRequest(config.stop.before_end_s) as request:
            while step < last:
                epoch, done = divmod(step, steps_an_epoch)
                sampler.set_epoch(epoch)
                order = list(sampler)[done * share : steps_an_epoch * share]  # in the middle of an epoch: what is left
                for x, y, *_ in DataLoader(train_set, share, sampler=order):
                    for parameters in optimizer.param_groups:
                        parameters["lr"] = params.lr * training.warm_up_then_cosine(step, last)
                    if params.data == "digits":
                        x = training.shifted(x, config.seed, step, group.ranks)
                    loss = backward(ddp, x.to(group.device), y.to(group.device), params.micro_batch, precision)
                    precision.step(optimizer, ddp, params.clip)
                    optimizer.zero_grad()
                    step += 1
                    meter.stepped(loss, params.global_batch)
                    wish = request.agreed(timer.due())  # the same on all ranks
                    if wish or step == last:
                        with meter.apart("checkpoints"):
                            checkpoints.save(step, state(group, config, model, optimizer, precision, step))
                    if wish is Wish.STOP and step < last:
                        report.show(group, f"stopped on request after step {step} of {last}, which is saved")
                        return Exit.LATER
                with meter.apart("evaluation"):
                    mean_loss = average(loss.item())  # of the epoch's last step
                    accuracy, counted = training.evaluate(model, test_set, group)
                waited_s = training.gradient_wait_s(ddp)
                meter.note(
                    f"epoch {epoch + 1}/{params.epochs}  loss {mean_loss:.4f}  test accuracy {accuracy:.4f}"
                    f"  {meter.samples_per_s():.0f} samples/s  waits {1e3 * waited_s:.1f} ms a step for gradients",
                    loss=mean_loss,
                    test_accuracy=accuracy,
                    samples_per_s=meter.samples_per_s(),
                    gradient_wait_s=waited_s,
                )
        checkpoints.finish()
        meter.close()

    accuracy, counted = training.evaluate(model, test_set, group)
    checks = [
        verify.replicas_identical(model),
        verify.at_most("test samples left out or counted twice", abs(counted - len(test_set)), 0),
    ]
    if precision.name == "off" and params.comm_hook == "none":  # else it is rounded on its way
        x, y, *_ = next(iter(DataLoader(train_set, share, sampler=list(sampler)[:share])))
        backward(
            ddp, x.to(group.device), y.to(group.device), max(1, share // 2), precision
        )  # accumulated, in two parts
        checks.append(verify.gradient_is_global(ddp, mean_loss_of, x.to(group.device), y.to(group.device)))
    metrics = {"test_accuracy": accuracy, "steps": step, "parameters": verify.fingerprint(model_state(model))}
    return report.finish(group, config, checks, {**metrics, **meter.summary()})


def wrap(model: nn.Module, params: Params) -> DistributedDataParallel:
    ddp = DistributedDataParallel(
        torch.compile(model) if params.compile else model,
        bucket_cap_mb=params.bucket_cap_mb,
        gradient_as_bucket_view=params.gradient_as_bucket_view,
        static_graph=params.static_graph,
        find_unused_parameters=params.find_unused_parameters,
    )
    try:
        if (
            params.comm_hook == "powersgd"
        ):  # its memory of what it left out is not saved: a resumed run differs a little
            low_rank = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2)
            ddp.register_comm_hook(low_rank, powerSGD_hook.powerSGD_hook)
        elif params.comm_hook != "none":
            hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
            ddp.register_comm_hook(None, hooks[params.comm_hook])
    except (ImportError, TypeError) as error:  # PowerSGD needs numpy; bf16 compression GPUs and nccl
        raise Refusal(f"demo.comm_hook={params.comm_hook} can't be had here: {error}") from None
    return ddp


def backward(
    ddp: DistributedDataParallel, x: Tensor, y: Tensor, micro_batch: int, precision: training.Precision
) -> Tensor:
    """Leave the gradient of the mean loss over all ranks' samples in the parameters; returns this rank's mean loss."""
    loss = torch.zeros((), device=x.device)
    parts = list(zip(x.split(micro_batch), y.split(micro_batch)))
    for number, (part_x, part_y) in enumerate(parts, start=1):
        # DDP averages after every backward pass unless it is told that more will come: only the last part talks.
        with nullcontext() if number == len(parts) else ddp.no_sync():
            with precision.autocast():
                part = cross_entropy(ddp(part_x), part_y, reduction="sum") / len(x)
            precision.scaled(part).backward()
        loss += part.detach()
    return loss


def mean_loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def facts(config: Config) -> Dict[str, Any]:
    """What must be the same when the run goes on."""
    params: Params = config.demo
    return {
        "demo": config.name,
        "seed": config.seed,
        "data": params.data,
        "global_batch": params.global_batch,
        "lr": params.lr,
        "weight_decay": params.weight_decay,
        "clip": params.clip,
        "precision": params.precision,
    }


def state(
    group: Group,
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: training.Precision,
    step: int,
) -> Dict[str, Any]:
    """All that a run needs to go on. No random state: what is random in a step follows from the seed and the step."""
    return {
        "model": model_state(model),
        "optimizer": optimizer.state_dict(),
        "precision": precision.state_dict(),
        "step": step,
        "world_size": group.ranks.world_size,
        "run": facts(config),
    }


def restore(
    saved: Dict[str, Any],
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: training.Precision,
) -> int:
    """The step to go on with."""
    same_run(saved["run"], facts(config))
    load_model(model, saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    precision.load_state_dict(saved["precision"])
    return int(saved["step"])


if __name__ == "__main__":
    sys.exit(main())
