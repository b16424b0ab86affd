"""A look at tokens before anything is trained on them: which, how often, how long documents are, what a batch shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rung.corpus.look import Lengths
from rung.tokens.batches import Batch, Batches
from rung.tokens.mapped import Tokens
from rung.tokens.mixture import Mixture
from rung.tokens.tokenizer import Tokenizer

MOST_TOKENS = 1 << 26  # of a split that are looked at, unless all are asked for
_BLOCK_TOKENS = 1 << 20

OnProgress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True)
class SplitLook:
    """What was found in a split.

    Attributes:
        tokens: in the split.
        seen: that were looked at; fewer than all in blocks spread evenly.
        counts_V: int64 [vocab_size], how often each id was seen.
        lengths: of documents in tokens, their end of text included; of those that lie whole within what was seen.
        seen_bytes: of text, that the tokens seen stand for.
    """

    tokens: int
    seen: int
    counts_V: np.ndarray
    lengths: Lengths
    seen_bytes: int

    @property
    def whole(self) -> bool:
        """Whether all tokens were seen."""
        return self.seen == self.tokens

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text over tokens, ends of text among them."""
        return self.seen_bytes / max(1, self.seen)

    @property
    def unused(self) -> int:
        """Entries of the vocabulary that were not seen."""
        return int((self.counts_V == 0).sum())

    def most_frequent(self, n: int) -> list[tuple[int, int]]:
        """Return (id, how often it was seen), the most frequent first."""
        order = np.argsort(-self.counts_V, kind="stable")[:n]
        return [(int(token), int(self.counts_V[token])) for token in order if self.counts_V[token]]

    def ranks(self) -> np.ndarray:
        """Return how often the most frequent id was seen, the second, and so on: int64, those seen at all."""
        return np.sort(self.counts_V[self.counts_V > 0])[::-1]


def look_at_split(
    tokens: Tokens, tokenizer: Tokenizer, most: int | None = MOST_TOKENS, on_progress: OnProgress | None = None
) -> SplitLook:
    """Return what is in a split, or in blocks spread evenly over it; memory is that of a block.

    Args:
        tokens: the split.
        tokenizer: that made it.
        most: tokens to look at; ``None``: all.
        on_progress: told of the bytes read.
    """
    counts_V = np.zeros(tokenizer.vocab_size, np.int64)
    lengths = Lengths()
    seen = 0
    listed = not tokens.ends_tell and len(tokens.document_starts) > 0
    if listed:
        lengths.add(np.diff(np.append(tokens.document_starts, len(tokens))))
    wanted = len(tokens) if most is None else min(most, len(tokens))
    carried = -1  # the last end of text before the block, where the block goes on from it
    stop_before = 0
    for start, stop in _blocks(len(tokens), wanted):
        ids = tokens.read(start, stop)
        counts_V += np.bincount(ids, minlength=tokenizer.vocab_size)
        seen += len(ids)
        if not listed:
            if start != stop_before:
                carried = -1
            if start == 0:
                carried = 0
            ends = start + 1 + np.flatnonzero(ids == tokens.end_id)
            bounds = np.append(carried, ends) if carried >= 0 else ends
            lengths.add(np.diff(bounds))
            carried = int(bounds[-1]) if len(bounds) else -1
        stop_before = stop
        if on_progress:
            on_progress(2 * seen, 2 * wanted)
    return SplitLook(len(tokens), seen, counts_V, lengths, int(counts_V @ tokenizer.token_bytes))


@dataclass(frozen=True)
class Window:
    """One row of a batch as the model sees it, in int32 [T] each.

    ``segments_T`` is None where documents are not kept apart, and a target is -1 where there is none.
    """

    step: int
    row: int
    source: str  # the store of a mixture; else empty
    tokens_T: np.ndarray
    targets_T: np.ndarray
    segments_T: np.ndarray | None


def windows(batches: Batches | Mixture, step: int, n: int) -> list[Window]:
    """Return the first ``n`` rows of the batch of ``step``, or as many as it has."""
    n = min(n, batches.batch_size)
    batch: Batch = batches.rows(step, 0, n)
    names = [""] * n
    if isinstance(batches, Mixture):
        sources, _ = batches.schedule(step * batches.batch_size + np.arange(n))
        names = [batches.names[source] for source in sources]
    segments = batch.get("segments")
    return [
        Window(
            step,
            row,
            names[row],
            batch["tokens"][row],
            batch["targets"][row],
            None if segments is None else segments[row],
        )
        for row in range(n)
    ]


def _blocks(n_tokens: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of blocks that come to ``wanted`` of so many tokens: all, or evenly spread with both ends."""
    number = -(-wanted // _BLOCK_TOKENS)
    if wanted == n_tokens:
        yield from ((k, min(k + _BLOCK_TOKENS, n_tokens)) for k in range(0, n_tokens, _BLOCK_TOKENS))
        return
    length = wanted // number
    for k in range(number):
        start = (n_tokens - length) * k // max(1, number - 1)
        yield start, start + length
