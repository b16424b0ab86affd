"""Step number to global batch: a pure function, with no cursor and no queue to save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from rung.errors import RungError
from rung.tokens.permutation import draw, key_of, permute
from rung.tokens.store import Tokens

IGNORED = -1  # target id at positions that have no target

Batch = dict[str, np.ndarray]  # "tokens", "targets" and, where documents are kept apart, "segments"; int32 [B, T]

_SHUFFLE, _PHASE, _OFFSET = range(3)  # uses of the seed


class Batches:
    """The training batches of one split.

    Contiguous windows: epoch e cuts the stream at a phase of its own into ``windows_per_epoch`` windows of T inputs and
    takes them in a shuffled order of its own; each of the n - 1 targets occurs exactly once an epoch. Global row
    r = step * B + b is window ``permutation(r % W)`` of epoch r // W. Positions beyond either end of the stream hold
    token 0, and their targets are IGNORED. Random windows: each row begins at a uniform offset, and is full.

    Raises:
        RungError: too few tokens for a target, or for one random window.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        context_length: int,
        batch_size: int,
        seed: int,
        windows: Literal["contiguous", "random"],
        segments: bool,
    ):
        check_length(len(tokens), 2)
        if windows == "random" and len(tokens) <= context_length:
            raise RungError(
                f"{len(tokens)} training tokens are too few for a random window of {context_length} and its targets",
                "shorten model.context_length, or take --data.windows contiguous",
            )
        self.tokens = tokens
        self.context_length = context_length
        self.batch_size = batch_size
        self.seed = seed
        self.windows = windows
        self.segments = segments
        self.windows_per_epoch = -(-(len(tokens) + context_length - 2) // context_length)

    def __call__(self, step: int) -> Batch:
        """Return the global batch of ``step``: int32 arrays [B, T]."""
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Return rows ``start`` to ``stop`` of the global batch of ``step``; nothing else is read."""
        return self.at(self._rows(step)[start:stop])

    def at(self, rows_B: np.ndarray) -> Batch:
        """Return rows by their global numbers (int64 [B], each at least 0), of whatever steps."""
        return _windows(self.tokens, self._starts_of(rows_B), self.context_length, self.segments)

    def epoch(self, step: int) -> float:
        """Return the passes over the split that lie before ``step``."""
        return step * self.batch_size / self.rows_per_epoch

    @property
    def rows_per_epoch(self) -> float:
        """The rows that one pass over the split has; of random windows as many as have its number of targets."""
        if self.windows == "contiguous":
            return self.windows_per_epoch
        return (len(self.tokens) - 1) / self.context_length

    def documents(self, step: int) -> list[int]:
        """Return the numbers of the documents, within the split, that the batch of ``step`` has tokens of.

        None where the documents of the split have no numbers.
        """
        return self.documents_at(self._rows(step))

    def documents_at(self, rows_B: np.ndarray) -> list[int]:
        """Return the same of rows by their global numbers."""
        found: set[int] = set()
        starts = self.tokens.document_starts
        if not len(starts):
            return []
        for start in self._starts_of(rows_B).tolist():
            first, last = max(start, 0), min(start + self.context_length, len(self.tokens)) - 1
            if first <= last:
                low, high = np.searchsorted(starts, [first, last], side="right").tolist()
                found.update(range(max(low - 1, 0), high))
        return sorted(found)

    def document_name(self, number: int) -> str | None:
        """Return the name of a document by its number, where the store knows it."""
        return self.tokens.names[number] if number < len(self.tokens.names) else None

    def _starts(self, step: int) -> np.ndarray:
        return self._starts_of(self._rows(step))

    def _rows(self, step: int) -> np.ndarray:
        return step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)

    def _starts_of(self, rows_B: np.ndarray) -> np.ndarray:
        """Return where each row's first input is: int64 [B], negative where a row begins before the text."""
        if self.windows == "random":
            return draw(rows_B, len(self.tokens) - self.context_length, key_of(self.seed, _OFFSET))
        epochs_B, order_B = np.divmod(rows_B, self.windows_per_epoch)
        starts_B = np.empty_like(rows_B)
        for epoch in np.unique(epochs_B).tolist():
            here = epochs_B == epoch
            phase = key_of(self.seed, _PHASE, epoch) % self.context_length
            windows = permute(order_B[here], self.windows_per_epoch, key_of(self.seed, _SHUFFLE, epoch))
            starts_B[here] = windows * self.context_length - phase
        return starts_B


def validation_batches(tokens: Tokens, *, context_length: int, batch_size: int, segments: bool) -> Iterator[Batch]:
    """Yield the fixed batches of a full validation pass: contiguous windows, each of the n - 1 targets exactly once.

    The last batch is filled up to its full shape with rows whose targets are all IGNORED.

    Raises:
        RungError: too few tokens for a target.
    """
    check_length(len(tokens), 2)
    n_windows = -(-(len(tokens) - 1) // context_length)
    for first in range(0, n_windows, batch_size):
        # Windows past the last begin past the last target, so that every target of theirs is IGNORED.
        starts_B = (first + np.arange(batch_size, dtype=np.int64)) * context_length
        yield _windows(tokens, starts_B, context_length, segments)


def check_length(n_tokens: int, least: int) -> None:
    """Raise a RungError when a split is too short to predict anything."""
    if n_tokens < least:
        problem = f"a split of {n_tokens} tokens is too short: it takes {least} to have a target"
        raise RungError(problem, "give more text, or hold out more of it")


# Helpers


def _windows(tokens: Tokens, starts_B: np.ndarray, length: int, segments: bool) -> Batch:
    last = len(tokens) - 1
    tokens_BS = tokens.gather(starts_B, length + 1)
    targets_BT = tokens_BS[:, 1:].copy()  # a single row is contiguous as it is, and would be shared with the inputs
    # Whole rows lie inside nearly always; only the others are masked position by position.
    for row in np.flatnonzero((starts_B < 0) | (starts_B + length > last)).tolist():
        inputs_T = starts_B[row] + np.arange(length)
        targets_BT[row, (inputs_T < 0) | (inputs_T >= last)] = IGNORED
    batch = {"tokens": tokens_BS[:, :-1].copy(), "targets": targets_BT}
    if segments:
        if tokens.ends_tell:
            batch["segments"] = _segments_by_ends(batch["tokens"], tokens.end_id, starts_B, len(tokens))
        else:
            batch["segments"] = _segments(tokens.document_starts, starts_B, length)
    return batch


def _segments(document_starts: np.ndarray, starts_B: np.ndarray, length: int) -> np.ndarray:
    """Return the document that each input belongs to, counted from the first of its row: int32 [B, T].

    The end-of-text before a document begins that document's segment: it is what the first token is predicted from.
    Positions before the text are a segment of their own.
    """
    begins_BT = np.zeros((len(starts_B), length), np.int32)
    low_B, high_B = np.searchsorted(document_starts, [starts_B + 1, starts_B + length], side="right")
    # Of position i it matters which documents begin at i + 1 or before; the first document begins at 0, not at -1.
    counts_B = high_B - low_B
    rows = np.repeat(np.arange(len(starts_B)), counts_B)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
    begun = document_starts[np.repeat(low_B, counts_B) + within]
    rows, begun = rows[begun > 0], begun[begun > 0]
    begins_BT[rows, begun - 1 - starts_B[rows]] = 1
    before = np.flatnonzero((starts_B < 0) & (starts_B > -length))
    begins_BT[before, -starts_B[before]] += 1
    return np.cumsum(begins_BT, axis=1, dtype=np.int32)


def _segments_by_ends(inputs_BT: np.ndarray, end_id: int | None, starts_B: np.ndarray, n_tokens: int) -> np.ndarray:
    """Return the same where nothing but the end of text in the row itself tells documents apart."""
    begins_BT = inputs_BT == end_id
    length = inputs_BT.shape[1]
    for row in np.flatnonzero((starts_B < 0) | (starts_B + length > n_tokens)).tolist():
        places_T = starts_B[row] + np.arange(length)
        begins_BT[row] &= (places_T >= 0) & (places_T < n_tokens)  # what fills a row up is no end of text
        begins_BT[row] |= places_T == 0
    return np.cumsum(begins_BT, axis=1, dtype=np.int32)
