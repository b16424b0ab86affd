"""Which tokens the model sees when a text is longer than its context: one rule, for every way of running the model."""

from __future__ import annotations


def window_start(n_tokens: int, context_length: int) -> int:
    """Return the first token that the model sees when it predicts what follows ``n_tokens`` tokens.

    The window grows to the context length; then its start moves on by half of it at once, so that between two moves the
    cached keys and values stay good. The model sees between half a context (and one token) and a whole one.
    """
    if n_tokens <= context_length:
        return 0
    step = window_step(context_length)
    return -(-(n_tokens - context_length) // step) * step


def window_step(context_length: int) -> int:
    """Return by how many tokens the window's start moves at once."""
    return max(1, context_length // 2)


def bucket(length: int, context_length: int) -> int:
    """Return the length to pad to: a power of two, at most the context, so that few lengths are compiled."""
    size = _SMALLEST_BUCKET
    while size < length:
        size *= 2
    return min(size, context_length)


_SMALLEST_BUCKET = 16  # shorter prompts cost about as much as this one
