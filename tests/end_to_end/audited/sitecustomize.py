"""Loaded by every interpreter that has this folder on its path: reports code made out of data.

Each process writes what it did to the file $AUDIT_FILE: one line when it starts, and one for every
pickle that is read, every marshal, eval, exec or compile that no import asked for.
"""

import json
import os
import pickle  # noqa: S403
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

WATCHED = {"pickle.find_class", "marshal.load", "marshal.loads", "exec", "compile", "code.__new__"}


def report(what: str) -> None:
    frames: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame.f_code.co_filename)
        frame = frame.f_back
    frames = [name for name in frames if name != __file__]
    # The interpreter itself and runpy begin the program; importlib runs a module's own code.
    if not frames or frames[0] == "<frozen runpy>":
        return
    if not any(name.startswith("<frozen importlib") for name in frames):
        write({"what": what, "stack": frames[:12]})


def write(line: dict[str, Any]) -> None:
    line |= {"pid": os.getpid(), "argv": sys.orig_argv[1:]}
    with open(os.environ["AUDIT_FILE"], "a") as file:
        file.write(json.dumps(line) + "\n")


def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        report(name)
        return function(*args, **kwargs)

    return call


# find_class tells nothing of a pickle that holds only numbers and text.
for name in ("load", "loads", "_load", "_loads", "Unpickler", "_Unpickler"):
    setattr(pickle, name, watched(f"pickle.{name}", getattr(pickle, name)))
write({"what": "started"})
sys.addaudithook(lambda event, args: report(event) if event in WATCHED else None)
