"""Overlaps with texts held out: found wherever the same words stand, and held against a brute-force search."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from rung.config import CleanConfig
from rung.corpus.contamination import Overlaps, build_index
from rung.corpus.documents import Document
from rung.corpus.words import words_of


def index_of(folder, *texts: str, **settings):
    named = [Document(f"eval#{k}", iter([text])) for k, text in enumerate(texts, start=1)]
    return build_index(named, folder, CleanConfig(**settings))


def overlaps(index, text: str):
    found = Overlaps(index)
    found.add(text, words_of(text), 0)
    return found.value()


def test_thirteen_words_in_a_row_are_found_with_the_text_that_is_shared(tmp_path):
    question = "In 1815 the Duke of Wellington won a battle at a village to the south of Brussels."
    index = index_of(tmp_path, "something else of at least thirteen words that has nothing to do with it all", question)
    (found,) = overlaps(index, f"It is known: {question.upper()} And so on.")
    assert index.names[found.held_out] == "eval#2"
    assert found.text == question.upper()[:-1]
    assert (found.places, found.words) == (1, 17)
    words = question.split()
    assert overlaps(index, " ".join(words[:12])) == []
    assert [one.words for one in overlaps(index, " ".join(words[:13]))] == [13]
    assert overlaps(index, " ".join([*words[:12], "no", *words[12:]])) == []


def test_short_texts_are_looked_for_whole_and_those_too_short_are_named(tmp_path):
    index = index_of(tmp_path, "one two three four five six seven eight", "seven words are not enough for this")
    assert index.too_short == ["eval#2"]
    assert [one.words for one in overlaps(index, "0 one two three four five six seven eight 9")] == [8]
    assert overlaps(index, "one two three four five six seven 8") == []


def test_japanese_takes_more_characters_for_an_overlap(tmp_path):
    text = "国境の長いトンネルを抜けると雪国であった。夜の底が白くなった。信号所に汽車が止まった。"
    index = index_of(tmp_path, text)
    assert overlaps(index, "「" + text[3:20] + "」と書いてある。") == []
    (found,) = overlaps(index, "「" + text[:36] + "」と書いてある。")
    assert found.text == text[:36]
    assert overlaps(index_of(tmp_path / "8", text, overlap_characters=8), text[3:20])


@given(
    st.lists(st.sampled_from("abc"), min_size=3, max_size=12),
    st.lists(st.sampled_from("abc"), max_size=40),
    st.lists(st.integers(1, 39), max_size=3),
)
def test_what_is_found_is_what_a_search_finds_however_the_text_comes(tmp_path_factory, held, text, cuts):
    n = 3
    index = index_of(tmp_path_factory.mktemp("index"), " ".join(held), overlap_words=n)
    parts = {tuple(held[k : k + n]) for k in range(len(held) - n + 1)}
    within = {k + i for k in range(len(text) - n + 1) if tuple(text[k : k + n]) in parts for i in range(n)}
    found = Overlaps(index)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, stop in itertools.pairwise(bounds):
        carried = min(n - 1, start)
        window = " ".join(text[start - carried : stop])
        found.add(window, words_of(window), carried)
    value = found.value()
    assert bool(value) == bool(within)
    if value and len(bounds) == 2:
        assert value[0].words == len(within)


def test_an_index_is_read_by_other_processes_as_it_was_made(tmp_path):
    from rung.corpus.contamination import Index

    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(10**6)}" for _ in range(50)) for _ in range(20)]
    made = index_of(tmp_path, *texts)
    again = Index(tmp_path)
    assert (again.names, again.longest) == (made.names, 13)
    for k, text in enumerate(texts):
        assert [again.names[one.held_out] for one in overlaps(again, text)] == [f"eval#{k + 1}"]
