"""Who is found to hold up the others, by what the ranks tell; the frames that are waits; steps and collectives seen."""

import os
import socket
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator, List
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_examples.core.deaths import process_state
from ddp_examples.core.failure import Failure, StartError
from ddp_examples.core.frames import at_debugger, look
from ddp_examples.core.group import Group, process_group
from ddp_examples.core.judge import Beat, Stall, judge, odd_one
from ddp_examples.core.progress import Progress
from ddp_examples.core.ranks import Ranks
from ddp_examples.core.report import straggler
from ddp_examples.core.trail import NO_GRADIENT, Entry, Trail, read_trails
from ddp_examples.core.watch import Watch


def tail(*calls: str, first: int = 1, step: int = 5) -> List[Entry]:
    """ "!" in front: never before at this place."""
    return [
        Entry(n, step, call.lstrip("!"), "a.py:9", "x" * call.startswith("!")) for n, call in enumerate(calls, first)
    ]


SAME = tail("forward pass", "all_reduce [1]")


def beat(rank: int, **given: Any) -> Beat:
    usual = {"local_rank": rank % 4, "host": f"c{rank // 4}", "pid": rank, "step": 5, "tail": SAME}
    return Beat(rank=rank, **{**usual, "age_s": 7.0, "waiting": True, "where": "a.py:9 in f", **given})


def test_while_one_moves_there_is_no_hang() -> None:
    assert judge([beat(0), beat(1, age_s=4.9), beat(2)], 5, 30) is None
    assert judge([beat(0), beat(1), beat(2)], 0, 30) is None


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("culprit", [0, 1, -1])
def test_who_does_not_wait_in_a_collective_is_the_cause(ranks: int, culprit: int) -> None:
    culprit %= ranks
    found = judge([beat(r, waiting=r != culprit, where=f"a.py:{r == culprit}") for r in range(ranks)], 5, 0)
    assert found is not None
    assert (found.kind, found.ranks, found.step) == ("hang", [culprit], 5)
    assert found.groups[0][0] == [culprit]
    assert len(found.groups) == 2


def test_where_none_is_seen_to_wait_the_one_that_has_done_least_is_the_cause() -> None:
    """As with nccl, where the others are in `.item()`."""
    behind = beat(2, waiting=False, step=4)
    found = judge([beat(0, waiting=False), beat(1, waiting=False), behind], 5, 0)
    assert found is not None
    assert found.ranks == [2]
    found = judge([beat(0, waiting=False), beat(1, waiting=False, tail=SAME[:1])], 5, 0)
    assert found is not None
    assert found.ranks == [1]


def test_who_has_left_keeps_nobody_waiting_but_is_named_when_all_wait() -> None:
    assert judge([beat(0, left=True, age_s=0), beat(1, age_s=1)], 5, 30) is None
    found = judge([beat(0, left=True, age_s=0, silent_s=99), beat(1)], 5, 30)
    assert found is not None
    assert (found.kind, found.ranks) == ("left", [0])


def test_a_silent_rank_is_lost_and_with_all_of_its_ranks_the_host() -> None:
    found = judge([beat(r, silent_s=31 * (r == 2)) for r in range(8)], 60, 30)
    assert found is not None
    assert (found.kind, found.ranks, found.host, found.detail) == ("lost", [2], "c0", "")
    found = judge([beat(r, silent_s=31 * (r > 3)) for r in range(8)], 60, 30)
    assert found is not None
    assert (found.ranks, found.host, found.detail) == ([4, 5, 6, 7], "c1", "host c1 is lost")
    assert judge([beat(r, silent_s=31 * (r == 2)) for r in range(8)], 60, 0) is None


def test_a_rank_whose_last_word_is_from_before_is_waited_for() -> None:
    assert judge([beat(0), beat(1, age_s=1, silent_s=5, tail=[])], 5, 30) is None


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("culprit", [0, 1, -1])
@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("shape", ["forward pass", "all_reduce [1]"], ["forward pass", "!all_reduce [5]"]),
        ("skip", ["forward pass", "all_reduce [1]"], ["forward pass", "!optimizer step"]),
        ("skip", ["forward pass"], ["forward pass", "!all_reduce [1]"]),  # it left out the backward pass
        ("unused", ["forward pass"], ["forward pass", f"all_reduce [1]{NO_GRADIENT}bias"]),
        ("unused", ["forward pass", "optimizer step"], ["forward pass", f"optimizer step{NO_GRADIENT}bias"]),
    ],
)
def test_the_odd_one_is_found_among_any_number(
    ranks: int, culprit: int, kind: str, right: List[str], wrong: List[str]
) -> None:
    culprit %= ranks
    found = judge([beat(r, tail=tail(*(wrong if r == culprit else right))) for r in range(ranks)], 5, 0)
    assert found is not None
    assert (found.kind, found.ranks) == (kind, [culprit])
    assert found.groups[0][0] == [culprit]


def test_without_a_history_the_majority_decides_and_of_two_both_are_shown() -> None:
    tails = [tail("all_reduce [1]"), tail("all_reduce [5]"), tail("all_reduce [1]")]
    odd = odd_one(dict(enumerate(tails)))
    assert odd is not None
    assert odd[1] == [1]
    odd = odd_one(dict(enumerate(tails[:2])))
    assert odd is not None
    assert odd[1] == [0, 1]
    assert len(odd[3]) == 2


def test_the_majority_counts_more_than_what_is_new() -> None:
    """The end of the first epoch is new to all; who goes on there is the odd one."""
    done, goes_on = tail("optimizer step", "!all_gather [1]"), tail("optimizer step", "forward pass")
    odd = odd_one({0: done, 1: goes_on, 2: done})
    assert odd is not None
    assert odd[1] == [1]


def test_ranks_are_told_in_order_however_their_trails_were_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lists the files of a folder in any order."""
    paths = [tmp_path / f"rank-{rank}.trail" for rank in (3, 0, 1, 2)]
    for path in paths:
        trail = Trail(path)
        trail.note("optimizer step")
        trail.note("forward pass" if path == paths[2] else "all_gather [1]")
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter(paths))
    odd = odd_one({rank: entries for rank, (_, entries) in read_trails(tmp_path).items()})
    assert odd is not None
    assert [ranks for ranks, _ in odd[3]] == [[1], [0, 2, 3]]


def test_trails_are_compared_where_they_overlap() -> None:
    assert odd_one({0: tail("a", "b"), 1: tail("b", "c", first=2)[:1]}) is None
    assert odd_one({0: SAME}) is None
    assert odd_one({0: SAME, 1: []}) is None
    assert odd_one({0: SAME, 1: SAME}) is None


def test_all_wait_and_nobody_is_odd() -> None:
    found = judge([beat(0), beat(1)], 5, 0)
    assert found is not None
    assert (found.kind, found.ranks) == ("stall", [0, 1])


def test_4096_ranks() -> None:
    beats = [beat(rank, tail=tail(*["forward pass", "optimizer step"] * 12)) for rank in range(4096)]
    beats[1234] = beat(1234, tail=tail(*["forward pass", "optimizer step"] * 11, "forward pass", "!all_reduce [1]"))
    found = judge(beats, 5, 30)
    assert found is not None
    assert (found.kind, found.ranks) == ("skip", [1234])
    beats[77] = beat(77, waiting=False)
    found = judge(beats, 5, 30)
    assert found is not None
    assert (found.kind, found.ranks) == ("hang", [77])


@pytest.mark.parametrize(
    ("own", "rank"),
    [
        ([[0.1, 10, 3], [2.0, 10, 3]], 1),
        ([[2.0, 10, 3], [0.1, 10, 3], [0.1, 10, 3]], 0),
        ([[0.1, 10, 3], [0.15, 10, 3]], None),  # not twice as long
        ([[0.01, 10, 3], [0.5, 10, 3]], None),  # not a fifth of the run
        ([[5.0, 10, 6]], None),
        ([[0.0, 0, 6], [0.0, 0, 6]], None),
    ],
)
def test_stragglers(own: List[List[float]], rank: "int | None") -> None:
    found = straggler(own)
    assert (found[0] if found else None) == rank


@pytest.fixture
def progress(group: Group) -> Progress:
    return group.progress


def whats(progress: Progress) -> List[str]:
    return [entry.what for entry in progress.trail.entries]


def test_steps_and_collectives_are_seen_without_a_line_in_the_loop(group: Group) -> None:
    from torch.distributed import all_reduce  # whoever has the function itself is seen too

    ddp = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    assert group.progress.step == 0
    for step in (1, 2, 3):
        ddp(torch.ones(1, 2)).sum().backward()
        assert group.progress.step == step
        all_reduce(torch.ones(3))
        optimizer.step()
        assert group.progress.step == step
    with torch.no_grad():
        ddp(torch.ones(1, 2))  # an evaluation may be one rank's alone
    assert whats(group.progress) == ["forward pass", "all_reduce float32 [3]", "optimizer step"] * 3
    assert group.progress.trail.entries[1].where.startswith("tests/test_watch.py:") or os.sep in (
        group.progress.trail.entries[1].where
    )
    assert group.progress.own_steps == 2
    assert group.progress.own_s > 0


def test_each_collective_is_seen_with_what_must_be_alike(group: Group) -> None:
    one, two = torch.ones(2, dtype=torch.float64), torch.empty(2, dtype=torch.float64)
    dist.broadcast(one, 0)
    dist.all_gather([two], one)
    dist.reduce(one, 0)
    dist.barrier()
    dist.gather(one, [two], 0)
    names = ["broadcast float64 [2]", "all_gather float64 [2]"]
    assert whats(group.progress) == [*names, "reduce float64 [2]", "barrier", "gather"]


def test_collectives_of_other_groups_and_threads_are_no_entries(group: Group) -> None:
    other = dist.new_group([0])
    before = len(group.progress.trail.entries)
    dist.all_reduce(torch.ones(1), group=other)
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
    thread.start()
    thread.join()
    assert len(group.progress.trail.entries) == before


def test_a_backward_pass_that_misses_a_parameter_is_noted_with_its_name(group: Group) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    ddp = DistributedDataParallel(Net())
    ddp(torch.ones(1, 2)).sum().backward()
    dist.all_reduce(torch.ones(1))
    assert whats(group.progress)[-1] == f"all_reduce float32 [1]{NO_GRADIENT}idle.weight, idle.bias"


def test_after_the_group_nothing_is_seen_any_more() -> None:
    before = dist.ProcessGroup.allreduce
    with process_group(Ranks(), "gloo", 20, hang_s=5, lost_s=5) as opened:
        assert dist.ProcessGroup.allreduce is not before
        assert "watch" not in [thread.name for thread in threading.enumerate()], "in a world of one nobody watches"
    assert dist.ProcessGroup.allreduce is before
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1).step()
    assert whats(opened.progress) == []


def sample(work: Any) -> Any:
    """What look() says of a thread that is in `work`."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.2)
    return sys._current_frames()[thread.ident or 0]


def test_a_sleep_is_no_wait_and_looks_the_same_until_it_ends() -> None:
    frame = sample(lambda: time.sleep(3))
    place, waiting, where = look(frame)
    assert not waiting
    assert "test_watch.py" in where
    assert look(frame)[0] == place


def test_a_collective_is_a_wait_at_the_users_own_line(group: Group) -> None:
    gate = threading.Event()
    with patch.object(dist.ProcessGroup, "allreduce", lambda *_, **__: SimpleNamespace(wait=gate.wait)):
        _, waiting, where = look(sample(lambda: dist.all_reduce(torch.ones(1))))
    gate.set()
    assert waiting
    assert "test_watch.py" in where


def test_a_backward_pass_is_a_wait_and_the_users_own_code_in_it_is_none() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(2)
            return x

    leaf = torch.ones(1, requires_grad=True)
    assert look(sample(lambda: Slow.apply(leaf).backward()))[1] is False
    gate = threading.Event()
    inside: dict = {"gate": gate}  # as a frame of torch's
    source = "def run_backward(*_, **__): gate.wait(2)"
    exec(compile(source, str(Path(torch.__file__).with_name("autograd") / "engine.py"), "exec"), inside)
    engine = SimpleNamespace(run_backward=inside["run_backward"])
    with patch.object(torch.autograd.graph, "Variable", SimpleNamespace(_execution_engine=engine)):
        assert look(sample(lambda: (leaf * 2).backward()))[1] is True
    gate.set()


def test_a_person_at_the_debugger_moves() -> None:
    namespace: dict = {}
    exec(compile("import time\ndef cmdloop():\n    time.sleep(2)\n", "/x/pdb.py", "exec"), namespace)
    assert at_debugger(sample(namespace["cmdloop"]))
    assert not at_debugger(sample(lambda: time.sleep(1)))


def test_the_state_of_a_process() -> None:
    import signal

    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    try:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert "SIGSTOP" in process_state(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert "gone" in process_state(pid)


@pytest.fixture
def meeting() -> Iterator[None]:
    """The store of a run, in this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)):
        yield
    del store


def watches(count: int, hang_s: float, lost_s: float) -> "tuple[List[Watch], dict[int, Stall]]":
    """The watches of `count` ranks, all of which have this thread for their main thread; and what each ends with."""
    ended: dict = {}

    def end(watch: Any, stall: Stall) -> None:
        ended[watch._ranks.rank] = stall
        watch._leaving.set()

    made = []
    for rank in range(count):
        watch = Watch(Ranks(rank, rank, count, count, True), Progress(Trail()), None, "t", hang_s, lost_s)
        watch._interval_s = 0.05
        watch._end = end.__get__(watch)  # type: ignore[method-assign]
        made.append(watch)
    return made, ended


def wait_for(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_main_thread_that_stands_still_is_found_and_all_ranks_hear_it(meeting: None) -> None:
    made, ended = watches(3, hang_s=0.5, lost_s=0)
    gate = threading.Event()
    stands = threading.Thread(target=gate.wait, daemon=True)
    stands.start()
    for watch in made:
        watch._main = stands.ident or 0
        watch.start()
    wait_for(lambda: len(ended) == 3)
    gate.set()
    for watch in made:
        watch.stop(through=False)
    assert {stall.kind for stall in ended.values()} == {"hang"}
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_is_silent_is_found_also_when_it_is_rank_0(meeting: None, culprit: int) -> None:
    made, ended = watches(2, hang_s=0, lost_s=0.6)
    for watch in made:
        watch.start()
    time.sleep(0.3)
    made[culprit].stop(through=False)
    wait_for(lambda: 1 - culprit in ended)
    made[1 - culprit].stop(through=False)
    assert ended[1 - culprit].kind == "lost"
    assert ended[1 - culprit].ranks == [culprit]


def test_a_rank_that_is_through_is_not_lost(meeting: None) -> None:
    made, ended = watches(2, hang_s=0, lost_s=0.4)
    for watch in made:
        watch.start()
    time.sleep(0.3)
    made[0].stop(through=True)
    time.sleep(0.8)
    made[1].stop(through=True)
    assert ended == {}


def test_time_in_which_the_watch_did_not_run_is_nobodys_fault(meeting: None) -> None:
    """As of a job that is suspended (all its processes get SIGSTOP), or a machine that is paused."""
    made, ended = watches(2, hang_s=0.5, lost_s=0.5)
    gate = threading.Event()
    for watch in made:
        watch._leaving = SimpleNamespace(wait=lambda _: gate.wait(0.05) or time.sleep(0.7), set=gate.set)  # type: ignore
        watch.start()
    time.sleep(2.5)
    for watch in made:
        watch.stop(through=False)
    assert ended == {}


def test_the_first_failure_of_another_host_is_heard_through_the_store(meeting: None) -> None:
    made, _ = watches(3, hang_s=5, lost_s=5)
    for watch in made:
        watch.start()
        watch.stop(through=False)
    one, other = (Failure(rank, 0, f"c{rank}", 7, 8, 5, "raise", "ValueError: boom", "") for rank in (1, 2))
    lost_a_peer = replace(one, rank=0, kind="echo")
    assert made[0].share(lost_a_peer) == lost_a_peer, "nobody has told yet"
    assert made[1].share(one) == one
    assert made[2].share(other) == one
    assert made[0].share(lost_a_peer) == one
    os.environ["MASTER_PORT"], made[0]._store = "1", None
    assert made[0].share(lost_a_peer) == lost_a_peer, "the store is gone"


def test_a_store_that_does_not_answer_is_the_loss_of_its_host_only_for_who_waits() -> None:
    (watch,), _ = watches(1, hang_s=0, lost_s=1)
    watch._answered = time.monotonic() - 2
    found = watch._no_answer(beat(1, age_s=2))
    assert found is not None
    assert found.kind == "lost"
    assert watch._no_answer(beat(1, age_s=2, waiting=False)) is None
    assert watch._no_answer(beat(1, age_s=0)) is None
    watch._answered = time.monotonic()
    assert watch._no_answer(beat(1, age_s=2)) is None


def test_start_errors_name_what_differs() -> None:
    assert str(StartError("batches a rank", 13, 12)) == "batches a rank: 13 here, 12 on the others"


def test_a_store_that_is_slow_at_the_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 ranks on 2 busy cores wait longer for their connection than one at work. (torch tries for 1 s at least.)"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(sys.modules[Watch.__module__], "REPLY_S", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    servers: List[dist.TCPStore] = []
    begin = partial(dist.TCPStore, "127.0.0.1", port, is_master=True, wait_for_workers=False)
    serve = threading.Timer(3.0, lambda: servers.append(begin()))
    serve.start()
    watching = Watch(Ranks(0, 0, 2, 2, True), Progress(Trail()), None, "t", 60, 30)
    watching.start()
    serve.join()
    assert watching._store.timeout == timedelta(seconds=0.2)
    watching.stop(through=False)
