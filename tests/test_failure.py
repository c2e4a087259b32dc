"""Records of failures, and the verdict that is made of them."""

import errno
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from ddp_examples.core.deaths import Death, dead_peers, exit_code, memory_kills, why_killed
from ddp_examples.core.exits import Refusal
from ddp_examples.core.failure import Failure, StartError, failure_of, kind_of
from ddp_examples.core.frames import is_users, short
from ddp_examples.core.judge import Stall
from ddp_examples.core.last_words import leave_record
from ddp_examples.core.records import RUN, conclude, leave_failure, read_failures
from ddp_examples.core.trail import NO_GRADIENT, Entry, Trail, read_trail, read_trails
from ddp_examples.core.verdict import Trails, Verdict, decide

GLOO_ECHO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:25752"
GLOO_ABORT = "[enforce fail at pair.cc:456] 652 vs 4. Received data size doesn't match expected size."
UNUSED = "Expected to have finished reduction in the prior iteration before starting a new one."


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("boom"), "raise"),
        (RuntimeError("boom"), "raise"),
        (SystemExit(7), "exit"),
        (KeyboardInterrupt(), "interrupt"),
        (RuntimeError(GLOO_ECHO), "echo"),
        (RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer"), "echo"),
        (RuntimeError("[Rank 0] Timed out waiting 5000ms for recv operation to complete"), "echo"),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), "echo"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "raise"),  # the user's own connection
        (RuntimeError(GLOO_ABORT), "mismatch"),
        (RuntimeError("Detected mismatch between collectives on ranks. Rank 0 is running"), "mismatch"),
        (RuntimeError(UNUSED), "unused"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "full_disk"),
        (OSError(errno.ENOENT, "No such file", "/x/y"), "raise"),
        (Refusal("no such checkpoint"), "refused"),
        (MemoryError(), "memory"),
        (OutOfMemoryError("CUDA out of memory"), "memory"),
        (FloatingPointError("the loss is nan"), "nan"),
        (RuntimeError("Function 'MulBackward0' returned nan values in its 0th output."), "nan"),
        (StartError("batches a rank", 13, 12), "uneven"),
        (StartError("demo.lr", "1", "2"), "differs"),
    ],
)
def test_kinds(error: BaseException, kind: str) -> None:
    assert kind_of(raised(error)) == kind


def test_an_error_raised_while_an_echo_is_handled_is_an_echo() -> None:
    wrapped = ValueError("could not train")
    wrapped.__cause__ = RuntimeError(GLOO_ECHO)
    assert kind_of(raised(wrapped)) == "echo"


def test_the_frame_is_the_users_own_not_the_librarys() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        failure = failure_of(error, 3, 1, 6)
    assert (
        failure.where
        == f"{short(__file__)}:{failure.where.split(':')[1].split()[0]} in {sys._getframe().f_code.co_name}"
    )
    assert (failure.rank, failure.local_rank, failure.step, failure.kind) == (3, 1, 6, "raise")
    assert failure.error.startswith("JSONDecodeError: Expecting property name")


def test_a_path_is_as_long_as_it_is_where_the_folder_of_the_start_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "getcwd", gone)
    assert short("/x/train.py") == "/x/train.py"


def test_what_counts_as_the_users_code() -> None:
    import torch

    import ddp_examples.basic

    assert is_users(__file__)
    assert is_users(ddp_examples.basic.__file__)
    assert is_users("/x/lib/python3.9/site-packages/ddp_examples/../../../../mine.py") is False
    for name in (
        torch.__file__,
        os.__file__,
        json.__file__,
        sys.modules[kind_of.__module__].__file__,
        "<frozen runpy>",
    ):
        assert not is_users(str(name)), name


def test_ddp_tells_of_an_unused_parameter_one_step_late() -> None:
    assert failure_of(raised(RuntimeError(UNUSED)), 0, 0, 6).step == 5


def test_records_come_back_in_order_of_time(tmp_path: Path) -> None:
    late, early = record(0, time_ns=20), record(1, time_ns=10)
    leave_failure(late, tmp_path)
    leave_failure(early, tmp_path)
    (tmp_path / "rank-2.json").write_text("{")  # its rank was killed while it wrote, on a disk that does not rename
    assert read_failures(tmp_path) == [early, late]


def test_a_record_that_cannot_be_written_is_no_second_failure(tmp_path: Path) -> None:
    leave_failure(record(0), tmp_path / "absent")
    assert read_failures(tmp_path / "absent") == []


def record(rank: int, **given: Any) -> Failure:
    usual = Failure(rank, rank, "c1", 100 + rank, 1000, 5, "raise", "ValueError: boom", "train.py:8 in train", "/r/log")
    return replace(usual, **given)


def echo(rank: int, **given: Any) -> Failure:
    return record(rank, kind="echo", error=f"RuntimeError: {GLOO_ECHO}", time_ns=given.pop("time_ns", 2000), **given)


def death(rank: int, code: int, time_ns: int = 1000) -> Death:
    return Death(rank, rank, "c1", 100 + rank, code, time_ns)


def trails(*calls: List[str], **head: Any) -> Trails:
    """Of each rank: what it did, in step 5; "!" in front: never before at this place."""
    return {
        rank: (
            {"host": "c1", "local_rank": rank, "pid": 100 + rank, "step": 5, **head},
            [Entry(n, 5, call.lstrip("!"), "train.py:9", "x" * call.startswith("!")) for n, call in enumerate(done, 1)],
        )
        for rank, done in enumerate(calls)
    }


SAME = ["forward pass", "all_reduce [1]"]


def check(verdict: Verdict, kind: str, ranks: List[int], *words: str) -> None:
    assert (verdict.kind, verdict.ranks, verdict.step) == (kind, ranks, 5)
    assert 0 < len(verdict.lines) <= 9
    for word in (*words, "c1"):
        assert word in "\n".join(verdict.lines)


def test_the_first_own_record_is_the_cause_not_the_first_record() -> None:
    found = decide([echo(0, time_ns=900), record(1), echo(2)], [death(0, 1), death(1, 1)], {}, None, 3)
    check(
        found, "raise", [1], "rank 1 failed first, in step 5: ValueError: boom", "train.py:8", "other 2 ranks", "/r/log"
    )


@pytest.mark.parametrize(("code", "word"), [(-9, "SIGKILL"), (-11, "SIGSEGV"), (7, "status 7"), (1000, "gone")])
def test_a_death_without_a_record_is_the_cause(code: int, word: str) -> None:
    found = decide([echo(0)], [death(1, code), death(0, 1, 3000)], trails(SAME, SAME, memory=2**28), None, 2)
    check(found, "exit" if code == 7 else "kill", [1], word, "256 MB", "the other rank only followed")


def test_a_death_long_after_a_record_is_not_the_cause() -> None:
    later = 10**9
    check(decide([record(1)], [death(0, -6, later), death(1, 1, 2 * later)], {}, None, 2), "raise", [1])
    check(
        decide([record(1, time_ns=later)], [death(0, -9), death(1, 1, later)], trails(SAME, SAME), None, 2), "kill", [0]
    )


@pytest.mark.parametrize("status", [2, 3, 4, 75])
def test_ranks_that_have_said_why_and_end_together_need_no_verdict(status: int) -> None:
    everyone = [record(rank, kind="exit", error=f"left with status {status}") for rank in (0, 1)]
    assert decide(everyone, [death(0, status), death(1, status)], {}, None, 2).lines == []
    assert decide([], [death(0, status)], {}, None, 2).lines == []
    alone = decide([everyone[1], echo(0)], [death(1, status), death(0, 1)], {}, None, 2)
    check(alone, "exit", [1], f"status {status}")


def test_gloo_aborts_the_innocent_and_the_trails_tell_the_other() -> None:
    odd = [["forward pass", "all_reduce [1]"], ["forward pass", "!all_reduce [5]"]]
    found = decide([echo(1)], [death(0, -signal.SIGABRT), death(1, 1)], trails(*odd), None, 2, mismatch=True)
    check(found, "shape", [1], "all_reduce [5]", "all_reduce [1]")
    found = decide([echo(1)], [death(0, -signal.SIGABRT), death(1, 1)], trails(*odd), None, 2, mismatch=False)
    check(found, "kill", [0], "SIGABRT")


def test_mismatch_records_of_all_ranks_lead_to_the_trails() -> None:
    both = [record(rank, kind="mismatch") for rank in (0, 1)]
    odd = [["forward pass", "!all_reduce [5]"], ["forward pass", "all_reduce [1]"]]
    found = decide(both, [], trails(*odd), None, 2)
    check(found, "shape", [0], "rank 0: all_reduce [5]")


def test_a_rank_without_gradients_is_named_with_them() -> None:
    odd = [["forward pass"], ["forward pass", f"all_reduce [1]{NO_GRADIENT}body.bias"]]
    found = decide([], [death(0, -signal.SIGABRT)], trails(*odd), None, 2, mismatch=True)
    check(found, "unused", [1], "body.bias", "find_unused_parameters")


def test_only_echoes_and_a_rank_that_has_left() -> None:
    known = trails(SAME, SAME)
    known[1][0]["left"] = True
    check(decide([echo(0)], [death(0, 1)], known, None, 2), "left", [1], "Join")


def test_only_echoes() -> None:
    check(decide([echo(0), echo(1)], [death(0, 1)], {}, None, 4), "echo", [0, 1], "on its own node")


@pytest.mark.parametrize("kind", ["hang", "skip", "shape", "unused", "lost", "left", "stall"])
def test_what_the_watch_found_goes_before_all_else(kind: str) -> None:
    groups = [([1], "a.py:1 in f"), ([0, 2, 3], "a.py:2 in f")]
    stall = Stall(kind, [1], 5, 7.2, groups, "c1", 1, 101)
    found = decide([record(2)], [death(3, 1)], {}, stall, 4)
    check(found, kind, [1], "rank 1", "ranks 0, 2, 3: a.py:2 in f", "local rank 1, pid 101")


def test_4096_ranks_at_100_places_are_10_lines() -> None:
    groups = [(list(range(start, 4096, 100)), f"a.py:{start}") for start in range(100)]
    stall = Stall("lost", list(range(64)), 5, 30, groups, "c1", 0, 1, "host c1 is lost")
    found = decide([], [], {}, stall, 4096)
    check(found, "lost", list(range(64)), "0, 1, 2, 3, 4, 5, 6, 7 and 56 more", "other 4032 ranks", "97 other places")


def test_conclude_leaves_the_verdict_and_tells_how_to_see_it_again(tmp_path: Path) -> None:
    from ddp_examples.core.watch import main

    leave_failure(record(1), tmp_path)
    found = conclude(tmp_path, [], 2)
    assert len(found.lines) <= 10
    assert found.lines[-1].endswith(f"core.watch {tmp_path}")
    assert json.loads((tmp_path / "verdict.json").read_text())["ranks"] == [1]
    assert main([str(tmp_path)]) == 0
    assert main([]) == 2


def test_nothing_is_said_of_a_folder_without_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ddp_examples.core.watch import main

    assert main([str(tmp_path)]) == 1
    assert "nothing in" in capsys.readouterr().err
    assert not (tmp_path / "verdict.json").exists()


def test_a_trail_is_there_after_a_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.trail"
    pid = os.fork()
    if pid == 0:
        trail = Trail(path)
        trail.head({"host": "c1"})
        for step in range(100):
            trail.step = step
            trail.note(f"all_reduce [{step}]", "a.py:1")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    head, entries = read_trail(path)
    assert head == {"host": "c1"}
    assert [entry.number for entry in entries] == list(range(37, 101))
    assert entries[-1] == Entry(100, 99, "all_reduce [99]", "a.py:1")


def test_what_is_new_at_a_place_is_noted_with_what_was_usual_there() -> None:
    trail = Trail()
    for _ in range(3):
        trail.note("forward pass")
        trail.note("all_reduce [4]", "a.py:1")
    trail.note("forward pass")
    trail.note("all_reduce [5]", "a.py:1")
    assert trail.entries[-1].usual == "all_reduce [4]a.py:1"
    assert [entry.usual for entry in trail.entries[:-1]] == [""] * 7


def test_shapes_that_change_all_the_time_are_not_unusual() -> None:
    trail = Trail()
    for size in range(50):
        trail.note(f"all_gather [{size}]", "a.py:1")
    assert {entry.usual for entry in trail.entries} == {""}


def test_a_peer_whose_process_is_dead_is_found(tmp_path: Path) -> None:
    import socket

    pid = os.fork()
    if pid == 0:
        os._exit(7)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    for rank, number in ((0, os.getpid()), (1, pid), (2, os.getppid())):
        Trail(tmp_path / f"rank-{rank}.trail").head(
            {"rank": rank, "local_rank": rank, "host": socket.gethostname(), "pid": number}
        )
    try:
        assert exit_code(pid) == 7
        assert [(dead.rank, dead.code) for dead in dead_peers(tmp_path)] == [(1, 7)]
    finally:
        os.waitpid(pid, 0)
    assert exit_code(pid) == 1000
    assert sorted(read_trails(tmp_path)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/job", "job/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("0::/in/a/container", "memory.events", "oom_kill 2\n"),
        ("9:cpu,memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_out_of_memory_kills_of_either_kind_of_cgroup(line: str, file: str, text: str, tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text(line + "\n")
    assert memory_kills(tmp_path, own) is None
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert memory_kills(tmp_path, own) == 2
    assert memory_kills(tmp_path, tmp_path / "absent") is None


def test_what_a_kill_was_for(tmp_path: Path) -> None:
    assert "out of memory" in why_killed(0, 1)
    assert "not for want of memory" in why_killed(1, 1)
    assert "nobody here counts" in why_killed(None, None)
    lines = conclude(tmp_path, [replace(death(1, -9), why="out of memory")], 2).lines
    assert "  out of memory" in lines
    assert "  out of memory" not in conclude(tmp_path, [death(1, -11)], 2).lines


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(RUN, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def end_by(error: BaseException, rank: int, folder: Path) -> None:
    caught = raised(error)
    leave_record(caught, rank, rank, 5, "", folder)
    sys.excepthook(type(caught), caught, caught.__traceback__)


def test_without_a_launcher_one_rank_speaks_for_those_that_fail_alike(
    no_launcher: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (2, 0, 1):
        end_by(ValueError("boom"), rank, tmp_path)
    said = capsys.readouterr().err
    assert (said.count("Traceback"), said.count("rank 2 failed first, in step 5: ValueError: boom")) == (1, 1)
    assert "Traceback" in (tmp_path / "rank-0.log").read_text()


def test_without_a_launcher_those_that_followed_are_one_line(
    no_launcher: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_failure(record(1), tmp_path)
    for rank in (0, 2, 3):
        end_by(RuntimeError(GLOO_ECHO), rank, tmp_path)
    said = capsys.readouterr().err
    assert said == "ddp-examples: rank 0 lost a peer: rank 1 on c1 failed first, ValueError: boom\n"


def test_a_rank_that_was_killed_with_its_parent_is_named() -> None:
    """On another node, where its agent, which would have told, is gone too."""
    calls = trails(["all_reduce"], ["all_reduce"], where="train.py:9 in f")
    lost = Failure(0, 0, "c1", 100, 5, 5, "echo", "RuntimeError: Connection closed by peer", "train.py:9 in f")
    verdict = decide([lost], [], calls, None, 2)
    assert (verdict.kind, verdict.ranks, verdict.step) == ("kill", [1], 5)
    assert "rank 1 went without a word, in step 5" in verdict.lines[0]
    assert "host c1" in verdict.lines[1]
    calls[1][0]["left"] = True  # it was through
    assert decide([lost], [], calls, None, 2).kind != "kill"
