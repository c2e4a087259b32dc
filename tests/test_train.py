"""The train demo: its pieces in memory, and a run that is stopped, killed and resized."""

import json
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Dict

import pytest
import torch
from loop_interrupt import fingerprint, interrupted, straight
from torch import nn
from torchrun import forked, local

from ddp_examples.core import exits, meter, stop, training
from ddp_examples.core.exits import Refusal
from ddp_examples.core.group import Group
from ddp_examples.core.ranks import Ranks
from ddp_examples.core.stop import StopRequest, Wish, job_end


def test_learning_rate_rises_in_the_first_tenth_and_falls_to_0() -> None:
    factors = [training.warm_up_then_cosine(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[55] == pytest.approx(0.5)
    assert 0 < factors[99] < 0.001


def test_what_is_shifted_where_does_not_depend_on_the_number_of_ranks() -> None:
    x = torch.rand(12, 64)
    alone = training.shifted(x, 3, 7, Ranks())
    for world in (2, 3, 4):
        parts = [training.shifted(x[rank::world], 3, 7, Ranks(rank, 0, world, world)) for rank in range(world)]
        for rank, part in enumerate(parts):
            assert torch.equal(part, alone[rank::world])
    assert not torch.equal(training.shifted(x, 3, 8, Ranks()), alone)


def test_shifted_images_are_moved_by_at_most_a_pixel() -> None:
    dot = torch.zeros(200, 8, 8)
    dot[:, 4, 4] = 1
    moved = training.shifted(dot.flatten(1), 0, 0, Ranks()).view(-1, 8, 8)
    places = {(int(row), int(column)) for _, row, column in moved.nonzero()}
    assert places == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}
    assert moved.sum() == 200


def test_who_waits_for_gradients_is_not_the_slow_rank() -> None:
    ended = forked(2, "waiting")
    (before, waited), (_, late) = json.loads(ended.output.splitlines()[-1])
    assert before == 0
    assert 0.02 < waited < 0.5
    assert late < waited / 2


def test_a_batch_that_can_not_be_shared_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exits, "SPEAKER_FIRST_S", 0)
    training.check_divides(48, Ranks(0, 0, 3, 3))
    for rank in (0, 1):
        with pytest.raises(SystemExit) as leaving:
            training.check_divides(50, Ranks(rank, rank, 4, 4))
        assert leaving.value.code == 2
    assert capsys.readouterr().err.count("demo.global_batch=48 can") == 1


def test_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_data.py").write_text("def load():\n    return [1, 2, 3], [4]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert training.load_data("my_data:load") == ([1, 2, 3], [4])
    for wrong in ("my_data:none", "no_such:load", "nonsense"):
        with pytest.raises(Refusal, match=f"demo.data={wrong}"):
            training.load_data(wrong)


def test_precision() -> None:
    assert training.Precision("auto", torch.device("cpu")).name == "off"
    with training.Precision("bf16", torch.device("cpu")).autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_clipping(clip: float) -> None:
    model = nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    (100 * model(torch.ones(1, 3))).sum().backward()
    training.Precision("off", torch.device("cpu")).step(torch.optim.SGD(model.parameters(), lr=1.0), model, clip)
    moved = float((model.weight.detach() - before).norm())
    assert moved == pytest.approx(0.5 if clip else 100 * 3**0.5, rel=1e-3)


def test_end_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "ask", lambda *command: "2026-01-02T03:04:05" if command[0] == "squeue" else None)
    assert job_end({}) is None
    assert job_end({"DDP_JOB_END": "17", "SLURM_JOB_END_TIME": "18"}) == 17
    assert job_end({"SLURM_JOB_END_TIME": "18"}) == 18
    assert job_end({"SLURM_JOB_ID": "5"}) == time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))
    monkeypatch.setattr(stop, "ask", lambda *_: "N/A")
    assert job_end({"SLURM_JOB_ID": "5"}) is None
    monkeypatch.undo()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_stops_all_one_step_later(
    group: Group, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "EVERY_S", 0)
    before = signal.getsignal(number)
    with StopRequest(0) as request:
        assert request.agreed() is Wish.NONE
        os.kill(os.getpid(), number)
        assert request.agreed() is Wish.NONE  # what was wished for at the call before
        assert request.agreed(save=True) is Wish.STOP
        assert request.agreed() is Wish.STOP
    assert signal.getsignal(number) is before


def test_the_end_of_the_job_is_a_wish_to_stop(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_JOB_END", str(int(time.time()) + 60))
    with StopRequest(30) as request:
        assert [request.agreed(), request.agreed()] == [Wish.NONE, Wish.NONE]
    with StopRequest(90) as request:
        assert [request.agreed(), request.agreed()] == [Wish.NONE, Wish.STOP]
    monkeypatch.undo()


def test_a_wish_to_save_is_everybodys(group: Group) -> None:
    with StopRequest(0) as request:
        assert [request.agreed(True), request.agreed(), request.agreed()] == [Wish.NONE, Wish.SAVE, Wish.NONE]


def wishes_of(
    steps: int, step_s: float, save_at: int, stop_at: int, monkeypatch: pytest.MonkeyPatch
) -> Dict[int, Wish]:
    """What is agreed on after which of the steps, each of which takes `step_s` by a clock of our own."""
    now = 0.0
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: now))
    wishes = {}
    with StopRequest(0) as request:
        for step in range(steps):
            now += step_s
            if step == stop_at:
                os.kill(os.getpid(), signal.SIGUSR1)
            wishes[step] = request.agreed(save=step == save_at)
    monkeypatch.undo()
    return {step: wish for step, wish in wishes.items() if wish}


def test_short_steps_ask_every_tenth_of_a_second_and_lose_no_wish(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = wishes_of(60, 0.0101, save_at=12, stop_at=31, monkeypatch=monkeypatch)  # asked at 0, 9, 18, 27, 36 ...
    assert wishes == {19: Wish.SAVE, 37: Wish.STOP, 46: Wish.STOP, 55: Wish.STOP}


def test_steps_of_no_time_ask_every_hundred(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wishes_of(250, 1e-6, save_at=1, stop_at=150, monkeypatch=monkeypatch) == {101: Wish.SAVE, 201: Wish.STOP}


def test_long_steps_ask_each_time(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wishes_of(5, 0.06, save_at=1, stop_at=3, monkeypatch=monkeypatch) == {2: Wish.SAVE, 4: Wish.STOP}


def test_timer(group: Group) -> None:
    timer = training.Timer(group, 0.05)
    assert not timer.due()
    time.sleep(0.06)
    assert [timer.due(), timer.due()] == [True, False]
    never = training.Timer(group, 0)
    time.sleep(0.01)
    assert not never.due()


def test_meter_counts_training_only_and_after_warm_up(group: Group, tmp_path: Path) -> None:
    watched = meter.Meter(group, tmp_path, 0, 100, 10)
    for _ in range(meter.WARM_UP):
        time.sleep(0.02)
        watched.stepped(torch.tensor(1.0), 8)
    assert watched.samples_per_s() == 0
    for _ in range(5):
        with watched.apart("evaluation"):
            time.sleep(0.1)
        time.sleep(0.01)
        watched.stepped(torch.tensor(1.0), 8)
    assert 100 < watched.samples_per_s() < 8 / 0.01
    speed = watched.samples_per_s()
    watched.note("epoch 1", loss=0.5)
    watched.close()
    assert watched.samples_per_s() == speed  # what comes after the last step, final checks for one, is no training
    [line] = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (line["step"], line["loss"]) == (10, 0.5)
    assert watched.summary()["evaluation_seconds"] == pytest.approx(0.5, abs=0.2)


def test_clock() -> None:
    assert [meter.clock(seconds) for seconds in (9.9, 125, 7509)] == ["0:09", "2:05", "2:05:09"]


def test_evaluation_counts_each_sample_once(group: Group) -> None:
    data = [(torch.tensor([float(number)]), number % 2) for number in range(300)]

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([1 - x[:, 0] % 2, x[:, 0] % 2], dim=1)

    assert training.evaluate(Odd(), data, group) == (1.0, 300)  # type: ignore[arg-type]


def test_interrupted_runs_end_as_the_straight_one(tmp_path: Path) -> None:
    """By SIGTERM to the launcher, and by SIGKILL to a rank, which is started again. All ways: loop_interrupt.py."""
    rng = random.Random(5)
    for name in ("straight", "term", "rank"):
        (tmp_path / name).mkdir()
    wanted = straight(tmp_path / "straight", 2)
    assert interrupted(tmp_path / "term", 2, "term", rng) == [75, 0], (tmp_path / "term" / "log").read_text()
    assert fingerprint(tmp_path / "term") == wanted
    assert interrupted(tmp_path / "rank", 2, "rank", rng) == [0], (tmp_path / "rank" / "log").read_text()
    assert fingerprint(tmp_path / "rank") == wanted


def test_resized_in_mid_run(tmp_path: Path) -> None:
    """4, 2, 3, 1 ranks, each stopped in the middle of an epoch, end within 1e-5 of the loss of the straight run."""
    settings = ["demo.epochs=2", "report=report.json", f"checkpoint.path={tmp_path}/c"]
    for ranks, steps in ((4, 9), (2, 13), (3, 17), (1, 10**6)):
        ended = forked(ranks, "stopped_train", str(steps), *settings, cwd=tmp_path)
        assert ended.status == (0 if ranks == 1 else 75), ended.output
    resized = last_loss(tmp_path / "c")
    ended = local("-n", "2", "demo=train", "demo.epochs=2", f"checkpoint.path={tmp_path}/s", cwd=tmp_path)
    assert ended.status == 0, ended.output
    assert resized == pytest.approx(last_loss(tmp_path / "s"), abs=1e-5)


def last_loss(folder: Path) -> float:
    loss: float = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    return loss


def test_a_restart_that_fails_at_the_same_step_is_not_tried_a_third_time(tmp_path: Path) -> None:
    ended = local("-n", "2", "--max-restarts=5", "demo=faults", "demo.kind=raise", "demo.rank=1", cwd=tmp_path)
    assert ended.status == 1
    assert ended.out.count("faults: 2 ranks") == 2, ended.output
    assert "rank 1 failed first, in step 5" in ended.err
