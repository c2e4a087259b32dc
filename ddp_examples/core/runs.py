"""What a command line is to run: one demo, or with demo=all each of them in turn. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import List, Sequence

from ddp_examples.core.config import Config, chosen_demo, key_types, load_config_of
from ddp_examples.core.demos import PACKAGE, DemoFile, demos, help_text
from ddp_examples.core.ranks import Ranks


@dataclass(frozen=True)
class Run:
    """A demo, the settings that are its own, and what they come to."""

    demo: DemoFile
    settings: List[str]
    config: Config


def planned_runs(argv: Sequence[str], ranks: Ranks) -> List[Run]:
    """What `argv` asks for, all of it checked: a mistake ends the process with status 2 and one message.

    With demo=all a demo gets the keys demo.KEY that it has; and since each writes files of its own, report=out.json
    becomes out.basic.json, and checkpoint.path=FOLDER becomes FOLDER/basic.
    """
    if not asks_for_all(argv):
        demo = chosen_demo(argv, ranks)
        return [Run(demo, list(argv), load_config_of(demo, argv, ranks))]
    chosen = [demo for demo in demos().values() if demo.in_all]
    if "--help" in argv or "-h" in argv:
        if ranks.rank == 0:
            print("\n\n".join(map(help_text, chosen)), flush=True)
        raise SystemExit(0)
    rest = [argument for argument in argv if not argument.startswith("demo=")]
    return [_one_of_all(demo, rest, ranks) for demo in chosen]


def asks_for_all(argv: Sequence[str]) -> bool:
    return [argument for argument in argv if argument.startswith("demo=")][-1:] == ["demo=all"]


def module_of(runs: Sequence[Run]) -> str:
    """The module that a rank starts with the whole command line."""
    return f"{PACKAGE.name}.{runs[0].demo.name}" if len(runs) == 1 else PACKAGE.name


def _one_of_all(demo: DemoFile, argv: Sequence[str], ranks: Ranks) -> Run:
    own = key_types(demo.params())
    others = {key for other in demos().values() for key in key_types(other.params())} - set(own)
    settings = [argument for argument in argv if argument.partition("=")[0] not in others]
    config = load_config_of(demo, settings, ranks)
    if config.report:
        report = Path(config.report)
        settings.append(f"report={report.with_name(f'{report.stem}.{demo.name}{report.suffix}')}")
    if any(argument.startswith("checkpoint.path=") for argument in argv):
        settings.append(f"checkpoint.path={Path(config.checkpoint.path) / demo.name}")
    return Run(demo, settings, load_config_of(demo, settings, ranks))
