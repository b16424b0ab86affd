"""What is wrong with a document by itself: too short, hardly any letters, another script or language, repetition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from rung.config import CleanConfig
from rung.corpus.words import Words, codes_of, ngrams
from rung.errors import RungError, nearest

WINDOW_CHARS = 1 << 17
"""Repetition is looked for within so many characters, whatever the length of a document."""

# Limits of Gopher (Rae et al. 2021, table A1): of lines and paragraphs that stand before, by number and by characters;
# of the characters within the most frequent sequence of n words; within sequences of n words that stand before.
_LINES, _LINE_CHARS = 0.30, 0.20
_MOST_FREQUENT = {2: 0.20, 3: 0.18, 4: 0.16}
_REPEATED = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
_CHARACTERS_A_WORD = 2  # of a script without spaces: sequences of n words are of so many times n characters there

_SAMPLE_CHARS = 700  # a language is judged by so many characters at the beginning, middle and end of the first window


class Measures:
    """Measures a document as its windows of text come, in bounded memory; ``verdict`` judges it at the end."""

    def __init__(self, settings: CleanConfig):
        self._settings = settings
        self.words = self.unspaced = self.letters = self.in_scripts = self.visible = 0
        self._lines = self._repeated_lines = self._line_chars = self._repeated_line_chars = 0
        self._word_chars = 0
        self._covered: Counter[int] = Counter()  # characters, by n
        self._sample = ""

    def add(self, text: str, words: Words) -> None:
        """Take in one window of text, of at most WINDOW_CHARS, and its words."""
        settings = self._settings
        self.words += len(words)
        self.unspaced += words.unspaced
        codes_N = codes_of(text)
        self.letters += _count(codes_N, r"[\p{L}\p{M}]")
        self.visible += _count(codes_N, r"\S")
        if settings.scripts:
            self.in_scripts += _count(codes_N, _script_pattern(settings.scripts))
        if "repetition" not in settings.skip:
            self._add_lines(text)
            self._add_sequences(words)
        if settings.languages and not self._sample:
            middle = max(len(text) // 2 - _SAMPLE_CHARS // 2, _SAMPLE_CHARS)
            parts = text[:_SAMPLE_CHARS], text[middle : middle + _SAMPLE_CHARS], text[middle + _SAMPLE_CHARS :]
            self._sample = parts[0] + parts[1] + parts[2][-_SAMPLE_CHARS:]

    def verdict(self) -> tuple[str, str] | None:
        """Return the first filter that takes the document, and why; None where all let it stay."""
        settings = self._settings
        for name, judge in _JUDGES.items():
            if name not in settings.skip and (why := judge(self, settings)):
                return name, why
        return None

    def _add_lines(self, text: str) -> None:
        seen: set[str] = set()
        for line in text.split("\n"):
            line = line.strip()
            if line:
                self._lines += 1
                self._line_chars += len(line)
                if line in seen:
                    self._repeated_lines += 1
                    self._repeated_line_chars += len(line)
                seen.add(line)

    def _add_sequences(self, words: Words) -> None:
        lengths = words.ends - words.starts
        before = np.concatenate([[0], np.cumsum(lengths)])
        self._word_chars += int(before[-1])
        scale = _CHARACTERS_A_WORD if 2 * words.unspaced > len(words) else 1
        places = np.arange(len(words))
        for n in (*_MOST_FREQUENT, *_REPEATED):
            # What is repeated begins with a shorter sequence that is.
            places, again, frequent = _repeats(words.hashes, places, before, n * scale)
            if not places.size:
                break
            self._covered[n] += frequent if n in _MOST_FREQUENT else _chars_within(lengths, again, n * scale)


def check_scripts(names: Sequence[str]) -> None:
    """Raise a RungError when a script is not one of Unicode's."""
    import regex

    for name in names:
        try:
            regex.compile(rf"\p{{Script={name}}}")
        except regex.error:
            known = ("Latin", "Cyrillic", "Greek", "Han", "Hiragana", "Katakana", "Hangul", "Arabic", "Hebrew", "Thai")
            raise RungError(f"unknown script {name!r}", nearest(name, (*known, "Devanagari"))) from None


def check_languages(names: Sequence[str]) -> None:
    """Raise a RungError when a language is not known, or the library that tells languages is missing."""
    if names:
        known = sorted(set(_identifier().nb_classes))
        for name in names:
            if name not in known:
                raise RungError(
                    f"unknown language {name!r}", f"known: {', '.join(one for one in known if len(one) < 3)}"
                )


def language_of(text: str) -> str:
    """Return the language that a text is most probably in, as en, ja (ISO 639-1).

    Raises:
        RungError: the library that tells languages is missing.
    """
    return str(_identifier().classify(text)[0])


# Judges: each returns why a document goes, or None


def _length(seen: Measures, settings: CleanConfig) -> str | None:
    if seen.words < settings.min_words:
        return f"{seen.words:,} words"
    if settings.max_words and seen.words > settings.max_words:
        return f"{seen.words:,} words"
    return None


def _letters(seen: Measures, settings: CleanConfig) -> str | None:
    share = seen.letters / max(seen.visible, 1)
    return f"{share:.0%} of its characters are letters" if share < settings.min_letters else None


def _scripts(seen: Measures, settings: CleanConfig) -> str | None:
    share = seen.in_scripts / max(seen.letters, 1)
    if settings.scripts and share < settings.min_script:
        return f"{share:.0%} of its letters are {' or '.join(settings.scripts)}"
    return None


def _repetition(seen: Measures, settings: CleanConfig) -> str | None:
    lines, chars = seen._repeated_lines / max(seen._lines, 1), seen._repeated_line_chars / max(seen._line_chars, 1)
    if lines > settings.repetition * _LINES:
        return f"{lines:.0%} of its lines stand in it before"
    if chars > settings.repetition * _LINE_CHARS:
        return f"{chars:.0%} of its text is in lines that stand in it before"
    unit, scale = ("characters", _CHARACTERS_A_WORD) if 2 * seen.unspaced > seen.words else ("words", 1)
    for limits, what in (
        (_MOST_FREQUENT, "is one sequence of {} {}"),
        (_REPEATED, "is in sequences of {} {} that stand in it before"),
    ):
        for n, limit in limits.items():
            share = seen._covered[n] / max(seen._word_chars, 1)
            if share > settings.repetition * limit:
                return f"{share:.0%} of its text {what.format(n * scale, unit)}"
    return None


def _language(seen: Measures, settings: CleanConfig) -> str | None:
    if not settings.languages:
        return None
    found = dict(_identifier().rank(seen._sample))
    if sum(float(found.get(name, 0.0)) for name in settings.languages) >= settings.min_language:
        return None
    best = max(found, key=found.__getitem__)
    return f"it is {best}, by {float(found[best]):.0%}"


_JUDGES: dict[str, Callable[[Measures, CleanConfig], str | None]] = {
    "length": _length,
    "letters": _letters,
    "scripts": _scripts,
    "repetition": _repetition,
    "languages": _language,
}

# Helpers


def _repeats(hashes: np.ndarray, places: np.ndarray, before: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Look for sequences of ``n`` words that occur twice or more among those that begin at ``places``.

    Returns where they begin, in order; those of them that are not the first of their kind; and the characters within
    the kind that has the most. ``before``: characters before each word.
    """
    places = places[places <= len(hashes) - n]
    if not places.size:
        return places, places, 0
    sequences = ngrams(hashes, n)[places]
    order = np.argsort(sequences, kind="stable")
    ordered = sequences[order]
    is_first = np.append(True, ordered[1:] != ordered[:-1])
    firsts = np.flatnonzero(is_first)
    counts = np.diff(np.append(firsts, len(ordered)))
    occurs_again = np.repeat(counts > 1, counts)
    begins = places[order[firsts]]
    chars = (before[begins + n] - before[begins]) * np.where(counts > 1, counts, 0)
    again = places[order[occurs_again & ~is_first]]
    return np.sort(places[order[occurs_again]]), again, min(int(chars.max()), int(before[-1]))


def _chars_within(lengths: np.ndarray, begins: np.ndarray, n: int) -> int:
    """Return the characters of the words within sequences of ``n`` that begin at ``begins``."""
    edges = np.zeros(len(lengths) + 1, np.int64)
    edges[begins] += 1
    edges[begins + n] -= 1  # no two begin at one place, nor end
    return int(lengths[np.cumsum(edges[:-1]) > 0].sum())


def _script_pattern(scripts: Sequence[str]) -> str:
    named = "".join(rf"\p{{Script={name}}}" for name in scripts)
    return rf"[[\p{{L}}\p{{M}}]&&[{named}]]"


def _count(codes_N: np.ndarray, pattern: str) -> int:
    return int(_table(pattern)[codes_N].sum())


@cache
def _table(pattern: str) -> np.ndarray:
    """Return for each code point whether a pattern matches it."""
    import regex

    matches = np.zeros(0x110000, bool)
    every = "".join(map(chr, range(0xD800))) + "\0" * 0x800 + "".join(map(chr, range(0xE000, 0x110000)))
    for found in regex.finditer(f"(?:{pattern})+", every, flags=regex.VERSION1):
        matches[found.start() : found.end()] = True
    matches[0xD800:0xE000] = False
    return matches


@cache
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        problem = "telling languages takes the package py3langid, which is not installed"
        raise RungError(problem, "pip install 'rung[languages]', or leave --languages out") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
