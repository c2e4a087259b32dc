"""Queues (Slurm: partitions) and their limits: which one takes a job. Pure functions, no torch."""

import re
from typing import Dict, Mapping, Optional

from ddp_examples.core.job import seconds
from ddp_examples.core.site import Queue


def choose_queue(queues: Mapping[str, Queue], wanted: Optional[str], nodes: int, time: str) -> str:
    """The queue to submit to, "" for Slurm's default. ValueError, with the one that would do, if it can't be.

    Where none is wanted it is the first that fits, and where queues with GPUs are known, one of these.
    """
    with_gpus = {name: queue for name, queue in queues.items() if queue.gpus} or queues
    fits = [name for name, queue in with_gpus.items() if not over(queue, nodes, time)]
    if wanted is None:
        if with_gpus and not fits:
            raise ValueError(f"no queue takes -N {nodes} -t {time}. {limits(with_gpus)}")
        return next(iter(fits), "")
    if queues and wanted not in queues:
        raise ValueError(f"-p {wanted}: no such queue. {limits(queues)}")
    excess = over(queues[wanted], nodes, time) if queues else ""
    if excess:
        raise ValueError(f"-p {wanted}: {excess}. " + (f"Use -p {fits[0]}" if fits else limits(with_gpus)))
    return wanted


def over(queue: Queue, nodes: int, time: str) -> str:
    """What is over the queue's limits, or ""."""
    if queue.nodes and nodes > queue.nodes:
        return f"-N {nodes} is more than its {queue.nodes} nodes"
    if seconds(time) > seconds(queue.time):
        return f"-t {time} is more than its {queue.time}"
    return ""


def limits(queues: Mapping[str, Queue]) -> str:
    """The queues and their limits, as a sentence."""
    texts = []
    for name, queue in queues.items():
        known = [f"{queue.nodes} nodes" if queue.nodes else "", queue.time, f"{queue.gpus} GPUs" * (queue.gpus > 0)]
        about = ", ".join(fact for fact in known if fact)
        texts.append(f"{name} ({about})" if about else name)
    return f"Queues: {'; '.join(texts)}"


def queues_of(sinfo: str) -> Dict[str, Queue]:
    """Queues from `sinfo -h -o %P|%l|%D|%G`; Slurm's default one first."""
    found: Dict[str, Queue] = {}
    lines = sorted(sinfo.splitlines(), key=lambda line: "*|" not in line)
    for name, time, nodes, gres in (line.split("|") for line in lines if line.count("|") == 3):
        gpus = sum(int(number) for number in re.findall(r"\bgpu(?::[A-Za-z][^:,()]*)?:(\d+)", gres))
        before = found.get(name.rstrip("*"), Queue(0, time, 0))  # one line for each kind of node in the queue
        found[name.rstrip("*")] = Queue(before.nodes + int(nodes), time, max(before.gpus, gpus))
    return found
