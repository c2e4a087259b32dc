"""Fixtures. Every test must leave no process group, environment variable, working folder or child process behind."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Iterator

import pytest
import torch.distributed as dist

from ddp_examples.core.group import Group, process_group
from ddp_examples.core.ranks import Ranks


def children() -> set:
    """Pids of this process's children."""
    found = set()
    for task in Path("/proc/self/task").glob("*"):
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


OTHERS_OWN = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # pytest's, and torch's when it first needs _dynamo


def environment() -> dict:
    return {name: value for name, value in os.environ.items() if name not in OTHERS_OWN}


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    before = environment(), Path.cwd(), children()
    yield
    leaked_group = dist.is_initialized()
    if leaked_group:
        dist.destroy_process_group()
    assert not leaked_group, "the test left a process group"
    assert environment() == before[0], "the test left an environment variable"
    assert Path.cwd() == before[1], "the test left another working folder"
    assert children() <= before[2], "the test left a child process"


@pytest.fixture(scope="session", autouse=True)
def _runs_that_break_leave_their_folder_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("runs"))
    yield
    del os.environ["TMPDIR"]
    if before is not None:
        os.environ["TMPDIR"] = before


@pytest.fixture
def group() -> Iterator[Group]:
    """A world of one in memory: no port, no launcher; collectives and DDP work on it."""
    with process_group(Ranks(), "gloo", timeout_s=20) as opened:
        yield opened
