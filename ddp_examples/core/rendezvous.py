"""A rendezvous for torchrun's agent on one node: there is no other node to meet, so no door needs to be open.

torchrun --standalone listens with two TCP stores on all interfaces, unauthenticated, and its agent unpickles what it
finds there (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py): who reaches the port runs code as the user.
"""

import socket
from datetime import timedelta
from typing import Optional

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

NAME = "loopback"  # torchrun's --rdzv-backend
ADDRESS = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """One node; the store of the agent and the ranks listens on 127.0.0.1 only, a new one for each restart.

    A new one: ranks that meet in the store of the attempt before find its keys (pytorch#135712).
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: Optional[TCPStore] = None

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((ADDRESS, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            ADDRESS,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),  # from here on the store's: it listens where we bound it
            use_libuv=False,  # torch 2.6's libuv backend "does not support initialization with an listen fd"
        )
        # The agents' keys get a prefix, so that the ranks, which use this store too, can't meet them.
        store: Store = PrefixStore("agent", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, port))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._store = None
        return True


def register() -> None:
    """Make `--rdzv-backend=loopback` known to torchrun in this process."""
    if NAME not in rendezvous_handler_registry._registry:
        rendezvous_handler_registry.register(NAME, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)
