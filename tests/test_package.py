"""The package as a package: what is in it, that it works where it is installed, and that its demos are complete."""

import ast
import dataclasses
import sys
import zipfile
from pathlib import Path
from typing import Dict

import pytest
from torchrun import ROOT, run

import ddp_examples
from ddp_examples.core.demos import DemoFile, commented_keys, demos

NAME = f"ddp_examples-{ddp_examples.__version__}"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of the tree, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    build("sdist", ROOT, folder)
    assert run(["tar", "-xzf", f"{NAME}.tar.gz"], cwd=folder).status == 0
    return folder / NAME


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution as pip does it, so that what this lacks is missed."""
    folder = tmp_path_factory.mktemp("wheel")
    build("wheel", sdist, folder)
    return folder / f"{NAME}-py3-none-any.whl"


def build(target: str, source: Path, folder: Path) -> None:
    """Without a network: the backend itself, in no environment of its own."""
    pytest.importorskip("hatchling")
    ended = run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)], cwd=source)
    assert ended.status == 0, ended.output


def files_in(folder: Path) -> Dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def test_sdist_has_the_tree(sdist: Path) -> None:
    for folder in ("conf", "ddp_examples", "launch"):
        assert files_in(sdist / folder) == files_in(ROOT / folder)
    assert (sdist / "launch" / "local.sh").stat().st_mode & 0o111
    assert {"README.md", "LICENSE", "pyproject.toml"} <= {file.name for file in sdist.iterdir()}


def test_wheel_has_the_package_with_conf_and_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        shipped = {name[len("ddp_examples/") :]: archive.read(name) for name in names}
    assert all(name.startswith("ddp_examples/") for name in names)
    conf = {f"conf/{name}": content for name, content in files_in(ROOT / "conf").items()}
    assert shipped == {**files_in(ROOT / "ddp_examples"), **conf}


def test_metadata_agree_with_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(f"{NAME}.dist-info/METADATA").decode().splitlines()
    assert f"Version: {ddp_examples.__version__}" in lines
    assert "Requires-Python: >=3.9" in lines
    needed = {line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line}
    assert {need.split(">")[0].split(";")[0].strip() for need in needed} == {"torch", "omegaconf", "importlib-metadata"}


def test_installed_wheel_runs_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    installed = run([*pip, "--target", str(site), str(wheel)], cwd=tmp_path)
    assert installed.status == 0, installed.output
    command = [sys.executable, "-m", "ddp_examples", "demo=basic"]
    ended = run([*command, "demo.epochs=1"], cwd=Path("/"), env={"PYTHONPATH": str(site)})
    assert ended.status == 0, ended.output
    assert "basic: ok, 4 of 4 checks passed" in ended.out
    told = run([*command, "--help"], cwd=Path("/"), env={"PYTHONPATH": str(site)})
    assert told.out.splitlines()[-1].strip() == str(site / "ddp_examples" / "conf")


@pytest.mark.parametrize("demo", demos().values(), ids=list(demos()))
def test_a_demo_is_complete(demo: DemoFile) -> None:
    assert demo.about.endswith(".")
    assert f"-m ddp_examples.{demo.name}" in (ast.get_docstring(ast.parse(demo.path.read_text())) or "")
    assert missing_meanings(demo) == {}


def missing_meanings(demo: DemoFile) -> Dict[str, str]:
    """What is wrong with the keys of a demo, by key: none for one of Params, no meaning, no such field."""
    (conf,) = demo.conf_files(f"demo/{demo.name}.yaml")
    meanings = {key: meaning for key, _, meaning in commented_keys(conf.read_text(encoding="utf-8"))}
    fields = {field.name for field in dataclasses.fields(demo.params())}
    wrong = dict.fromkeys(fields - set(meanings), "not in the conf file")
    wrong.update(dict.fromkeys(set(meanings) - fields, "not in Params"))
    wrong.update({key: "no meaning" for key in fields & set(meanings) if len(meanings[key].split()) < 2})
    return wrong


def test_a_key_without_meaning_is_found(tmp_path: Path) -> None:
    (tmp_path / "conf" / "demo").mkdir(parents=True)
    (tmp_path / "conf" / "demo" / "mine.yaml").write_text("a: 1\nb: 2 # is said\nd: 3 # is said\n")
    source = "@dataclass(frozen=True)\nclass Params:\n    a: int\n    b: int\n    c: int\n"
    (tmp_path / "mine.py").write_text(source)
    wrong = missing_meanings(DemoFile(tmp_path / "mine.py"))
    assert wrong == {"a": "no meaning", "c": "not in the conf file", "d": "not in Params"}
