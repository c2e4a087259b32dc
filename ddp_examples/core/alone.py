"""Collectives of a world of one, without a socket: gloo listens on a TCP port for peers even when there are none.

from ddp_examples.core import alone  # registers the backend
torch.distributed.init_process_group(alone.NAME, store=torch.distributed.HashStore(), rank=0, world_size=1)
"""

from typing import Any, List

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

NAME = "alone"


def _done(result: Any) -> dist.Work:
    # DDP reads the averaged gradients from the future, which torch's own "fake" backend leaves empty.
    future: Future[Any] = Future()
    future.set_result(result)
    work: dist.Work = _create_work_from_future(future)
    return work


ProcessGroup: Any = dist.ProcessGroup  # its stub has overloads that torch.distributed itself does not call


class Alone(ProcessGroup):  # type: ignore[misc]
    """Every reduction of one tensor is that tensor, and what is gathered or scattered is a copy."""

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return NAME

    def barrier(self, *_: Any, **__: Any) -> dist.Work:
        return _done([])

    def allreduce(self, tensors: List[Tensor], *_: Any, **__: Any) -> dist.Work:
        return _done(tensors)

    broadcast = reduce = allreduce_coalesced = allreduce

    def allgather(self, outputs: List[List[Tensor]], inputs: List[Tensor], *_: Any, **__: Any) -> dist.Work:
        for parts, tensor in zip(outputs, inputs):
            parts[0].copy_(tensor)
        return _done(outputs)

    gather = allgather

    def scatter(self, outputs: List[Tensor], inputs: List[List[Tensor]], *_: Any, **__: Any) -> dist.Work:
        for tensor, parts in zip(outputs, inputs):
            tensor.copy_(parts[0])
        return _done(outputs)

    reduce_scatter = scatter

    def alltoall(self, outputs: List[Tensor], inputs: List[Tensor], *_: Any, **__: Any) -> dist.Work:
        outputs[0].copy_(inputs[0])
        return _done(outputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, *_: Any, **__: Any) -> dist.Work:
        output.copy_(tensor.view_as(output))
        return _done([output])

    _reduce_scatter_base = alltoall_base = _allgather_base
    all_gather_single = reduce_scatter_single = all_to_all_single = _allgather_base  # torch 2.13 has other names


dist.Backend.register_backend(NAME, lambda _, rank, size, __: Alone(rank, size), devices=["cpu"])
