"""Learning BPE merges from text of any length in bounded memory and time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rung.corpus.documents import utf8_length
from rung.errors import RungError
from rung.tokens.learner import learn, learn_apart

if TYPE_CHECKING:
    import tokenizers

# The trainer holds every distinct word, at up to 70 bytes of memory a byte of text. Text in words repeats them; text
# without spaces (Japanese, one long line) hardly does. So of the memory allowed, these parts are the most that the
# words of the text, and the text itself, may come to; both are exceeded by text that is then sampled.
_DISTINCT = 1 / 96
_HELD = 1 / 6
_APART_BYTES = 1 << 19  # of text; what more takes is learned from where Ctrl-C ends it
_KEY = b"rung tokenizer"  # fixed, so that a text has one sample


@dataclass(frozen=True)
class TrainingText:
    """How much of a text a vocabulary was learned from, in UTF-8 bytes; if not all, from a keyed sample of pieces."""

    used_bytes: int
    total_bytes: int


def train_bpe(
    pieces: Iterable[str], end: str, vocab_size: int, min_frequency: int, memory: int
) -> tuple[tokenizers.Tokenizer, TrainingText]:
    """Return a byte-level BPE tokenizer with ``end`` as id 0 and all 256 bytes, and what it was learned from.

    Text that would take more than about ``memory`` bytes is sampled, by piece.

    Raises:
        RungError: no text at all.
    """
    sample, text = _sample(pieces, memory)
    if not sample:
        raise RungError("no text to learn a tokenizer from", "name a file that has text in it")
    # A moment's work is not worth a process.
    learner = learn if text.used_bytes <= _APART_BYTES else learn_apart
    return learner(sample, end, vocab_size, min_frequency), text


def _sample(pieces: Iterable[str], memory: int) -> tuple[list[str], TrainingText]:
    """Return every piece, or half, a quarter, an eighth ... of them: the most that the memory holds.

    Which ones is a function of their numbers alone: a piece is in half of the samples that the next larger one is in.
    """
    kept: list[tuple[int, str, int]] = []  # rank, piece, bytes
    words: set[str] = set()
    level = total = held = distinct = 0
    for number, piece in enumerate(pieces):
        size, rank = utf8_length(piece), _rank(number)
        total += size
        if rank < level:
            continue
        kept.append((rank, piece, size))
        held += size
        distinct += _add_words(words, piece)
        while len(kept) > 1 and (distinct > _DISTINCT * memory or held > _HELD * memory):
            level += 1
            kept = [one for one in kept if one[0] >= level] or [max(kept, key=lambda one: one[0])]
            words.clear()
            held = sum(size for _, _, size in kept)
            distinct = sum(_add_words(words, piece) for _, piece, _ in kept)
    return [piece for _, piece, _ in kept], TrainingText(held, total)


def _add_words(words: set[str], piece: str) -> int:
    """Add the words of a piece; return the bytes of those that are new."""
    new = set(piece.split()) - words
    words |= new
    return sum(map(utf8_length, new))


def _rank(number: int) -> int:
    """Return how often a fair coin, thrown for each number on its own, falls heads before tails."""
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=_KEY).digest()
    drawn = int.from_bytes(digest, "little") | 1 << 63
    return (drawn & -drawn).bit_length() - 1
