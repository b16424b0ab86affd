"""The continuation of a run: what may be another than when it was saved, and what may not."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from rung import config as settings
from rung.config import Config
from rung.errors import RungError
from rung.mesh import make_mesh
from rung.report.trackers import check_trackers
from rung.run.folder import CONFIG, Run
from rung.run.prepare import Say
from rung.run.training import Training, say_to_standard_error
from rung.train.checkpoint import Progress
from rung.train.schedule import rate_factor

# Settings that decide neither an update nor a batch: when to look, what to tell, how the work is laid out.
_FREE = (
    "name",
    "train.micro_batch_size",
    "train.max_skipped",
    "train.log_every_steps",
    "train.norms_every_steps",
    "train.spike_threshold",
    "evaluate.",
    "sample.",
    "checkpoint.",
    "track.",
    "mesh.",
    "compute.attention",
    "compute.remat",
    "compute.scan_layers",
)


def resume(
    run: str | Path,
    steps: int | None = None,
    changes: Mapping[str, Any] | None = None,
    *,
    reschedule: bool = False,
    time_limit: float | None = None,
    profile: tuple[int, int] | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Continue a run from its last whole checkpoint, exactly as if it had not stopped.

    Args:
        run: the run folder.
        steps: a new, greater length of the run.
        changes: settings to change that decide no update: intervals, samples, trackers, the mesh, micro-batches, and
            how the same is computed (``compute.attention``, ``compute.remat``, ``compute.scan_layers``).
        reschedule: let the learning rate jump to that of a run of the new length, where the steps that are done had
            another; without it such a length is refused.
        time_limit: seconds after which to stop, as on a signal.
        profile: as in ``train``.
        say: as in ``train``.

    Returns:
        As ``train``; of a run that is done already, what it came to.

    Raises:
        RungError: no such run; no whole checkpoint where there was one; fewer steps than are done, or a length that
            needs ``reschedule``; or config, tokenizer or data are no longer those of the run: the line names each.
    """
    opened = Run(run)
    changes = dict(changes or {})
    if steps is not None:
        changes["train.steps"] = steps
    for path in changes:
        if not is_free(path) and path != "train.steps":
            raise RungError(
                f"{path} decides what the run learns, and cannot change in the middle of it",
                f"start a new run from this one's weights: rung train --from {shlex.quote(str(run))}",
            )
    before = opened.config
    if not before.model.vocab_size or not before.train.steps:
        raise RungError(
            f"{opened.path / CONFIG} is not what the run began with: sizes are missing", "put it back as it was"
        )
    _ = opened.store  # first: what a store says of itself tells more than that a file is another
    opened.check_tokens()
    opened.config = settings.resolve(settings.override(before, changes))
    check_trackers(opened.config)
    training = Training(opened, make_mesh(opened.config.mesh), say or say_to_standard_error, profile, time_limit)
    return training.resume(_check(opened, training.tokens_per_step, reschedule))


def is_free(path: str) -> bool:
    """Return whether a setting may be another after a resume."""
    return path.startswith(_FREE)


def _check(run: Run, tokens_per_step: int, reschedule: bool) -> Callable[[dict[str, Any], Progress], list[str]]:
    """Return a function of (identity, progress) of a checkpoint: it returns what has changed, or refuses it."""

    def check(identity: dict[str, Any], progress: Progress) -> list[str]:
        # Settings that the version which saved it did not have are at their defaults.
        saved = settings.from_dict(identity["config"], where=f"the checkpoint of step {progress.step:,}")
        changed = settings.differences(saved, run.config)
        refused = [
            f"{path} was {old!r} and is {new!r}"
            for path, (old, new) in changed.items()
            if not is_free(path) and path != "train.steps"
        ]
        if identity["tokenizer"] != run.tokenizer.hash:
            refused.append(f"the tokenizer was {identity['tokenizer'][:12]} and is {run.tokenizer.hash[:12]}")
        if identity["data"] != run.store.identity:
            refused.append(f"the tokens were {identity['data'][:12]} and are {run.store.identity[:12]}")
        if refused:
            raise RungError(
                f"{run.path} is not as it was saved: {'; '.join(refused)}",
                f"put {CONFIG} and the data back; or start a new run from its weights: "
                f"rung train --from {shlex.quote(str(run.path))}",
            )
        notes = [f"{path} {_shown(old)} -> {_shown(new)}" for path, (old, new) in changed.items()]
        if "train.steps" in changed:
            notes += _check_length(run, saved, progress, tokens_per_step, reschedule)
        return notes

    return check


def _check_length(run: Run, saved: Config, progress: Progress, tokens_per_step: int, reschedule: bool) -> list[str]:
    """Return what another length does to the schedule; refuse what cannot be, or was not asked for."""
    old, new, done = saved.train.steps, run.config.train.steps, progress.step
    if new <= done:
        raise RungError(
            f"{run.path} has done {done:,} steps of {old:,}, and {new:,} are asked",
            f"ask for more steps, with --steps or in {CONFIG}",
        )
    at = np.arange(done)
    before, after = (
        np.asarray(rate_factor(config.train, config.train.steps, tokens_per_step)(jnp.asarray(at)), np.float64)
        for config in (saved, run.config)
    )
    (differ,) = np.nonzero(~np.isclose(np.broadcast_to(before, at.shape), after, rtol=1e-5, atol=1e-9))
    if not len(differ):
        return []
    peak = run.config.train.learning_rate
    rates = f"{before[-1] * peak:.3g}, and would go on at {after[-1] * peak:.3g}"
    if not reschedule:
        raise RungError(
            f"the {saved.train.schedule} schedule of {old:,} steps is not the beginning of one of {new:,}: at step "
            f"{done:,} the learning rate is {rates}",
            "--reschedule lets it jump; constant, and wsd before its decay, go on without a jump",
        )
    return [f"learning rate rescheduled: at step {done:,} it was {rates}"]


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
