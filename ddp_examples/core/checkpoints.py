"""Checkpoints that survive: a folder of them, verified when loaded, owned by one run at a time.

    with CheckpointDir(config.checkpoint.path, keep=2) as checkpoints:
        state = checkpoints.load(group.device)     # None: the folder has none
        checkpoints.save(step, {"model": model_state(ddp), "optimizer": optimizer.state_dict(), "next_epoch": 3})

All of it is collective. A file is a plain `torch.save`, which `torch.load(file)` reads without this module. A person
looks into a folder with `python -m ddp_examples.core.checkpoints FOLDER`.

Why not torch.distributed.checkpoint: what it leaves is a folder that plain torch.load can't read, and torch's object
collectives need numpy, which is not installed with torch. Measured (torch 2.13, 503 MB, 2 cores, medians of 3):
torch.save without its own CRC 1.06 s, with it 1.77 s, a raw write and fsync of as many bytes 1.65 s.
"""

import sys
import threading
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Dict, List, Mapping, Optional, Tuple, Type

import torch
from torch import Tensor, nn

from ddp_examples.core.exits import Exit, say
from ddp_examples.core.group import all_gather, gather, on_main
from ddp_examples.core.owner import Owner
from ddp_examples.core.stored import (
    CheckpointError,
    checkpoint_files,
    copied,
    fault,
    load_file,
    refuse_unloadable,
    save_file,
    step_of,
)


class CheckpointDir:
    """The checkpoints of one run. `mode` "async" writes in the background: a save costs the copy, not the disk.

    Whatever fails is a CheckpointError, with the same words on every rank.
    """

    def __init__(self, path: str, keep: int = 2, mode: str = "sync") -> None:
        self.path, self.keep, self.mode = Path(path), max(keep, 2), mode
        self._owner: Optional[Owner] = None  # on rank 0
        self._writer: Optional[threading.Thread] = None
        self._failure: Optional[BaseException] = None  # of the writer
        on_main(self._open)

    def __enter__(self) -> "CheckpointDir":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        try:
            if error is None:
                self.finish()
            elif self._writer is not None:
                self._writer.join()  # what was begun is worth ending; but no collective, the peers may be gone
        finally:
            if self._owner is not None:
                self._owner.release()

    def _open(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._owner = Owner.take(self.path / ".owner")
            for part in self.path.glob("*.part"):
                part.unlink()  # of a run that is dead, or the folder would be its
        except OSError as error:
            raise CheckpointError(f"checkpoint.path={self.path} can't be used: {error.strerror}") from None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write `state`, the same on all ranks (see rng_states for what is not), as the checkpoint of `step`.

        A failure leaves the checkpoints before untouched; with mode "async" it is raised by the next save or the end.
        """
        refuse_unloadable(dict(state))
        self.finish()
        if self.mode == "async":
            on_main(lambda: self._write_in_background(step, copied(state)))
        else:
            on_main(lambda: self._write(step, state))

    def finish(self) -> None:
        """Wait for the save that is under way, and raise what has become of it."""
        on_main(self._join)

    def load(self, device: torch.device) -> Optional[Dict[str, Any]]:
        """The newest checkpoint that is whole, its tensors on `device`; None if there is none at all.

        One that is cut or altered is named, set aside as *.bad, and the one before is taken. If none is whole,
        CheckpointError lists them with their faults, and nothing is touched.
        """
        self.finish()
        chosen = on_main(self._choose)  # one rank chooses: they may see different listings of a shared folder
        if chosen is None:
            return None
        state, failure = None, ""
        try:
            state = load_file(Path(chosen), device)
        except Exception as error:  # whatever it is, the others must not go on without this rank
            failure = f"{chosen} could not be loaded: {type(error).__name__}: {error}"
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(gather(failure)) if text]
        if failures:
            raise CheckpointError(failures[0])
        return state

    def _choose(self) -> Optional[str]:
        bad: List[Tuple[Path, str]] = []
        for path in checkpoint_files(self.path):
            reason = fault(path)
            if not reason:
                for worse, why in bad:
                    worse.rename(worse.with_name(worse.name + ".bad"))
                    say(f"{worse} is {why}. It is set aside as *.bad, and the one before is used: {path.name}")
                return str(path)
            bad.append((path, reason))
        if bad:
            raise CheckpointError("no checkpoint is whole:\n" + "\n".join(f"  {path} is {why}" for path, why in bad))
        return None

    def _write(self, step: int, state: Mapping[str, Any]) -> None:
        save_file(self.path, f"step_{step:08d}", state)
        for path in checkpoint_files(self.path)[self.keep :]:
            path.unlink()

    def _write_in_background(self, step: int, state: Mapping[str, Any]) -> None:
        def write() -> None:
            try:
                self._write(step, state)
            except BaseException as error:
                self._failure = error

        self._writer = threading.Thread(target=write, name="checkpoint")
        self._writer.start()

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
        failure, self._writer, self._failure = self._failure, None, None
        if failure is not None:
            raise failure


def model_state(model: nn.Module) -> Dict[str, Tensor]:
    """Parameters and buffers by the names they have without DDP, whether `model` is wrapped or not."""
    return {_bare(name): value for name, value in model.state_dict().items()}


def load_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy a saved model into `model`, whichever of the two is wrapped. CheckpointError names the first difference."""
    theirs = {_bare(name): value for name, value in saved.items()}
    mine = model_state(model)
    for name, value in mine.items():
        if name not in theirs:
            raise CheckpointError(f"the checkpoint is of another model: it has no {name}")
        if theirs[name].shape != value.shape:
            was, now = tuple(theirs[name].shape), tuple(value.shape)
            raise CheckpointError(f"the checkpoint is of another model: {name} is {was} there and {now} here")
    for name in theirs.keys() - mine.keys():
        raise CheckpointError(f"the checkpoint is of another model: it has {name}, which is not here")
    with torch.no_grad():
        for name, value in mine.items():
            value.copy_(theirs[name])


def _bare(name: str) -> str:
    return name[len("module.") :] if name.startswith("module.") else name


def same_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """CheckpointError for the first fact (demo, a parameter) that is another than when the checkpoint was saved."""
    for key in {**saved, **now}:
        if saved.get(key) != now.get(key):
            was, is_now = saved.get(key), now.get(key)
            raise CheckpointError(
                f"the checkpoint is of another run: {key} was {was} and is {is_now}."
                " Give the old value, or another checkpoint.path=..."
            )


def rng_states() -> List[Tensor]:
    """torch's random state of each rank, by rank: what is saved beside the model. Collective."""
    return all_gather(torch.get_rng_state())


def main() -> int:
    """List a folder: step, time, bytes, ranks, and whether each checkpoint is whole."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        say("python -m ddp_examples.core.checkpoints FOLDER")
        return Exit.USAGE
    print(f"{'step':>8}  {'written':<19}  {'bytes':>15}  {'ranks':>5}  state")
    for path in checkpoint_files(Path(sys.argv[1])):
        reason = fault(path)
        ranks = "?" if reason else str(load_file(path, torch.device("cpu")).get("world_size", "?"))
        stat = path.stat()
        written = datetime.fromtimestamp(stat.st_mtime).isoformat(sep=" ", timespec="seconds")
        print(f"{step_of(path):>8}  {written}  {stat.st_size:>15,}  {ranks:>5}  {reason or 'whole'}")
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
