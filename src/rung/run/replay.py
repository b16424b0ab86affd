"""A step that made a run diverge, run again: whether it does the same, and which rows and documents it was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from rung.config import Config, MeshConfig
from rung.diagnose.activations import describe
from rung.diagnose.replay import DIVERGED, Kept, Replayed, kept_steps, read_replay
from rung.diagnose.replay import replay as run_again
from rung.errors import RungError
from rung.mesh import make_mesh
from rung.run.folder import Run
from rung.tokens.batches import IGNORED, Batches
from rung.tokens.mixture import Mixture, training_batches

_WORST_ROWS = 3


def replay(run: Run | str | Path, at: int | None = None) -> dict[str, Any]:
    """Run a step again whose update was the last of too many that were not finite.

    Args:
        run: a run or its folder.
        at: the step, as in the log; ``None``: the newest that is kept.

    Returns:
        ``run``, ``step``, ``in_a_row`` (updates that were not finite up to it), ``reproduced`` (whether the update is
        not finite again), ``found_then`` and ``found_now`` (each one line), ``loss`` (nats per target),
        ``gradient_norm``, ``first_not_finite``, ``largest`` (names and magnitudes), ``gradients_not_finite`` (weights),
        ``batch_rows``, ``rows_not_finite`` (their numbers in the batch, from 0), ``documents`` (``id`` and ``name``),
        ``rows`` (the worst: ``row``, ``loss``, ``finite``, ``documents``, ``text``), ``notes``.

    Raises:
        RungError: nothing is kept, not of that step, or it is damaged.
    """
    run = run if isinstance(run, Run) else Run(run)
    kept = read_replay(run.path / DIVERGED / str(_chosen(run.path, at)), run.model.weights())
    replayed = run_again(run.model, kept, _mesh(run.config))
    findings, batches, notes = replayed.findings, None, []
    try:
        batches = _batches(run)
        if not np.array_equal(batches(kept.step - 1)["tokens"], kept.batch["tokens"]):
            notes.append("the settings of the data now give another batch at this step; the one that was kept is used")
    except RungError as error:
        notes.append(f"the documents cannot be looked up: {error.problem}")
    return {
        "run": str(run.path),
        "step": kept.step,
        "in_a_row": kept.in_a_row,
        "reproduced": not findings.finite,
        "found_then": kept.found,
        "found_now": describe(findings),
        "loss": findings.loss,
        "gradient_norm": findings.gradient_norm,
        "first_not_finite": findings.first_not_finite,
        "largest": findings.largest,
        "gradients_not_finite": findings.gradients_not_finite,
        "batch_rows": len(replayed.losses_B),
        "rows_not_finite": np.flatnonzero(~np.isfinite(replayed.losses_B)).tolist(),
        "documents": _named(kept.documents, None if notes else batches),
        "rows": [_row(row, run, kept, replayed, None if notes else batches) for row in _worst(replayed)],
        "notes": notes,
    }


def _chosen(path: Path, at: int | None) -> int:
    steps = kept_steps(path / DIVERGED)
    if not steps:
        raise RungError(
            f"{path} has kept no step to replay: none of its updates ended it",
            "a run keeps the batch and the weights when too many updates in a row are not finite (train.max_skipped)",
        )
    if at is not None and at not in steps:
        kept = ", ".join(f"{step:,}" for step in steps)
        raise RungError(f"{path} has not kept step {at:,}", f"it has kept {kept}; --replay alone takes the newest")
    return steps[-1] if at is None else at


def _mesh(config: Config) -> Any:
    """Return the run's mesh, or where it has more devices than there are here, one of them."""
    try:
        return make_mesh(config.mesh)
    except RungError:
        return make_mesh(MeshConfig())


def _batches(run: Run, batch_size: int = 0) -> Batches | Mixture:
    config = run.config
    return training_batches(
        run.store,
        context_length=config.model.context_length,
        batch_size=batch_size or config.train.batch_size,
        seed=config.train.seed,
        windows=config.data.windows,
        cross_documents=config.data.cross_documents,
    )


def _worst(replayed: Replayed) -> list[int]:
    """Return the rows of the largest losses, those that are not finite first."""
    means_B = replayed.row_means_B
    order = np.argsort(np.where(np.isfinite(means_B), -means_B, -math.inf), kind="stable")
    return order[:_WORST_ROWS].tolist()


def _row(row: int, run: Run, kept: Kept, replayed: Replayed, batches: Batches | Mixture | None) -> dict[str, Any]:
    loss = float(replayed.row_means_B[row])
    documents: list[int] = []
    if batches is not None:
        # A batch of one row is that row of the global batch, whatever the batch's size.
        documents = _batches(run, 1).documents((kept.step - 1) * len(replayed.losses_B) + row)
    return {
        "row": row,
        "loss": loss,
        "finite": math.isfinite(loss),
        "documents": _named(documents, batches),
        "text": _text(run, kept, row),
    }


def _text(run: Run, kept: Kept, row: int) -> str:
    """Return the text of a row: its inputs, without the filling before and after the text."""
    tokens_T, targets_T = kept.batch["tokens"][row], kept.batch["targets"][row]
    inside = np.flatnonzero(targets_T != IGNORED)
    if not len(inside):
        return ""
    return run.tokenizer.decode(tokens_T[inside[0] : inside[-1] + 1].tolist())


def _named(documents: list[int], batches: Batches | Mixture | None) -> list[dict[str, Any]]:
    return [{"id": number, "name": batches.document_name(number) if batches else None} for number in documents]
