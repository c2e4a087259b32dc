"""The only code of the tests that starts ranks. Every process that it starts is gone when it returns."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence

ROOT = Path(__file__).resolve().parents[1]
MARKER = "DDP_EXAMPLES_TEST_RUN"  # in the environment of every process of a run, so that none is missed
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Result:
    """How a command ended. `left` are the processes of the run that outlived it by more than a second."""

    status: int
    out: str
    err: str
    seconds: float
    left: Sequence[str]

    @property
    def output(self) -> str:
        return self.out + self.err


def run(
    command: Sequence[str],
    cwd: Optional[Path] = None,
    env: Optional[Mapping[str, Optional[str]]] = None,
    timeout_s: float = 120,
) -> Result:
    """Run `command` to its end; past `timeout_s` it gets SIGTERM, so that torchrun ends its ranks, then SIGKILL.

    `env` is added to this process's environment, None removes a variable. Output goes to files: a pipe that nobody
    reads would stop the ranks, and a rank that holds one open would stop us.
    """
    marker = uuid.uuid4().hex
    environment = {**{k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}, MARKER: marker}
    for name, value in (env or {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        process = subprocess.Popen(
            list(command), cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
            status = -1000  # no status that a process can have
        seconds = time.monotonic() - start
        left = _end_leftovers(marker)
        process.wait()
        out.seek(0)
        err.seek(0)
        return Result(status, out.read().decode(), err.read().decode(), seconds, left)


def torchrun(ranks: int, *arguments: str, **options: object) -> Result:
    """Bare torchrun with `ranks` ranks on this machine: `torchrun(4, "-m", "ddp_examples.basic", "seed=1")`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return run([*command, f"--nproc-per-node={ranks}", *arguments], **options)  # type: ignore[arg-type]


FORK = """
import sys
from ddp_examples.core.forkserver import start_server
start_server()
from ddp_examples.core.agent import run_agent
sys.exit(run_agent(sys.argv[1:]))
"""


def forked(ranks: int, module: str, *arguments: str, **options: object) -> Result:
    """`ranks` ranks of a module, of the tests too, from a fork server, as launch/local.sh starts them: 3 times as fast.

    The status is that of the rank that failed first.
    """
    python_path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", **(options.pop("env", None) or {})}  # type: ignore[dict-item]
    command = [sys.executable, "-c", FORK, "--standalone", f"--nproc-per-node={ranks}", "--module", module]
    return run([*command, *arguments], env=env, **options)  # type: ignore[arg-type]


def local(*arguments: str, **options: object) -> Result:
    """launch/local.sh, with this interpreter."""
    return _script("local.sh", *arguments, **options)


def debug(*arguments: str, **options: object) -> Result:
    """launch/debug.sh, with this interpreter."""
    return _script("debug.sh", *arguments, **options)


def _script(name: str, *arguments: str, **options: object) -> Result:
    env: Dict[str, Optional[str]] = {"PYTHON": sys.executable}
    env.update(options.pop("env", None) or {})  # type: ignore[call-overload]
    return run([str(ROOT / "launch" / name), *arguments], env=env, **options)  # type: ignore[arg-type]


def processes(marker: str) -> Dict[int, str]:
    """Processes of the run `marker`, by pid, with their command lines; read from the kernel."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={marker}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def _end_leftovers(marker: str) -> List[str]:
    """Wait a second for the processes of the run to go; kill and return those that don't."""
    deadline = time.monotonic() + 1
    while processes(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = processes(marker)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return [f"{pid}: {command}" for pid, command in left.items()]
