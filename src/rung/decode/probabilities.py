"""What a model expects: at each position of a text, the most probable next tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rung.decode.sampling import mask_outside
from rung.decode.window import bucket, window_start
from rung.model.weights import Tree
from rung.tokens.tokenizer import Tokenizer

_POSITIONS_AT_ONCE = 64  # whose logits exist together


@dataclass(frozen=True)
class Candidate:
    """A token that may come next.

    Attributes:
        id: of the token.
        piece: its text, printable: control characters and bytes that are no whole character are written as escapes.
        probability: by the softmax of the model's logits, at temperature 1.
        rank: 1 for the most probable token; among equals the lowest id first.
    """

    id: int
    piece: str
    probability: float
    rank: int


@dataclass(frozen=True)
class Position:
    """A place in the text: what stands there, what the model expects next, and what does come next.

    Attributes:
        id, piece: the token here.
        top: the most probable next tokens, most probable first.
        next: the token that does come next; ``None`` at the end of the text.
    """

    id: int
    piece: str
    top: tuple[Candidate, ...]
    next: Candidate | None


def next_token_probabilities(
    model: Any, weights: Tree, tokenizer: Tokenizer, text: str, top: int = 10
) -> list[Position]:
    """Return for each token of ``text`` what the model expects after it.

    An empty text is the beginning of a document, as for generation: one position, the end-of-text token. In a text
    longer than the context each position is predicted from the window that generation would have there.

    Args:
        model: has ``config.context_length``, ``hidden`` and ``unembed``.
        weights: its weights.
        tokenizer: that the model was trained with.
        text: to look at.
        top: how many candidates a position; the vocabulary at most.
    """
    ids = np.asarray(tokenizer.encode(text), np.int32)
    if not len(ids):
        ids = np.array([tokenizer.end_id], np.int32)
    top = min(top, tokenizer.vocab_size)
    positions = []
    for start, first, stop in _windows(len(ids), model.config.context_length):
        length = bucket(stop - start, model.config.context_length)
        tokens_T, next_T = (_padded(ids[at : at + stop - start], length) for at in (start, start + 1))
        scores = _scores(model, tokenizer.vocab_size, top, weights, tokens_T, next_T)
        top_ids_Tk, top_Tk, next_probability_T, next_rank_T = (np.asarray(score) for score in scores)
        for place in range(first, stop):
            row = place - start
            candidates = zip(top_ids_Tk[row], top_Tk[row], range(1, top + 1), strict=True)
            following = (
                (int(ids[place + 1]), next_probability_T[row], next_rank_T[row]) if place + 1 < len(ids) else None
            )
            positions.append(
                Position(
                    int(ids[place]),
                    printable(tokenizer, int(ids[place])),
                    tuple(_candidate(tokenizer, *candidate) for candidate in candidates),
                    _candidate(tokenizer, *following) if following else None,
                )
            )
    return positions


def rows(positions: list[Position]) -> Iterator[tuple[str, ...]]:
    """Yield a table of positions, a heading first: token, what came next, its probability and rank, candidates."""
    yield "token", "next", "probability", "rank", "most probable next tokens"
    for position in positions:
        following = position.next
        actual = (
            ("", "", "")
            if following is None
            else (following.piece, f"{following.probability:.4f}", str(following.rank))
        )
        yield position.piece, *actual, "  ".join(f"{one.piece} {one.probability:.4f}" for one in position.top)


def printable(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text for people: control characters and bytes that are no whole character as escapes."""
    piece = tokenizer.show(token)
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in piece)


def _candidate(tokenizer: Tokenizer, token: int, probability: float, rank: int) -> Candidate:
    return Candidate(int(token), printable(tokenizer, int(token)), float(probability), int(rank))


def _windows(n_tokens: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(start, first, stop)``: window [start, stop) predicts what follows its positions from ``first`` on."""
    first = 0
    while first < n_tokens:
        start = window_start(first + 1, context)
        stop = min(n_tokens, start + context)
        yield start, first, stop
        first = stop


def _padded(ids: np.ndarray, length: int) -> np.ndarray:
    return np.pad(ids, (0, length - len(ids)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _scores(model, vocab_size, top, weights, tokens_T, next_T):
    """Return ids and probabilities [T, top] of the best next tokens, and probability and rank [T] of ``next_T``."""
    x_TD = model.hidden(weights, tokens_T[None])[0]

    def score(position):
        x_D, token = position
        probability_V = jax.nn.softmax(mask_outside(model.unembed(weights, x_D)[None], vocab_size)[0])
        top_k, ids_k = jax.lax.top_k(probability_V, top)
        own = probability_V[token]
        before_V = (probability_V > own) | ((probability_V == own) & (jnp.arange(probability_V.shape[0]) < token))
        return ids_k, top_k, own, jnp.sum(before_V) + 1

    return jax.lax.map(score, (x_TD, next_T), batch_size=_POSITIONS_AT_ONCE)
