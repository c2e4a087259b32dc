"""Checkpoints: whole or not there, altered ones found, one owner, the same numbers after a resume."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator

import pytest
import torch
from loop_kill import kill_while_saving
from torch.nn.parallel import DistributedDataParallel
from torchrun import ROOT, local, run

from ddp_examples.core import checkpoints as checkpoints_module
from ddp_examples.core import owner, stored
from ddp_examples.core.checkpoints import CheckpointDir, load_model, main, model_state, rng_states, same_run
from ddp_examples.core.exits import Refusal
from ddp_examples.core.group import Group
from ddp_examples.core.stored import CheckpointError, checkpoint_files, fault, refuse_unloadable, save_file

CPU = torch.device("cpu")
STATE: Dict[str, Any] = {"model": {"w": torch.arange(1000.0)}, "next_epoch": 3, "world_size": 1}

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    with CheckpointDir(str(tmp_path / "c")) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {**STATE, "next_epoch": step})
    return tmp_path / "c"


def loaded_step(folder: Path) -> int:
    with CheckpointDir(str(folder)) as checkpoints:
        state = checkpoints.load(CPU)
    assert state is not None
    return int(state["next_epoch"])


def names(folder: Path) -> list:
    return sorted(path.name for path in folder.iterdir() if path.name != ".owner")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_saved_is_loaded_and_the_oldest_go(tmp_path: Path, mode: str) -> None:
    with CheckpointDir(str(tmp_path), keep=2, mode=mode) as checkpoints:
        assert checkpoints.load(CPU) is None
        for step in range(5):
            checkpoints.save(step, {**STATE, "next_epoch": step})
    assert [stored.step_of(path) for path in checkpoint_files(tmp_path)] == [4, 3]
    assert loaded_step(tmp_path) == 4
    plain = torch.load(checkpoint_files(tmp_path)[0])  # without this project
    assert torch.equal(plain["model"]["w"], STATE["model"]["w"])


def test_async_saves_what_was_there_when_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(1000)
    go_on = __import__("threading").Event()

    def late(*arguments: Any) -> Path:
        go_on.wait(10)
        return save_file(*arguments)

    monkeypatch.setattr(checkpoints_module, "save_file", late)
    with CheckpointDir(str(tmp_path), mode="async") as checkpoints:
        checkpoints.save(1, {"w": weight})
        weight += 1  # training goes on
        go_on.set()
        state = checkpoints.load(CPU)
    assert state is not None
    assert torch.equal(state["w"], torch.zeros(1000))
    monkeypatch.undo()


@pytest.mark.parametrize("when", ["next save", "end"])
def test_a_failure_in_the_background_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def full(*_: Any) -> None:
        raise CheckpointError("disk full")

    monkeypatch.setattr(checkpoints_module, "save_file", full)
    with pytest.raises(CheckpointError, match="disk full"), CheckpointDir(str(tmp_path), mode="async") as checkpoints:
        checkpoints.save(1, STATE)
        if when == "next save":
            checkpoints.save(2, STATE)
            pytest.fail("the first failure was lost")
    monkeypatch.undo()


def test_one_flipped_byte_is_found_wherever_it_is(two: Path) -> None:
    newest, before = checkpoint_files(two)
    whole = newest.read_bytes()
    rng = random.Random(0)
    for position in [0, len(whole) - 1, *rng.sample(range(len(whole)), 50)]:
        altered = bytearray(whole)
        altered[position] ^= 1 << rng.randrange(8)
        newest.write_bytes(altered)
        assert "altered" in fault(newest), position
    newest.write_bytes(whole)
    assert fault(newest) == ""
    assert fault(before) == ""


def test_a_cut_file_is_found_at_any_length(two: Path) -> None:
    newest = checkpoint_files(two)[0]
    whole = newest.read_bytes()
    rng = random.Random(0)
    for length in [0, 1, len(whole) - 1, *rng.sample(range(len(whole)), 20)]:
        newest.write_bytes(whole[:length])
        assert fault(newest), length
    newest.write_bytes(whole + b"\0")
    assert fault(newest)


def test_the_checksum_tells_swapped_and_missing_blocks(tmp_path: Path) -> None:
    blocks = [os.urandom(stored.BLOCK) for _ in range(3)]
    codes = set()
    for order in ([0, 1, 2], [1, 0, 2], [0, 1], [0, 1, 2, 2]):
        file = tmp_path / "f"
        file.write_bytes(b"".join(blocks[i] for i in order) + b"tail")
        codes.add(stored.digest(file))
    assert len(codes) == 4


@pytest.mark.parametrize("damage", ["empty", "cut", "flip"])
def test_a_bad_newest_is_named_set_aside_and_the_one_before_is_used(
    two: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoint_files(two)[0]
    data = bytearray(newest.read_bytes())
    data[100] ^= 1
    newest.write_bytes({"empty": b"", "cut": bytes(data[:50]), "flip": bytes(data)}[damage])
    assert loaded_step(two) == 1
    said = capsys.readouterr().err
    assert said.count(str(newest)) == 1
    assert "empty" in said if damage == "empty" else "altered" in said
    assert newest.with_name(newest.name + ".bad").exists()
    assert loaded_step(two) == 1
    assert capsys.readouterr().err == ""


def test_when_none_is_whole_all_are_listed_and_nothing_is_touched(two: Path) -> None:
    for path in checkpoint_files(two):
        path.write_bytes(b"")
    before = names(two)
    with pytest.raises(CheckpointError) as error:
        loaded_step(two)
    assert all(str(path) in str(error.value) for path in checkpoint_files(two))
    assert names(two) == before


def test_parts_of_dead_runs_are_removed(two: Path) -> None:
    (two / "step_00000009.123.part").write_bytes(b"half")
    assert loaded_step(two) == 2
    assert not list(two.glob("*.part"))


class Number(float):
    """As numpy.float64: a float, and not one that loads."""


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": {"b": [1, Path("x")]}}, "state.a.b[1]"),
        ({"lr": Number(1)}, "state.lr"),
        ({"a": {1, 2}}, "state.a"),
        ({"a": {(1, 2): 3}}, "state.a has the key (1, 2)"),
        ({"a": lambda: 0}, "state.a"),
        ({"a": torch.device("cpu")}, "state.a"),
    ],
)
def test_what_would_not_load_is_refused_when_it_is_saved(tmp_path: Path, value: Any, where: str) -> None:
    with CheckpointDir(str(tmp_path)) as checkpoints:
        with pytest.raises(CheckpointError) as error:
            checkpoints.save(1, value)
        assert where in str(error.value)
        assert checkpoints.load(CPU) is None
    assert names(tmp_path) == []


def test_a_dict_config_is_refused() -> None:
    from omegaconf import OmegaConf

    with pytest.raises(CheckpointError, match=r"state.config is a omegaconf"):
        refuse_unloadable({"config": OmegaConf.create({"a": 1})})


def test_what_is_allowed_loads(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": random.getstate(),
        "rng": rng_states(),
        "plain": [None, True, 1, 1.5, "a", b"b", (1, [2])],
        "parameter": model.weight,
    }
    path = save_file(tmp_path, "step_00000001", state)
    assert fault(path) == ""
    random.setstate(torch.load(path)["random"])


def test_wrapped_and_bare_models_load_from_each_other() -> None:
    bare = torch.nn.Sequential(torch.nn.Linear(2, 2))
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    load_model(ddp, bare.state_dict())
    assert torch.equal(ddp.module[0].weight, bare[0].weight)
    with torch.no_grad():
        bare[0].weight += 1
    load_model(ddp, {f"module.{name}": value for name, value in bare.state_dict().items()})
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    load_model(other, ddp.state_dict())
    assert torch.equal(other[0].weight, bare[0].weight)
    assert list(model_state(ddp)) == list(bare.state_dict())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.nn.Sequential(torch.nn.Linear(2, 3)), "0.weight is (3, 2) there and (2, 2) here"),
        (torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)), "it has no 0.bias"),
        (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), "it has 1."),
    ],
)
def test_another_model_is_refused_with_the_first_difference(other: torch.nn.Module, said: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    before = model[0].weight.clone()
    with pytest.raises(CheckpointError) as error:
        load_model(model, other.state_dict())
    assert said in str(error.value)
    assert torch.equal(model[0].weight, before)


def test_another_run_is_refused() -> None:
    same_run({"lr": 1}, {"lr": 1})
    with pytest.raises(CheckpointError, match=r"lr was 1 and is 2.*checkpoint.path"):
        same_run({"lr": 1}, {"lr": 2})


HOLD = """
import sys, time
from pathlib import Path
from ddp_examples.core.owner import Owner
owner = Owner.take(Path(sys.argv[1]) / ".owner")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_and_told_of_the_holder(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    with pytest.raises(Refusal) as error:
        CheckpointDir(str(tmp_path))
    assert f"process {holder.pid} on " in str(error.value)
    assert ", started 20" in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_dead_holder_is_taken_over_with_a_line(
    tmp_path: Path, holder: "subprocess.Popen[str]", capsys: pytest.CaptureFixture[str]
) -> None:
    holder.kill()
    holder.wait()
    with CheckpointDir(str(tmp_path)) as checkpoints:
        assert checkpoints.load(CPU) is None
    assert f"process {holder.pid}" in capsys.readouterr().err
    with CheckpointDir(str(tmp_path)):
        pass
    assert capsys.readouterr().err == "", "released, so nothing was taken over"


@pytest.mark.parametrize("age", [0, 3600])
def test_a_holder_on_another_host_counts_as_long_as_it_beats(tmp_path: Path, age: int) -> None:
    file = tmp_path / ".owner"
    file.write_text(json.dumps({"host": "c101-002", "pid": 1, "started": "2026-01-01T00:00:00"}))
    now = file.stat().st_mtime
    os.utime(file, (now - age, now - age))
    if age < owner.STALE_S:
        with pytest.raises(Refusal, match="process 1 on c101-002"):
            CheckpointDir(str(tmp_path))
    else:
        with CheckpointDir(str(tmp_path)):
            pass


@pytest.mark.parametrize("path", ["/dev/null", "/dev/null/x", "/proc/x"])
def test_a_path_that_can_not_be_a_folder(path: str) -> None:
    with pytest.raises(CheckpointError) as error:
        CheckpointDir(path)
    assert path in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_parent_is_made(tmp_path: Path) -> None:
    with CheckpointDir(str(tmp_path / "a" / "b c")) as checkpoints:
        checkpoints.save(1, STATE)
    assert loaded_step(tmp_path / "a" / "b c") == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs: needs root")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_is_told_with_bytes_and_the_older_ones_load(tmp_path: Path, mode: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount")
    try:
        big = {**STATE, "big": torch.zeros(300_000)}
        with pytest.raises(CheckpointError) as error, CheckpointDir(str(disk / "c"), mode=mode) as checkpoints:
            checkpoints.save(1, STATE)
            checkpoints.save(2, big)
        message = str(error.value)
        assert "No space left" in message
        assert f"{stored.nbytes(big):,} bytes are needed" in message
        assert str(disk / "c") in message
        assert loaded_step(disk / "c") == 3
        assert len(names(disk / "c")) == 1, "no .part is left"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a folder read-only: needs root")
def test_a_read_only_folder(two: Path) -> None:
    if subprocess.run(["mount", "--bind", "-o", "ro", str(two), str(two)], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(two)], check=True)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            CheckpointDir(str(two))
    finally:
        subprocess.run(["umount", str(two)], check=True)


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with pytest.raises(CheckpointError, match="not there any more"), CheckpointDir(str(folder)) as checkpoints:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        checkpoints.save(1, STATE)


def test_the_list_for_a_person(two: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_files(two)[0].write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["checkpoints", str(two)])
    assert main() == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[0] == "2"
    assert rows[1].endswith("empty")
    assert rows[2].split()[0] == "1"
    assert rows[2].endswith("1  whole")
    monkeypatch.setattr(sys, "argv", ["checkpoints", "/nowhere"])
    assert main() == 2
    monkeypatch.undo()


def test_the_demo_goes_on_is_resized_and_ends(tmp_path: Path) -> None:
    """4 ranks, then 2, then 4 end as 4 without an interruption; a finished run has nothing left to do."""
    losses = {}
    for path, starts in {"resized": [(4, 2), (2, 4), (4, 6), (2, 6)], "straight": [(4, 6)]}.items():
        for ranks, epochs in starts:
            settings = [f"demo.epochs={epochs}", f"checkpoint.path={path}", "report=r.json"]
            ended = local("-n", str(ranks), "demo=checkpoint", *settings, cwd=tmp_path)
            assert ended.status == 0, ended.output
            report = json.loads((tmp_path / "r.json").read_text())
            if epochs == 6 and "loss" in report["metrics"]:
                losses[path] = report["metrics"]["loss"]
        if path == "resized":
            assert "nothing left to do" in ended.out
            assert len(report["checks"]) == 1
    assert abs(losses["resized"] - losses["straight"]) < 1e-6
    other = local("-n", "2", "demo=checkpoint", "demo.lr=0.1", "checkpoint.path=straight", cwd=tmp_path)
    assert other.status == 1
    assert other.output.count("lr was 0.5 and is 0.1") == 1
    assert "Traceback" not in other.output
    indivisible = local("-n", "3", "demo=checkpoint", cwd=tmp_path)
    assert indivisible.status == 2
    assert "126" in indivisible.output


def test_killed_while_saving_nothing_is_lost(tmp_path: Path) -> None:
    """10 of the 100 kills of loop_kill.py, with a small state."""
    outcome = kill_while_saving(tmp_path, kills=10, megabytes=4, seed=0)
    assert outcome["lost"] == 0, outcome
    assert outcome["corrupt"] == 0, outcome
    assert outcome["left over"] == 0, outcome
    assert outcome["kills"] == 10
    assert outcome["while saving"] > 0, "no kill came while a save was under way: the test did not test"


def test_the_demo_alone(tmp_path: Path, group: Group) -> None:
    del group
    ended = run([sys.executable, "-m", "ddp_examples.checkpoint", "demo.epochs=1"], cwd=tmp_path)
    assert ended.status == 0, ended.output
    assert (tmp_path / "checkpoints" / "checkpoint").is_dir()
