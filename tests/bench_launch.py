"""What the launchers cost: python tests/bench_launch.py [plan | local | cluster].

plan: the whole dry run for 1,024 nodes. local: launch/local.sh against bare torchrun, 4 ranks, 5 pairs. cluster: two
nodes by launch/slurm.sh against srun and torchrun by hand, 3 pairs, as root. On a machine that does nothing else.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Callable, List

import testbed
from torchrun import ROOT, Result, local, run, torchrun

RUN = ("demo=basic", "backend=gloo", "demo.epochs=1")


def plan() -> None:
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "c[0001-1024]", "PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(ROOT / "launch" / "slurm.sh"), "--dry-run", *RUN]
        seconds = [checked(run(command, env=job, cwd=Path(folder))).seconds for _ in range(5)]
        print(f"plan for 1,024 nodes: {statistics.median(seconds):.2f} s; files: {list(Path(folder).iterdir())}")


def pairs(name: str, ours: Callable[[], Result], bare: Callable[[], Result], count: int) -> None:
    """The two in turn, so that a slower minute of the machine hits both."""
    times: List[List[float]] = [[], []]
    for _ in range(count):
        for kind, start in enumerate((ours, bare)):
            times[kind].append(checked(start()).seconds)
    mine, other = map(statistics.median, times)
    ratios = [first / second for first, second in zip(*times)]
    print(
        f"{name}: launcher {mine:.2f} s, by hand {other:.2f} s, ratio {statistics.median(ratios):.3f}, by pair:", times
    )


def checked(result: Result) -> Result:
    assert result.status == 0, result.output
    return result


def on_cluster() -> None:
    with testbed.cluster() as cluster, cluster.job() as job, tempfile.TemporaryDirectory() as folder:
        env = {"SLURM_JOB_ID": job, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        by_hand = (
            f"srun -N2 -n2 bash -c '{sys.executable} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 "
            "--rdzv-backend=c10d --rdzv-endpoint=c101-001:29400 --rdzv-conf=is_host=$((1 - SLURM_PROCID)) "
            f"--local-addr=$(hostname) -m ddp_examples.basic {' '.join(RUN[1:])}'"
        )
        pairs(
            "two nodes",
            lambda: cluster.launch("slurm", "c101-001", "-n1", *RUN, cwd=Path(folder), **env),
            lambda: cluster.on("c101-001", "bash", "-c", by_hand, cwd=Path(folder), **env),
            count=3,
        )


def main(wanted: str) -> None:
    if wanted in ("", "plan"):
        plan()
    if wanted in ("", "local"):
        bare = lambda: torchrun(4, "-m", "ddp_examples.basic", *RUN[1:])  # noqa: E731
        pairs("4 ranks here", lambda: local("-n", "4", *RUN), bare, count=5)
    if wanted in ("", "cluster"):
        on_cluster()


if __name__ == "__main__":
    main("".join(sys.argv[1:]))
