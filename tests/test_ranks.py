"""Ranks from the environment: none, all, some, impossible."""

import pytest

from ddp_examples.core import exits
from ddp_examples.core.ranks import NAMES, Ranks, loopback_interface, read_ranks


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "SPEAKER_FIRST_S", 0)


def test_none_is_a_world_of_one() -> None:
    assert read_ranks({"PATH": "/bin"}) == Ranks(0, 0, 1, 1, launched=False)


def test_all() -> None:
    env = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert read_ranks(env) == Ranks(5, 1, 8, 4, launched=True)


def test_a_launcher_without_local_world_size() -> None:
    assert read_ranks({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}).local_world_size == 2


@pytest.mark.parametrize("present", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_some_is_refused_and_the_absent_are_named(present: tuple, capsys: pytest.CaptureFixture[str]) -> None:
    env = {NAMES[i]: "0" for i in present}
    with pytest.raises(SystemExit) as leaving:
        read_ranks(env)
    message = capsys.readouterr().err
    assert leaving.value.code == 2
    before = message.split(" not set")[0]
    for name in NAMES:
        assert (name in before.split()) == (name not in env)
    assert "torchrun --nproc_per_node" in message


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "4"},
        {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
        {"RANK": "0", "LOCAL_RANK": "-1", "WORLD_SIZE": "4"},
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "two"},
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"},
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"},
    ],
)
def test_impossible_is_refused(env: dict) -> None:
    with pytest.raises(SystemExit) as leaving:
        read_ranks(env)
    assert leaving.value.code == 2


def test_one_rank_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank finds the same fault; only rank 0 says so."""
    for rank in range(3):
        with pytest.raises(SystemExit):
            read_ranks({"RANK": str(rank), "WORLD_SIZE": "3"})
    assert capsys.readouterr().err.count("LOCAL_RANK not set") == 1


def test_loopback_has_another_name_on_other_systems() -> None:
    assert (loopback_interface("linux"), loopback_interface("darwin")) == ("lo", "lo0")
