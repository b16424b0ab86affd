"""Checkpoints: the whole state and what belongs to it, saved in the background, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import mmap
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rung.disk import on_disk
from rung.errors import RungError
from rung.model.files import why_unwritten
from rung.model.hashes import path_of, tree_hashes
from rung.train.step import State

FOLDER = "checkpoints"
DAMAGED = "damaged"
STATE = "state.safetensors"
RECORD = "checkpoint.json"

_ALIGNMENT = 64  # bytes: a line of the cache
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, SafetensorError)  # what reading a damaged one may raise


@dataclass(frozen=True)
class Progress:
    """What a run has come to, beside its arrays; saved in every checkpoint.

    Attributes:
        step: steps done.
        tokens: target tokens trained on.
        seconds: training time, over all resumes.
        best_step: the step of the best validation so far; 0 before the first.
        best_loss: its loss in nats per token; ``None`` before the first.
        losses: what the watch for spikes remembers.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int = 0
    best_loss: float | None = None
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a save."""

    step: int
    path: Path
    error: str | None  # why it is not whole; None: it is


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read back.

    Attributes:
        state: its arrays.
        progress: saved with them.
        problems: lines on newer checkpoints that were passed over.
    """

    state: State
    progress: Progress
    problems: list[str]


class Checkpoints:
    """The checkpoints of a run: ``checkpoints/<step>/`` in its folder, and the pointers ``latest`` and ``best``.

    A save is copied off the devices at once and written in the background, to a temporary name that is renamed when the
    disk has all of it; then the pointers move, and what need not be kept is deleted. One save runs at a time, so there
    is never more than one copy of the state. A save that fails leaves the checkpoints before it as they were.

    Args:
        run: the run folder.
        keep: newest checkpoints to keep; the best by validation, of those saved, is kept besides.
        keep_every_steps: those of multiples of it are kept for good; 0: none.
        identity: what makes the run the run that it is (config, tokenizer, data), as plain JSON; saved along.
    """

    def __init__(self, run: Path, keep: int, keep_every_steps: int = 0, identity: Mapping[str, Any] | None = None):
        self.run = run
        self._folder = run / FOLDER
        self._keep, self._keep_every_steps = keep, keep_every_steps
        self._identity = dict(identity or {})
        self._writer: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._remove_unfinished()

    # Saving

    def save(self, state: State, progress: Progress, sync: Callable[[], None] = lambda: None) -> None:
        """Begin to save. The save before must have ended: ask ``outcome`` or ``wait`` first.

        Args:
            state: to be saved.
            progress: saved along.
            sync: called in the background before the checkpoint is whole; where it raises, the save has failed. What
                else has to be on the disk when a run goes on from here is written there.
        """
        assert self._writer is None, "the save before has not been asked for its outcome"
        record = {
            "progress": dataclasses.asdict(progress),
            "identity": self._identity,
            "hashes": tree_hashes(state),
        }
        arrays = _on_host(state)
        self._writer = threading.Thread(target=self._write, args=(arrays, record, progress, sync), name="rung-save")
        self._writer.start()

    @property
    def saving(self) -> bool:
        """Whether a save is being written."""
        return self._writer is not None and self._writer.is_alive()

    def outcome(self) -> Outcome | None:
        """Return what became of the save, once, when it has ended; ``None`` while it runs, and where there was none."""
        return None if self.saving else self.wait()

    def wait(self) -> Outcome | None:
        """Wait for the save that runs, and return what became of it; ``None`` where there is none to tell of."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        outcome, self._outcome = self._outcome, None
        return outcome

    def _write(
        self, arrays: dict[str, np.ndarray], record: dict[str, Any], progress: Progress, sync: Callable[[], None]
    ) -> None:
        path = self._folder / str(progress.step)
        try:
            self._write_whole(path, arrays, record, sync)
            write_pointer(self.run / "latest", progress.step)
            if progress.best_step == progress.step:
                write_pointer(self.run / "best", progress.step)
            self._tidy()
        except Exception as error:  # whatever it is, training goes on
            self._outcome = Outcome(progress.step, path, _reason(error))
            self._remove_unfinished()
        else:
            self._outcome = Outcome(progress.step, path, None)

    def _write_whole(
        self, path: Path, arrays: dict[str, np.ndarray], record: dict[str, Any], sync: Callable[[], None]
    ) -> None:
        self._folder.mkdir(exist_ok=True)  # but not its parent: a run folder that is gone is not made anew
        self._remove_unfinished()  # of a save that failed while the folder was out of reach
        temporary = path.with_name(path.name + ".tmp")
        temporary.mkdir()
        save_file(arrays, temporary / STATE)
        arrays.clear()  # the disk has them: their memory is free for the next save
        (temporary / RECORD).write_text(json.dumps(record), encoding="utf-8")
        for part in (temporary / STATE, temporary / RECORD, temporary):
            on_disk(part)
        sync()
        if path.exists():
            # Of a step that was reached before: the run went back to a checkpoint before it.
            path.rename(path.with_name(path.name + ".old"))
        temporary.rename(path)
        on_disk(self._folder)
        shutil.rmtree(path.with_name(path.name + ".old"), ignore_errors=True)

    def _tidy(self) -> None:
        every, best = self._keep_every_steps, read_pointer(self.run / "best")
        for step in self.steps()[: -self._keep]:
            if step != best and not (every and step % every == 0):
                # Renamed first, so that one which is half deleted is never taken for whole.
                doomed = self._folder / f"{step}.old"
                (self._folder / str(step)).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        """Delete what saves that did not become whole have left."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if path.suffix in (".tmp", ".old"):
                    shutil.rmtree(path, ignore_errors=True)

    # Restoring

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending. Those that are not whole have other names."""
        if not self._folder.is_dir():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal() and path.is_dir())

    def restore(
        self, like: State, check: Callable[[dict[str, Any], Progress], None] = lambda identity, progress: None
    ) -> Restored:
        """Return the newest whole checkpoint, its arrays placed as those of ``like`` and their hashes verified.

        One that is damaged is put aside, into ``damaged/`` in the run folder, and the one before it is taken.

        Args:
            like: a state of the same structure, shapes and placement, or an ``abstract_state`` of ``rung.train.step``.
            check: called with the identity that was saved, and the progress; raises where it is not this run's.

        Raises:
            NoCheckpoint: the run has not saved anything yet.
            RungError: there are checkpoints, and none of them is whole.
        """
        problems = []
        steps, latest = self.steps(), read_pointer(self.run / "latest")
        if latest is not None and latest not in steps:
            problems.append(f"the latest checkpoint, of step {latest:,}, is missing")
        for step in reversed(steps):
            path = self._folder / str(step)
            try:
                progress, identity = read_record(path)
            except _UNREADABLE as error:
                problems.append(self._put_aside(step, _reason(error)))
                continue
            check(identity, progress)
            try:
                return Restored(read_state(path, like), progress, problems)
            except _UNREADABLE as error:
                problems.append(self._put_aside(step, _reason(error)))
        if not steps and latest is None:
            raise NoCheckpoint(f"{self.run} has no checkpoint", "train it from the start with --overwrite")
        raise RungError(
            f"{self.run} has no whole checkpoint: {'; '.join(problems)}",
            "put one back from a copy, or train it from the start with --overwrite",
        )

    def _put_aside(self, step: int, reason: str) -> str:
        path = self.run / DAMAGED / str(step)
        try:
            path.parent.mkdir(exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)
            (self._folder / str(step)).rename(path)
        except OSError as error:
            return f"the checkpoint of step {step:,} is damaged ({reason}), and cannot be moved: {error.strerror}"
        return f"the checkpoint of step {step:,} is damaged ({reason}); it is in {path} now"


def read_record(path: Path) -> tuple[Progress, dict[str, Any]]:
    """Return the progress and the identity that a checkpoint's folder holds.

    Raises:
        OSError, ValueError, KeyError, TypeError: it is damaged.
    """
    record = json.loads((path / RECORD).read_text(encoding="utf-8"))
    progress = {**record["progress"], "losses": tuple(record["progress"]["losses"])}
    for name, default in vars(Progress()).items():
        kinds = (
            (int, float, type(None)) if name == "best_loss" else (int, float) if name == "seconds" else type(default)
        )
        if name not in progress or not isinstance(progress[name], kinds):
            raise ValueError(f"{name} of its progress is {progress.get(name)!r}")
    if not isinstance(record["identity"], dict):
        raise ValueError("its identity is no object")
    return Progress(**progress), record["identity"]


def read_state(path: Path, like: State) -> State:
    """Return the arrays of a checkpoint's folder that ``like`` names, placed as they are there.

    Args:
        path: of the checkpoint.
        like: a tree of arrays, or of shapes with dtypes and shardings; a part of the state will do.

    Raises:
        OSError, ValueError, KeyError, SafetensorError: it is damaged, or its arrays have other shapes; or their hashes
            are not those of what was saved.
    """
    hashes = json.loads((path / RECORD).read_text(encoding="utf-8"))["hashes"]
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    arrays = []
    with safe_open(path / STATE, framework="numpy") as file:
        stored = set(file.keys())
        for key, leaf in leaves:
            if path_of(key) not in stored:
                raise KeyError(path_of(key))
            array = file.get_tensor(path_of(key))
            if array.shape != leaf.shape or array.dtype != leaf.dtype:
                raise ValueError(
                    f"{path_of(key)} is {array.dtype}{list(array.shape)}, not {leaf.dtype}{list(leaf.shape)}"
                )
            arrays.append(jax.device_put(array, leaf.sharding))
    state = jax.tree_util.tree_unflatten(structure, arrays)
    for name, found in tree_hashes(state).items():
        if hashes[name] != found:
            raise ValueError(f"{name} is not what was saved: its hash is {found}, not {hashes[name]}")
    return state


class NoCheckpoint(RungError):
    """A run has not saved anything yet."""


def write_pointer(path: Path, step: int) -> None:
    """Write a pointer, a file that holds the number of a step, at once."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(f"{step}\n", encoding="ascii")
    temporary.replace(path)


def read_pointer(path: Path) -> int | None:
    """Return the step that a pointer names, or ``None`` where there is no pointer, or none that can be read."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _on_host(state: State) -> dict[str, np.ndarray]:
    """Return a copy of the arrays in host memory, by path: the step that comes next will take over their buffers."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    got = jax.device_get([x for _, x in leaves])
    if all(device.platform == "cpu" for _, x in leaves for device in x.devices()):
        got = _copied(got)  # what JAX gives there is the buffer itself
    return {path_of(path): np.asarray(array) for (path, _), array in zip(leaves, got, strict=True)}


def _copied(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return copies of arrays in one block from the system, which has it back as soon as the last of them is gone.

    A heap that keeps what is freed would have holes of their sizes, and not always use them for the next copies.
    """
    starts = list(itertools.accumulate((-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays), initial=0))
    block = mmap.mmap(-1, max(1, starts[-1]))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    copies = [
        np.ndarray(array.shape, array.dtype, block, start) for array, start in zip(arrays, starts[:-1], strict=True)
    ]
    for copy, array in zip(copies, arrays, strict=True):
        copy[...] = array
    return copies


def _reason(error: Exception) -> str:
    """Return why a save or a restore failed, in few words."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]}"
    return "it is not what Rung writes there" if isinstance(error, TypeError) else why_unwritten(error)
