"""A new run from the weights of another: which weights, what else is taken over, and the record of where it is from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from safetensors import SafetensorError

from rung.config import Config, override
from rung.errors import RungError
from rung.model.files import load_weights, read_metadata
from rung.model.hashes import digest, tree_hashes
from rung.model.weights import WeightTable
from rung.run.folder import LINEAGE, TOKENIZER, WEIGHTS, Run
from rung.train.checkpoint import FOLDER, Checkpoints, Progress, read_state
from rung.train.step import State

# What a run fills in for its own length, and a new one should choose for its own.
_OF_THE_LENGTH = ("evaluate.every_steps", "sample.every_steps", "checkpoint.every_steps", "train.norms_every_steps")


@dataclass(frozen=True)
class Start:
    """The run to start from, and what to take of it.

    Attributes:
        run: opened.
        step: whose weights are taken.
        checkpoint: the folder that they are in; ``None``: they are the run's ``model.safetensors``.
        keep_optimizer: take the optimizer's state too.
    """

    run: Run
    step: int
    checkpoint: Path | None
    keep_optimizer: bool

    def config(self) -> Config:
        """Return the config of the run, for a run of another length to begin with."""
        return override(self.run.config, {"name": "", **dict.fromkeys(_OF_THE_LENGTH, 0)})

    def changes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that come from the weights: the model's, and the tokenizer."""
        taken: dict[str, Any] = {f"model.{name}": value for name, value in vars(self.run.config.model).items()}
        taken["tokenizer.file"] = str(self.run.path / TOKENIZER)
        taken["tokenizer.allow_lossy"] = self.run.config.tokenizer.allow_lossy
        return {**taken, **given}

    def state(self, initial: State, table: WeightTable) -> State:
        """Return the initial state of a new run with what is taken in its place.

        Raises:
            RungError: the weights are damaged, or are not those of the new model; or its optimizer is another.
        """
        parts = ("weights", "optimizer") if self.keep_optimizer else ("weights",)
        if self.checkpoint is None:
            weights = load_weights(self.run.path / WEIGHTS, table)
            taken = {
                "weights": jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), weights, initial["weights"])
            }
        else:
            try:
                taken = read_state(self.checkpoint, {part: initial[part] for part in parts})
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                reason = f"it has no {error.args[0]}" if isinstance(error, KeyError) else str(error)
                raise RungError(
                    f"{self.checkpoint} does not fit: {reason}",
                    "model and optimizer have to be those of the run that is started from",
                ) from None
        return {**initial, **taken}

    def record(self, folder: Path, final: Path, state: State) -> None:
        """Write ``lineage.json``: where a run is from, and where that one was from."""
        parents = read_lineage(self.run.path)
        lineage = {
            "run": os.path.relpath(self.run.path.resolve(), final.resolve()),
            "step": self.step,
            "weights": digest(tree_hashes(state["weights"])),
            "optimizer": "kept" if self.keep_optimizer else "fresh",
            "parents": []
            if parents is None
            else [{k: v for k, v in parents.items() if k != "parents"}, *parents["parents"]],
        }
        (folder / LINEAGE).write_text(json.dumps(lineage, indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        kept = ", its optimizer kept" if self.keep_optimizer else ", with a fresh optimizer"
        return f"from {self.run.path} at step {self.step:,}{kept}"


def read_lineage(folder: Path) -> dict[str, Any] | None:
    """Return where a run is from; ``None`` for one that began with weights of its own."""
    try:
        return json.loads((folder / LINEAGE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def open_start(named: str, keep_optimizer: bool) -> Start:
    """Return the start that is named by ``RUN``, ``RUN@STEP`` or ``RUN@latest``.

    ``RUN`` alone takes the run's ``model.safetensors``, the best by validation; or, to keep the optimizer, its latest
    checkpoint.

    Raises:
        RungError: no such run, or no such checkpoint.
    """
    path, at, which = named.rpartition("@")
    if not at or Path(named).is_dir():
        path, which = named, "latest" if keep_optimizer else ""
    elif not which:
        raise RungError(f"--from {named} names no step", f"write {named}STEP, {named}latest, or leave @ out")
    run = Run(path)
    if not which:
        return Start(run, int(read_metadata(run.path / WEIGHTS).get("step", 0)), None, False)
    steps = Checkpoints(run.path, keep=1).steps()
    if not steps:
        raise RungError(f"{run.path} has no checkpoint", "leave @ and --keep-optimizer out to take its best weights")
    if which != "latest" and not (which.isdecimal() and int(which) in steps):
        have = ", ".join(map(str, steps))
        raise RungError(f"{run.path} has no checkpoint {which!r}", f"there are: {have}; or write @latest")
    step = steps[-1] if which == "latest" else int(which)
    return Start(run, step, run.path / FOLDER / str(step), keep_optimizer)


def begin(start: Start, run: Run, model: Any, initial: State, identity: Mapping[str, Any], final: Path) -> None:
    """Give a new run its first checkpoint, of step 0, and its lineage, so that it never begins with other weights."""
    state = start.state(initial, model.weights())
    start.record(run.path, final, state)
    checkpoints = Checkpoints(run.path, run.config.checkpoint.keep, identity=identity)
    checkpoints.save(state, Progress())
    outcome = checkpoints.wait()
    assert outcome is not None
    if outcome.error is not None:
        raise RungError(f"cannot save in {final}: {outcome.error}", "choose another place with --run")
