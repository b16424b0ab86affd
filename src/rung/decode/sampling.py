"""Drawing the next token from logits: which tokens may be drawn, and the draw.

The order is fixed: ids outside the vocabulary are masked, then repetition penalty, temperature, top-k, top-p, min-p.
Each filter works on what the ones before it left, with the probabilities of the rest scaled to sum to one.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from rung import config
from rung.config import GenerateConfig
from rung.errors import RungError

Scalar = jax.Array | np.float32 | np.int32 | float

_FLOAT32 = np.finfo(np.float32)


def check(settings: GenerateConfig) -> None:
    """Raise a RungError where a setting has another type than it should, is out of its bounds, or can have no meaning.

    ``top_k`` over the vocabulary is fine and means all of it.
    """
    for path, declared in config.fields(GenerateConfig):
        value = config.check_value(path, config.field_type(GenerateConfig, path), getattr(settings, path), "generate")
        config.check_bounds(path, declared.metadata["setting"], value, "generate")
    if "" in settings.stop:
        raise RungError("generate: stop has an empty string", "it would end every text before its first character")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Filters:
    """The numbers of the filters that are on; ``None`` where one is off, so that what is off is not compiled either.

    The values are traced: another temperature is no other program.
    """

    temperature: Scalar | None  # None: the most probable token
    top_k: Scalar | None = None
    top_p: Scalar | None = None
    min_p: Scalar | None = None
    repetition_penalty: Scalar | None = None

    @classmethod
    def of(cls, settings: GenerateConfig) -> Filters:
        """Return the filters that ``settings`` turn on."""
        penalty = None
        if settings.repetition_penalty != 1:
            penalty = np.float32(np.clip(settings.repetition_penalty, _FLOAT32.tiny, _FLOAT32.max))
        if settings.temperature == 0:  # no filter removes the most probable token
            return cls(None, repetition_penalty=penalty)
        return cls(
            np.float32(np.clip(settings.temperature, _FLOAT32.tiny, _FLOAT32.max)),
            np.int32(min(settings.top_k, np.iinfo(np.int32).max)) if settings.top_k else None,
            np.float32(settings.top_p) if settings.top_p < 1 else None,
            np.float32(settings.min_p) if settings.min_p > 0 else None,
            penalty,
        )


def keys(seed: jax.Array | int, samples: int) -> jax.Array:
    """Return a key for each sample, [B]; the key of sample ``i`` does not depend on the number of samples."""
    root = jax.random.key(seed, impl="threefry2x32")  # named: it is part of what a seed means
    return jax.vmap(lambda sample: jax.random.fold_in(root, sample))(jnp.arange(samples))


def draw(logits_BV: jax.Array, keys_B: jax.Array, filters: Filters, seen_BV: jax.Array | None = None) -> jax.Array:
    """Return a token id a row, int32 [B], drawn from the softmax of the filtered logits.

    The draw is an argmax over logits with Gumbel noise (Gumbel 1954), noise that belongs to the id: filters that remove
    nothing change no draw.

    Args:
        logits_BV: float32, -inf at ids that may not be drawn.
        keys_B: a fresh PRNG key a row.
        filters: what is on.
        seen_BV: bool, the tokens that the repetition penalty is for; needed where it is on.
    """
    logits_BV = filtered(logits_BV, filters, seen_BV)
    if filters.temperature is not None:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:], jnp.float32))
        logits_BV = logits_BV + noise(keys_B)
    return jnp.argmax(logits_BV, -1).astype(jnp.int32)


def filtered(logits_BV: jax.Array, filters: Filters, seen_BV: jax.Array | None = None) -> jax.Array:
    """Return logits whose softmax the next token is drawn from: -inf at each token that a filter removed."""
    if filters.repetition_penalty is not None:
        assert seen_BV is not None, "the repetition penalty needs the tokens seen"
        logits_BV = penalize(logits_BV, seen_BV, filters.repetition_penalty)
    if filters.temperature is not None:
        # From the maximum down, so that a temperature near zero overflows to -inf and never to inf - inf.
        logits_BV = (logits_BV - jnp.max(logits_BV, -1, keepdims=True)) / filters.temperature
    if filters.top_k is not None:
        logits_BV = keep_top_k(logits_BV, filters.top_k)
    if filters.top_p is not None:
        logits_BV = keep_top_p(logits_BV, filters.top_p)
    if filters.min_p is not None:
        logits_BV = keep_min_p(logits_BV, filters.min_p)
    return logits_BV


def mask_outside(logits_BV: jax.Array, vocab_size: jax.Array | int) -> jax.Array:
    """Mask ids that are no token: rows of the embedding past the tokenizer's vocabulary."""
    return jnp.where(jnp.arange(logits_BV.shape[-1]) < vocab_size, logits_BV, -jnp.inf)


def penalize(logits_BV: jax.Array, seen_BV: jax.Array, penalty: Scalar) -> jax.Array:
    """Make tokens already seen less probable: logits over 0 divided by ``penalty``, the others multiplied.

    Keskar et al. 2019 (CTRL, arXiv:1909.05858), section 4.1, divides only, which favours a token of negative logit.
    """
    penalized = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    penalized = jnp.where(jnp.isneginf(logits_BV), logits_BV, jnp.clip(penalized, _FLOAT32.min, _FLOAT32.max))
    return jnp.where(seen_BV, penalized, logits_BV)


def keep_top_k(logits_BV: jax.Array, k: Scalar) -> jax.Array:
    """Keep the ``k`` largest logits, exactly; among equals the lowest ids (Fan et al. 2018, arXiv:1805.04833)."""
    return _keep_largest(logits_BV, -jnp.sort(-logits_BV, -1), jnp.full(logits_BV.shape[0], k))


def keep_top_p(logits_BV: jax.Array, p: Scalar) -> jax.Array:
    """Keep the fewest tokens that have probability ``p`` together (Holtzman et al. 2019, arXiv:1904.09751)."""
    sorted_BV = -jnp.sort(-logits_BV, -1)
    probability_BV = jax.nn.softmax(sorted_BV, -1)
    before_BV = jnp.cumsum(probability_BV, -1) - probability_BV
    count_B = jnp.sum((before_BV < p) & (probability_BV > 0), -1)
    return _keep_largest(logits_BV, sorted_BV, count_B)


def keep_min_p(logits_BV: jax.Array, p: Scalar) -> jax.Array:
    """Keep tokens at least ``p`` times as probable as the most probable (Nguyen et al. 2024, arXiv:2407.01082)."""
    return jnp.where(logits_BV >= jnp.max(logits_BV, -1, keepdims=True) + jnp.log(p), logits_BV, -jnp.inf)


def _keep_largest(logits_BV: jax.Array, sorted_BV: jax.Array, count_B: jax.Array) -> jax.Array:
    """Keep the ``count_B`` (1 at least) largest logits of each row, given also sorted, largest first."""
    count_B1 = jnp.clip(count_B, 1, logits_BV.shape[-1])[:, None]
    smallest_B1 = jnp.take_along_axis(sorted_BV, count_B1 - 1, -1)
    larger_BV, equal_BV = logits_BV > smallest_B1, logits_BV == smallest_B1
    places_B1 = count_B1 - jnp.sum(larger_BV, -1, keepdims=True)
    return jnp.where(larger_BV | (equal_BV & (jnp.cumsum(equal_BV, -1) <= places_B1)), logits_BV, -jnp.inf)
