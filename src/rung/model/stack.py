"""Layers one after the other: unrolled or as a loop, and what the backward pass finds kept or computes again."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rung.config import ComputeConfig
from rung.model.layers import PRODUCT
from rung.model.weights import Tree

Layer = Callable[[jax.Array | int, Tree, jax.Array], jax.Array]
"""One layer: of its number, from 0, its weights and the states [B, T, D] that come in, gives those that go out."""


def run_layers(layer: Layer, weights: Sequence[Tree], x: jax.Array, compute: ComputeConfig) -> jax.Array:
    """Return ``x`` after all layers, each with its own of ``weights``.

    ``compute.remat`` says what the forward pass keeps for the backward pass: ``none``: all that it needs; ``dots``: the
    results of products with weights, the widest part of the arithmetic; ``block``: the input of each layer; ``full``:
    that of every sqrt(n)-th layer, from which those between are made once, and what is in them once more (Chen et al.
    2016, arXiv:1604.06174, section 4.3). ``compute.scan_layers`` stacks the weights and compiles one layer for all;
    the layers must then be alike, and get their number as an array.
    """
    if not weights:
        return x
    if compute.remat != "full":
        return _run(layer, weights, x, 0, compute)
    size = round(math.sqrt(len(weights)))
    for first in range(0, len(weights), size):
        group = functools.partial(_run, layer, first=first, compute=compute)
        x = _again(group, _KEEP_NOTHING)(weights[first : first + size], x)
    return x


def _run(layer: Layer, weights: Sequence[Tree], x: jax.Array, first: int, compute: ComputeConfig) -> jax.Array:
    """Return ``x`` after the layers ``first``, ``first + 1``, ..."""
    policy = _POLICIES[compute.remat]
    if compute.scan_layers:
        numbers = first + jnp.arange(len(weights))
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *weights)
        # Forward and backward pass are two loops: nothing made in the one can be taken for what the other makes again.
        again = jax.checkpoint(layer, policy=policy, prevent_cse=False) if policy else layer
        return jax.lax.scan(lambda x, each: (again(*each, x), None), x, (numbers, stacked))[0]
    for number, of_layer in enumerate(weights, first):
        numbered = functools.partial(layer, number)
        x = (_again(numbered, policy) if policy else numbered)(of_layer, x)
    return x


_KEEP_NOTHING = jax.checkpoint_policies.nothing_saveable
_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
    "block": _KEEP_NOTHING,
    "full": _KEEP_NOTHING,
}


def _again(function: Callable[[Any, jax.Array], jax.Array], policy: Callable[..., bool]) -> Callable[..., jax.Array]:
    """Return ``function(weights, x)`` that is computed again in its backward pass, but for what ``policy`` keeps.

    XLA for CPUs removes the barriers by which ``jax.checkpoint`` tells it to compute again, finds that the values are
    there already, and keeps them after all. There the backward pass is put into a branch, whose condition always holds,
    as the compiler cannot know: it does not look for equal values across branches.
    """
    checkpointed = jax.checkpoint(function, policy=policy)
    if jax.default_backend() != "cpu":
        return checkpointed

    def forward(weights: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        return jax.vjp(checkpointed, weights, x)

    def backward(pull: Any, dy: jax.Array) -> Any:
        always = ~(jnp.abs(dy[(0,) * dy.ndim]) > jnp.inf)
        nothing = jax.eval_shape(pull, dy)
        zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), nothing)
        return jax.lax.cond(always, lambda pull, dy: pull(dy), lambda pull, dy: zeros(), pull, dy)

    branching = jax.custom_vjp(checkpointed)
    branching.defvjp(forward, backward)
    return branching
