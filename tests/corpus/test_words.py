"""Words of any script: held against a plain regular expression."""

from __future__ import annotations

import unicodedata

import numpy as np
import regex
from hypothesis import given
from hypothesis import strategies as st

from rung.corpus.words import ngrams, words_of

WORD = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}ー々〇&&[\p{L}\p{M}\p{N}]]"
    r"|[\p{L}\p{M}\p{N}--[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}ー々〇]]+",
    regex.VERSION1,
)
ALPHABET = "abcXYZéＡß１2 \n.,'-国境のトンネルー。、กา한국Жж\u0301😀\ud800"


@given(st.text(ALPHABET, max_size=80))
def test_words_are_runs_of_letters_and_single_characters_of_unspaced_scripts(text):
    words = words_of(text)
    expected = [found.span() for found in WORD.finditer(text)]
    assert list(zip(words.starts.tolist(), words.ends.tolist(), strict=True)) == expected


@given(st.text(ALPHABET, max_size=60))
def test_hashes_are_equal_just_where_words_are_but_for_case_and_compatibility(text):
    words = words_of(text)
    spelled = [
        "".join(folded(c) for c in text[a:b]) for a, b in zip(words.starts.tolist(), words.ends.tolist(), strict=True)
    ]
    for i, one in enumerate(spelled):
        for j, two in enumerate(spelled):
            assert (words.hashes[i] == words.hashes[j]) == (one == two), (one, two)


def folded(character: str) -> str:
    plain = unicodedata.normalize("NFKC", character).casefold()
    return plain if len(plain) == 1 else character


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 5))
def test_sequences_hash_alike_just_where_their_words_are_the_same(numbers, n):
    hashes = words_of(" ".join("abc"[k] for k in numbers)).hashes
    sequences = ngrams(hashes, n)
    parts = [tuple(numbers[k : k + n]) for k in range(len(numbers) - n + 1)]
    assert len(sequences) == len(parts)
    assert len(np.unique(sequences)) == len(set(parts))
    assert len(set(zip(parts, sequences.tolist(), strict=True))) == len(set(parts))


def test_words_of_a_script_without_spaces_are_counted():
    words = words_of("The 国境 of Ｊａｐａｎ")
    assert (len(words), words.unspaced) == (5, 2)
    assert words_of("Japan").hashes[0] == words_of("ｊａｐａｎ").hashes[0]
    assert len(words_of("")) == len(words_of(" \ud800 .")) == 0
