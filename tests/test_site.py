"""Sites: the shipped files, a user's own one, and what is wrong in it."""

import re

import pytest
from torchrun import ROOT, run

from ddp_examples.core.config import ConfigError
from ddp_examples.core.queues import choose_queue, queues_of
from ddp_examples.core.site import Queue, load_site

QUEUES = {"dev": Queue(2, "02:00:00", 4), "gpu": Queue(16, "48:00:00", 4), "cpu": Queue(0, "", 0)}


@pytest.fixture
def own(monkeypatch, tmp_path):
    """Write conf/site/own.yaml."""
    monkeypatch.setenv("DDP_EXAMPLES_CONF", str(tmp_path))
    (tmp_path / "site").mkdir()
    return lambda text, name="own": (tmp_path / "site" / f"{name}.yaml").write_text(text)


def test_own_site_is_one_file(own):
    own("start: mpirun -np {nodes}\nqueues: {fat: {nodes: 3, time: '1-00:00:00', gpus: 8}}\n")
    site = load_site("own")
    assert site.start == "mpirun -np {nodes}"
    assert site.queues == {"fat": Queue(3, "1-00:00:00", 8)}
    assert site.look == load_site("slurm").look  # what it leaves out is as in slurm.yaml


def test_own_site_of_readme(own):
    text = (ROOT / "README.md").read_text()
    own(text.partition("owl.yaml <<'END'\n")[2].partition("END\n")[0], name="owl")
    site = load_site("owl")
    assert site.queues["short"] == Queue(4, "04:00:00", 2)
    assert site.interface == "ib0"


def test_own_file_of_a_shipped_site_wins_by_key(own):
    own("startup_timeout_s: 99\n", name="frontera")
    site = load_site("frontera")
    assert site.startup_timeout_s == 99
    assert site.start == "ibrun -n {nodes}"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("strat: srun\n", "strat"),
        ("queues: {rtx: {node: 3}}\n", "node"),
        ("startup_timeout_s: soon\n", "startup_timeout_s"),
        ("startup_timeout_s: 1\n", "at least 10"),
        ("never: [--mem]\nsbatch: [--mem=4G]\n", "--mem=4G"),
        ("start: [\n", "own.yaml"),
    ],
)
def test_mistake_in_a_site_is_named_with_its_file(own, text, word):
    own(text)
    with pytest.raises(ConfigError) as error:
        load_site("own")
    assert word in str(error.value)
    assert "own.yaml" in str(error.value)


def test_unknown_site_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean site=frontera"):
        load_site("frontara")


def test_folder_with_a_variable_that_is_not_set(monkeypatch):
    monkeypatch.delenv("SCRATCH", raising=False)
    with pytest.raises(ConfigError, match="SCRATCH"):
        load_site("frontera").runs_folder()


def test_frontera_gets_no_option_that_it_refuses(own):
    own("sbatch: [--gres=gpu:4]\n", name="frontera")
    with pytest.raises(ConfigError, match="--gres=gpu:4"):
        load_site("frontera")


@pytest.mark.parametrize(
    ("wanted", "nodes", "time", "queue"),
    [
        (None, 1, "00:30:00", "dev"),
        (None, 3, "00:30:00", "gpu"),
        (None, 2, "03:00:00", "gpu"),
        ("cpu", 99, "9:0:0", "cpu"),
    ],
)
def test_first_queue_with_gpus_that_fits(wanted, nodes, time, queue):
    assert choose_queue(QUEUES, wanted, nodes, time) == queue


@pytest.mark.parametrize(
    ("wanted", "nodes", "time", "words"),
    [
        ("dev", 3, "1:00:00", "more than its 2 nodes. Use -p gpu"),
        ("dev", 1, "03:00:00", "more than its 02:00:00. Use -p gpu"),
        ("gpu", 17, "1:00:00", "more than its 16 nodes. Queues: dev"),
        (None, 17, "1:00:00", "no queue takes -N 17"),
        ("gup", 1, "1:00:00", "no such queue. Queues: dev"),
    ],
)
def test_over_the_limits(wanted, nodes, time, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        choose_queue(QUEUES, wanted, nodes, time)


def test_without_known_queues_slurm_decides():
    assert choose_queue({}, None, 5, "99:00:00") == ""
    assert choose_queue({}, "any", 5, "99:00:00") == "any"


def test_queues_of_sinfo():
    text = "dev|2:00:00|2|gpu:4(S:0-1)\nmain*|infinite|10|(null)\nmain*|infinite|3|gpu:a100:8,craynetwork:1\nodd line"
    assert queues_of(text) == {"main": Queue(13, "infinite", 8), "dev": Queue(2, "2:00:00", 4)}


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("frontera", "module load python3/3.9.2|/scratch/me/ddp-examples/venv"),
        ("slurm", f"|{ROOT}/.venv"),
        ("own", "module load gcc/12 python/3.11|/work/me/ddp/venv"),
    ],
)
def test_launchers_find_modules_and_environment(own, site, said, tmp_path):
    """They must read the site's file before there is a Python."""
    own("modules: [gcc/12, python/3.11] # both\nfolder: $WORK/ddp\n")
    script = 'source "$0/launch/common.sh"; module() { echo -n "module $*"; }; use_site "$1"; echo "|$venv"'
    result = run(
        ["bash", "-euc", script, str(ROOT), site],
        env={"DDP_EXAMPLES_CONF": str(tmp_path), "SCRATCH": "/scratch/me", "WORK": "/work/me"},
    )
    assert result.output == said + "\n"
