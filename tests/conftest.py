"""Fixtures. Every test must leave no process group, environment variable, working folder or child process behind."""

import os
from pathlib import Path
from typing import Iterator

import pytest
import torch.distributed as dist

from ddp_examples.core.group import Group, process_group
from ddp_examples.core.ranks import Ranks


def children() -> set:
    """Pids of this process's children."""
    return {int(pid) for task in Path("/proc/self/task").glob("*") for pid in (task / "children").read_text().split()}


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    before = dict(os.environ), Path.cwd(), children()
    yield
    leaked_group = dist.is_initialized()
    if leaked_group:
        dist.destroy_process_group()
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    assert not leaked_group, "the test left a process group"
    assert environment == {name: value for name, value in before[0].items() if name != "PYTEST_CURRENT_TEST"}
    assert Path.cwd() == before[1], "the test left another working folder"
    assert children() <= before[2], "the test left a child process"


@pytest.fixture
def group() -> Iterator[Group]:
    """A world of one in memory: no port, no launcher; collectives and DDP work on it."""
    with process_group(Ranks(), "gloo", timeout_s=20) as opened:
        yield opened
