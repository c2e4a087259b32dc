"""A thread a rank that sees when nothing moves any more, or a rank is gone; then it says who, and ends the run.

process_group(..., hang_s=60, lost_s=30) starts it. `python -m ddp_examples.core.watch RUNDIR` prints a verdict again.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, List, NoReturn, Optional, Tuple

import torch.distributed as dist

from ddp_examples.core.deaths import process_state
from ddp_examples.core.exits import Exit, say
from ddp_examples.core.failure import Failure, is_own
from ddp_examples.core.frames import at_debugger, look
from ddp_examples.core.judge import Beat, Stall, judge
from ddp_examples.core.last_words import speak
from ddp_examples.core.progress import Progress
from ddp_examples.core.ranks import Ranks
from ddp_examples.core.records import conclude, leave_stall, read_verdict, run_folder
from ddp_examples.core.trail import Entry, memory_use

TAIL = 24  # entries of a rank's trail that it tells when it does not move
REPLY_S = 5.0  # a store that takes longer does not answer
BEGIN_S = 120.0  # at the start it may: 64 ranks that begin at once on 2 busy cores wait more than 5 s to be let in
_HOST = socket.gethostname()


class Watch:
    """One rank's watch. `start` after the group is open, `stop` before it is closed."""

    def __init__(
        self, ranks: Ranks, progress: Progress, folder: Optional[Path], token: str, hang_s: float, lost_s: float
    ) -> None:
        self._ranks, self._progress, self._folder, self._token = ranks, progress, folder, token
        self._hang_s, self._lost_s = hang_s, lost_s
        # Of a rank that stands still; so a hang of 60 s is told within 65. One that moves looks up less often: on a
        # machine whose cores are all busy the mere wake-up of a thread costs the ranks about 5 ms. A store answers
        # about 10,000 requests a second, and each rank has two.
        self._interval_s = min(0.8, (hang_s or lost_s) / 10, (lost_s or hang_s) / 10) * max(1, ranks.world_size / 1024)
        self._moves = True
        self._main = threading.main_thread().ident or 0
        self._moved = time.monotonic()
        self._last: Any = None
        self._ticks = 0
        self._store: Any = None
        self._answered = time.monotonic()
        self._seen: Dict[int, Tuple[str, float]] = {}  # the beats as they came, and when they last changed
        self._through = self._judge = False
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._log = (folder / f"rank-{ranks.rank}.log").open("a") if folder else None

    def start(self) -> None:
        """Tell a first time, so that all have told before one can stop, and look from now on."""
        self._arm()
        store = self._open(BEGIN_S)
        self._exchange(store, self._beat(False))
        store.set_timeout(timedelta(seconds=REPLY_S))
        self._thread.start()

    def stop(self, through: bool) -> None:
        """Look no longer. `through`: this rank has ended well, tell the others.

        A thread that is in a call of the store when Python ends would abort the process, so it is waited for.
        """
        self._through = through
        self._leaving.set()
        self._thread.join(REPLY_S)
        faulthandler.cancel_dump_traceback_later()
        if self._log:
            self._log.close()

    def share(self, failure: Failure) -> Failure:
        """The first failure of the run, as far as it is known: of other hosts only the store tells. After `stop`."""
        record = json.dumps(asdict(failure)) if is_own(failure) else ""
        with suppress(Exception):  # the store may be gone with the rank that failed
            return Failure(**json.loads(self._open().compare_set("failure", "", record)))
        return failure

    def _sleep(self) -> bool:
        """Until the next look; whether the rank leaves.

        Time in which this process did not run is nobody's fault: a suspended job, a paused machine, one that is slow.
        """
        began, wanted_s = time.monotonic(), self._interval_s * (2.5 if self._moves else 1)
        left = self._leaving.wait(wanted_s)
        late = time.monotonic() - began - wanted_s
        if late > self._interval_s:
            self._moved, self._answered = self._moved + late, self._answered + late
            self._seen = {rank: (text, when + late) for rank, (text, when) in self._seen.items()}
        return left

    def _run(self) -> None:
        while True:
            left = self._sleep()
            if left and not self._through:
                return
            self._arm()
            beat = self._beat(left)
            stall = None
            try:
                stall = self._exchange(self._open(), beat)
                self._answered = time.monotonic()
            except Exception:  # DistError in torch 2.6, DistNetworkError, RuntimeError: whatever, it does not answer
                self._store = None
                stall = self._no_answer(beat)
            if left:
                return
            if stall:
                self._end(stall)

    def _open(self, patience_s: float = REPLY_S) -> Any:
        """A connection of our own: the main thread may wait in its one."""
        if self._store is None:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=patience_s))
            self._store = dist.PrefixStore(self._token, store)
        return self._store

    def _arm(self) -> None:
        """Should C code hold Python's lock, this thread can't run either; faulthandler, which needs none, tells."""
        if self._log:
            faulthandler.dump_traceback_later(self._lost_s or self._hang_s, file=self._log)

    def _beat(self, left: bool) -> Beat:
        frame = sys._current_frames().get(self._main)
        place, waiting, where = look(frame)
        now = time.monotonic()
        self._moves = (place, self._progress.trail.number) != self._last or at_debugger(frame)
        if self._moves:
            self._last, self._moved = (place, self._progress.trail.number), now
        ranks, age = self._ranks, now - self._moved
        tail = self._progress.trail.entries[-TAIL:] if age >= min(self._hang_s or age, 2) else []
        beat = Beat(
            ranks.rank, ranks.local_rank, _HOST, os.getpid(), self._progress.step, age, waiting, where, left, 0, tail
        )
        facts = {**asdict(beat), "memory": memory_use()}
        facts.pop("tail")
        self._progress.trail.head(facts)
        return beat

    def _exchange(self, store: Any, beat: Beat) -> Optional[Stall]:
        """Tell the others, and hear what there is: rank 0 looks at all, the others at rank 0."""
        self._ticks += 1
        if beat.rank == 0 and self._ticks == 1:
            store.set("stall", "")  # the others wait for it
        store.set(f"{beat.rank}", json.dumps({"tick": self._ticks, **asdict(beat)}))
        if beat.rank == 0 and self._ticks > 1:
            return self._judged(store)
        if self._ticks == 1:
            return None
        found, first = store.multi_get(["stall", "0"])
        if found:
            return _stall(found)
        (head,) = self._read({0: first})
        if self._lost_s and head.silent_s >= self._lost_s and not head.left:
            mine = str(beat.rank)
            return self._judged(store) if store.compare_set("judge", "", mine).decode() == mine else None
        return None

    def _judged(self, store: Any) -> Optional[Stall]:
        keys = [f"{rank}" for rank in range(self._ranks.world_size)]
        if len(self._seen) < len(keys) and not store.check(keys):
            return None  # some have not begun
        beats = self._read(dict(enumerate(store.multi_get(keys))))
        stall = judge(beats, self._hang_s, self._lost_s)
        if stall:
            self._judge, stall = True, _with_state(stall)
            store.set("stall", json.dumps(asdict(stall)))
        return stall

    def _read(self, contents: Dict[int, bytes]) -> List[Beat]:
        now, beats = time.monotonic(), []
        for rank, content in contents.items():
            text = content.decode()
            if self._seen.get(rank, ("", 0))[0] != text:
                self._seen[rank] = text, now
            facts = json.loads(text)
            facts.update(silent_s=now - self._seen[rank][1], tail=[Entry(*entry) for entry in facts["tail"]])
            facts.pop("tick")
            beats.append(Beat(**facts))
        return beats

    def _no_answer(self, beat: Beat) -> Optional[Stall]:
        """The store's host does not answer, and we wait for somebody: that host is lost."""
        silent_s = time.monotonic() - self._answered
        if not self._lost_s or silent_s < self._lost_s or not beat.waiting or beat.age_s < self._lost_s / 2:
            return None
        head = self._read({0: self._seen[0][0].encode()})[0] if 0 in self._seen else None
        host = os.environ.get("MASTER_ADDR", "") if head is None else head.host
        detail = f"host {host}, where the ranks meet, does not answer"
        return Stall(
            "lost", [0], head.step if head else beat.step, silent_s, [], host, 0, head.pid if head else 0, detail
        )

    def _end(self, stall: Stall) -> NoReturn:
        """Leave: the main thread can't. Not at once, so that every rank has time to hear it, and to leave its stack."""
        if self._folder:
            leave_stall(stall, self._folder)
            if self._judge and not run_folder():  # no launcher of ours will say it
                speak(self._folder)
        if self._log:
            frame = sys._current_frames().get(self._main)
            self._log.write("".join(traceback.format_stack(frame)) if frame else "")
            self._log.flush()
        time.sleep(1.2 * self._interval_s)
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(int(Exit.ERROR))


def _stall(content: bytes) -> Stall:
    return Stall(**json.loads(content))


def _with_state(stall: Stall) -> Stall:
    """Of a silent rank on this host the kernel knows more."""
    if stall.kind != "lost" or stall.host != _HOST or stall.detail:
        return stall
    return replace(stall, detail=process_state(stall.pid))


def main(argv: List[str]) -> int:
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        say("usage: python -m ddp_examples.core.watch RUNDIR")
        return Exit.USAGE
    folder = Path(argv[0])
    verdict = read_verdict(folder) or conclude(folder, [], 0)
    say("\n".join(verdict.lines or [f"nothing in {folder} tells of a failure"]))
    return Exit.OK if verdict.lines else Exit.ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
