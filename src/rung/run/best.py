"""``model.safetensors`` of a run, the weights to use: written when the best moves, and again where that failed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError

from rung.errors import RungError
from rung.model.files import load_weights, read_metadata, save_weights
from rung.model.weights import WeightTable
from rung.run.folder import WEIGHTS
from rung.run.prepare import Say
from rung.train.checkpoint import FOLDER, Progress, read_state
from rung.train.step import State


class BestWeights:
    """The file, and the weights that wait to be written to it where the disk did not take them.

    ``write`` and ``sync`` may be called in two threads.

    Args:
        run: the run folder.
        say: told what could not be written, and what is written again.
    """

    def __init__(self, run: Path, say: Say):
        self._run, self._say = run, say
        self._waiting: tuple[Any, dict[str, str]] | None = None
        self._lock = threading.Lock()

    def write(self, weights: Any, progress: Progress) -> None:
        """Write weights, those of ``progress.step``; where that fails, say so and keep a copy of them for ``sync``."""
        on_host, metadata = jax.device_get(weights), _metadata(progress)
        with self._lock:
            try:
                save_weights(self._run / WEIGHTS, on_host, metadata)
                self._waiting = None
            except OSError as error:
                # On a CPU, what JAX gives is the buffer itself, which the next step takes over.
                self._waiting = jax.tree.map(np.array, on_host), metadata
                self._say(f"{error.filename}: {error.strerror}; the weights of step {progress.step:,} wait in memory")

    def sync(self) -> None:
        """Write what waits.

        Raises:
            OSError: it cannot be written; it goes on waiting.
        """
        with self._lock:
            if self._waiting is not None:
                weights, metadata = self._waiting
                save_weights(self._run / WEIGHTS, weights, metadata)
                self._waiting = None

    def mend(self, table: WeightTable, state: State, progress: Progress) -> None:
        """Write the file again where it is gone, damaged, or older than the best validation.

        The weights are those of the best checkpoint; where that is gone too, of ``state``, which ``progress`` is of.

        Raises:
            OSError: it cannot be written.
        """
        path, best = self._run / WEIGHTS, progress.best_step or progress.step
        try:
            load_weights(path, table)
            if int(read_metadata(path).get("step", 0)) >= best:
                return
            problem = f"{path} is older than the best validation, of step {best:,}"
        except RungError as error:
            problem = error.problem
        weights = state["weights"]
        if best != progress.step:
            try:
                weights = read_state(self._run / FOLDER / str(best), {"weights": weights})["weights"]
            except (OSError, ValueError, KeyError, SafetensorError):
                best = progress.step
        self._say(f"{problem}; written again, as they are at step {best:,}")
        save_weights(path, jax.device_get(weights), _metadata(progress, best))


def _metadata(progress: Progress, step: int | None = None) -> dict[str, str]:
    """Return what stands in the file's header; of another step than that of ``progress``, the tokens are not known."""
    step = progress.step if step is None else step
    metadata = {"step": str(step), "format": "rung"}
    if step == progress.step:
        metadata["tokens"] = str(progress.tokens)
    if progress.best_loss is not None and step == progress.best_step:
        metadata["validation_loss"] = f"{progress.best_loss:.6f}"
    return metadata
