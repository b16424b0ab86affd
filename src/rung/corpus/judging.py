"""One block of a corpus judged: what each of its documents is like, found in a worker and kept on disk."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rung.config import CleanConfig
from rung.corpus.contamination import Index, Overlap, Overlaps
from rung.corpus.documents import even_pieces, utf8_length
from rung.corpus.duplicates import Signature, TextKey
from rung.corpus.filters import WINDOW_CHARS, Measures
from rung.corpus.folder import read_lines
from rung.corpus.words import Words, words_of
from rung.disk import whole_file

FILTERS = ("length", "letters", "scripts", "repetition", "languages", "duplicates", "near-duplicates", "contamination")
"""What takes documents, in this order: the first that takes one counts it."""

STAYS = -1  # taken by no filter
EXAMPLES = 3  # of each filter, that are shown


@dataclass(frozen=True)
class Block:
    """A part of a shard that begins and ends with a line, and how to judge it."""

    path: str
    start: int
    stop: int
    settings: CleanConfig
    index: str  # the folder of the index of texts held out; empty for none


@dataclass(frozen=True)
class Judged:
    """What was found of the documents of a block. ``taken_by``: the number of a filter, or -1."""

    offsets: np.ndarray  # int64 [n]: where each line begins in the file; then where the last ends: [n + 1]
    bytes: np.ndarray  # int64 [n], of text
    characters: np.ndarray  # int64 [n]
    taken_by: np.ndarray  # int8 [n]
    keys: np.ndarray  # uint64 [n, 2]
    signatures: np.ndarray  # uint32 [n, permutations], or [n, 0]
    why: list[tuple[int, str]]  # of the first documents that each filter took: (document, reason)
    overlaps: list[tuple[int, Overlap]]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        words = json.dumps([self.why, [(n, dataclasses.astuple(one)) for n, one in self.overlaps]])
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        with whole_file(path) as file:
            np.savez(file, words=np.frombuffer(words.encode(), np.uint8), **arrays)

    @classmethod
    def load(cls, path: Path) -> Judged:
        """Read what was saved, but for the signatures, which are by far the most of it."""
        with np.load(path) as file:
            why, overlaps = json.loads(file["words"].tobytes())
            arrays = {name: file[name] for name in _ARRAYS if name != "signatures"}
        no_signatures = np.empty((len(arrays["bytes"]), 0), np.uint32)
        found = [(n, Overlap(*said)) for n, said in overlaps]
        return cls(**arrays, signatures=no_signatures, why=[(n, text) for n, text in why], overlaps=found)


_ARRAYS = ("offsets", "bytes", "characters", "taken_by", "keys", "signatures")


def judge_block(block: Block) -> Judged:
    """Judge the documents of a block; runs in a worker."""
    settings = block.settings
    index = _index(block.index) if block.index else None
    found: dict[str, list[Any]] = {name: [] for name in _ARRAYS}
    why: list[tuple[int, str]] = []
    overlaps: list[tuple[int, Overlap]] = []
    examples: Counter[int] = Counter()
    for number, record in enumerate(read_lines(Path(block.path), block.start, block.stop)):
        seen = _Seen(settings, index)
        for piece in even_pieces(record.pieces, WINDOW_CHARS):
            seen.add(piece)
        verdict = seen.measures.verdict()
        taken_by = FILTERS.index(verdict[0]) if verdict else STAYS
        if verdict:
            examples[taken_by] += 1
            if examples[taken_by] <= EXAMPLES:
                why.append((number, verdict[1]))
        elif seen.overlaps:
            overlaps += [(number, one) for one in seen.overlaps.value()]
        found["offsets"].append(record.offset)
        found["bytes"].append(seen.bytes)
        found["characters"].append(seen.characters)
        found["taken_by"].append(taken_by)
        found["keys"].append(seen.key.value())
        found["signatures"].append(seen.signature.value() if seen.signature else ())
    found["offsets"].append(block.stop)
    dtypes = {"offsets": "i8", "bytes": "i8", "characters": "i8", "taken_by": "i1", "keys": "u8", "signatures": "u4"}
    arrays = {name: np.array(values, dtypes[name]) for name, values in found.items()}
    n = len(arrays["bytes"])
    arrays |= {name: arrays[name].reshape(n, width) for name, width in (("keys", 2), ("signatures", -1 if n else 0))}
    return Judged(**arrays, why=why, overlaps=overlaps)


def look_in_block(block: Block) -> list[tuple[int, Overlap]]:
    """Look in a block for what its documents share with the texts of an index, and no more; runs in a worker."""
    index = _index(block.index)
    found: list[tuple[int, Overlap]] = []
    for number, record in enumerate(read_lines(Path(block.path), block.start, block.stop)):
        seen = _Seen(block.settings, index)
        for piece in even_pieces(record.pieces, WINDOW_CHARS):
            seen.add(piece)
        found += [(number, one) for one in seen.overlaps.value()] if seen.overlaps else []
    return found


class _Seen:
    """All that is computed of one document, as its pieces come."""

    def __init__(self, settings: CleanConfig, index: Index | None):
        self.bytes = self.characters = 0
        self.measures = Measures(settings)
        self.key = TextKey()
        wanted = "near-duplicates" not in settings.skip
        self.signature = Signature(settings.permutations, settings.shingle_words) if wanted else None
        self.overlaps = Overlaps(index) if index else None
        # Sequences go on over the border of two pieces: so many words are carried over, with their text.
        self._carry = max(settings.shingle_words, index.longest if index else 0) - 1
        self._tail, self._tail_words = "", words_of("")

    def add(self, piece: str) -> None:
        self.bytes += utf8_length(piece)
        self.characters += len(piece)
        self.key.add(piece)
        words = words_of(piece)
        self.measures.add(piece, words)
        before = self._tail_words
        text = self._tail + piece
        joined = Words(
            np.concatenate([before.hashes, words.hashes]),
            np.concatenate([before.starts, words.starts + len(self._tail)]),
            np.concatenate([before.ends, words.ends + len(self._tail)]),
            before.unspaced + words.unspaced,
        )
        if self.signature:
            self.signature.add(joined.hashes)
        if self.overlaps:
            self.overlaps.add(text, joined, len(before))
        first = max(len(joined) - self._carry, 0)
        at = int(joined.starts[first]) if self._carry and len(joined) else len(text)
        self._tail = text[at:]
        kept = slice(first, None) if self._carry else slice(0, 0)
        self._tail_words = Words(joined.hashes[kept], joined.starts[kept] - at, joined.ends[kept] - at, 0)


@lru_cache(maxsize=1)
def _index(folder: str) -> Index:
    return Index(Path(folder))
