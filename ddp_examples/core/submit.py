"""launch/slurm.sh: outside a job it submits itself with sbatch; inside one it starts a process on each node.

python -m ddp_examples.core.submit LAUNCHER [-N NODES] [-n RANKS] ... site=NAME [group=choice | key=value ...]
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List

from ddp_examples.core import launch
from ddp_examples.core.config import ConfigError
from ddp_examples.core.exits import Exit, refuse, say
from ddp_examples.core.follow import follow, job_number
from ddp_examples.core.job import Job, ask, first_nodes, read_job, seconds, task
from ddp_examples.core.queues import choose_queue, queues_of
from ddp_examples.core.ranks import Ranks
from ddp_examples.core.records import conclude, read_deaths
from ddp_examples.core.runs import Run, module_of, planned_runs
from ddp_examples.core.site import Site, load_site
from ddp_examples.core.step import run_step


def main(argv: List[str]) -> int:
    launcher, *rest = argv
    options, settings = launch.parse_arguments(rest)
    number, tasks = task(os.environ)
    me = Ranks(rank=number if tasks > 1 else 0)
    if me.rank == 0 and ("--help" in settings or "-h" in settings):
        print(launch.USAGE)
    runs = planned_runs(settings, me)
    try:
        site, job = load_site(options.site), read_job(os.environ)
        if not site.start:
            raise ValueError(f"site={options.site} is this machine alone: launch/local.sh")
        if job and tasks > 1:
            raise ValueError(launch.too_many_tasks(tasks, len(job.nodes), options.ranks))
        if job:
            status = start(site, first_nodes(job, options.nodes), options, runs, settings)
            if status == Exit.LATER:
                go_on_later(job, options, [launcher, *rest])
            return status
        return submit(site, launcher, options, runs, settings)
    except (ConfigError, ValueError) as error:
        refuse(Exit.USAGE, str(error), speaks=me.rank == 0)


def start(site: Site, job: Job, options: argparse.Namespace, runs: List[Run], settings: List[str]) -> int:
    """In a job: start the ranks on its nodes."""
    table = site.queues[job.queue].gpus if job.queue in site.queues else 0
    ranks = options.ranks or launch.gpus_here(os.environ) or max(table, 0) or launch.DEFAULT_RANKS
    logs, restarts = site.runs_folder() / job.id, options.max_restarts or 0
    if options.dry_run:
        print(
            launch.plan_in_job(
                site, options.site, job, sys.executable, ranks, str(logs), module_of(runs), settings, restarts
            )
        )
        return Exit.OK
    if options.queue or options.time or options.account:
        say(f"this is job {job.id} already, so -p, -t and -A have no effect")
    process = launch.node_arguments(sys.executable, options.site, len(job.nodes), ranks, str(logs), settings, restarts)
    command = launch.start_command(site, len(job.nodes), process)
    if not shutil.which(command[0]):
        refuse(
            Exit.UNABLE,
            f"no {command[0]} in PATH, which starts the nodes of job {job.id}. Type this outside the container",
        )
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    if cpus:  # since 22.05 srun does not take it from sbatch, and all ranks of a node would share one core
        os.environ.setdefault("SRUN_CPUS_PER_TASK", cpus)

    def tell() -> None:
        verdict = conclude(logs, read_deaths(logs), ranks * len(job.nodes))
        if verdict.lines:
            say("\n".join(verdict.lines))

    return run_step(command, logs, job, tell)


def go_on_later(job: Job, options: argparse.Namespace, command: List[str]) -> None:
    """The ranks have stopped on request, and saved: put the job into the queue again, or a successor behind it.

    Each start makes some steps, so this ends; --max-restarts ends it sooner.
    """
    successor = shlex.split(os.environ.get(launch.SUCCESSOR, ""))
    made = len([option for option in successor if option.startswith("--dependency=")]) + job.restarts
    if not options.requeue and not successor:
        return  # not from sbatch
    if options.max_restarts and made >= options.max_restarts:
        say(f"job {job.id} was started again {made} times (--max-restarts), and is not again; by hand it goes on")
    elif options.requeue:
        done = ask("scontrol", "requeue", job.id) is not None
        say(f"job {job.id} " + ("is in the queue again, and goes on there" if done else "could not be queued again"))
    else:
        successor = [option.replace("%j", job.id) for option in successor]  # one log for all
        successor.append(f"--dependency=afterany:{job.id}")
        script = launch.batch_script(command[0], sys.executable, command[1:], successor)
        given = subprocess.run(successor, input=script, capture_output=True, text=True)
        number = job_number(given.stdout)
        say(f"job {number} goes on when this one has ended" if number else f"no successor: {given.stderr.strip()}")


def submit(site: Site, launcher: str, options: argparse.Namespace, runs: List[Run], settings: List[str]) -> int:
    """Outside a job: check what can be checked here, give the job to sbatch, tell how to follow it."""
    nodes, time = options.nodes or 1, options.time or site.time
    backend, name = runs[0].config.backend.name, runs[0].demo.name if len(runs) == 1 else "all"
    seconds(time)
    if not options.dry_run and not shutil.which("sbatch"):
        refuse(
            Exit.UNABLE, "no sbatch in PATH: this is no login node of a Slurm cluster. On this machine: launch/local.sh"
        )
    queues = site.queues or queues_of(ask("sinfo", "-h", "-o", "%P|%l|%D|%G") or "")
    queue = choose_queue(queues, options.queue, nodes, time)
    gpus = queues[queue].gpus if queue in queues else -1
    ranks = options.ranks or max(gpus, 0) or launch.DEFAULT_RANKS
    if backend == "nccl" and 0 <= gpus < ranks:
        raise ValueError(f"backend=nccl can't run: {ranks} ranks, but {gpus} GPUs on a node of {queue}")
    folder = site.runs_folder()
    asked = 0 if backend == "gloo" else min(max(gpus, 0), ranks)
    command = launch.sbatch_command(
        site, f"ddp-{name}", nodes, queue, asked, time, options.account, str(folder / "%j.log")
    )
    restarts = options.max_restarts or 0
    again = [f"--max-restarts={restarts}"] * bool(restarts)
    arguments = [f"-N{nodes}", f"-n{ranks}", *again, *["--requeue"] * site.requeue, f"site={options.site}", *settings]
    script = launch.batch_script(launcher, sys.executable, arguments, [] if site.requeue else command)
    if options.dry_run:
        some = launch.some_job(nodes)
        print(launch.plan_of_submission(command, script))
        logs = str(folder / some.id)
        print(
            launch.plan_in_job(
                site, options.site, some, sys.executable, ranks, logs, module_of(runs), settings, restarts
            )
        )
        return Exit.OK
    folder.mkdir(parents=True, exist_ok=True)
    return _give_to_sbatch(command, script, folder, options.wait)


def _give_to_sbatch(command: List[str], script: str, folder: Path, wait: bool) -> int:
    done = subprocess.run(command, input=script, capture_output=True, text=True)
    number = job_number(done.stdout)
    if done.returncode or not number:
        why = (done.stderr or done.stdout).strip().replace("\n", "\n  ")
        refuse(Exit.USAGE, f"sbatch did not take the job:\n  {why}")
    log = folder / f"{number}.log"
    print(f"job {number} is submitted\n  log     {log}\n  ranks   {folder / number}/<host>-rank<R>.log")
    print(f"  follow  tail -F {log}\n  watch   launch/watch.sh {number}\n  cancel  scancel {number}", flush=True)
    return follow(number, log) if wait else Exit.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
