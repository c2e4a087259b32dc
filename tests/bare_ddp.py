"""The least that trains the same model on the same data with DDP: what the start of basic is measured against."""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_examples.core.digits import load_digits


def train(epochs: int = 8) -> None:
    dist.init_process_group("gloo")
    data = load_digits()[0]
    sampler = DistributedSampler(data)
    layers = [torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y, _ in DataLoader(data, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    del model, optimizer
    dist.destroy_process_group()


def spawned(rank: int, world_size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train()


if __name__ == "__main__":
    train()
