"""Save and load a DDP model: what goes on from a checkpoint ends as if there had been no interruption.

    torchrun --nproc_per_node=4 -m ddp_examples.checkpoint demo.epochs=4
    torchrun --nproc_per_node=2 -m ddp_examples.checkpoint demo.epochs=8    # goes on from there, on 2 ranks

Half-way the run saves, and goes on. Then it forgets everything, loads, and goes on again: parameters, optimizer and
losses must come out the same, to the last bit, on every rank.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from ddp_examples.core.config import Config, load_config
from ddp_examples.core.ranks import read_ranks


@dataclass(frozen=True)
class Params:
    """Types of the keys in conf/demo/checkpoint.yaml, where their values and meanings are."""

    epochs: int
    global_batch: int
    lr: float

    def __post_init__(self) -> None:
        if self.epochs < 1 or not 1 <= self.global_batch <= 1437:
            raise ValueError(
                "demo.epochs must be at least 1, demo.global_batch between 1 and 1437, the training digits"
            )


if __name__ == "__main__":  # a mistake in the arguments is told now: importing torch takes a second or two on each rank
    load_config(Params, sys.argv[1:], read_ranks(os.environ))

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_examples.core import report, verify
from ddp_examples.core.checkpoints import CheckpointDir, load_model, model_state, rng_states, same_run
from ddp_examples.core.digits import load_digits
from ddp_examples.core.exits import Exit, refuse
from ddp_examples.core.group import Group, average, on_main, process_group
from ddp_examples.core.stored import checkpoint_files


@record
def main() -> int:
    ranks = read_ranks(os.environ)
    config = load_config(Params, sys.argv[1:], ranks)
    if config.demo.global_batch % ranks.world_size:
        fits = config.demo.global_batch // ranks.world_size * ranks.world_size or ranks.world_size
        message = (
            f"demo.global_batch={config.demo.global_batch} can't be shared by {ranks.world_size} ranks; {fits} can"
        )
        refuse(Exit.USAGE, message, speaks=ranks.rank == 0)
    with process_group(ranks, **config.group()) as group:
        return run(group, config)


def run(group: Group, config: Config) -> int:
    report.begin(group, config)
    epochs = config.demo.epochs
    with CheckpointDir(config.checkpoint.path, config.checkpoint.keep, config.checkpoint.mode) as checkpoints:
        saved = checkpoints.load(group.device)
        ddp, optimizer, start = build(group, config, saved)
        report.show(
            group,
            f"  checkpoints in {checkpoints.path}, {'from the beginning' if not saved else f'{start} epochs done'}",
        )
        if start >= epochs:
            report.show(group, f"nothing left to do: {start} of {epochs} epochs are done")
            return report.finish(group, config, [verify.replicas_identical(ddp)], {"epochs": start})

        middle = (start + epochs) // 2
        train(group, config, ddp, optimizer, range(start, middle))
        checkpoints.save(middle, state_of(group, config, ddp, optimizer, middle))
        straight = train(group, config, ddp, optimizer, range(middle, epochs))
        end = fingerprints(ddp, optimizer, straight)

        ddp, optimizer, start = build(group, config, checkpoints.load(group.device))  # as a new process would
        resumed = train(group, config, ddp, optimizer, range(start, epochs))
        checkpoints.save(epochs, state_of(group, config, ddp, optimizer, epochs))
        checks = [
            *(
                verify.same(f"resumed = uninterrupted: {name}", value, end[name])
                for name, value in fingerprints(ddp, optimizer, resumed).items()
            ),
            verify.replicas_identical(ddp),
            loads_alone(group, checkpoints, ddp),
        ]
    return report.finish(group, config, checks, {"loss": resumed[-1], "epochs": epochs})


def build(group: Group, config: Config, saved: Optional[Dict[str, Any]]) -> Tuple[nn.Module, torch.optim.SGD, int]:
    """A model, an optimizer, and the epoch to go on with: fresh, or as a checkpoint has them."""
    torch.manual_seed(config.seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(group.device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=config.demo.lr, momentum=0.5)
    # DDP lays out its buckets anew after the first backward, and from 3 ranks on the last bit of a summed gradient
    # depends on where in a bucket it lies. So the first backward must be no step: a resumed run would differ.
    ddp(torch.zeros(1, 64, device=group.device)).sum().backward()
    if saved is None:
        return ddp, optimizer, 0
    same_run(saved["run"], facts(config))
    load_model(ddp, saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    was, now = saved["world_size"], group.ranks.world_size
    if was == now:
        torch.set_rng_state(saved["rng"][group.ranks.rank].cpu())
    else:
        part = f"a rank's part of it becomes {config.demo.global_batch // now}"
        report.show(
            group, f"  saved by {was} ranks, now {now}: the global batch stays {config.demo.global_batch}, {part}"
        )
    return ddp, optimizer, saved["next_epoch"]


def facts(config: Config) -> Dict[str, Any]:
    """What must be the same when the run goes on."""
    return {"demo": config.name, "seed": config.seed, "lr": config.demo.lr, "global_batch": config.demo.global_batch}


def state_of(
    group: Group, config: Config, ddp: nn.Module, optimizer: torch.optim.SGD, next_epoch: int
) -> Dict[str, Any]:
    """Everything that a checkpoint holds. Collective: it has the random states of all ranks."""
    return {
        "model": model_state(ddp),
        "optimizer": optimizer.state_dict(),
        "next_epoch": next_epoch,
        "rng": rng_states(),
        "world_size": group.ranks.world_size,
        "run": facts(config),
    }


def train(group: Group, config: Config, ddp: nn.Module, optimizer: torch.optim.SGD, epochs: range) -> List[float]:
    """Train, and return the mean loss of each epoch over all ranks."""
    train_set = load_digits()[0]
    sampler: DistributedSampler[Any] = DistributedSampler(train_set, seed=config.seed)
    # The k-th batches of all ranks together are the k-th global batch, whatever the number of ranks. The last, cut one
    # is left out: the sampler's repeats in it depend on that number.
    loader = DataLoader(train_set, config.demo.global_batch // group.ranks.world_size, sampler=sampler, drop_last=True)
    means = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        losses = []
        for x, y, _ in loader:
            optimizer.zero_grad()
            loss = cross_entropy(ddp(x.to(group.device)), y.to(group.device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(average(sum(losses) / len(losses)))
        report.show(group, f"epoch {epoch + 1}/{config.demo.epochs}  loss {means[-1]:.4f}")
    return means


def fingerprints(ddp: nn.Module, optimizer: torch.optim.SGD, losses: List[float]) -> Dict[str, str]:
    """Of each thing that must come out the same; the next random number stands for the random state."""
    things = {
        "parameters": ddp.state_dict(),
        "optimizer": optimizer.state_dict(),
        "losses": losses,
        "random state": torch.rand(1),
    }
    return {name: verify.fingerprint(thing) for name, thing in things.items()}


def loads_alone(group: Group, checkpoints: CheckpointDir, ddp: nn.Module) -> verify.Check:
    """The file loads into a model without DDP, by torch.load alone, on each rank for itself."""
    checkpoints.finish()
    newest = on_main(lambda: str(checkpoint_files(checkpoints.path)[0]))
    report.show(group, f"checkpoint: {newest}")
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model.load_state_dict(torch.load(newest, map_location="cpu")["model"])
    return verify.same(
        "loads without DDP", verify.fingerprint(model.state_dict()), verify.fingerprint(model_state(ddp))
    )


if __name__ == "__main__":
    sys.exit(main())
