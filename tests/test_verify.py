"""Each check passes on what is right, and fails on what is wrong. In a world of one, and with made-up other ranks."""

from typing import Any, List

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_examples.core import verify
from ddp_examples.core.group import Group

pytestmark = pytest.mark.usefixtures("group")


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x), y)


def others(monkeypatch: pytest.MonkeyPatch, *values: Any) -> None:
    """Pretend that gather returns ours, then these."""
    monkeypatch.setattr(verify, "gather", lambda mine: [mine, *(value(mine) for value in values)])


def test_at_most() -> None:
    assert verify.at_most("x", 1.0, 1.0).passed
    assert not verify.at_most("x", 1.1, 1.0).passed
    assert not verify.at_most("x", float("nan"), 1.0).passed


def test_digest_is_of_the_bits() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert verify.digest(nan) == verify.digest(nan.clone())
    assert verify.digest(torch.tensor([0.0])) != verify.digest(torch.tensor([-0.0]))
    assert verify.digest(torch.arange(6).reshape(2, 3).t()) == verify.digest(torch.tensor([[0, 3], [1, 4], [2, 5]]))
    assert verify.digest(torch.empty(0)) == verify.digest(torch.empty(0))
    assert verify.digest(torch.ones(3, dtype=torch.bfloat16)) != verify.digest(torch.ones(3))


def test_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert verify.replicas_identical(model).passed

    def differs(mine: Any) -> Any:
        return {**mine, "1.running_mean": "other"} if isinstance(mine, dict) else "other"

    others(monkeypatch, lambda mine: mine, differs)
    check = verify.replicas_identical(model)
    assert (check.measured, check.passed) == (1, False)
    assert check.detail == "rank 2 differs first in 1.running_mean"


def test_gradient(group: Group) -> None:
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    ddp = DistributedDataParallel(nn.Linear(4, 3))
    loss_of(ddp, x, y).backward()
    check = verify.gradient_is_global(ddp, loss_of, x, y)
    assert check.passed
    assert check.measured <= 1e-6
    ddp.module.bias.grad[1] *= 1.001
    check = verify.gradient_is_global(ddp, loss_of, x, y)
    assert not check.passed
    assert check.measured > 1e-5
    ddp.module.bias.grad[1] = float("nan")
    assert not verify.gradient_is_global(ddp, loss_of, x, y).passed
    ddp.module.bias.grad = None
    assert not verify.gradient_is_global(ddp, loss_of, x, y).passed


@pytest.mark.parametrize(
    ("shards", "size", "wrong"),
    [
        ([[0, 2, 4], [1, 3, 5]], 6, 0),
        ([[0, 2, 4], [1, 3, 0]], 5, 0),  # 5 samples on 2 ranks: one fills up
        ([[0, 1, 2], [0, 1, 2]], 6, 6),  # the same shard twice: 3 missing, 3 repeated
        ([[0, 2, 4], [1, 3, 5]], 5, 2),  # an index that the set does not have, and no repeat where one is due
        ([[0, 2], [1, 3]], 5, 2),  # one missing, and no repeat where one is due
        ([[0, 2, 2], [1, 3, 4]], 5, 0),
        ([[0, 2, 2], [1, 3, 3]], 4, 2),
    ],
)
def test_shards(monkeypatch: pytest.MonkeyPatch, shards: List[List[int]], size: int, wrong: int) -> None:
    monkeypatch.setattr(verify, "gather", lambda mine: shards)
    check = verify.shards_cover(shards[0], size)
    assert (check.measured, check.passed) == (wrong, wrong == 0)


def test_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Identity()
    x, y = torch.eye(5), torch.tensor([0, 1, 2, 0, 0])
    assert verify.count_right(model, x, y) == 3
    assert verify.same_as_alone(model, x, y).passed
    monkeypatch.setattr(verify, "count_right", lambda *_: 4)
    check = verify.same_as_alone(model, x, y)
    assert (check.measured, check.passed) == (1, False)
    assert "4 right together; alone: rank 0 3" in check.detail


def test_evaluation_leaves_the_model_in_its_mode() -> None:
    model = nn.Dropout(0.5)
    verify.right_of(model, torch.eye(2), torch.arange(2))
    assert model.training
