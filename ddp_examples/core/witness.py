"""What process_group needs to see and tell how its rank fares: progress, the watch, the record of a failure."""

import os
import signal
import socket
from pathlib import Path
from typing import Iterable, Optional

import torch
import torch.distributed as dist

from ddp_examples.core.last_words import leave_record
from ddp_examples.core.orphans import die_with_parent
from ddp_examples.core.progress import Progress, unused_parameters
from ddp_examples.core.ranks import Ranks
from ddp_examples.core.records import clear_rank, leave_failure, own_folder, run_folder
from ddp_examples.core.trail import Trail
from ddp_examples.core.verdict import UNUSED_HINT
from ddp_examples.core.watch import Watch


class Witness:
    """Of one rank, from when its group is open until it is closed."""

    def __init__(self, ranks: Ranks, store: dist.Store, hang_s: float, lost_s: float) -> None:
        self._ranks = ranks
        watched = ranks.world_size > 1 and bool(hang_s or lost_s) and "MASTER_ADDR" in os.environ
        self._folder = run_folder() or (_meet(store, ranks) if watched else None)
        self.progress = Progress(Trail(self._folder / f"rank-{ranks.rank}.trail" if self._folder else None))
        facts = {"rank": ranks.rank, "local_rank": ranks.local_rank, "host": socket.gethostname(), "pid": os.getpid()}
        self.progress.trail.head(facts)
        self._hooks = self.progress.hooks()
        self._watch: Optional[Watch] = None
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent(signal.SIGKILL)  # torchrun, when it is killed, leaves its ranks running
        if watched:
            token = _agreed(store, "watch", os.urandom(8).hex() if ranks.rank == 0 else None)
            self._watch = Watch(ranks, self.progress, self._folder, token, hang_s, lost_s)
            self._watch.start()

    def failed(self, error: BaseException, models: Iterable[torch.nn.Module]) -> None:
        failure = None
        if self._folder:
            names = ", ".join(unused_parameters(error, models))
            hint = UNUSED_HINT.format(names=names) if names else ""
            failure = leave_record(
                error, self._ranks.rank, self._ranks.local_rank, self.progress.step, hint, self._folder
            )
        if self._watch:
            self._watch.stop(through=False)
            if failure and self._folder and not run_folder():
                leave_failure(self._watch.share(failure), self._folder)

    def through(self) -> None:
        """The rank has ended well."""
        if self._watch:
            self._watch.stop(through=True)
        if self._folder and not run_folder():
            clear_rank(self._folder, self._ranks.rank)

    def close(self) -> None:
        self._hooks.close()


def _agreed(store: dist.Store, key: str, value: Optional[str]) -> str:
    """One rank's value, on all ranks."""
    if value is not None:
        store.set(key, value)
    return str(store.get(key).decode())


def _meet(store: dist.Store, ranks: Ranks) -> Path:
    """A folder of this run on this host, which its ranks share."""
    return Path(_agreed(store, f"folder {socket.gethostname()}", own_folder() if ranks.local_rank == 0 else None))
