"""The conf tree and key=value arguments. Nothing here imports torch for the sake of the config."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import pytest
from torchrun import ROOT

from ddp_examples.core import exits
from ddp_examples.core.config import Config, ConfigError, build_config, key_types, load_config
from ddp_examples.core.demos import DemoFile, commented_keys, demos, help_text
from ddp_examples.core.ranks import Ranks


@dataclass(frozen=True)
class Params:
    steps: int
    lr: float
    name: str
    note: Optional[str]
    fast: bool

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("demo.steps must be at least 1")


SOURCE = '''"""A demo of one's own: says little.

And more.
"""
from dataclasses import dataclass
from typing import Optional
import torch_is_not_imported_here

@dataclass(frozen=True)
class Params:
    steps: int
    lr: float
    name: str
    note: Optional[str]
    fast: bool
'''


@pytest.fixture
def demo(tmp_path: Path) -> DemoFile:
    """mine.py with conf/demo/mine.yaml, in a folder with a space in its name."""
    folder = tmp_path / "a b"
    (folder / "conf" / "demo").mkdir(parents=True)
    (folder / "mine.py").write_text(SOURCE)
    (folder / "conf" / "demo" / "mine.yaml").write_text(
        "steps: 3 # optimizer steps\nlr: 1e-3 # learning rate\nname: x # of the run\n"
        "note: null # free text\nfast: false # or not\n"
    )
    return DemoFile(folder / "mine.py")


def build(demo: DemoFile, *argv: str) -> Config:
    return build_config(demo, Params, argv)


def fault(demo: DemoFile, *argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        build(demo, *argv)
    return str(error.value)


def test_defaults_come_from_the_files(demo: DemoFile) -> None:
    config = build(demo)
    assert config.name == "mine"
    assert config.demo == Params(steps=3, lr=1e-3, name="x", note=None, fast=False)
    assert config.backend.name == "auto"


def test_values_and_choices_in_any_order(demo: DemoFile) -> None:
    for argv in (["backend=nccl", "backend.timeout_s=5"], ["backend.timeout_s=5", "backend=nccl"]):
        config = build(demo, "demo.lr=1e-2", *argv, "demo.fast=true")
        assert (config.backend.name, config.backend.timeout_s) == ("nccl", 5.0)
        assert (config.demo.lr, config.demo.fast) == (0.01, True)


@pytest.mark.parametrize("text", ["off", "1:30:00", "12e3456", "null", "007", "a=b", "a b", "{", "1e-3", "#x"])
def test_a_str_is_what_was_typed(demo: DemoFile, text: str) -> None:
    assert build(demo, f"demo.name={text}").demo.name == text


def test_null_of_an_optional_str(demo: DemoFile) -> None:
    assert build(demo, "demo.note=off").demo.note == "off"
    assert build(demo, "demo.note=null").demo.note is None
    assert build(demo, "demo.note=").demo.note is None


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("demo.stpes=3", "demo.steps"),
        ("steps=3", "demo.steps"),
        ("stpes=3", "demo.steps"),
        ("timeout_s=5", "backend.timeout_s"),
        ("checkpoint.kep=3", "checkpoint.keep"),
        ("sed=1", "seed"),
        ("backend=ncll", "backend=nccl"),
        ("backend=NCCL", "backend=nccl"),
        ("nccl", "backend=nccl"),
        ("--backend=gloo", "backend=gloo"),
        ("--seed", "seed"),
    ],
)
def test_a_slip_is_refused_with_the_nearest_right_one(demo: DemoFile, argument: str, nearest: str) -> None:
    message = fault(demo, argument)
    assert argument.partition("=")[0] in message
    assert nearest in message.replace(argument, "", 1)


@pytest.mark.parametrize(
    "argument",
    [
        "demo.steps=abc",
        "demo.steps=3.5",
        "demo.steps=true",
        "demo.steps=",
        "demo.steps=null",
        "demo.steps=0",
        "demo.steps=[1,2]",
        "demo.lr=12e3456",
        "demo.lr=nan",
        "demo.lr={",
        "demo.lr=${nope}",
        "demo.fast=maybe",
        "seed=-1",
        "seed=x",
        "checkpoint.keep=1",
        "backend.timeout_s=0",
        "backend.timeout_s=inf",
        "launch.start=fork",
        "report=/",
        "word",
        "=3",
    ],
)
def test_a_wrong_value_is_refused_in_one_line(demo: DemoFile, argument: str) -> None:
    message = fault(demo, argument)
    key = argument.partition("=")[0]
    assert key in message
    assert "\n" not in message


def test_another_demo_is_refused_with_the_command_for_it(demo: DemoFile) -> None:
    assert "-m ddp_examples demo=basic" in fault(demo, "demo=basic")


def test_a_missing_value_is_named(demo: DemoFile) -> None:
    (demo.path.parent / "conf" / "demo" / "mine.yaml").write_text("lr: 1\nname: x\nnote: null\nfast: false\n")
    assert "demo.steps" in fault(demo)
    assert build(demo, "demo.steps=2").demo.steps == 2


def test_a_wrong_key_in_a_file_names_the_file(demo: DemoFile) -> None:
    file = demo.path.parent / "conf" / "demo" / "mine.yaml"
    file.write_text(file.read_text() + "stpes: 4\n")
    message = fault(demo)
    assert str(file) in message
    assert "stpes" in message
    file.write_text("a: [")
    assert str(file) in fault(demo)


def test_own_folder_wins_key_by_key(demo: DemoFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    (own / "backend").mkdir(parents=True)
    (own / "config.yaml").write_text("seed: 7\nbackend: gloo\n")
    (own / "backend" / "gloo.yaml").write_text("timeout_s: 9\n")
    monkeypatch.setenv("DDP_EXAMPLES_CONF", str(own))
    config = build(demo)
    assert (config.seed, config.backend.name, config.backend.timeout_s, config.checkpoint.keep) == (7, "gloo", 9.0, 2)
    assert "seed                  7" in help_text(demo) or "  7  " in help_text(demo)


def test_relative_paths_start_where_the_command_is_typed(
    demo: DemoFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = build(demo, "report=r.json", "checkpoint.path=c d/e")
    assert config.report == str(tmp_path / "r.json")
    assert config.checkpoint.path == str(tmp_path / "c d" / "e")
    monkeypatch.undo()


def test_a_mistake_is_said_by_rank_0_and_ends_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddp_examples.basic import Params as BasicParams

    monkeypatch.setattr(exits, "SPEAKER_FIRST_S", 0)
    for rank in range(3):
        with pytest.raises(SystemExit) as leaving:
            load_config(BasicParams, ["demo.epohs=3"], Ranks(rank, rank, 3, 3, True))
        assert leaving.value.code == 2
    assert capsys.readouterr().err.count("demo.epochs") == 1
    monkeypatch.undo()


def test_local_rank_of_older_launchers_is_ignored_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from ddp_examples.basic import Params as BasicParams

    for _ in range(2):  # before torch is imported, and in main
        config = load_config(BasicParams, ["--local-rank=0", "seed=3"], Ranks())
        assert config.seed == 3
    assert capsys.readouterr().err.count("--local-rank=0 ignored") == 1


def test_help_lists_every_key_with_value_and_meaning() -> None:
    for demo in demos().values():
        rows = help_text(demo).splitlines()
        for key in key_types(demo.params()):
            row = next(line for line in rows if line.strip().startswith(key + " "))
            assert len(row.split(maxsplit=2)) == 3, f"{demo.name}: {key} has no meaning in its conf file"
        assert next(line for line in rows if line.startswith("  demo ")).split()[1] == demo.name


def test_comments_behind_keys() -> None:
    text = "a: 1 # one\nb:\n  c: 'x # y' # two\n  d: 3\ne: [1, 2] # three\n"
    assert commented_keys(text) == [
        ("a", "1", "one"),
        ("b.c", "'x # y'", "two"),
        ("b.d", "3", ""),
        ("e", "[1, 2]", "three"),
    ]


def test_params_from_the_source_without_importing_it(demo: DemoFile) -> None:
    assert demo.about == "A demo of one's own: says little."
    assert build_config(demo, demo.params(), ["demo.steps=5"]).demo.steps == 5


def test_a_file_without_params_is_no_demo(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("pass\n")
    with pytest.raises(NameError, match="no class Params"):
        DemoFile(tmp_path / "x.py").params()


@pytest.mark.parametrize("start", [["-m", "ddp_examples.basic"], ["-m", "ddp_examples", "demo=basic"]])
def test_a_wrong_key_is_told_before_torch_is_imported(start: list, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", *start, "demo.epohs=3"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ended.returncode == 2
    imported = {
        line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")
    }
    assert "omegaconf" in imported
    assert not [name for name in imported if name.partition(".")[0] == "torch"]
    assert [line for line in ended.stderr.splitlines() if line.startswith("ddp-examples:")] == [
        "ddp-examples: demo.epohs=3: unknown key demo.epohs. Did you mean demo.epochs?"
    ]


def test_an_unknown_demo_names_the_nearest() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "ddp_examples", "demo=basik"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "demo=basic" in ended.stderr
