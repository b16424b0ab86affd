"""Words of any script as numbers: what repetition, likeness and overlap of texts are counted in."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache

import numpy as np

# Scripts that are written without spaces between words, by code points: each of their characters counts as a word.
_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # iteration mark and zero of Han
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # small Katakana
    (0x3400, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han, for compatibility
    (0xFF66, 0xFF9F),  # Katakana of half width
    (0x1B000, 0x1B16F),  # old Kana
    (0x20000, 0x323AF),  # Han, rare
)
_LAST = 0x323AF  # no letter has a code point beyond

_SEPARATOR, _LETTER, _WHOLE = range(3)  # kinds of characters; one of the last is a word of its own


@dataclass(frozen=True)
class Words:
    """The words of a text, in order: a word is a run of letters, marks and digits, or one character as Kana or Han.

    ``hashes``: uint64 [n], alike for words that differ in case or compatibility forms only. ``starts``, ``ends``: int64
    [n], where they stand in the text. ``unspaced``: how many are characters of a script without spaces.
    """

    hashes: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    unspaced: int

    def __len__(self) -> int:
        return len(self.hashes)


def words_of(text: str) -> Words:
    """Return the words of a text."""
    kinds, folded = _tables()
    codes_N = np.minimum(codes_of(text), _LAST + 1)
    kinds_N = kinds[codes_N]
    places = np.flatnonzero(kinds_N)
    kinds_M = kinds_N[places]
    begins_M = np.ones(len(places), bool)
    begins_M[1:] = (kinds_M[1:] != _LETTER) | (kinds_M[:-1] != _LETTER) | (np.diff(places) > 1)
    first = np.flatnonzero(begins_M)
    if not first.size:
        none = np.empty(0, np.int64)
        return Words(np.empty(0, np.uint64), none, none, 0)
    last = np.append(first[1:], len(places)) - 1
    starts, ends = places[first], places[last] + 1
    within_M = places - np.repeat(starts, last - first + 1)
    letters_M = folded[codes_N[places]] + within_M.astype(np.uint64) * np.uint64(1 << 32)
    hashes = _mixed(np.add.reduceat(_mixed(letters_M), first))
    return Words(hashes, starts, ends, int((kinds_M == _WHOLE).sum()))


def ngrams(hashes: np.ndarray, n: int) -> np.ndarray:
    """Return a hash of each ``n`` on end, along the first axis: uint64 [len - n + 1], empty where there are fewer."""
    combined = hashes[: max(len(hashes) - n + 1, 0)]
    for k in range(1, n):
        combined = combined * _STEP + hashes[k : k + len(combined)]
    return _mixed(combined)


def codes_of(text: str) -> np.ndarray:
    """Return the code points of a text: uint32 [n]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


# Helpers

_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return a bijection of 64-bit numbers that spreads every bit: the finaliser of SplitMix64 (Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Return for each code point, and for one beyond all letters, its kind and what it is folded to."""
    kinds = np.zeros(_LAST + 2, np.uint8)
    folded = np.arange(_LAST + 2, dtype=np.uint64)
    for code in range(_LAST + 1):
        character = chr(code)
        if unicodedata.category(character)[0] in "LMN":
            kinds[code] = _LETTER
            plain = unicodedata.normalize("NFKC", character).casefold()
            if len(plain) == 1:
                folded[code] = ord(plain)
    for low, high in _UNSPACED:
        here = slice(low, high + 1)
        kinds[here] = np.where(kinds[here] == _LETTER, _WHOLE, kinds[here])
    return kinds, folded
