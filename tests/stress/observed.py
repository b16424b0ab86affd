"""The command line as it is, which marks in a file what it is doing: where a kill falls can then be seen, and chosen.

    python observed.py MARKS train text.txt ...

The file is mapped into memory, so that a mark costs nothing and outlives the process that made it: byte 0 is the
phase of the training thread, byte 1 that of the thread which writes a checkpoint, bytes 4 to 7 the steps done. Bytes 2
and 3 are written by the other side: a phase of each thread to linger in, before and after its work, so that one which
is over in a moment can be met.
"""

from __future__ import annotations

import functools
import mmap
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRAINING = (
    "starting Python",
    "importing, reading",
    "restoring the checkpoint",
    "cutting the log",
    "compiling the step",
    "in a step, accumulating",
    "between steps",
    "validating",
    "writing the best weights",
    "sampling",
    "copying the state to save",
    "finishing",
    "writing the report",
)
SAVING = ("", "writing arrays", "waiting for the disk", "renaming", "moving pointers", "deleting old ones")
SIZE = 8
LINGER = 0.005  # seconds


def main() -> int:
    """Run the command that follows the name of the file."""
    with open(sys.argv[1], "r+b") as file:
        marks = mmap.mmap(file.fileno(), SIZE)
    from rung.host import keep_freed_memory

    keep_freed_memory()  # as the command line does, before anything starts a thread
    from rung.cli import main as command

    observe(marks)
    marks[0] = TRAINING.index("importing, reading")
    return command(sys.argv[2:])


def observe(marks: mmap.mmap) -> None:
    """Let the functions of a run mark when they are entered and left."""
    import rung.run.training as training
    from rung.train import checkpoint
    from rung.train.loop import Loop

    def within(phases: tuple[str, ...], at: int, owner: Any, name: str, phase: str) -> None:
        original = getattr(owner, name)
        number = phases.index(phase)

        @functools.wraps(original)
        def marking(*args: Any, **kwargs: Any) -> Any:
            if at == 1 and threading.current_thread().name != "rung-save":
                return original(*args, **kwargs)
            before, marks[at] = marks[at], number
            try:
                linger()
                result = original(*args, **kwargs)
                linger()
                return result
            finally:
                marks[at] = before

        def linger() -> None:
            if marks[2 + at] == number:
                time.sleep(LINGER)

        setattr(owner, name, marking)

    for owner, name, phase in (
        (checkpoint.Checkpoints, "restore", "restoring the checkpoint"),
        (training, "truncate_after", "cutting the log"),
        (training.Compiling, "step", "compiling the step"),
        (Loop, "_evaluate", "validating"),
        (training.BestWeights, "write", "writing the best weights"),
        (Loop, "_sample", "sampling"),
        (checkpoint.Checkpoints, "save", "copying the state to save"),
        (Loop, "_steps", "between steps"),
        (Loop, "_finish", "finishing"),
        (training, "write_report", "writing the report"),
    ):
        within(TRAINING, 0, owner, name, phase)
    for owner, name, phase in (
        (checkpoint.Checkpoints, "_write", "writing arrays"),
        (checkpoint, "on_disk", "waiting for the disk"),
        (Path, "rename", "renaming"),
        (checkpoint, "write_pointer", "moving pointers"),
        (checkpoint.Checkpoints, "_tidy", "deleting old ones"),
    ):
        within(SAVING, 1, owner, name, phase)

    run, stepped = Loop.run, Loop._stepped
    begun, read = 0, 0

    def in_step(step: Callable[..., Any]) -> Callable[..., Any]:
        def marking(*args: Any) -> Any:
            nonlocal begun
            begun += 1
            marks[0] = TRAINING.index("in a step, accumulating")
            return step(*args)

        return marking

    def marked_run(self: Loop, state: Any, progress: Any) -> Any:
        self.step = in_step(self.step)
        return run(self, state, progress)

    def marked_stepped(self: Loop, pending: Any, state: Any) -> None:
        nonlocal read
        stepped(self, pending, state)
        read += 1
        marks[4:8] = struct.pack("<I", pending.number + 1)
        if read == begun:  # else the device is at work on the next
            marks[0] = TRAINING.index("between steps")

    Loop.run, Loop._stepped = marked_run, marked_stepped  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
