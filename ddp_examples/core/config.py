"""The conf tree and `key=value` arguments -> Config. Imports no torch: a mistake is told in 0.2 s, not after 2.

Use, in a demo, before it imports torch:

    config = load_config(Params, sys.argv[1:], read_ranks(os.environ))

YAML files hold the values and, behind each key, its meaning; the dataclasses hold the types.
"""

import dataclasses
import difflib
import inspect
import math
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_examples.core.demos import DemoFile, demos, help_text
from ddp_examples.core.exits import Exit, refuse, say
from ddp_examples.core.ranks import Ranks

GROUPS = ("backend", "demo")  # a choice is the name of a file: conf/<group>/<choice>.yaml


@dataclass(frozen=True)
class Backend:
    name: str  # auto, gloo, nccl: the choice itself
    timeout_s: float

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ValueError(f"backend.timeout_s={self.timeout_s:g}: must be more than 0")


@dataclass(frozen=True)
class Checkpoint:
    path: str
    keep: int
    mode: str  # sync, async
    every_s: float

    def __post_init__(self) -> None:
        if self.every_s < 0:
            raise ValueError(f"checkpoint.every_s={self.every_s:g}: 0 (never), or seconds")
        if self.keep < 2:
            raise ValueError(f"checkpoint.keep={self.keep}: at least 2, so that one is whole while another is written")
        if self.mode not in ("sync", "async"):
            raise ValueError(f"checkpoint.mode={self.mode}: sync or async")


@dataclass(frozen=True)
class Launch:
    """For launch/*.sh and the ranks they start; plain torchrun does as it does."""

    start: str  # forkserver, spawn

    def __post_init__(self) -> None:
        if self.start not in ("forkserver", "spawn"):
            raise ValueError(f"launch.start={self.start}: forkserver or spawn")


@dataclass(frozen=True)
class WatchLimits:
    """Of core/watch.py; 0: not looked for."""

    hang_s: float
    lost_s: float

    def __post_init__(self) -> None:
        for name, value in (("hang_s", self.hang_s), ("lost_s", self.lost_s)):
            if value < 0 or 0 < value < 2:
                raise ValueError(f"watch.{name}={value:g}: 0 (off), or at least 2 seconds")


@dataclass(frozen=True)
class Stop:
    before_end_s: float

    def __post_init__(self) -> None:
        if self.before_end_s < 0:
            raise ValueError(f"stop.before_end_s={self.before_end_s:g}: 0 (not looked for), or seconds")


@dataclass(frozen=True)
class Config:
    """What a run was asked to do. Paths are absolute; `demo` is the demo's own Params."""

    name: str  # of the demo
    demo: Any
    backend: Backend
    checkpoint: Checkpoint
    launch: Launch
    watch: WatchLimits
    stop: Stop
    report: Optional[str]
    seed: int
    debug: bool

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: 0 or more, and below 2**63")

    def group(self) -> Dict[str, Any]:
        """What process_group takes: `with process_group(ranks, **config.group()) as group:`."""
        backend = {"backend": self.backend.name, "timeout_s": self.backend.timeout_s, "debug": self.debug}
        return {**backend, "hang_s": self.watch.hang_s, "lost_s": self.watch.lost_s}


class ConfigError(Exception):
    """A mistake in an argument or a conf file; the message is for the person who made it."""


def load_config(params: Type[Any], argv: Sequence[str], ranks: Ranks) -> Config:
    """Config of the demo that defines `params`.

    A mistake ends the process with status 2 and one message, from rank 0; `--help` prints the keys and ends with 0.
    """
    return _load(DemoFile(Path(inspect.getfile(params)).resolve()), params, argv, ranks)


def load_config_of(demo: DemoFile, argv: Sequence[str], ranks: Ranks) -> Config:
    """As load_config, from the demo's source: for who has not imported the demo, and torch with it, yet."""
    try:
        params = demo.params()
    except NameError as error:
        refuse(Exit.USAGE, f"{demo.path}: {error}", speaks=ranks.rank == 0)
    return _load(demo, params, argv, ranks)


def _load(demo: DemoFile, params: Type[Any], argv: Sequence[str], ranks: Ranks) -> Config:
    if "--help" in argv or "-h" in argv:
        if ranks.rank == 0:
            print(help_text(demo), flush=True)
        raise SystemExit(0)
    try:
        return build_config(demo, params, _without_local_rank(argv, ranks))
    except ConfigError as error:
        refuse(Exit.USAGE, str(error), speaks=ranks.rank == 0)


def chosen_demo(argv: Sequence[str], ranks: Ranks) -> DemoFile:
    """The demo that `argv` selects by demo=NAME, else the one that config.yaml selects."""
    names = [argument[len("demo=") :] for argument in reversed(argv) if argument.startswith("demo=")]
    some = next(iter(demos().values()))
    names = names or [
        str(content["demo"]) for content in map(_read, some.conf_files("config.yaml")) if "demo" in content
    ]
    name = names[0]
    if name not in demos():
        refuse(Exit.USAGE, f"demo={name}: no such demo. {nearest(name, list(demos()), 'demo=')}", ranks.rank == 0)
    return demos()[name]


def build_config(demo: DemoFile, params: Type[Any], argv: Sequence[str]) -> Config:
    """As load_config, but raises ConfigError; nothing else happens."""
    arguments = split_arguments(argv)
    chosen = {key: text for key, text in arguments if key in GROUPS}
    if chosen.get("demo", demo.name) != demo.name:
        raise ConfigError(f"this is the demo {demo.name}. For another: -m ddp_examples demo={chosen['demo']}")
    tree = _typed_tree(params)
    choices = {"backend": "auto", **lay_over(tree, demo.conf_files("config.yaml")), **chosen, "demo": demo.name}
    for group, choice in choices.items():
        lay_over(tree[group], _choice_files(demo, group, str(choice)), prefix=f"{group}.")
    tree.name, tree.backend.name = demo.name, choices["backend"]
    types = key_types(params)
    for key, text in arguments:
        if key not in GROUPS:
            _set(tree, types, key, text)
    return _finished(tree, demo)


def split_arguments(argv: Sequence[str]) -> List[Tuple[str, str]]:
    """`["backend=nccl", "seed=1"]` -> `[("backend", "nccl"), ("seed", "1")]`."""
    pairs = []
    for argument in argv:
        key, equals, text = argument.partition("=")
        if argument.startswith("-"):
            raise ConfigError(f"{argument}: write settings without dashes: {key.lstrip('-') or 'seed'}={text or '...'}")
        if not equals or not key:
            groups = {"auto": "backend", "gloo": "backend", "nccl": "backend", **dict.fromkeys(demos(), "demo")}
            group = groups.get(argument)
            meant = f"did you mean {group}={argument}?" if group else "write settings as key=value, without spaces"
            raise ConfigError(f"{argument}: {meant}")
        pairs.append((key, text))
    return pairs


def key_types(params: Type[Any]) -> Dict[str, Any]:
    """All keys that can be set, dotted, with their types: `{"demo.epochs": int, "backend.timeout_s": float, ...}`."""
    types = _hints(Config)
    for name, section in _sections(params).items():
        types.update((f"{name}.{key}", kind) for key, kind in _hints(section).items())
        del types[name]
    del types["name"], types["backend.name"]  # set by demo=NAME, backend=NAME
    return types


@cache  # the arguments are read twice, before torch is imported and in main(); said once
def _ignored(argument: str) -> None:
    say(f"{argument} ignored: the local rank is taken from LOCAL_RANK, as torchrun sets it")


def _without_local_rank(argv: Sequence[str], ranks: Ranks) -> List[str]:
    """argv less the --local-rank=N that torch.distributed.launch and older launchers append."""
    old = [argument for argument in argv if argument.partition("=")[0] in ("--local-rank", "--local_rank")]
    if old and ranks.rank == 0:
        _ignored(old[0])
    return [argument for argument in argv if argument not in old]


def _hints(section: Type[Any]) -> Dict[str, Any]:
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def _sections(params: Type[Any]) -> Dict[str, Type[Any]]:
    return {
        "demo": params,
        "backend": Backend,
        "checkpoint": Checkpoint,
        "launch": Launch,
        "watch": WatchLimits,
        "stop": Stop,
    }


def _typed_tree(params: Type[Any]) -> DictConfig:
    tree = OmegaConf.structured(Config)
    OmegaConf.set_readonly(tree, False)  # the dataclasses are frozen; here their values are gathered
    for name, section in _sections(params).items():
        tree[name] = OmegaConf.structured(section)
        OmegaConf.set_readonly(tree[name], False)
    return typing.cast(DictConfig, tree)


def _choice_files(demo: DemoFile, group: str, choice: str) -> List[Path]:
    files = demo.conf_files(f"{group}/{choice}.yaml")
    if not files:
        there = sorted({file.stem for folder in demo.conf_folders for file in (folder / group).glob("*.yaml")})
        raise ConfigError(f"{group}={choice}: there is no {group}/{choice}.yaml. {nearest(choice, there, group + '=')}")
    return files


def lay_over(tree: DictConfig, files: Sequence[Path], prefix: str = "") -> Dict[str, Any]:
    """Merge files into the tree, the first one last: it wins. Returns the choices (`backend: nccl`) they hold."""
    choices = {}
    for path in reversed(files):
        content = _read(path)
        if not prefix:
            choices.update({group: content.pop(group) for group in GROUPS if isinstance(content.get(group), str)})
        try:
            tree.merge_with(content)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{path}: {prefix}{error.full_key}: {first_line(error)}") from None
    return choices


def _read(path: Path) -> Dict[Any, Any]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines")
    return typing.cast("Dict[Any, Any]", content)


def _set(tree: DictConfig, types: Mapping[str, Any], key: str, text: str) -> None:
    if key not in types:
        raise ConfigError(f"{key}={text}: unknown key {key}. {nearest(key, [*GROUPS, *types])}")
    try:
        OmegaConf.update(tree, key, _value(key, text, types[key]))
        value = OmegaConf.select(tree, key)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("not a finite number")
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{key}={text}: {first_line(error)}") from None


def _value(key: str, text: str, kind: Any) -> Any:
    """What `text` means for a key of this type.

    YAML takes `off` for False and `1:30:00` for 5400: a key of type str gets the text as typed.
    """
    if kind is str:
        return text
    if kind == Optional[str]:
        return None if text in ("", "null") else text
    return OmegaConf.select(OmegaConf.from_dotlist([f"{key}={text}"]), key)


def _finished(tree: DictConfig, demo: DemoFile) -> Config:
    missing = sorted(OmegaConf.missing_keys(tree))
    if missing:
        raise ConfigError(f"{missing[0]} has no value: add {missing[0]}=... or set it in conf/demo/{demo.name}.yaml")
    try:
        config = typing.cast(Config, OmegaConf.to_object(tree))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(first_line(error)) from None
    checkpoint = dataclasses.replace(config.checkpoint, path=_absolute(config.checkpoint.path))
    report = _absolute(config.report) if config.report else None
    if report and Path(report).is_dir():
        raise ConfigError(f"report={report}: this is a folder, and a file is needed")
    return dataclasses.replace(config, checkpoint=checkpoint, report=report)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def nearest(word: str, words: Sequence[str], prefix: str = "") -> str:
    """The word that is nearest to a mistyped one, in a sentence; first one whose last component is right or near."""
    last = {other.rpartition(".")[2]: other for other in reversed(words)}
    word = word.lower()
    close = difflib.get_close_matches(word, words, n=1) or [
        last[name] for name in difflib.get_close_matches(word.rpartition(".")[2], list(last), n=1)
    ]
    return f"Did you mean {prefix}{close[0]}?" if close else f"There are: {', '.join(words)}"


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
