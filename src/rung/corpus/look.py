"""A look at text before anything is made of it: how much, how long, in which scripts, and some of it to read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rung.config import DataConfig
from rung.corpus.documents import OnProgress, documents, utf8_length
from rung.corpus.sources import Source
from rung.corpus.words import codes_of

EXCERPT_CHARS = 3000  # of a sampled document that are kept
SAMPLED = 200  # documents

_BINS = 16  # lengths are counted in so many steps from a number to its double
_BUFFER = 1 << 20  # characters that are counted at once
_KEY = 0  # of the sample, so that the same text shows the same documents


class Lengths:
    """Lengths, counted in bins so fine that a quantile is off by at most 4.5%; least, greatest and sum are exact."""

    def __init__(self) -> None:
        self.counts = np.zeros(64 * _BINS, np.int64)
        self.number = self.total = 0
        self.least: int | None = None
        self.greatest: int | None = None

    def add(self, lengths: np.ndarray) -> None:
        """Count lengths: whole numbers, at least 0, [n]."""
        if not len(lengths):
            return
        bins = np.floor(np.log2(np.maximum(lengths, 1)) * _BINS).astype(np.int64)
        self.counts += np.bincount(bins, minlength=len(self.counts))
        self.number += len(lengths)
        self.total += int(lengths.sum())
        least, greatest = int(lengths.min()), int(lengths.max())
        self.least = least if self.least is None else min(self.least, least)
        self.greatest = greatest if self.greatest is None else max(self.greatest, greatest)

    @property
    def mean(self) -> float:
        """The mean; 0 of none."""
        return self.total / max(1, self.number)

    def quantile(self, part: float) -> int:
        """Return a length that about ``part`` of all are not over; 0 of none."""
        if self.least is None or self.greatest is None:
            return 0
        bin_ = int(np.searchsorted(np.cumsum(self.counts), max(1, part * self.number)))
        return int(min(max(2 ** ((bin_ + 0.5) / _BINS), self.least), self.greatest))

    def histogram(self, bins_per_doubling: int = 2) -> list[tuple[float, float, int]]:
        """Return (from, to, how many) over the lengths that there are, in equal steps of their logarithm."""
        step = _BINS // bins_per_doubling
        counts = self.counts.reshape(-1, step).sum(axis=1)
        (there,) = np.nonzero(counts)
        edges = 2.0 ** (np.arange(len(counts) + 1) * step / _BINS)
        shown = range(there[0], there[-1] + 1) if len(there) else range(0)
        return [(float(edges[k]), float(edges[k + 1]), int(counts[k])) for k in shown]


@dataclass(frozen=True)
class Excerpt:
    """The beginning of a sampled document."""

    name: str
    text: str
    characters: int  # of the whole document
    metadata: Mapping[str, Any]


@dataclass
class Look:
    """What one pass over a text finds; empty documents are counted apart, in nothing else.

    ``lengths``: of documents in characters. ``scripts``: characters by Unicode script; "Common" are those of all
    scripts: spaces, digits, punctuation. ``odd``: characters that hint at damage, by kind. ``excerpts``: of documents
    drawn evenly from all, in the order of the text.
    """

    documents: int = 0
    empty: int = 0
    bytes: int = 0  # in UTF-8
    characters: int = 0
    different: int = 0  # characters
    lengths: Lengths = field(default_factory=Lengths)
    scripts: dict[str, int] = field(default_factory=dict)
    odd: dict[str, int] = field(default_factory=dict)
    excerpts: list[Excerpt] = field(default_factory=list)


def look_at(sources: Sequence[Source], config: DataConfig, on_progress: OnProgress | None = None) -> Look:
    """Return what all of a text holds, read once, in bounded memory.

    Raises:
        RungError: a file that cannot be read or decoded.
    """
    look, counter, drawn = Look(), _Characters(), _Reservoir(SAMPLED)
    waiting: list[int] = []
    for document in documents(sources, config, on_progress):
        characters, kept = 0, ""
        for piece in document.pieces:
            kept = kept or piece[:EXCERPT_CHARS]
            characters += len(piece)
            look.bytes += utf8_length(piece)
            counter.add(piece)
        if not characters:
            look.empty += 1
            continue
        look.documents += 1
        look.characters += characters
        waiting.append(characters)
        if len(waiting) == _BUFFER:
            look.lengths.add(np.array(waiting))
            waiting.clear()
        drawn.offer(Excerpt(document.name, kept, characters, document.metadata))
    look.lengths.add(np.array(waiting, np.int64))
    counts = counter.finish()
    look.different = int(np.count_nonzero(counts))
    look.scripts, look.odd = _by_script(counts), _odd(counts)
    look.excerpts = drawn.items()
    return look


class _Characters:
    """Counts every character of a text, many at once."""

    def __init__(self) -> None:
        self._counts = np.zeros(0x110000, np.int64)
        self._waiting: list[str] = []
        self._size = 0

    def add(self, piece: str) -> None:
        self._waiting.append(piece)
        self._size += len(piece)
        if self._size >= _BUFFER:
            self.finish()

    def finish(self) -> np.ndarray:
        codes = codes_of("".join(self._waiting))
        self._counts += np.bincount(codes.astype(np.intp), minlength=len(self._counts))
        self._waiting, self._size = [], 0
        return self._counts


class _Reservoir:
    """Draws evenly from a stream of unknown length (Vitter 1985, algorithm R)."""

    def __init__(self, size: int):
        self._size, self._seen = size, 0
        self._random = random.Random(_KEY)
        self._kept: list[tuple[int, Any]] = []

    def offer(self, item: Any) -> None:
        place = self._seen if self._seen < self._size else self._random.randrange(self._seen + 1)
        if place < self._size:
            self._kept[place : place + 1] = [(self._seen, item)]
        self._seen += 1

    def items(self) -> list[Any]:
        return [item for _, item in sorted(self._kept, key=lambda pair: pair[0])]


def _by_script(counts: np.ndarray) -> dict[str, int]:
    """Return how many characters are of each Unicode script, the most first."""
    from fontTools import unicodedata as unicode_data

    found: Counter[str] = Counter()
    for code in np.flatnonzero(counts).tolist():
        found[unicode_data.script_name(unicode_data.script(chr(code)))] += int(counts[code])
    return dict(found.most_common())


def _odd(counts: np.ndarray) -> dict[str, int]:
    control = counts[:0x20].sum() - counts[[0x09, 0x0A, 0x0D]].sum() + counts[0x7F:0xA0].sum()
    private = counts[0xE000:0xF900].sum() + counts[0xF0000:].sum()
    found = {
        "replacement characters (U+FFFD)": int(counts[0xFFFD]),
        "control characters": int(control),
        "private use": int(private),
    }
    return {name: number for name, number in found.items() if number}
