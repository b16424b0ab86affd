"""A step that could not be applied, kept whole: its batch and its weights in a folder, and the step run again."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rung.diagnose.activations import Findings, describe, examine, row_losses
from rung.disk import on_disk, publish, reason
from rung.errors import RungError
from rung.mesh import replicated
from rung.model.files import load_weights, save_weights
from rung.model.weights import Tree, WeightTable
from rung.train.step import Model, place, row_keys

DIVERGED = "diverged"
"""The folder in a run's folder that holds what is kept, a folder for each step that a run ended at."""

FINDINGS, BATCH, WEIGHTS = "findings.json", "batch.safetensors", "weights.safetensors"

_AGAIN = "it cannot be made again but by the run: resume it, and it is kept anew where the run diverges"


@dataclass(frozen=True)
class Kept:
    """What was kept of a step.

    Attributes:
        step: as in the log, where the first is 1.
        in_a_row: updates that were not finite, up to this one.
        seed: of the run; with the step it gives the keys of the rows.
        micro_batch_size: rows whose gradient was computed at once; 0: all.
        documents: ids of the documents that the batch was cut from.
        found: what looking into it found then, as one line.
        batch: host arrays [B, ...].
        weights: host arrays in the shape of the model's table, as they were before the update.
    """

    step: int
    in_a_row: int
    seed: int
    micro_batch_size: int
    documents: list[int]
    found: str
    batch: dict[str, np.ndarray]
    weights: Tree


@dataclass(frozen=True)
class Replayed:
    """What came of running a step again: what was found, and of each row its summed loss and number of targets."""

    findings: Findings
    losses_B: np.ndarray
    targets_B: np.ndarray

    @property
    def row_means_B(self) -> np.ndarray:
        """Loss of each row in nats per target; 0 for a row without targets."""
        return self.losses_B / np.maximum(self.targets_B, 1)


def write_replay(
    folder: str | Path,
    *,
    step: int,
    in_a_row: int,
    seed: int,
    micro_batch_size: int,
    documents: Sequence[int],
    findings: Findings | None,
    batch: Mapping[str, Any],
    weights: Tree,
) -> Path:
    """Keep a step in ``folder/<step>/``, whole or not at all; arguments as in ``Kept``. Returns that folder.

    What was kept of the same step before is replaced. ``findings`` is ``None`` where the step could not be looked into.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "step": step,
        "in_a_row": in_a_row,
        "seed": seed,
        "micro_batch_size": micro_batch_size,
        "documents": list(documents),
        "found": "" if findings is None else describe(findings),
    }
    if findings is not None:
        record["findings"] = _strict(dataclasses.asdict(findings))
    partial = Path(tempfile.mkdtemp(prefix=f".{step}-", dir=folder))
    try:
        partial.chmod(folder.stat().st_mode)  # mkdtemp makes it private
        arrays = {name: np.ascontiguousarray(array) for name, array in jax.device_get(dict(batch)).items()}
        save_file(arrays, partial / BATCH)
        (partial / BATCH).chmod(0o644)  # the library makes it private
        save_weights(partial / WEIGHTS, jax.device_get(weights), {"format": "rung", "step": str(step - 1)})
        (partial / FINDINGS).write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        for path in partial.iterdir():
            on_disk(path)
        publish(partial, folder / str(step))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder / str(step)


def kept_steps(folder: str | Path) -> list[int]:
    """Return the steps that are kept in a folder, ascending."""
    try:
        return sorted(int(path.name) for path in Path(folder).iterdir() if path.name.isdecimal())
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_replay(folder: str | Path, table: WeightTable) -> Kept:
    """Read what was kept of a step.

    Args:
        folder: of the step, ``diverged/<step>``.
        table: of the model.

    Raises:
        RungError: a file is missing or damaged, or the weights are those of another model.
    """
    folder = Path(folder)
    try:
        record = json.loads((folder / FINDINGS).read_text(encoding="utf-8"))
        known = {f.name: record[f.name] for f in dataclasses.fields(Kept) if f.name not in ("batch", "weights")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RungError(f"{folder / FINDINGS} cannot be read: {_reason(error)}", _AGAIN) from None
    try:
        weights = load_weights(folder / WEIGHTS, table)
    except RungError as error:
        raise RungError(error.problem, _AGAIN) from None
    return Kept(batch=_read_batch(folder / BATCH), weights=weights, **known)


def replay(model: Model, kept: Kept, mesh: jax.sharding.Mesh) -> Replayed:
    """Compute the loss and the gradient of a step again, dropout masks included, and look into it."""
    n_rows = len(next(iter(kept.batch.values())))
    keys_B = row_keys(kept.seed, kept.step - 1, n_rows)
    batch = place(dict(kept.batch), mesh)
    weights = jax.device_put(kept.weights, replicated(mesh))
    findings = examine(model, weights, batch, keys_B, kept.micro_batch_size)
    return Replayed(findings, *row_losses(model, weights, batch, keys_B))


# Helpers


def _read_batch(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        batch = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RungError(f"{path} cannot be read: {_reason(error)}", _AGAIN) from None
    lengths = {name: len(array) if array.ndim else 0 for name, array in batch.items()}
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        raise RungError(f"{path} is no batch: its arrays have {lengths or 'no'} rows", _AGAIN)
    return batch


def _strict(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record in which a number that is not finite is ``None``, and ``not_finite`` says which it was."""
    odd: dict[str, str] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            odd[path] = repr(value)
            return None
        if isinstance(value, list | tuple):
            return [plain(one, f"{path}.{number}") for number, one in enumerate(value)]
        return value

    record = {name: plain(value, name) for name, value in record.items()}
    return record | ({"not_finite": odd} if odd else {})


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return reason(error)
    return f"it has no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
