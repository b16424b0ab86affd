"""Held-out loss: one full pass over fixed batches, averaged over tokens, in nats and in bits per byte."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from rung.model.losses import IGNORED


@dataclass(frozen=True)
class HeldOut:
    """The result of a pass over held-out text.

    Attributes:
        loss_sum: of all targets, in nats.
        targets: number of target tokens.
        text_bytes: bytes of text that the targets stand for; 0 where that is not known.
        sources: of a mixture the same of each source, by its name.
    """

    loss_sum: float
    targets: int
    text_bytes: float
    sources: Mapping[str, HeldOut] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Nats per target token: the sum of all losses over the number of all targets."""
        return self.loss_sum / self.targets if self.targets else math.nan

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, which compares across tokenizers; ``None`` where the bytes are not known."""
        return self.loss_sum / math.log(2) / self.text_bytes if self.text_bytes else None


def held_out_loss(
    loss: Callable[[Any, dict[str, Any]], tuple[jax.Array, jax.Array]],
    weights: Any,
    batches: Iterable[dict[str, np.ndarray]],
    token_bytes: np.ndarray | None = None,
    place: Callable[[dict[str, np.ndarray]], dict[str, jax.Array]] = jax.device_put,
) -> HeldOut:
    """Return the loss of ``weights`` over ``batches``.

    Args:
        loss: compiled ``(weights, batch) -> (sum of losses, number of targets)``, from ``compiled_loss``.
        batches: host batches with ``targets`` int32 [B, T], -1 where there is none.
        token_bytes: int32 [V], bytes of text that each id stands for; ``None``: bits per byte is not computed.
        place: puts a host batch on the devices.
    """
    total, n_targets, n_bytes = 0.0, 0, 0
    pending = None
    for batch in batches:
        result = loss(weights, place(batch))
        targets = batch["targets"]
        if token_bytes is not None:
            n_bytes += int(token_bytes[targets[targets != IGNORED]].sum(dtype=np.int64))
        # One batch computes while the one before it is read.
        if pending is not None:
            total, n_targets = total + float(pending[0]), n_targets + int(pending[1])
        pending = result
    if pending is not None:
        total, n_targets = total + float(pending[0]), n_targets + int(pending[1])
    return HeldOut(total, n_targets, n_bytes)


def mixed(sources: Mapping[str, HeldOut], shares: Mapping[str, float]) -> HeldOut:
    """Return the loss over a mixture: the mean of the sources' losses by their shares, whatever their sizes.

    Bits per byte are those of a text that has the sources' tokens in these shares.

    Args:
        sources: the result for each source, by name.
        shares: of each source, 1 together.
    """
    targets = sum(one.targets for one in sources.values())
    loss = sum(shares[name] * one.loss for name, one in sources.items())
    known = all(one.text_bytes for one in sources.values())
    n_bytes = sum(shares[name] * one.text_bytes / one.targets for name, one in sources.items()) if known else 0.0
    return HeldOut(loss * targets, targets, n_bytes * targets, dict(sources))


@functools.lru_cache(maxsize=8)
def compiled_loss(model: Any) -> Callable[[Any, dict[str, Any]], tuple[jax.Array, jax.Array]]:
    """Return the compiled ``(weights, batch) -> (sum of losses, number of targets)`` of a model, without dropout."""
    return jax.jit(lambda weights, batch: model.loss(weights, batch, None)[:2])
