"""A demo of one's own: README's section "Your own model in four steps", done literally, block by block."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import List, NamedTuple

import pytest
from torchrun import ROOT, Result, run


class Section(NamedTuple):
    """The blocks of README's section."""

    single: str  # the script that it starts from
    mine: str  # mine.py, from the pieces of the four steps
    conf: str
    commands: List[str]


def section() -> Section:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    own = re.search(r"^## Your own model in four steps\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert own is not None
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", own[1], re.MULTILINE | re.DOTALL)
    python = [content for language, content in blocks if language == "python"]
    (conf,) = [content for language, content in blocks if language == "yaml"]
    return Section(python[0], "\n\n".join(python[1:]), conf, [text for language, text in blocks if language == "bash"])


def shell(commands: str, home: Path) -> Result:
    """`commands` as a person with that home would type them, with this Python first in PATH."""
    bin_folder = home / "bin"
    bin_folder.mkdir(exist_ok=True)
    (bin_folder / "torchrun").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    (bin_folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for program in bin_folder.iterdir():
        program.chmod(0o755)
    path = os.pathsep.join([str(bin_folder), os.environ["PATH"]])
    return run(["bash", "-euc", commands], cwd=home, env={"HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT)})


def test_the_section_leads_to_the_end(tmp_path: Path) -> None:
    single, mine, conf, (make_folder, start, other_conf) = section()
    (tmp_path / "single.py").write_text(single)
    ended = shell(f"python single.py\n{make_folder}", tmp_path)
    assert ended.status == 0, ended.output
    assert "epoch 5/5" in ended.out

    (tmp_path / "my demos" / "mine.py").write_text(mine)
    (tmp_path / "my demos" / "conf" / "demo" / "mine.yaml").write_text(conf)
    ended = shell(start, tmp_path)
    assert ended.status == 0, ended.output
    assert f"More: torchrun --nproc_per_node=4 '{tmp_path}/my demos/mine.py'" in ended.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["demo"], report["world_size"], report["config"]["seed"]) == ("mine", 2, 1)
    assert [check["passed"] for check in report["checks"]] == [True, True]

    ended = shell(other_conf, tmp_path)
    assert ended.status == 0, ended.output
    assert "epoch 2/2" in ended.out


def test_only_what_the_comments_mark_is_new() -> None:
    """The loop of the fourth step is that of the single-process script, plus lines with a comment."""
    single, mine, _, _ = section()
    old = {line.strip() for line in single.splitlines()}
    loop = re.search(r"        for x, y in loader:\n(.*?)        report\.show", mine, re.DOTALL)
    assert loop is not None
    for line in loop[1].splitlines():
        assert line.strip() in old or "  # " in line or line.strip() == "loss = loss_of(ddp, x, y)", line


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the project with mine.py among its demos."""
    for name in ("ddp_examples", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    _, mine, conf, _ = section()
    (tmp_path / "ddp_examples" / "mine.py").write_text(mine)
    (tmp_path / "conf" / "demo" / "mine.yaml").write_text(conf)
    return tmp_path


def test_in_the_package_two_files_make_a_demo(package: Path) -> None:
    listed = run([sys.executable, "-m", "ddp_examples"], cwd=package)
    assert re.search(r"^  mine +Learns to add eight numbers\.$", listed.out, re.MULTILINE)
    ended = run([sys.executable, "-m", "ddp_examples", "demo=mine", "demo.epochs=1"], cwd=package)
    assert ended.status == 0, ended.output
    assert "mine: ok, 2 of 2 checks passed" in ended.out
    wrong = run([sys.executable, "-m", "ddp_examples", "demo=mine", "demo.epohs=1"], cwd=package)
    assert wrong.status == 2
    assert "Did you mean demo.epochs?" in wrong.err
