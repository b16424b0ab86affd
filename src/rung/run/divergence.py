"""What a run does about updates that are not finite: a closer look, and the last of too many kept for replay."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import jax

from rung.config import TrainConfig
from rung.diagnose.activations import Findings, describe, examine
from rung.diagnose.replay import DIVERGED, write_replay
from rung.run.prepare import Say
from rung.tokens.batches import Batches
from rung.tokens.mixture import Mixture
from rung.train.step import Model, place, row_keys


class Divergence:
    """Called by the loop where an update was skipped.

    Args:
        run: the run folder.
        model: that is trained.
        batches: from the number of a step to its batch, and to its documents.
        mesh: of the devices.
        config: of the training.
        say: told where the step was kept.
    """

    def __init__(
        self,
        run: Path,
        model: Model,
        batches: Batches | Mixture,
        mesh: jax.sharding.Mesh,
        config: TrainConfig,
        say: Say,
    ):
        self._run, self._model, self._batches = run, model, batches
        self._mesh, self._config, self._say = mesh, config, say
        self._findings: Findings | None = None

    def look_closer(self, step: int, weights: Any) -> tuple[list[int], str]:
        """Return the documents of a step's batch, and what is found on computing it again with ``weights``."""
        self._findings = None
        try:
            keys_B = row_keys(self._config.seed, step, self._config.batch_size)
            batch = place(self._batches(step), self._mesh)
            self._findings = examine(self._model, weights, batch, keys_B, self._config.micro_batch_size)
        except Exception as error:  # a look at what went wrong must not make it worse
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            return self._batches.documents(step), f"could not be looked into: {reason}"
        return self._batches.documents(step), describe(self._findings)

    def keep(self, step: int, weights: Any) -> None:
        """Keep the batch of a step, whose update was the last of too many, and the weights it was for."""
        try:
            kept = write_replay(
                self._run / DIVERGED,
                step=step + 1,
                in_a_row=self._config.max_skipped,
                seed=self._config.seed,
                micro_batch_size=self._config.micro_batch_size,
                documents=self._batches.documents(step),
                findings=self._findings,
                batch=self._batches(step),
                weights=weights,
            )
        except OSError as error:
            self._say(f"the batch of step {step + 1:,} cannot be kept: {error.strerror}")
        else:
            look = f"rung check {shlex.quote(str(self._run))} --replay"
            self._say(f"batch and weights of step {step + 1:,} are in {kept}; look with: {look}")
