"""Checkpoints: the whole state and what belongs to it, saved in the background through Orbax, whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from rung.errors import RungError
from rung.train.step import State


@dataclass(frozen=True)
class Progress:
    """What a run has come to, beside its arrays; saved in every checkpoint.

    Attributes:
        step: steps done.
        tokens: target tokens trained on.
        seconds: training time, over all resumes.
        best_step: the step of the best validation so far; 0 before the first.
        best_loss: its loss in nats per token; ``None`` before the first.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int = 0
    best_loss: float | None = None


class Checkpoints:
    """The checkpoints of a run: ``checkpoints/<step>/`` in its folder, and the pointers ``latest`` and ``best``.

    A save is copied off the devices at once and written in the background, to a temporary name that is renamed when the
    checkpoint is whole; a pointer names a step only when its checkpoint is whole.
    """

    def __init__(self, run: Path, keep: int):
        self._run = run
        self._keep = keep
        self._saving: Progress | None = None
        options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager((run / "checkpoints").absolute(), options=options)

    def save(self, state: State, progress: Progress) -> Path:
        """Begin to save; returns the path that the checkpoint will have. Waits for a save before it that still runs."""
        self.wait()
        self._manager.save(
            progress.step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(vars(progress))),
            force=True,
        )
        self._saving = progress
        return self._run / "checkpoints" / str(progress.step)

    def wait(self) -> None:
        """Wait until the save that was begun is whole, move the pointers, and delete what need not be kept."""
        if self._saving is None:
            return
        self._manager.wait_until_finished()
        progress, self._saving = self._saving, None
        steps = sorted(self._manager.all_steps())
        write_pointer(self._run / "latest", progress.step)
        if progress.best_step == progress.step:
            write_pointer(self._run / "best", progress.step)
        for step in steps[: -self._keep]:
            if step != progress.best_step:
                self._manager.delete(step)

    def restore(self, like: State) -> tuple[State, Progress]:
        """Return the newest whole checkpoint, its arrays placed as those of ``like``.

        Raises:
            RungError: the run has no whole checkpoint.
        """
        step = self._manager.latest_step()
        if step is None:
            raise RungError(f"{self._run} has no whole checkpoint", "train it from the start with --overwrite")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore()),
        )
        return restored["state"], Progress(**restored["progress"])

    def close(self) -> None:
        """Finish the save that runs, and let go of the background threads."""
        self.wait()
        self._manager.close()


def write_pointer(path: Path, step: int) -> None:
    """Write a pointer, a file that holds the number of a step, at once."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(f"{step}\n", encoding="ascii")
    temporary.replace(path)


def read_pointer(path: Path) -> Any:
    """Return the step that a pointer names, or ``None`` where there is no pointer."""
    try:
        return int(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
