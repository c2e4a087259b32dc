"""Which demos there are, and what their sources and conf files say. Imports no demo, and with it torch: 1.1 s."""

import ast
import dataclasses
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Tuple, Type

import yaml

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class DemoFile:
    """A demo as its source shows it: `DemoFile(Path("mine.py")).about`."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def module(self) -> str:
        """What stands behind `-m` or `torchrun` to run it."""
        return f"-m {PACKAGE.name}.{self.name}" if self.path.parent == PACKAGE else str(self.path)

    @property
    def about(self) -> str:
        """First line of the docstring."""
        return (ast.get_docstring(self._tree()) or "").partition("\n")[0]

    @property
    def in_all(self) -> bool:
        """Whether demo=all runs it; a demo that breaks on purpose says `IN_ALL = False` at its top level."""
        lines = (ast.unparse(node) for node in self._tree().body if isinstance(node, ast.Assign))
        return "IN_ALL = False" not in lines

    @property
    def conf_folders(self) -> List[Path]:
        """Where its conf files are looked for; of two files of one name, keys in the earlier folder win."""
        own = os.environ.get("DDP_EXAMPLES_CONF")
        shipped = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
        folders = [Path(own).absolute()] if own else []
        return [folder for folder in dict.fromkeys([*folders, self.path.parent / "conf", shipped]) if folder.is_dir()]

    def conf_files(self, name: str) -> List[Path]:
        """The files `name` ("config.yaml", "demo/basic.yaml") in the conf folders that have one, in their order."""
        return [folder / name for folder in self.conf_folders if (folder / name).is_file()]

    def params(self) -> Type[Any]:
        """The class Params, made without the module around it.

        So Params may use builtins, `dataclasses` and `typing` only: another name is a NameError here.
        """
        for node in self._tree().body:
            if isinstance(node, ast.ClassDef) and node.name == "Params":
                scope: Dict[str, Any] = {**vars(typing), **vars(dataclasses), "__name__": __name__}
                scope.update(typing=typing, dataclasses=dataclasses)
                exec(compile(ast.Module([node], []), str(self.path), "exec", dont_inherit=True), scope)
                return typing.cast("Type[Any]", scope["Params"])
        raise NameError(f"{self.path} has no class Params, so it is no demo")

    def _tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))


def demos() -> Dict[str, DemoFile]:
    """The demos of this package by name: the modules beside core."""
    return {path.stem: DemoFile(path) for path in sorted(PACKAGE.glob("[!_]*.py"))}


def help_text(demo: DemoFile) -> str:
    """What `--help` prints: how to start, and each key with its value as the conf files have it, and its meaning."""
    keys: Dict[str, Tuple[str, str]] = {}
    for name in ("config.yaml", "backend/auto.yaml", f"demo/{demo.name}.yaml"):
        group = name.partition("/")[0] + "." if "/" in name else ""
        for path in reversed(demo.conf_files(name)):
            for key, value, meaning in commented_keys(path.read_text(encoding="utf-8")):
                keys[group + key] = (value, meaning or keys.get(group + key, ("", ""))[1])
    keys["demo"] = (demo.name, keys["demo"][1])  # this one's help, whatever config.yaml takes where none is named
    rows = [("key", "value", "meaning"), *((key, *value) for key, value in keys.items())]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    table = [f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {meaning}".rstrip() for key, value, meaning in rows]
    start = f"torchrun --nproc_per_node=4 {demo.module} [group=choice | key=value ...]"
    folders = [f"  {folder}" for folder in demo.conf_folders]
    return "\n".join(
        [f"{demo.name}: {demo.about}", "", f"  {start}", "", *table, "", "conf files, first wins:", *folders]
    )


def commented_keys(text: str) -> List[Tuple[str, str, str]]:
    """(dotted key, value, comment behind it) of each key in a YAML text."""
    lines = text.splitlines()
    found: List[Tuple[str, str, str]] = []

    def walk(node: Any, prefix: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(value, yaml.MappingNode):
                walk(value, f"{prefix}{key.value}.")
            else:
                end = value.end_mark
                comment = lines[end.line][end.column :] if end.line < len(lines) else ""
                shown = text[value.start_mark.index : end.index]
                found.append((prefix + key.value, shown, comment.strip().lstrip("#").strip()))

    walk(yaml.compose(text), "")
    return found
