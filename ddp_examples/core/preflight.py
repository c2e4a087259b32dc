"""Whether a node can take part in a job of several: its versions, its name, its GPUs. Standard library only."""

import importlib.metadata
import platform
import socket
import sys
from dataclasses import dataclass

from ddp_examples.core.job import Job

COMPARED = {"python": "Python", "torch": "torch", "package": "ddp-examples"}  # must be the same on all nodes


@dataclass(frozen=True)
class Node:
    """What a node tells the head node of itself."""

    run: str
    number: int
    host: str
    python: str
    torch: str
    package: str
    fault: str = ""  # why no rank can run there


def describe(job: Job, number: int, fault: str) -> Node:
    """This node."""
    host, python = socket.gethostname(), platform.python_version()
    return Node(job.run, number, host, python, version("torch"), version("ddp-examples"), fault)


def version(distribution: str) -> str:
    """As installed; no import, which takes a second for torch."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def judge(head: Node, node: Node) -> str:
    """Why the run can't be with this node, or ""."""
    if node.fault:
        return node.fault
    for name, title in COMPARED.items():
        there, here = getattr(node, name), getattr(head, name)
        if there != here:
            return (
                f"{node.host} has {title} {there}, {head.host} has {here}: all nodes need the same. Use one "
                f"environment that all of them see: PYTHON=/path/to/python (now {sys.executable})"
            )
    return ""


def gpu_fault(backend: str, ranks: int, gpus: int) -> str:
    """Fewer GPUs than ranks where each rank must have one, or ""."""
    if backend != "nccl" or gpus >= ranks:
        return ""
    cure = f"-n {gpus} or backend=gloo" if gpus else "backend=gloo"
    return f"backend=nccl can't run: {ranks} ranks but {gpus} GPUs on {socket.gethostname()}. Use {cure}"


def own_name_fault(interface: str) -> str:
    """Ranks talk by the address of the host's own name: why that can't be, or ""."""
    host = socket.gethostname()
    if interface:  # then it is not by the name
        return ""
    cure = "Set it right in /etc/hosts or DNS, or name the network in the site's file, as interface: ib0"
    try:
        address = resolve(host)
    except OSError as error:
        return f"{host} can't resolve its own name {host} ({error}), and the ranks need its address. {cure}"
    if address.startswith("127."):
        return f"{host} resolves its own name {host} to {address}, where no other node can reach it. {cure}"
    return ""


def resolve(host: str) -> str:
    """An address of `host`; IPv4 first, as TCPStore and gloo take it."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
