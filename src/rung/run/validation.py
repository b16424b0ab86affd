"""Held-out loss over a split, of one store or of a mixture: each store apart, and together by their shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rung.evaluate.held_out import HeldOut, mixed
from rung.tokens.batches import Batch, validation_batches
from rung.tokens.mapped import Tokens
from rung.tokens.mixture import Store, keep_apart, parts
from rung.tokens.store import TokenStore


def over_split(
    store: Store,
    split: str,
    score: Callable[[Iterator[Batch], Tokens], HeldOut],
    *,
    context_length: int,
    batch_size: int,
    cross_documents: bool,
) -> HeldOut:
    """Return the loss over all of a split; every target counts once within its store.

    Args:
        store: or mixture, whose stores are then in ``sources`` of the result.
        split: such as ``validation``.
        score: the loss over batches; it is given the tokens that they are of, too.
        context_length: of a batch.
        batch_size: of a batch.
        cross_documents: let a token see earlier documents.

    Raises:
        RungError: no such split.
    """
    found = parts(store, split)
    segments = keep_apart(found, cross_documents)
    scored = {}
    for part in found:
        batches = validation_batches(
            part.tokens, context_length=context_length, batch_size=batch_size, segments=segments
        )
        scored[part.name] = score(batches, part.tokens)
    if isinstance(store, TokenStore):
        return scored[found[0].name]
    return mixed(scored, {part.name: part.share for part in found})
