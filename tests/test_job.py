"""What a job knows of itself: node lists, own number, time limits."""

import pytest

from ddp_examples.core import job
from ddp_examples.core.job import Job, expand, expand_nodes, first_nodes, read_job, seconds, task


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("c196-011", ["c196-011"]),
        ("c101-[001-002,007],c196-011", ["c101-001", "c101-002", "c101-007", "c196-011"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[3,5]-ib", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"]),
        ("a,b-1,c", ["a", "b-1", "c"]),
    ],
)
def test_node_lists(text, names):
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "n[]", "n]1[", "a,,b", "n[1-2-3]"])
def test_no_node_list(text):
    with pytest.raises(ValueError, match="is not a"):
        expand_nodes(text)


def test_without_scontrol_the_list_is_expanded_here(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert expand("c101-[001-002]") == ["c101-001", "c101-002"]


def test_scontrol_is_asked_first(monkeypatch):
    monkeypatch.setattr(job, "ask", lambda *command: "x\ny")
    assert expand("c101-[001-002]") == ["x", "y"]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, (3, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "9"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0"}, (1, 2)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"SLURM_PROCID": "0"}, (0, 0)),  # a batch script: no step
        ({}, (0, 0)),
    ],
)
def test_own_number(env, expected):
    assert task(env) == expected


def test_no_job():
    assert read_job({"SLURM_CONF": "x"}) is None


def test_job_of_a_shell_that_came_by_ssh(monkeypatch):
    monkeypatch.setattr(job, "ask", lambda *command: "c101-[001-002]" if command[0] == "squeue" else None)
    assert read_job({"SLURM_JOB_ID": "17"}) == Job("17", 0, ("c101-001", "c101-002"))


def test_job_without_nodes(monkeypatch):
    monkeypatch.setattr(job, "ask", lambda *command: None)
    with pytest.raises(ValueError, match="unset SLURM_JOB_ID"):
        read_job({"SLURM_JOB_ID": "17"})


def test_restarted_job():
    env = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "a,b", "SLURM_RESTART_COUNT": "2"}
    found = read_job(env)
    assert found is not None
    assert found.run == "17-2"
    assert first_nodes(found, 1).nodes == ("a",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("02:00:00", 7200),
        ("2-00:00:00", 172800),
        ("1-12", 129600),
        ("1-1:30", 91800),
        ("infinite", float("inf")),
    ],
)
def test_time_limits(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["soon", "1:2:3:4", "x-1", "-5", "1.5"])
def test_no_time_limit(text):
    with pytest.raises(ValueError, match="HH:MM:SS"):
        seconds(text)
