"""Generation of token ids: prefill, then the decode loop on the device in chunks, sliding past the context."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rung.config import GenerateConfig
from rung.decode import sampling
from rung.decode.sampling import Filters
from rung.decode.window import bucket, window_start, window_step
from rung.errors import RungError
from rung.model.weights import Tree

Note = Callable[[str], None]
"""Is called with a line that the user should know of."""

_CHUNK_TOKENS = 64  # most tokens that the device makes between two looks of the host
_NO_TOKEN = -1  # an id that is never drawn
_CHUNK_SECONDS = 0.25  # a text that grows four times a second still flows; entering the loop has a price


@dataclass(frozen=True)
class Chunk:
    """What generation has come by since the chunk before.

    Attributes:
        ids: for each sample its new tokens, int32 [up to N], without the end-of-text token that ends a sample.
        ended: for each sample whether its text has ended.
    """

    ids: tuple[np.ndarray, ...]
    ended: tuple[bool, ...]


class Generator:
    """Continues prompts of token ids with a model.

    Args:
        model: has ``config.context_length``, ``unembed``, ``empty_cache``, ``prefill`` and ``decode``, as
            ``rung.model.Decoder`` has; hashable.
        weights: its weights.
        vocab_size: of the tokenizer; ids from here on are padding of the embedding, and never produced.
        end_id: the end-of-text token.

    Raises:
        RungError: the tokenizer has more tokens than the model.
    """

    def __init__(self, model: Any, weights: Tree, *, vocab_size: int, end_id: int):
        if vocab_size > model.config.vocab_size:
            raise RungError(
                f"the tokenizer has {vocab_size} tokens, the model {model.config.vocab_size}",
                "take the tokenizer that the model was trained with",
            )
        assert 0 <= end_id < vocab_size, "the end-of-text token is a token"
        self.model = model
        self.weights = weights
        self.vocab_size = vocab_size
        self.end_id = end_id

    def generate_ids(
        self, prompt_ids: Sequence[int] | np.ndarray, settings: GenerateConfig, note: Note | None = None
    ) -> Iterator[Chunk]:
        """Yield the continuations of a prompt as they come, all samples together.

        The draw depends on the seed, the number of the sample and the token's place in the text, prompt included. It
        does not depend on how many samples there are, nor on whether the text so far was prompt or generated.

        Args:
            prompt_ids: token ids. An empty prompt begins a document: the model then sees the end-of-text token, which
                is what precedes a document in training. Before any other prompt nothing is put, as a model of one
                single document has never learned what an end-of-text token in front means.
            settings: how to draw and when to end. (``stop`` is about text: see ``rung.decode.text``.)
            note: is told when the text is longer than the context, and what the model sees then.

        Raises:
            RungError: a setting out of bounds, or an id that is no token.
        """
        sampling.check(settings)
        prompt = self._checked(prompt_ids)
        seen = np.unique(prompt)
        if not len(prompt):
            prompt = np.array([self.end_id], np.int32)
        return self._chunks(prompt, seen, settings, note or (lambda line: None))

    def _checked(self, prompt_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        prompt = np.asarray(prompt_ids, np.int64)
        for token in prompt[(prompt < 0) | (prompt >= self.vocab_size)]:
            raise RungError(
                f"the prompt has the id {token}, and the vocabulary ends at {self.vocab_size - 1}",
                "encode the prompt with the tokenizer that the model was trained with",
            )
        return prompt.astype(np.int32)

    def _chunks(self, prompt: np.ndarray, seen: np.ndarray, settings: GenerateConfig, note: Note) -> Iterator[Chunk]:
        context, B = self.model.config.context_length, settings.samples
        filters = Filters.of(settings)
        special = np.int32(self.vocab_size), np.int32(_NO_TOKEN if settings.ignore_end else self.end_id)
        tokens_BT = np.empty((B, len(prompt) + settings.max_tokens), np.int32)
        tokens_BT[:, : len(prompt)] = prompt
        n, end, size, said = len(prompt), tokens_BT.shape[1], 1, set[str]()
        if n == end:
            return
        state = _begin(self.model, len(prompt), seen, settings, filters)
        start, cache = -1, None
        while n < end and not np.all(state["ended"]):
            began, before = time.perf_counter(), n
            if window_start(n, context) != start:
                start, cache = window_start(n, context), None  # the old cache is freed before the new one is made
                for line in _slid(n, len(prompt), context, start):
                    if line not in said:
                        said.add(line)
                        note(line)
                # Before anything is generated the samples are one text, which is read once.
                logits_BV, cache = self._prefill(tokens_BT[: 1 if n == len(prompt) else B, start:n], B)
                state = _first(filters, *special, logits_BV, state)
                tokens_BT[:, n], n = state["token"], n + 1
            else:
                limit = min(size, end - n, start + context - n + 1)
                state, cache, new_BN, count = _more(
                    self.model, self.weights, filters, *special, state, cache, start, limit
                )
                tokens_BT[:, n : n + int(count)], n = np.asarray(new_BN)[:, : int(count)], n + int(count)
                size = _next_size(size, time.perf_counter() - began)
            yield self._chunk(tokens_BT[:, len(prompt) : n], before - len(prompt), settings.ignore_end)

    def _prefill(self, tokens_bT: np.ndarray, samples: int) -> tuple[jax.Array, Any]:
        length = tokens_bT.shape[1]
        padding = bucket(length, self.model.config.context_length) - length
        return _prefill(self.model, self.weights, np.pad(tokens_bT, ((0, 0), (0, padding))), length, samples)

    def _chunk(self, generated_BT: np.ndarray, before: int, ignore_end: bool) -> Chunk:
        if ignore_end:
            return Chunk(tuple(row[before:].copy() for row in generated_BT), (False,) * len(generated_BT))
        ends = [int(np.argmax(row == self.end_id)) if self.end_id in row else None for row in generated_BT]
        ids = tuple(row[before:end].copy() for row, end in zip(generated_BT, ends, strict=True))
        return Chunk(ids, tuple(end is not None for end in ends))


def _next_size(size: int, seconds: float) -> int:
    """Return how many tokens the next chunk may have, after one of ``size`` took ``seconds``."""
    if seconds < _CHUNK_SECONDS / 2:
        return min(2 * size, _CHUNK_TOKENS)
    return max(1, size // 2) if seconds > 2 * _CHUNK_SECONDS else size


def _slid(n: int, prompt_length: int, context: int, start: int) -> Iterator[str]:
    """Yield what to say of a window that begins at ``start``."""
    if start and n == prompt_length:
        yield f"the prompt has {n} tokens, over the context of {context}: the model sees the last {n - start}"
    elif start:
        least = context - window_step(context) + 1
        yield f"the text is longer than the context of {context} tokens: the model sees the last {least} to {context}"


# On the device. What is compiled depends on the model, the number of samples, which filters are on, and the bucket of
# the prompt's length; never on a value. The model is a static argument, so that its generators share the programs.


def _begin(model: Any, n: int, seen: np.ndarray, settings: GenerateConfig, filters: Filters) -> dict[str, Any]:
    """Return the state of the loop: last token, whether each text ended, tokens so far, keys, and the tokens seen."""
    seen_BV = None
    if filters.repetition_penalty is not None:
        seen_V = np.zeros(model.config.vocab_size, bool)
        seen_V[seen] = True
        seen_BV = jnp.asarray(np.tile(seen_V, (settings.samples, 1)))
    return {
        "token": jnp.zeros(settings.samples, jnp.int32),
        "ended": jnp.zeros(settings.samples, bool),
        "n": jnp.int32(n),
        "keys": sampling.keys(settings.seed, settings.samples),
        "seen": seen_BV,
    }


@functools.partial(jax.jit, static_argnums=(0, 4))
def _prefill(model, weights, tokens_bT, length, samples):
    """Return the logits [B, V] that follow the first ``length`` tokens and the cache, both for all samples."""
    x_bTD, cache = model.prefill(weights, tokens_bT, model.empty_cache(tokens_bT.shape[0]))
    logits_bV = model.unembed(weights, jax.lax.dynamic_index_in_dim(x_bTD, length - 1, 1, keepdims=False))
    if tokens_bT.shape[0] == samples:
        return logits_bV, cache
    return jax.tree.map(lambda row: jnp.repeat(row, samples, 0), (logits_bV, cache))


@functools.partial(jax.jit, donate_argnums=(4,))
def _first(filters, vocab_size, end_id, logits_BV, state):
    """Return the state with one more token drawn from ``logits_BV``."""
    return _drawn(filters, vocab_size, end_id, logits_BV, state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(5, 6))
def _more(model, weights, filters, vocab_size, end_id, state, cache, start, limit):
    """Return ``(state, cache, new tokens [B, N], count)``: ``count`` is ``limit``, or less when all texts ended."""
    B = state["token"].shape[0]

    def going(carry):
        state, _, _, count = carry
        return (count < limit) & ~jnp.all(state["ended"])

    def step(carry):
        state, cache, new_BN, count = carry
        position_B = jnp.broadcast_to(state["n"] - 1 - start, B)
        x_BD, cache = model.decode(weights, state["token"], position_B, cache)
        state = _drawn(filters, vocab_size, end_id, model.unembed(weights, x_BD), state)
        new_BN = jax.lax.dynamic_update_slice(new_BN, state["token"][:, None], (0, count))
        return state, cache, new_BN, count + 1

    return jax.lax.while_loop(going, step, (state, cache, jnp.zeros((B, _CHUNK_TOKENS), jnp.int32), jnp.int32(0)))


def _drawn(filters, vocab_size, end_id, logits_BV, state):
    keys_B = jax.vmap(lambda key: jax.random.fold_in(key, state["n"]))(state["keys"])
    token_B = sampling.draw(sampling.mask_outside(logits_BV, vocab_size), keys_B, filters, state["seen"])
    seen_BV = state["seen"]
    if seen_BV is not None:
        seen_BV = seen_BV.at[jnp.arange(token_B.shape[0]), token_B].set(True)
    ended_B = state["ended"] | (token_B == end_id)
    return {**state, "token": token_B, "ended": ended_B, "n": state["n"] + 1, "seen": seen_BV}
