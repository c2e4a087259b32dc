"""process_group, gather, on_main: in memory, and over ranks."""

import gc
import os
from typing import Any, List

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrun import forked

from ddp_examples.core import group as group_module
from ddp_examples.core.group import Group, MainRankError, average, choose_backend, gather, on_main, process_group
from ddp_examples.core.ranks import Ranks


def ranks_of(local_world_size: int) -> Ranks:
    return Ranks(0, 0, local_world_size, local_world_size, launched=True)


def test_auto_takes_nccl_if_each_rank_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert choose_backend("auto", ranks_of(4), gpus=4) == ("nccl", "a GPU for every rank")
    name, why = choose_backend("auto", ranks_of(4), gpus=3)
    assert name == "gloo"
    assert "4 ranks but 3 GPUs" in why
    name, why = choose_backend("auto", ranks_of(1), gpus=0)
    assert name == "gloo"
    assert "no GPU" in why
    monkeypatch.undo()


def test_nccl_that_can_not_be_had_names_the_reason_and_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    name, why = choose_backend("nccl", ranks_of(2), gpus=2)
    assert name == ""
    assert "built without nccl" in why
    assert "backend=gloo" in why
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    name, why = choose_backend("nccl", ranks_of(2), gpus=0)
    assert name == ""
    assert "no GPU" in why
    assert "CUDA_VISIBLE_DEVICES=" in why
    name, why = choose_backend("nccl", ranks_of(4), gpus=2)
    assert name == ""
    assert "--nproc_per_node=2" in why
    monkeypatch.undo()


def test_ranks_of_different_means_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with too few GPUs decides for all: else ranks with different backends wait for each other."""
    store = dist.HashStore()
    store.set("backend/1", '["gloo", "4 ranks but 2 GPUs on b"]')
    assert group_module._agree(store, Ranks(0, 0, 2, 1, True), "nccl", "a GPU for every rank") == (
        "gloo",
        "4 ranks but 2 GPUs on b",
    )
    assert group_module._agree(store, Ranks(1, 0, 2, 1, True), "gloo", "x")[1] == "4 ranks but 2 GPUs on b"


def test_no_meeting_point_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(SystemExit) as leaving, process_group(Ranks(0, 0, 2, 2, True), "gloo"):
        pass
    assert leaving.value.code == 2
    assert "MASTER_ADDR and MASTER_PORT not set" in capsys.readouterr().err
    monkeypatch.undo()


@pytest.mark.filterwarnings("ignore:.*(all_gather_into_tensor|reduce_scatter_tensor|all_to_all).* is deprecated")
def test_collectives_of_a_world_of_one_without_a_socket() -> None:
    given = torch.arange(4.0)
    same, out = given.clone(), torch.zeros(10, 4)
    with process_group(Ranks(), "auto") as group:
        assert (group.backend, dist.get_backend()) == ("alone", "alone")
        dist.all_reduce(same)
        dist.reduce(same, 0)
        dist.broadcast(same, 0)
        dist.barrier()
        work = dist.all_reduce(same, async_op=True)
        work.wait()
        dist.all_gather([out[0]], given)
        dist.gather(given, [out[1]], 0)
        dist.scatter(out[2], [given], 0)
        dist.reduce_scatter(out[3], [given])
        dist.all_gather_into_tensor(out[4], given)
        dist.all_gather_into_tensor(out[5:6], given)
        dist.reduce_scatter_tensor(out[6], given)
        dist.all_to_all_single(out[7], given)
        dist.all_to_all([out[8]], [given])
        dist.all_reduce(same, group=dist.new_group([0]))
        assert gather({"a": 1}) == [{"a": 1}]
        out[9] = same
    assert torch.equal(out, given.expand(10, 4))


def test_the_group_is_gone_after_success_and_after_an_error_alone() -> None:
    with process_group(Ranks(), "gloo") as group:
        assert dist.is_initialized()
        assert group.device == torch.device("cpu")
        assert group.is_main
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="on purpose"), process_group(Ranks(), "gloo"):
        raise ValueError("on purpose")
    assert not dist.is_initialized()


def test_a_model_that_is_kept_loses_its_reducer_before_the_group_goes() -> None:
    kept: List[Any] = []
    with process_group(Ranks(), "gloo"):
        kept.append(DistributedDataParallel(torch.nn.Linear(2, 2)))
        kept[0](torch.ones(1, 2)).sum().backward()
    assert not hasattr(kept[0], "reducer")


def test_a_model_in_a_reference_cycle_is_freed_before_the_group_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: List[int] = []
    destroy = dist.destroy_process_group

    def destroying() -> None:
        alive.append(sum(issubclass(type(thing), DistributedDataParallel) for thing in gc.get_objects()))
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", destroying)
    with process_group(Ranks(), "gloo"):
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model.itself = [model]
        del model
    assert alive == [0]
    monkeypatch.undo()


def test_debug_mode_is_left_behind_with_the_group() -> None:
    before = dist.get_debug_level()
    with process_group(Ranks(), "gloo", debug=True):
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
        assert torch.is_anomaly_enabled()
        DistributedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
    assert dist.get_debug_level() == before
    assert not torch.is_anomaly_enabled()


def test_gather_average_and_on_main_alone(group: Group) -> None:
    assert gather({"a": [1, None, "ä"]}) == [{"a": [1, None, "ä"]}]
    assert average(2.5) == 2.5
    assert on_main(lambda: 3) == 3
    with pytest.raises(OSError, match="full"):
        on_main(lambda: (_ for _ in ()).throw(OSError("full")))


def test_over_ranks() -> None:
    """What each rank has gathered, and the failure of rank 0 that each rank has seen."""
    ended = forked(3, "test_group")
    assert ended.status == 0, ended.output
    assert sorted(ended.out.splitlines()) == [
        "rank 0: ['', 'x', 'xx'] True 1.0 0 OSError disk full",
        "rank 1: ['', 'x', 'xx'] True 1.0 0 MainRankError rank 0 on HOST: OSError: disk full",
        "rank 2: ['', 'x', 'xx'] True 1.0 0 MainRankError rank 0 on HOST: OSError: disk full",
    ]


def failing() -> None:
    raise OSError("disk full")


def main() -> None:
    from ddp_examples.core.ranks import read_ranks

    with process_group(read_ranks(os.environ), "gloo", 60) as group:
        rank = group.ranks.rank
        seen = (gather("x" * rank), average(rank), on_main(lambda: rank))
        long = [str(other) * 600 * other for other in range(3)]  # the longest takes a second collective
        same = gather(long[rank]) == long
        try:
            on_main(failing)
        except (OSError, MainRankError) as error:
            failure = f"{type(error).__name__} {error}".replace(group.host, "HOST")
        gathered, mean, from_main = seen
        print(f"rank {rank}: {gathered} {same} {mean} {from_main} {failure}\n", end="", flush=True)  # one write a rank


if __name__ == "__main__":
    main()
