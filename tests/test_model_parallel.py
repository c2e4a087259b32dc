"""The split model computes what it does unsplit; each rank gets two devices, and says so where there are too few."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchrun import torchrun

from ddp_examples import model_parallel
from ddp_examples.core.exits import Exit
from ddp_examples.core.group import Group, choose_backend
from ddp_examples.core.ranks import Ranks
from ddp_examples.model_parallel import SplitModel, parts_in_place, same_as_unsplit, two_devices

CPU = torch.device("cpu")


@pytest.fixture
def _nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


def of(local_ranks: int) -> Ranks:
    return Ranks(0, 0, local_ranks, local_ranks, launched=True)


@pytest.mark.usefixtures("_nccl")
@pytest.mark.parametrize(("ranks", "gpus"), [(1, 2), (1, 3), (2, 4), (4, 8)])
def test_two_gpus_for_every_rank_is_enough(ranks: int, gpus: int) -> None:
    assert choose_backend("auto", of(ranks), gpus, devices_per_rank=2) == ("nccl", "2 GPUs for every rank")
    assert choose_backend("nccl", of(ranks), gpus, devices_per_rank=2)[0] == "nccl"


@pytest.mark.usefixtures("_nccl")
@pytest.mark.parametrize(("ranks", "gpus", "fit"), [(2, 2, 1), (2, 3, 1), (4, 4, 2), (4, 7, 3)])
def test_too_few_gpus_name_the_ranks_that_fit(ranks: int, gpus: int, fit: int) -> None:
    name, why = choose_backend("nccl", of(ranks), gpus, devices_per_rank=2)
    assert name == ""
    assert f"{ranks} ranks of 2 GPUs each but {gpus} GPUs" in why
    assert why.endswith(f"Use --nproc_per_node={fit} or backend=gloo")
    name, why = choose_backend("auto", of(ranks), gpus, devices_per_rank=2)
    assert name == "gloo"
    assert f"--nproc_per_node={fit} would use them" in why


@pytest.mark.usefixtures("_nccl")
def test_one_gpu_fits_no_rank(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["model_parallel", "backend=nccl"])
    with pytest.raises(SystemExit) as leaving:
        model_parallel.main()
    assert leaving.value.code == Exit.UNABLE
    assert "1 rank of 2 GPUs each but 1 GPU on" in capfd.readouterr().err
    assert "--nproc_per_node" not in choose_backend("nccl", of(4), 1, devices_per_rank=2)[1]


def test_the_second_device_is_the_next_gpu_or_the_cpu_again() -> None:
    assert [two_devices(torch.device("cuda", 2 * local_rank))[1].index for local_rank in range(4)] == [1, 3, 5, 7]
    assert two_devices(CPU) == (CPU, CPU)


@pytest.mark.parametrize("microbatches", [1, 3, 16])
def test_split_model_equals_unsplit(group: Group, microbatches: int) -> None:
    checks = checks_of(SplitModel((CPU, CPU), microbatches))
    assert [check.passed for check in checks] == [True, True]


class LosesAMicrobatch(SplitModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([x[:-4], torch.zeros_like(x[-4:])]))


class DetachesAPart(SplitModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).detach()) + 0 * self.first(x).sum()


def test_checks_fail_where_outputs_or_gradients_are_wrong(group: Group) -> None:
    outputs, gradients = checks_of(LosesAMicrobatch((CPU, CPU), 4))
    assert not outputs.passed
    assert not gradients.passed
    outputs, gradients = checks_of(DetachesAPart((CPU, CPU), 4))
    assert outputs.passed
    assert not gradients.passed


def checks_of(model: SplitModel) -> list:
    x, y = torch.rand(16, 64), torch.arange(16) % 10
    cross_entropy(DistributedDataParallel(model)(x), y).backward()
    return same_as_unsplit(model, x, y)


def test_a_parameter_on_the_wrong_device_is_counted(group: Group) -> None:
    model = SplitModel((CPU, CPU), 1)
    assert parts_in_place(model).passed
    model.second = nn.Linear(32, 10, device="meta")
    check = parts_in_place(model)
    assert not check.passed
    assert check.measured == 2


def test_microbatches_within_the_batch() -> None:
    for microbatches in (0, 9):
        with pytest.raises(ValueError, match="microbatches"):
            model_parallel.Params(epochs=1, batch_size=8, microbatches=microbatches, lr=0.1)


def test_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = torchrun(2, "-m", "ddp_examples.model_parallel", "demo.epochs=1", "backend=gloo", f"report={file}")
    assert result.status == 0, result.output
    assert "both parts lie on the CPU" in result.out
    report = json.loads(file.read_text())
    assert report["world_size"] == 2
    assert [check["passed"] for check in report["checks"]] == [True] * 4
