"""What the nodes of a job say to each other before torch is imported; here all are threads of this process."""

import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ddp_examples.core import hello, preflight
from ddp_examples.core.hello import UnfitError, meet
from ddp_examples.core.job import PORTS, Job
from ddp_examples.core.ports import owner_of
from ddp_examples.core.preflight import Node, describe, gpu_fault, own_name_fault

EVERYWHERE = "0.0.0.0"  # an address of this machine that is not loopback, which the checks refuse


@pytest.fixture
def job(monkeypatch):
    """A job of three nodes, all here, on a port that is free."""
    monkeypatch.setattr(hello, "resolve", lambda host: EVERYWHERE)
    monkeypatch.setattr(hello, "FIRST_S", 1)
    with socket.create_server((EVERYWHERE, 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(Job, "port", port)
    return Job("17", 0, ("head", "second", "third"))


def node(job, number, **changed):
    return replace(describe(job, number, ""), host=job.nodes[number], **changed)


def outcomes(job, nodes, timeout_s=10):
    """What each node's `meet` ended with: its address, or the message of its error."""

    def one(me):
        try:
            return ("ok", meet(job, me, timeout_s))
        except UnfitError as error:
            return ("unfit", str(error))

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(one, nodes))


def test_all_fit(job):
    nodes = [node(job, number) for number in range(3)]
    assert [outcome[0] for outcome in outcomes(job, nodes)] == ["ok"] * 3


@pytest.mark.parametrize("name", ["python", "torch", "package"])
def test_another_version_is_named_by_the_head_alone(job, name):
    nodes = [node(job, 0), node(job, 1), node(job, 2, **{name: "0.1.other"})]
    head, second, third = outcomes(job, nodes)
    assert head[0] == "unfit"
    assert "third has" in head[1]
    assert "0.1.other" in head[1]
    assert second == third == ("unfit", "")


def test_fault_of_one_node_ends_all(job):
    nodes = [node(job, 0), node(job, 1, fault="second has no GPU"), node(job, 2)]
    assert outcomes(job, nodes) == [("unfit", "second has no GPU"), ("unfit", ""), ("unfit", "")]


def test_fault_of_the_head_ends_all(job):
    nodes = [node(job, 0, fault="head has no GPU"), node(job, 1), node(job, 2)]
    assert outcomes(job, nodes) == [("unfit", "head has no GPU"), ("unfit", ""), ("unfit", "")]


def test_missing_node_is_named(job):
    head, second = outcomes(job, [node(job, 0), node(job, 1)], timeout_s=1.5)
    assert "no word from third within" in head[1]
    assert "1 of 3 nodes" in head[1]
    assert second == ("unfit", "")


def test_strangers_are_not_nodes(job):
    """Something else connects, sends no JSON, another's JSON, nothing: the nodes still meet."""

    def disturb():
        for data in (b"GET / HTTP/1.0\r\n\r\n", b'{"a": 1}\n', b"[]\n", b"", b"x" * 10000):
            with socket.create_connection((EVERYWHERE, job.port), timeout=5) as connection:
                connection.sendall(data)
        other = node(replace(job, id="18"), 1)
        with socket.create_connection((EVERYWHERE, job.port), timeout=5) as connection:
            connection.sendall(json.dumps(vars(other)).encode() + b"\n")

    with ThreadPoolExecutor(3) as pool:
        head = pool.submit(meet, job, node(job, 0), 20)
        while True:
            try:
                disturb()
                break
            except ConnectionRefusedError:
                continue
        others = [pool.submit(meet, job, node(job, number), 20) for number in (1, 2)]
        assert [future.result() for future in (head, *others)]


def test_port_in_use_names_who_has_it(job):
    with socket.create_server((EVERYWHERE, job.port)):
        with pytest.raises(UnfitError, match=f"port {job.port} on .* is in use by process {os.getpid()}"):
            meet(job, node(job, 0), 5)
        assert str(os.getpid()) in owner_of(job.port)


def test_another_program_on_the_port_is_not_the_head(job):
    """It takes connections and says nothing of ours: the head can't have the port and says so; this node is silent."""
    with socket.create_server((EVERYWHERE, job.port)) as server:
        stop = threading.Event()

        def serve():
            server.settimeout(0.1)
            while not stop.is_set():
                try:
                    server.accept()[0].close()
                except socket.timeout:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UnfitError) as error:
            meet(job, node(job, 1), 30)
        stop.set()
        thread.join()
    assert str(error.value) == ""


def test_head_out_of_reach_is_named(job):
    with pytest.raises(UnfitError, match=f"second can't reach head:{job.port}"):
        meet(job, node(job, 1), 1.5)


def test_head_that_does_not_resolve(job, monkeypatch):
    def unknown(host):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(hello, "resolve", unknown)
    with pytest.raises(UnfitError, match="head does not resolve there"):
        meet(job, node(job, 1), 5)


def test_head_that_is_loopback_elsewhere(job, monkeypatch):
    monkeypatch.setattr(hello, "resolve", lambda host: "127.0.1.1")
    with pytest.raises(UnfitError, match=r"second resolves head to 127\.0\.1\.1"):
        meet(job, node(job, 1), 5)


def test_process_zero_that_is_not_on_the_first_node(job, monkeypatch):
    monkeypatch.setattr(hello, "resolve", lambda host: "192.0.2.1")  # of no machine (RFC 5737)
    with pytest.raises(UnfitError, match="the first node of job 17 is head"):
        meet(job, node(job, 0), 5)


def test_own_name(monkeypatch):
    def unknown(host):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(preflight, "resolve", unknown)
    assert "can't resolve its own name" in own_name_fault("")
    monkeypatch.setattr(preflight, "resolve", lambda host: "127.0.1.1")
    assert "127.0.1.1" in own_name_fault("")
    assert own_name_fault("ib0") == ""
    monkeypatch.setattr(preflight, "resolve", lambda host: "10.0.0.1")
    assert own_name_fault("") == ""


def test_gpus_against_ranks():
    assert gpu_fault("auto", 4, 0) == gpu_fault("nccl", 4, 4) == ""
    assert "Use -n 2 or backend=gloo" in gpu_fault("nccl", 4, 2)
    assert "Use backend=gloo" in gpu_fault("nccl", 4, 0)


def test_versions_without_importing():
    me = describe(Job("17", 0, ("a",)), 0, "")
    assert isinstance(me, Node)
    assert me.torch[0].isdigit()
    assert preflight.version("no-such-thing") == "not installed"


def test_ports_are_below_the_ephemeral_ones():
    assert 1024 < PORTS[0] < PORTS[1] < 32768
