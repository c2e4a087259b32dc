"""process_group(...): from Ranks to a running torch.distributed; on_main(...), gather(...): talk between ranks.

with process_group(read_ranks(os.environ), backend="auto", timeout_s=120) as group:
    train(group)  # owns the model, and has let go of it when it returns
"""

import gc
import importlib
import itertools
import json
import os
import socket
import time
import weakref
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Callable, Deque, Iterator, List, Tuple, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_examples.core import alone
from ddp_examples.core.debug import more_checks
from ddp_examples.core.exits import Exit, Refusal, refuse, say
from ddp_examples.core.progress import Progress
from ddp_examples.core.ranks import Ranks, loopback_interface
from ddp_examples.core.witness import Witness

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """The running group as one rank sees it."""

    ranks: Ranks
    backend: str  # "gloo" or "nccl"; "alone" where one rank needs neither
    why: str  # that backend
    device: torch.device  # of this rank, the first one where it has several
    progress: Progress
    host: str = field(default_factory=socket.gethostname)
    started: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def is_main(self) -> bool:
        return self.ranks.rank == 0


class MainRankError(RuntimeError):
    """What rank 0 was doing in on_main failed; raised on every other rank with rank 0's words."""


@contextmanager
def process_group(
    ranks: Ranks,
    backend: str = "auto",
    timeout_s: float = 120,
    debug: bool = False,
    hang_s: float = 0,
    lost_s: float = 0,
    devices_per_rank: int = 1,
) -> Iterator[Group]:
    """Open the default process group, and close it when the block has succeeded.

    `backend` is "auto", "gloo" or "nccl"; the ranks agree on one, and where it can't be had end with status 4. With
    "auto", one rank that no launcher started and that has no GPU opens no socket (core/alone.py). Tensors on the CPU
    can always be used in collectives. A collective that takes longer than `timeout_s` seconds is an error.
    When no rank has moved for `hang_s` seconds, or one has been silent for `lost_s`, the run ends, and says which (0:
    not looked for; in a world of one neither, so that a breakpoint is no hang).
    With `devices_per_rank` k, local rank r has the GPUs k*r to k*r + k-1, and k GPUs a rank are needed.

    The block must not keep a DDP model alive (call a function that owns it): see _close. On an error the group is left
    as it is: destroying it makes the peers fail in their collectives while the rank at fault is still on its way out,
    and torchrun then names a peer (the right rank 7 of 20 times with destroy in `finally`, 20 of 20 without).
    """
    _freeze_imports()
    timeout = timedelta(seconds=timeout_s)
    models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    restore = more_checks(models, gather) if debug else ExitStack()
    store = _open_store(ranks, timeout)
    gpus = torch.cuda.device_count()
    name, why = _agree(store, ranks, *choose_backend(backend, ranks, gpus, devices_per_rank))
    if name == "gloo" and backend == "auto" and not _has_peers(ranks):
        name = alone.NAME
    device = torch.device("cuda", ranks.local_rank * devices_per_rank) if name == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before init: else each rank also takes memory on GPU 0
    with _on_loopback_if_alone(ranks):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if name == "nccl" else name,
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
            # nccl then refuses tensors on any other GPU, so it is not said where a rank has several.
            device_id=device if device.type == "cuda" and devices_per_rank == 1 else None,
        )
    witness = Witness(ranks, store, hang_s, lost_s)
    hook = register_module_module_registration_hook(lambda owner, *_: _remember(owner, models, witness))
    try:
        yield Group(ranks, name, why, device, witness.progress)
    except BaseException as error:
        witness.failed(error, models)
        if ranks.world_size == 1:
            _close(models)
        if isinstance(error, Refusal):
            refuse(error.status, str(error), speaks=ranks.rank == 0)
        raise
    else:
        witness.through()
        _close(models)
    finally:
        witness.close()
        hook.remove()
        restore.close()


def _freeze_imports() -> None:
    """Keep what is imported out of every later collection: the one at the interpreter's end takes 1.4 s of CPU else.

    To see it: `python -c "import torch, torch._dynamo, time; print(time.time())"; date +%s.%N` (torch 2.13, Python
    3.11; with gc.freeze() 0.2 s).
    """
    importlib.import_module("torch._dynamo")  # DDP's constructor would
    gc.freeze()


def choose_backend(wanted: str, ranks: Ranks, gpus: int, devices_per_rank: int = 1) -> Tuple[str, str]:
    """(backend, why) as this rank sees it on a node with `gpus` GPUs; ("", why) if what is wanted can't be had."""
    host = socket.gethostname()
    fit = gpus // devices_per_rank  # ranks that could run here
    if wanted == "gloo":
        return "gloo", "asked for"
    if not dist.is_nccl_available():
        lack = f"torch {torch.__version__} was built without nccl"
    elif gpus == 0:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        lack = f"no GPU on {host}" + (f" (CUDA_VISIBLE_DEVICES={hidden})" if hidden is not None else "")
    elif fit < ranks.local_world_size:
        each = f" of {devices_per_rank} GPUs each" if devices_per_rank > 1 else ""
        lack = f"{_count(ranks.local_world_size, 'rank')}{each} but {_count(gpus, 'GPU')} on {host}"
    else:
        per_rank = "a GPU" if devices_per_rank == 1 else f"{devices_per_rank} GPUs"
        return "nccl", "asked for" if wanted == "nccl" else f"{per_rank} for every rank"
    few = 0 < fit < ranks.local_world_size and dist.is_nccl_available()
    if wanted == "auto":
        return "gloo", lack + (f"; --nproc_per_node={fit} would use {'it' if gpus == 1 else 'them'}" if few else "")
    return "", f"backend=nccl can't run: {lack}. Use {f'--nproc_per_node={fit} or ' * few}backend=gloo"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _has_peers(ranks: Ranks) -> bool:
    """Or a launcher that expects this rank at its store."""
    return ranks.world_size > 1 or "MASTER_ADDR" in os.environ


_opened = itertools.count()  # a process may open one group after another; each has keys of its own in the store


def _open_store(ranks: Ranks, timeout: timedelta) -> dist.Store:
    """The store that the ranks meet in. A world of one that no launcher started has it in memory."""
    if not _has_peers(ranks):
        return dist.HashStore()
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if absent:
        refuse(
            Exit.USAGE, f"{' and '.join(absent)} not set, so the ranks can't meet: start with torchrun", ranks.rank == 0
        )
    store: dist.Store = next(iter(dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout)))[0]
    return dist.PrefixStore(f"group {next(_opened)}", store)


def _agree(store: dist.Store, ranks: Ranks, name: str, why: str) -> Tuple[str, str]:
    """What all ranks can do, or all end: nodes may differ, and ranks with different backends wait for each other."""
    store.set(f"backend/{ranks.rank}", json.dumps([name, why]))
    if ranks.rank == 0:
        found = [json.loads(store.get(f"backend/{rank}")) for rank in range(ranks.world_size)]
        first = min(found, key=lambda one: ("", "gloo", "nccl").index(one[0]))
        if not first[0]:
            say(first[1])
        store.set("backend", json.dumps(first))
    name, why = json.loads(store.get("backend"))
    if not name:
        raise SystemExit(int(Exit.UNABLE))
    return name, why


@contextmanager
def _on_loopback_if_alone(ranks: Ranks) -> Iterator[None]:
    """gloo opens a listening socket in a world of one too, on the address of the host name: here on loopback only."""
    alone = ranks.world_size == 1 and "GLOO_SOCKET_IFNAME" not in os.environ
    with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": loopback_interface()} if alone else {}):
        yield


def _remember(owner: torch.nn.Module, models: "weakref.WeakSet[torch.nn.Module]", witness: Witness) -> None:
    if isinstance(owner, DistributedDataParallel) and owner not in models:
        models.add(owner)  # the hook runs when DDP takes the model as its submodule
        witness.progress.see(owner)


def _close(models: "weakref.WeakSet[torch.nn.Module]") -> None:
    """Free the DDP models, then destroy the group, so that no thread of gloo has anything of Python's left to free.

    The group's destructor joins gloo's run loop while it holds the GIL. Should that thread just then drop the last
    reference to a tensor that Python has seen (of a DDP model's last all_reduce, or of a list of tensors that has gone
    out of scope), it waits for the GIL: a deadlock (torch 2.13: 5 of 10 runs of 16 ranks with the model alive; torch
    2.6: the first run of 3 ranks with it gone), or `terminate called without an active exception`, status -6 (torch
    2.13: twice in about 70 runs of 4 ranks). To see it: end a script of 16 ranks with all_reduce, then
    destroy_process_group.
    """
    if models:
        gc.collect()  # models in reference cycles; costs 0.2 s with torch loaded, so only when some are left
    for model in models:
        del model.reducer, model.logger  # someone still holds the model; both hold the Reducer, and it must go now
    time.sleep(0.01)  # without the GIL: lets the run loop drop what a collective of the user's has left
    dist.destroy_process_group()
    _kept.clear()


# Tensors of the last collectives, so that the run loop never drops the last reference: see _close. It has two threads,
# so one may lag behind by some collectives; 32 is plenty.
_kept: Deque[List[torch.Tensor]] = deque(maxlen=32)


def all_gather(tensor: torch.Tensor) -> List[torch.Tensor]:
    """Every rank's tensor, all of one shape and type, in rank order, on every rank. Collective."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    _kept.append([*parts, tensor])
    dist.all_gather(parts, tensor)
    return parts


def gather(value: Any) -> List[Any]:
    """Every rank's `value`, in rank order, on every rank. Collective.

    Values are what JSON can carry (tuples come back as lists): torch's all_gather_object needs numpy, and unpickles.
    """
    words = json.dumps(value).encode()
    head = len(words).to_bytes(8, "big") + words[: BLOCK - 8]
    found = [bytes(block.tolist()) for block in all_gather(_bytes(head, BLOCK))]
    sizes = [int.from_bytes(block[:8], "big") for block in found]
    if max(sizes) <= BLOCK - 8:
        return [json.loads(block[8 : 8 + size]) for block, size in zip(found, sizes)]
    parts = all_gather(_bytes(words, max(sizes)))
    return [json.loads(bytes(part[:size].tolist())) for part, size in zip(parts, sizes)]


BLOCK = 1024  # bytes a rank: what is shorter takes one collective instead of two, 8 ms each with 32 ranks on 2 cores


def _bytes(content: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)


def total(value: float) -> float:
    """The sum over the ranks of a number that each rank has, the same on every rank. Collective."""
    tensor = torch.tensor(value, dtype=torch.float64)
    _kept.append([tensor])
    dist.all_reduce(tensor)
    return tensor.item()


def start_max(*values: float) -> Callable[[], List[float]]:
    """Begin to find, of each of the numbers, the largest that a rank has; the function that is returned waits for it.

    Collective. It may be called some steps later: the answer comes while other work is done.
    """
    tensor = torch.tensor(values, dtype=torch.float64)
    _kept.append([tensor])
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)

    def result() -> List[float]:
        work.wait()
        return tensor.tolist()

    return result


def average(value: float) -> float:
    """The mean over the ranks of a number that each rank has, the same on every rank. Collective."""
    return total(value) / dist.get_world_size()


def on_main(work: Callable[[], T]) -> T:
    """Rank 0 calls `work`; every rank gets the value, or the failure. Collective: `path = on_main(newest_checkpoint)`.

    The value is one that JSON can carry. Where `work` raises, rank 0 raises that, and the others MainRankError; a
    Refusal is raised with the same words on all.
    """
    outcome: Tuple[Any, str, bool] = (None, "", False)
    failure = None
    if dist.get_rank() == 0:
        try:
            outcome = (work(), "", False)
        except Exception as error:
            failure = error
            refused = isinstance(error, Refusal)
            words = str(error) if refused else f"rank 0 on {socket.gethostname()}: {type(error).__name__}: {error}"
            outcome = (None, words, refused)
    value, message, refused = gather(outcome)[0]
    if failure is not None:
        raise failure
    if message:
        raise Refusal(message) if refused else MainRankError(message)
    return value  # type: ignore[no-any-return]
