"""SIGKILL the launcher of a run at random moments while it saves, start it again, and see what is left.

    python tests/loop_kill.py [--kills 100] [--megabytes 64] [--mode sync]

2 ranks save one checkpoint after the other, and note on the screen each step that save() has returned from. After each
kill the next start must go on from that step, or from the one whose save was under way. Also the worker: `loop_kill
FOLDER MEGABYTES MODE` under torchrun.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Dict

from torchrun import FORK, MARKER, ROOT, processes


def save_for_ever(folder: str, megabytes: int, mode: str) -> None:
    import torch

    from ddp_examples.core.checkpoints import CheckpointDir
    from ddp_examples.core.group import process_group
    from ddp_examples.core.ranks import read_ranks

    with process_group(read_ranks(os.environ), "gloo", 60) as group, CheckpointDir(folder, 2, mode) as checkpoints:
        state = checkpoints.load(group.device)
        step = 0 if state is None else int(state["step"])
        if group.is_main:
            print(f"resumed {step}", flush=True)
        weight = torch.zeros(megabytes * 250_000)
        while True:
            step += 1
            weight += 1
            if group.is_main:
                print(f"saving {step}", flush=True)
            checkpoints.save(step, {"weight": weight, "step": step})
            if group.is_main and mode == "sync":
                print(f"saved {step}", flush=True)


def kill_while_saving(folder: Path, kills: int, megabytes: int, seed: int, mode: str = "sync") -> Dict[str, int]:
    """Counts of: kills, kills that hit a save, starts that lost a step that was saved, bad files, leftovers."""
    rng = random.Random(seed)
    outcome = {"kills": 0, "while saving": 0, "lost": 0, "corrupt": 0, "left over": 0}
    saved = saving = 0
    for _ in range(kills):
        marker = uuid.uuid4().hex
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        env = {**os.environ, MARKER: marker, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        command = [sys.executable, "-c", FORK, "--standalone", "--nproc-per-node=2", "--module", "loop_kill"]
        log = folder / "log"
        with log.open("wb") as out:
            arguments = [*command, str(folder / "c"), str(megabytes), mode]
            process = subprocess.Popen(arguments, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        wait_for(log, "saving", process)
        time.sleep(rng.uniform(0, 1.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 10
        while processes(marker) and time.monotonic() < deadline:
            time.sleep(0.02)  # the kernel ends the ranks after the launcher: until then they save and write on
        text = log.read_text()
        resumed = [int(line.split()[1]) for line in text.splitlines() if line.startswith("resumed ")]
        outcome["kills"] += 1
        outcome["lost"] += not resumed or not saved <= resumed[0] <= max(saving, saved)
        outcome["corrupt"] += "cut or altered" in text or "empty" in text
        finished = [int(line.split()[1]) for line in text.splitlines() if line.startswith("saved ")]
        begun = [int(line.split()[1]) for line in text.splitlines() if line.startswith("saving ")]
        saved = max([*finished, *resumed, 0])
        saving = max([*begun, saved])
        outcome["while saving"] += saving > saved
        outcome["left over"] += len(processes(marker))
    return {**outcome, "left over": outcome["left over"] + leftovers(folder / "c")}


def leftovers(folder: Path) -> int:
    """Files that the next start would not remove: it does remove *.part."""
    from ddp_examples.core.stored import checkpoint_files

    known = {*checkpoint_files(folder), folder / ".owner", *folder.glob("*.part")}
    return len(set(folder.iterdir()) - known) + max(0, len(checkpoint_files(folder)) - 3)


def wait_for(log: Path, word: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while word not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"the run did not get to its first save:\n{log.read_text()}")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--mode", default="sync")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        outcome = kill_while_saving(Path(name), options.kills, options.megabytes, seed=1, mode=options.mode)
    print(outcome)
    sys.exit(outcome["lost"] + outcome["corrupt"] + outcome["left over"] > 0)


if __name__ == "__main__":
    if "RANK" in os.environ:
        save_for_ever(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        main()
