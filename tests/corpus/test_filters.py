"""Filters: the measures of repetition held against a slow plain form of what Gopher's paper says."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.config import CleanConfig
from rung.corpus.filters import WINDOW_CHARS, Measures, check_languages, check_scripts
from rung.corpus.words import words_of
from rung.errors import RungError

PROSE = (
    "The family of Dashwood had long been settled in Sussex. Their estate was large, and their residence was at "
    "Norland Park, in the centre of their property, where, for many generations, they had lived in so respectable a "
    "manner as to engage the general good opinion of their surrounding acquaintance. The late owner of this estate "
    "was a single man, who lived to a very advanced age."
)
JAPANESE = (
    "国境の長いトンネルを抜けると雪国であった。夜の底が白くなった。信号所に汽車が止まった。向側の座席から娘が立って来て、"
    "島村の前のガラス窓を落した。雪の冷気が流れこんだ。娘は窓いっぱいに乗り出して、遠くへ叫ぶように、駅長さあんと言った。"
)


def measured(text: str, **settings) -> Measures:
    seen = Measures(CleanConfig(**settings))
    for start in range(0, len(text), WINDOW_CHARS):
        window = text[start : start + WINDOW_CHARS]
        seen.add(window, words_of(window))
    return seen


def taken(text: str, **settings) -> str | None:
    verdict = measured(text, **settings).verdict()
    return verdict and verdict[0]


@pytest.mark.parametrize("text", [PROSE, JAPANESE, PROSE * 1 + "\n" + JAPANESE])
def test_prose_stays(text):
    assert taken(text) is None


def test_each_filter_takes_what_it_is_for_and_says_why():
    assert measured("too short").verdict() == ("length", "2 words")
    assert measured(PROSE, max_words=20).verdict()[0] == "length"
    assert measured("0x12 34 56 78 9 " * 40, repetition=9).verdict() == ("letters", "9% of its characters are letters")
    assert taken("12 34 56 " * 40) == "letters"
    assert measured("buy now cheap\n" * 40).verdict() == ("repetition", "98% of its lines stand in it before")
    assert taken(PROSE, scripts=("Cyrillic", "Greek")) == "scripts"
    assert taken(JAPANESE, scripts=("Han", "Hiragana", "Katakana")) is None
    assert taken(JAPANESE, scripts=("Han",)) == "scripts"
    assert taken("hi", skip=("length",)) is None


def test_an_empty_text_is_too_short_and_nothing_else_breaks_on_it():
    assert taken("") == "length"
    assert taken("", min_words=0, skip=("letters",)) is None


WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "dd"]), min_size=1, max_size=60)


@given(WORDS)
def test_shares_of_repeated_sequences_are_those_of_a_plain_count(words):
    seen = measured(" ".join(words))
    for n in (2, 3, 4):
        assert seen._covered[n] == most_frequent(words, n), n
    for n in range(5, 11):
        assert seen._covered[n] == repeated(words, n), n


@given(st.text("国境長", min_size=1, max_size=50))
def test_characters_of_unspaced_scripts_are_looked_at_in_twice_as_long_sequences(text):
    seen = measured(text)
    assert [seen._covered[n] for n in range(2, 11)] == [
        (most_frequent if n < 5 else repeated)(list(text), 2 * n) for n in range(2, 11)
    ]


def most_frequent(words: list[str], n: int) -> int:
    counts = Counter(tuple(words[k : k + n]) for k in range(len(words) - n + 1))
    most = max((count * sum(map(len, part)) for part, count in counts.items() if count > 1), default=0)
    return min(most, sum(map(len, words)))  # sequences may overlap themselves


def repeated(words: list[str], n: int) -> int:
    seen, within = set(), set()
    for k in range(len(words) - n + 1):
        part = tuple(words[k : k + n])
        if part in seen:
            within |= set(range(k, k + n))
        seen.add(part)
    return sum(len(words[k]) for k in within)


@given(st.lists(st.sampled_from(["", "one", "two ", "three"]), max_size=30))
def test_repeated_lines_are_those_of_a_plain_count(lines):
    seen = measured("\n".join(lines))
    full = [line.strip() for line in lines if line.strip()]
    again = [line for k, line in enumerate(full) if line in full[:k]]
    assert (seen._lines, seen._repeated_lines) == (len(full), len(again))
    assert seen._repeated_line_chars == sum(map(len, again))


def test_languages_are_told_offline():
    pytest.importorskip("py3langid", reason="the extra languages is not installed")
    assert taken(PROSE, languages=("en",)) is None
    assert taken(PROSE, languages=("de", "ja")) == "languages"
    assert taken(JAPANESE, languages=("ja",)) is None
    assert "it is ja" in measured(JAPANESE, languages=("en",)).verdict()[1]
    check_languages(("en", "ja", "zh"))
    with pytest.raises(RungError, match="unknown language 'english'"):
        check_languages(("english",))


def test_an_unknown_script_is_refused_with_the_nearest_name():
    check_scripts(("Latin", "Han", "Devanagari"))
    with pytest.raises(RungError, match="did you mean Latin"):
        check_scripts(("Latni",))
