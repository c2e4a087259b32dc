"""What a run tells: a header, lines as it goes, a row a rank and a row a check at the end; the same as report.json."""

import argparse
import dataclasses
import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from ddp_examples.core import plot
from ddp_examples.core.config import Config
from ddp_examples.core.demos import demos
from ddp_examples.core.exits import Exit, refuse, say
from ddp_examples.core.group import Group, gather, on_main
from ddp_examples.core.verify import Check

Row = Dict[str, Any]


def begin(group: Group, config: Config) -> None:
    """Print the header of the run, on rank 0. Collective."""
    hosts = _distinct(gather(group.host))
    ranks = group.ranks
    show(group, f"{config.name}: {ranks.world_size} rank{'s' * (ranks.world_size > 1)} on {', '.join(hosts)}")
    show(group, f"  backend {group.backend} ({group.why}), device {device_name(group)}")
    show(group, f"  torch {torch.__version__}, Python {platform.python_version()}")
    if not ranks.launched:
        program = demos()[config.name].module if config.name in demos() else shlex.quote(sys.argv[0])
        show(group, f"  one rank, no launcher. More: torchrun --nproc_per_node=4 {program}")


def show(group: Group, line: str) -> None:
    """Print a line, on rank 0, at once."""
    if group.is_main:
        print(line, flush=True)


def finish(group: Group, config: Config, checks: Sequence[Check], metrics: Mapping[str, Any]) -> Exit:
    """Print how the run went, write the report if config.report names a file, return the exit status. Collective.

    `checks` are the same on every rank. A run without any has not proved anything, so it does not succeed either.
    """
    ranks: List[Row] = gather(
        {
            "rank": group.ranks.rank,
            "local_rank": group.ranks.local_rank,
            "host": group.host,
            "pid": os.getpid(),
            "device": device_name(group),
            "seconds": round(time.time() - group.started, 3),
        }
    )
    waited_for = straggler(gather([group.progress.own_s, group.progress.own_steps, time.time() - group.started]))
    if waited_for:
        show(group, slow_line(*waited_for, ranks))
        metrics = {**metrics, "straggler_rank": waited_for[0], "straggler_factor": waited_for[1] / waited_for[2]}
    rows: List[Row] = [dataclasses.asdict(check) for check in checks]
    ok = bool(checks) and all(check.passed for check in checks)
    seconds = max(row["seconds"] for row in ranks)
    report = {
        "demo": config.name,
        "ok": ok,
        "world_size": group.ranks.world_size,
        "hosts": _distinct([row["host"] for row in ranks]),
        "backend": group.backend,
        "device": group.device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "started": datetime.fromtimestamp(group.started, timezone.utc).isoformat(timespec="seconds"),
        "seconds": seconds,
        "config": dataclasses.asdict(config),
        "ranks": ranks,
        "checks": rows,
        "metrics": dict(metrics),
    }
    if group.is_main:
        print_tables(report)
    path = config.report
    unwritten = on_main(lambda: write_report(report, path)) if path else ""
    if unwritten and group.is_main:
        say(unwritten)
    return Exit.CHECK_FAILED if not ok else Exit.ERROR if unwritten else Exit.OK


def straggler(own: Sequence[Sequence[float]]) -> Optional[Tuple[int, float, float]]:
    """(rank, its own seconds a step, those of the others) of the rank that all wait for, if there is one.

    `own`: of each rank seconds of its own, in how many steps, and seconds that its run took. Own is the time from the
    end of a step to the end of the next forward pass, so a slow backward pass is not seen. A straggler takes twice as
    long as the median of the others, and so spends a fifth of the run: on a busy machine single steps differ more.
    """
    each = [seconds / max(steps, 1) for seconds, steps, _ in own]
    rank = max(range(len(each)), key=each.__getitem__)
    others = [each[other] for other in range(len(each)) if other != rank]
    if not others:
        return None
    usual = max(statistics.median(others), 1e-6)
    lost = (each[rank] - usual) * own[rank][1]
    return (rank, each[rank], usual) if each[rank] > 2 * usual and lost > 0.2 * own[rank][2] else None


def slow_line(rank: int, seconds: float, usual: float, rows: Sequence[Row]) -> str:
    return (
        f"rank {rank} on {rows[rank]['host']} is slow: {1e3 * seconds:.0f} ms a step of its own (data, forward pass), "
        f"the others {1e3 * usual:.1f} ms: {seconds / usual:.0f} times. They wait for it"
    )


def print_tables(report: Mapping[str, Any]) -> None:
    """The end of a run for a person: a row a rank, a row a check, one line that says how it went."""
    columns = ("rank", "local_rank", "host", "pid", "device", "seconds")
    print("\n" + table([columns, *([row[name] for name in columns] for row in report["ranks"])]))
    verdicts = [("ok" if check["passed"] else "FAILED", *_figures(check)) for check in report["checks"]]
    print("\n" + table([("check", "", "measured", "allowed"), *verdicts]))
    failed = [check for check in report["checks"] if not check["passed"]]
    for check in failed:
        print(f"FAILED {check['name']}: {check['detail'] or 'measured is more than allowed'}")
    passed = f"{len(report['checks']) - len(failed)} of {len(report['checks'])} checks passed"
    print(f"{report['demo']}: {'ok' if report['ok'] else 'FAILED'}, {passed}, {report['seconds']:.1f} s", flush=True)


def _figures(check: Mapping[str, Any]) -> Sequence[str]:
    return (check["name"], f"{check['measured']:.2g}", f"{check['allowed']:.2g}")


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Rows of cells as aligned text; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    right = [not isinstance(cell, str) for cell in rows[-1]]
    lines = [[cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right)] for row in cells]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def write_report(report: Mapping[str, Any], path: str) -> str:
    """Write it whole or not at all: a reader never sees half a file. Returns "" or why it could not be written."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_finite(report), indent=1)
        text = re.sub(r"\[\n([-+\d.,e\s]+)\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)  # on one line
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(target)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        return f"the report could not be written to {path}: {error.strerror}"
    return ""


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; as text they can still be read."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def device_name(group: Group) -> str:
    """`cpu`, or `cuda:1 Quadro RTX 5000`."""
    if group.device.type == "cpu":
        return "cpu"
    return f"{group.device} {torch.cuda.get_device_name(group.device)}"


def _distinct(values: Sequence[str]) -> List[str]:
    return list(dict.fromkeys(values))


def main(argv: Sequence[str]) -> int:
    """`python -m ddp_examples.core.report FILE.json [--plot OUT.png]`: print a report's tables again, or draw it."""
    parser = argparse.ArgumentParser(prog="python -m ddp_examples.core.report", allow_abbrev=False)
    parser.add_argument("report", metavar="FILE.json", help="what report=FILE.json has written")
    parser.add_argument("--plot", metavar="OUT.png", help="draw loss and step times; needs the extra `plot`")
    options = parser.parse_args(argv)
    try:
        report = json.loads(Path(options.report).read_text(encoding="utf-8"))
        if options.plot:
            plot.draw(report, options.plot)
            print(f"{options.plot} written")
        else:
            print_tables(report)
    except plot.PlotError as error:
        refuse(Exit.USAGE, str(error))
    except (OSError, ValueError, KeyError, TypeError) as error:
        refuse(Exit.USAGE, f"{options.report} is no report of a run: {type(error).__name__}: {error}")
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
