"""Which training text stands in validation or evaluation texts too: words in a row that both have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rung.config import CleanConfig
from rung.corpus.documents import Document
from rung.corpus.words import Words, ngrams, words_of

# A text shorter than an overlap should be is looked for whole, down to so large a part of it; 8 of 13 words are what
# GPT-3 took at least (Brown et al. 2020, appendix C).
_LEAST = 8 / 13
_EXCERPT = 200  # characters of an overlap that are shown

_NAMES = "names.json"


@dataclass(frozen=True)
class Overlap:
    """Text that a document shares with one text held out: ``words`` words in ``places`` places, ``text`` the first."""

    held_out: int  # the number of that text in its index
    places: int
    words: int
    text: str


class Index:
    """Every n words in a row of the texts held out, in a folder of arrays that many processes map at once.

    ``names``: of the texts. ``too_short``: the texts that are too short to be looked for.
    """

    def __init__(self, folder: Path):
        self.names: list[str]
        self.names, self.too_short = json.loads((folder / _NAMES).read_text(encoding="utf-8"))
        self._arrays = {
            int(path.stem.split("-")[1]): (np.load(path, mmap_mode="r"), np.load(path.with_suffix(".owners.npy")))
            for path in sorted(folder.glob("sequences-*.npy"))
            if not path.name.endswith(".owners.npy")
        }

    @property
    def longest(self) -> int:
        """The longest sequence that is looked for, in words; 0 for none."""
        return max(self._arrays, default=0)

    def found_in(self, words: Words) -> Iterator[tuple[int, int, int]]:
        """Yield (first word, words, number of the text held out) of each sequence that stands in one, by length."""
        for n, (sequences, owners) in self._arrays.items():
            hashes = ngrams(words.hashes, n)
            places = np.minimum(np.searchsorted(sequences, hashes), len(sequences) - 1)
            for first in np.flatnonzero(sequences[places] == hashes).tolist():
                yield first, n, int(owners[places[first]])


def build_index(texts: Iterable[Document], folder: Path, settings: CleanConfig) -> Index:
    """Make the index of the texts held out in ``folder``; it takes 12 bytes a word in memory."""
    names: list[str] = []
    too_short: list[str] = []
    found: dict[int, list[tuple[np.ndarray, int]]] = {}
    for text in texts:
        pieces = [words_of(piece) for piece in text.pieces]
        hashes = np.concatenate([np.empty(0, np.uint64), *(piece.hashes for piece in pieces)])
        unspaced = sum(piece.unspaced for piece in pieces)
        asked = settings.overlap_characters if 2 * unspaced > len(hashes) else settings.overlap_words
        n = min(asked, len(hashes))
        if n < max(_LEAST * asked, 1):
            too_short.append(text.name)
            continue
        found.setdefault(n, []).append((np.unique(ngrams(hashes, n)), len(names)))
        names.append(text.name)
    folder.mkdir(parents=True, exist_ok=True)
    for n, parts in found.items():
        sequences, first = np.unique(np.concatenate([hashes for hashes, _ in parts]), return_index=True)
        owners = np.repeat([owner for _, owner in parts], [len(hashes) for hashes, _ in parts]).astype(np.int32)
        np.save(folder / f"sequences-{n}.npy", sequences)
        np.save(folder / f"sequences-{n}.owners.npy", owners[first])
    (folder / _NAMES).write_text(json.dumps([names, too_short]), encoding="utf-8")
    return Index(folder)


class Overlaps:
    """Looks for what one document shares with the texts of an index, as its windows come."""

    def __init__(self, index: Index):
        self._index = index
        self._found: dict[int, tuple[int, int, str]] = {}  # by text held out: places, words, the first text

    def add(self, text: str, words: Words, carried: int) -> None:
        """Take in a window; its first ``carried`` words are the last of the window before, with their text."""
        runs: dict[int, list[int]] = {}
        for first, n, owner in sorted(self._index.found_in(words)):
            if first + n <= carried:
                continue
            run = runs.get(owner)
            if run and first <= run[1]:
                run[1] = max(run[1], first + n)
                continue
            if run:
                self._add_run(text, words, carried, owner, run)
            runs[owner] = [first, first + n]
        for owner, run in runs.items():
            self._add_run(text, words, carried, owner, run)

    def value(self) -> list[Overlap]:
        """Return one overlap for each text held out that the document shares words with."""
        return [Overlap(owner, *said) for owner, said in sorted(self._found.items())]

    def _add_run(self, text: str, words: Words, carried: int, owner: int, run: list[int]) -> None:
        first, stop = run
        shown = text[words.starts[first] : words.ends[stop - 1]]
        shown = shown if len(shown) <= _EXCERPT else shown[:_EXCERPT] + " ..."
        places, n_words, shown = self._found.get(owner, (0, 0, shown))
        goes_on = places > 0 and first < carried
        self._found[owner] = (places + (not goes_on), n_words + stop - (carried if goes_on else first), shown)
