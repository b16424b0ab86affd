"""The learning rate over the run, as a factor of its peak."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rung.config import TrainConfig


def steps_of(tokens: int, tokens_per_step: int) -> int:
    """Return the number of steps that ``tokens`` target tokens take, rounded up."""
    return -(-tokens // tokens_per_step)


def rate_factor(config: TrainConfig, steps: int, tokens_per_step: int) -> Callable[[jax.Array], jax.Array]:
    """Return the function from step (0 to ``steps - 1``) to learning rate over peak rate, in [0, 1].

    Warm-up of W steps is linear: (step + 1) / W, so that the first step already learns and step W - 1 is at the peak.
    What follows, where steps are left, reaches ``final_learning_rate_ratio`` exactly at the last, ``steps - 1``:
    ``cosine`` and ``linear`` from the end of the warm-up, ``wsd`` from ``decay_steps`` before the end; ``constant``
    stays at the peak. Beyond the last step the rate stays what it was there.

    Args:
        steps: length of the run.
        tokens_per_step: target tokens of a step, for lengths that are given in tokens.
    """
    warmup = (
        config.warmup_steps
        or steps_of(config.warmup_tokens, tokens_per_step)
        or math.ceil(config.warmup_fraction * steps - 1e-9)  # 0.07 * 100 is a little over 7
    )
    final = config.final_learning_rate_ratio
    decay_begins = warmup
    if config.schedule == "wsd":
        decay = config.decay_steps or steps_of(config.decay_tokens, tokens_per_step) or steps_of(steps, 5)
        decay_begins = max(warmup, steps - 1 - decay)
    decay_length = max(1, steps - 1 - decay_begins)

    def factor(step: jax.Array) -> jax.Array:
        warm = jnp.minimum(1.0, (step + 1) / max(1, warmup))
        progress = jnp.clip((step - decay_begins) / decay_length, 0.0, 1.0)
        if config.schedule == "constant":
            return jnp.float32(warm)
        if config.schedule == "cosine":
            progress = 0.5 * (1 - jnp.cos(jnp.pi * progress))
        return jnp.float32(warm * (1 - (1 - final) * progress))

    return factor
