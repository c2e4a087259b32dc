"""Whose code a frame is of, and whether it waits for other ranks. Standard library only."""

import os
import sysconfig
import traceback
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Optional, Tuple

_CORE = str(Path(__file__).resolve().parent) + os.sep
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_STDLIB = tuple({sysconfig.get_path("stdlib") + os.sep, str(Path(os.__file__).parent) + os.sep})  # a venv has two
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_FOUND = find_spec("torch")  # does not import it
_TORCH = str(Path(_FOUND.origin).parent) + os.sep if _FOUND and _FOUND.origin else "no torch"
_DDP = _TORCH + str(Path("nn", "parallel", "distributed.py"))
_DISTRIBUTED = _TORCH + "distributed" + os.sep


def is_users(filename: str) -> bool:
    """Whether a frame of this file is of the user's own code. `<stdin>` is; `<frozen runpy>` is not."""
    if filename.startswith(_PACKAGE):  # installed or not, the demos stand for the user's code
        return not filename.startswith(_CORE)
    installed = any(folder in filename for folder in _INSTALLED)
    return not (installed or filename.startswith(("<frozen", _TORCH, *_STDLIB)))


def short(filename: str) -> str:
    """A path as short as it can be typed here."""
    with suppress(OSError):  # the folder of the start may be gone
        here = os.getcwd() + os.sep  # noqa: PTH109
        return filename[len(here) :] if filename.startswith(here) else filename
    return filename


def user_frame(trace: Optional[TracebackType]) -> str:
    """Of a traceback the innermost frame that is neither of torch, nor of an installed package, nor of our own core."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if is_users(frame.filename)] or list(frames)
    return f"{short(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else ""


def look(frame: Optional[FrameType]) -> Tuple[Any, bool, str]:
    """Of a thread's innermost frame: (differs where the stack does, whether it waits in a collective, user's frame)."""
    place, waiting, where, innermost = [], False, "", True
    while frame is not None:
        name = frame.f_code.co_filename
        place.append((id(frame.f_code), frame.f_lasti))
        if not where:
            if is_users(name):
                where = f"{short(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
            waiting = waiting or (not where and _is_collective(frame.f_code.co_name, name, innermost))
        innermost = False
        frame = frame.f_back
    return tuple(place), waiting, where


def _is_collective(function: str, filename: str, innermost: bool) -> bool:
    """A frame of torch.distributed, or of a backward pass, in which DDP waits; DDP's own only where it waits itself."""
    if filename == _DDP:
        return innermost
    return filename.startswith(_DISTRIBUTED) or function == "_engine_run_backward"


def at_debugger(frame: Optional[FrameType]) -> bool:
    """A person at a prompt is no hang."""
    while frame is not None:
        if Path(frame.f_code.co_filename).name in ("pdb.py", "bdb.py", "pydevd.py"):
            return True
        frame = frame.f_back
    return False
