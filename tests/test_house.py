"""The house: imports go down only, and what README and the conf files promise is there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest
from floors import all_faults, faults
from torchrun import ROOT

from ddp_examples.core.config import build_config
from ddp_examples.core.demos import demos
from ddp_examples.core.launch import parse_arguments
from ddp_examples.core.ranks import Ranks
from ddp_examples.core.runs import planned_runs

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL_WORDS = {
    "cd",
    "git",
    "pip",
    "python3",
    "ssh",
    "scp",
    "export",
    "module",
    "sbatch",
    "squeue",
    "scancel",
    "idev",
    "tail",
}


def test_imports_go_down_only() -> None:
    assert all_faults(ROOT / "ddp_examples") == {}


@pytest.mark.parametrize(
    ("name", "source", "is_demo"),
    [
        ("ranks", "import torch", False),
        ("config", "if True:\n    import torch.nn", False),
        ("group", "from omegaconf import OmegaConf", False),
        ("group", "from ddp_examples.core import report", False),
        ("config", "from ddp_examples.core.agent import run_agent", False),
        ("report", "import ddp_examples.basic", False),
        ("mine", "from ddp_examples.basic import Params", True),
        ("mine", "from ddp_examples.core.node import main", True),
        ("unheard_of", "", False),
    ],
)
def test_an_import_that_goes_up_is_found(name: str, source: str, is_demo: bool) -> None:
    assert faults(name, source, is_demo)


def test_what_may_be_imported_is_not_a_fault() -> None:
    assert faults("mine", "import torch\nfrom ddp_examples.core import report, verify", is_demo=True) == []
    assert faults("node", "def main():\n    import torch", is_demo=False) == []


def commands() -> List[str]:
    """The lines of README's shell blocks, and what stands in backticks and begins like a command."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")]
    inline = re.findall(r"`((?:torchrun|launch/\w+\.sh|python -m ddp_examples)[^`\n]*)`", README)
    return list(dict.fromkeys([*lines, *inline]))


def settings_of(words: List[str]) -> List[str]:
    """The settings of a command of README, as far as it starts one of our demos."""
    if words[0] in ("launch/local.sh", "launch/slurm.sh", "launch/frontera.sh"):
        return [setting for setting in parse_arguments(words[1:])[1] if setting != "--setup"]
    return [word for word in words if "=" in word and not word.startswith("-") and "[" not in word]


@pytest.mark.parametrize("command", commands())
def test_a_command_of_readme_exists_and_its_settings_are_right(command: str) -> None:
    words = shlex.split(command, comments=True)
    program = words[0]
    assert program in SHELL_WORDS | {"torchrun", "python"} or (ROOT / program).is_file(), program
    modules = [words[index + 1] for index, word in enumerate(words) if word == "-m"]
    for module in modules:
        file = ROOT / (module.replace(".", "/") + ".py")
        assert file.is_file() or (file.with_suffix("") / "__main__.py").is_file(), module
    if program in SHELL_WORDS:
        return
    settings = settings_of(words)
    named = [module.rpartition(".")[2] for module in modules if module.rpartition(".")[2] in demos()]
    chosen = [setting[len("demo=") :] for setting in settings if setting.startswith("demo=")]
    if chosen == ["all"]:
        planned_runs(settings, Ranks())
        return
    demo = demos()[(chosen or named or ["basic"])[0]]
    if "--help" not in words:
        build_config(demo, demo.params(), settings)


def test_readme_has_commands() -> None:
    assert {"launch/local.sh", "launch/test.sh"} <= set(commands())


def test_links_of_readme() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert "://" in target or (ROOT / target).exists(), target


def test_every_demo_is_in_readme_with_conf_and_meaning() -> None:
    for name, demo in demos().items():
        assert f"](ddp_examples/{name}.py)" in README
        assert demo.about
        assert demo.conf_files(f"demo/{name}.yaml")
        assert "report.finish(" in demo.path.read_text(), f"{name} ends without checks"


def test_scripts_are_executable_and_name_no_place_of_anyones() -> None:
    for script in [*ROOT.glob("launch/*.sh"), ROOT / ".ci" / "run"]:
        assert script.name == "common.sh" or script.stat().st_mode & 0o111, script
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for name in tracked or ["README.md"]:
        text = (ROOT / name).read_bytes()
        assert b"/home/" not in text.replace(b"/home/[", b"") or Path(name).suffix in (".gz", ".py"), name


def test_the_list_of_demos_is_printed_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ddp_examples"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0
    assert " torch\n" not in ended.stderr
