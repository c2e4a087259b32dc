"""Before the ranks start, every node of a job says hello to the first one, so that what is wrong is named in seconds.

torchrun waits ten minutes for a node that does not come, and then does not say which. Here each node connects to the
head node by plain TCP on the port that the ranks will meet on, sends one line of JSON, and gets one line back: go on,
or end. The head node speaks for all. Standard library only; lines are parsed, never unpickled.

Use, on every node: `address = meet(job, describe(job, number, fault), timeout_s)`.
"""

import contextlib
import errno
import json
import socket
import time
from dataclasses import asdict
from typing import Any, Dict, List, Optional, Tuple

from ddp_examples.core.job import Job
from ddp_examples.core.ports import owner_of
from ddp_examples.core.preflight import Node, judge, resolve

LINE = 4096  # bytes; longer is not from us
FIRST_S = 5  # a node that can't reach the head gives up so much sooner than the head does, so that one of them speaks

Hello = Tuple[Node, socket.socket]  # what a node said, and the connection that it waits on


class UnfitError(Exception):
    """Why the ranks can't be started. The message is empty on a node where another one has said it."""


def meet(job: Job, me: Node, timeout_s: float) -> str:
    """Wait until all nodes of the job are there and fit; returns this node's address. Raises UnfitError."""
    return lead(job, me, timeout_s) if me.number == 0 else follow(job, me, timeout_s)


def lead(job: Job, me: Node, timeout_s: float) -> str:
    """The head node: hear all nodes, judge, tell all."""
    deadline = time.monotonic() + timeout_s
    try:
        address = resolve(job.nodes[0])
    except OSError:
        address = ""
    own = bool(address) and not address.startswith("127.")
    listener = _listen(job, address if own else "")
    heard: List[Hello] = []
    with listener:
        message = me.fault
        while len(heard) < len(job.nodes) - 1 and not message:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                heard.append(_hear(listener, job.run))
            except ValueError:
                continue  # not one of our nodes
            except socket.timeout:
                message = _missing(job, [node.number for node, _ in heard], timeout_s)
            message = message or judge(me, heard[-1][0])
        here = heard[0][1].getsockname()[0] if heard else address
        _tell(listener, job, heard, message, min(deadline, time.monotonic() + FIRST_S))
    if message:
        raise UnfitError(message)
    return str(address if own else here)


def _listen(job: Job, address: str) -> socket.socket:
    try:
        return socket.create_server((address, job.port), backlog=max(128, len(job.nodes)))
    except OSError as error:
        host = socket.gethostname()
        if error.errno == errno.EADDRINUSE:
            raise UnfitError(
                f"port {job.port} on {host}, where the nodes of job {job.id} meet, is in use by {owner_of(job.port)}. "
                "End that, or start when it has ended"
            ) from None
        raise UnfitError(
            f"the first process was started on {host}, but the first node of job {job.id} is {job.nodes[0]} "
            f"({address}: {error.strerror}). The site's `start` must start one process a node, in the nodes' order"
        ) from None


def _hear(listener: socket.socket, run: str) -> Hello:
    """The next node's hello. ValueError: someone else's."""
    connection, _ = listener.accept()
    connection.settimeout(2)
    try:
        node = Node(**_read(connection))
        _write(connection, {"run": run})
        if node.run == run:
            return node, connection
    except (OSError, TypeError, ValueError):
        pass
    connection.close()
    raise ValueError("not a hello")


def _tell(listener: socket.socket, job: Job, heard: List[Hello], message: str, until: float) -> None:
    """Go on, or end. With bad news, those who are still on their way get them too."""
    for _, connection in heard:
        _verdict(connection, message)
    while message and len(heard) < len(job.nodes) - 1 and time.monotonic() < until:
        listener.settimeout(max(0.01, until - time.monotonic()))
        with contextlib.suppress(ValueError, socket.timeout):
            heard.append(_hear(listener, job.run))
            _verdict(heard[-1][1], message)


def _verdict(connection: socket.socket, message: str) -> None:
    with contextlib.suppress(OSError):  # gone meanwhile; torchrun's own time limit ends the run
        _write(connection, {"go": not message})
    connection.close()


def _missing(job: Job, came: List[int], timeout_s: float) -> str:
    absent = [node for number, node in enumerate(job.nodes) if number and number not in came]
    some = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
    return (
        f"no word from {some} within {timeout_s:.0f} s: {len(absent)} of {len(job.nodes)} nodes are missing. Is it up "
        f"(scontrol show node {absent[0]}), and can it reach {job.nodes[0]} on port {job.port}? "
        "A slow start needs a larger startup_timeout_s in the site's file"
    )


def follow(job: Job, me: Node, timeout_s: float) -> str:
    """Any other node: say hello, wait for the head's word."""
    connection = _reach(job, me, time.monotonic() + timeout_s - FIRST_S)
    with connection:
        connection.settimeout(timeout_s + 2 * FIRST_S)
        try:
            verdict = _read(connection)
        except (OSError, ValueError):
            verdict = {}  # the head node has ended, and has said why
        address = str(connection.getsockname()[0])
    if not verdict.get("go"):
        raise UnfitError("")
    return address


def _reach(job: Job, me: Node, deadline: float) -> socket.socket:
    """A connection to the head node, which has answered. Refused is usual until the head has started."""
    head = job.nodes[0]
    where = f"{me.host} can't reach {head}:{job.port}"
    foreign: Optional[float] = None
    while True:
        reason = ""
        try:
            address = resolve(head)
            if address.startswith("127."):
                raise UnfitError(
                    f"{me.host} resolves {head} to {address}, which is itself. Set it right in /etc/hosts or DNS"
                )
            connection = socket.create_connection((address, job.port), timeout=max(0.1, deadline - time.monotonic()))
            if _greet(connection, job, me):
                return connection
            foreign = foreign or time.monotonic()
        except socket.gaierror as error:
            raise UnfitError(
                f"{where}: {head} does not resolve there ({error}). Set it right in /etc/hosts or DNS"
            ) from None
        except OSError as error:
            reason = error.strerror or "timed out"
        if foreign and time.monotonic() > foreign + FIRST_S:
            raise UnfitError("")  # someone else has the port, and the head node, which can't have it then, has said so
        if time.monotonic() > deadline:
            cure = (
                f"Ports {job.port} and up must be open between nodes, or name another network as the site's interface"
            )
            raise UnfitError(f"{where} ({reason}): a firewall, or a broken link. {cure}")
        time.sleep(0.1)


def _greet(connection: socket.socket, job: Job, me: Node) -> bool:
    """Say hello; does our head node answer?"""
    connection.settimeout(10)
    try:
        _write(connection, asdict(me))
        if _read(connection).get("run") == job.run:
            return True
    except (OSError, ValueError):
        pass
    connection.close()
    return False


def _write(connection: socket.socket, message: Dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket) -> Dict[str, Any]:
    """One line, byte by byte, so that the next one stays. ValueError if it is none of ours."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = connection.recv(1)
        if not part or len(line) > LINE:
            raise ValueError("no line")
        line += part
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("no message")
    return message
