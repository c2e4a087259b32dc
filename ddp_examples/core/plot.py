"""A report as a picture: loss by step, step time by rank. Needs matplotlib, the extra `plot`.

    python -m ddp_examples.core.report out.json --plot out.png

It must be readable without colour: ranks differ by line style and marker, and the title says what is to be seen.
"""

from statistics import median
from typing import Any, List, Mapping, Sequence

STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # with as many ranks each has its line; more are drawn as a band


class PlotError(Exception):
    """Why there is no picture; the message is for the person who wants one."""


def draw(report: Mapping[str, Any], path: str) -> None:
    """Draw `report` into the file `path`, whose ending is the format: png, svg, pdf. Raises PlotError."""
    try:
        figure_of(report).savefig(path, dpi=130)
    except ImportError:
        raise PlotError("--plot needs matplotlib: pip install 'ddp-examples[plot]'") from None
    except (OSError, ValueError) as error:
        raise PlotError(f"{path}: {error}") from None


def figure_of(report: Mapping[str, Any]) -> Any:
    series = report["metrics"].get("series")
    if not series:
        raise PlotError(f"the demo {report['demo']} has no series in its report, so there is nothing to draw")
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    figure.suptitle(_headline(report), fontsize=12, x=0.01, ha="left")
    draw_loss(left, _numbers(series["loss"]), series["every"])
    draw_times(right, _numbers(series["step_seconds"]))
    return figure


def _numbers(by_rank: Sequence[Sequence[Any]]) -> List[List[float]]:
    """JSON has no NaN: a report has it as text."""
    return [[float(value) for value in values] for values in by_rank]


def _headline(report: Mapping[str, Any]) -> str:
    passed = sum(check["passed"] for check in report["checks"])
    verdict = f"{'ok' if report['ok'] else 'FAILED'}, {passed} of {len(report['checks'])} checks passed"
    ranks = f"{report['world_size']} rank{'s' * (report['world_size'] > 1)}"
    hosts = ", ".join(report["hosts"]) if len(report["hosts"]) < 3 else f"{len(report['hosts'])} hosts"
    return f"{report['demo']}: {ranks} on {hosts}, {report['backend']}, {report['device']}: {verdict}"


def draw_loss(axes: Any, losses: Sequence[Sequence[float]], every: int) -> None:
    """The mean over the ranks, and where they differ a line for each rank, or a band if they are many."""
    steps = [1 + every * number for number in range(len(losses[0]))]
    means = [sum(values) / len(values) for values in zip(*losses)]
    differ = len({str(values) for values in losses}) > 1  # as text: NaN is not equal to itself
    if differ and len(losses) <= len(MARKERS):
        draw_ranks(axes, steps, losses)
    elif differ:
        lowest, highest = [min(values) for values in zip(*losses)], [max(values) for values in zip(*losses)]
        axes.fill_between(steps, lowest, highest, color="0.8", label=f"lowest to highest of {len(losses)} ranks")
    axes.plot(steps, means, "k-", linewidth=2.5, label="mean over the ranks" if differ else "loss, same on all ranks")
    axes.set_title(f"Loss: {means[0]:.2f} at step {steps[0]}, {means[-1]:.2f} at step {steps[-1]}", loc="left")
    axes.set(xlabel="step", ylabel="loss (mean over the samples of a step)", ylim=(0, None), xlim=(0, None))
    axes.grid(color="0.9")
    axes.legend(frameon=False)


def draw_ranks(axes: Any, steps: List[int], losses: Sequence[Sequence[float]]) -> None:
    marks = max(1, len(steps) // 12)
    for rank, values in enumerate(losses):
        axes.plot(
            steps,
            values,
            linestyle=STYLES[rank % len(STYLES)],
            marker=MARKERS[rank],
            markevery=(rank * marks // len(losses), marks),  # not all at the same steps: they would hide each other
            markersize=5,
            linewidth=0.9,
            label=f"rank {rank}",
        )


def draw_times(axes: Any, seconds: Sequence[Sequence[float]]) -> None:
    """A box for each rank. Averaging waits for the slowest rank, so one that is slow in itself slows all alike."""
    times = [[1000 * value for value in values] for values in seconds]
    medians = [median(values) for values in times]
    slowest = max(range(len(times)), key=lambda rank: medians[rank])
    alike = medians[slowest] <= 1.1 * min(medians)
    whose = "" if len(times) == 1 else "alike on all ranks, " if alike else f"rank {slowest} is the slowest, "
    axes.set_title(f"Step time: {whose}{medians[slowest]:.2g} ms", loc="left")
    black = {"color": "black", "linewidth": 2.5}
    ranks = range(len(times))
    axes.boxplot(
        times, positions=ranks, whis=(5, 95), showfliers=False, widths=0.5, medianprops=black, manage_ticks=False
    )
    axes.set_xticks(ranks[:: -(-len(ranks) // 16)])
    axes.set(ylabel="forward, backward and averaging (ms)", ylim=(0, None))
    axes.set_xlabel("rank\n(line: median, box: middle half, whiskers: 5 % to 95 %)")
    axes.grid(axis="y", color="0.9")
