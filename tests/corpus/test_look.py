"""A look at text: every count against plain counting, and the same sample each time."""

from __future__ import annotations

import unicodedata
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.config import DataConfig
from rung.corpus import look as look_module
from rung.corpus.look import Lengths, look_at
from rung.corpus.sources import resolve

TEXTS = ["Hello, world! 雪国", "カタカナとひらがな、漢字。", "", "Привет\x00\ufffd\ue000 мир\n", "ab\u0301c 123"]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("<end>".join(TEXTS), encoding="utf-8")
    return path


def look(path, **rest):
    return look_at(resolve([path]), DataConfig(separator="<end>", **rest))


def test_everything_is_counted_as_by_plain_counting(path):
    found, text = look(path), "".join(TEXTS)
    assert (found.documents, found.empty) == (4, 1)
    assert (found.bytes, found.characters, found.different) == (len(text.encode()), len(text), len(set(text)))
    assert sum(found.scripts.values()) == len(text)
    for script in ("HIRAGANA", "KATAKANA", "CYRILLIC"):
        named = sum(unicodedata.name(letter, "").startswith(script) for letter in text)
        assert found.scripts[script.capitalize()] == named
    assert found.scripts["Han"] == sum(unicodedata.name(letter, "").startswith("CJK") for letter in text)
    assert found.scripts["Latin"] == sum(letter.isascii() and letter.isalpha() for letter in text)
    assert found.odd == {"replacement characters (U+FFFD)": 1, "control characters": 1, "private use": 1}
    lengths = [len(text) for text in TEXTS if text]
    assert (found.lengths.least, found.lengths.greatest, found.lengths.total) == (min(lengths), max(lengths), len(text))
    assert [(one.name, one.text, one.characters) for one in found.excerpts] == [
        (f"texts.txt#{number}", text, len(text)) for number, text in enumerate(TEXTS, 1) if text
    ]


def test_counts_do_not_depend_on_how_much_is_counted_at_once(path, monkeypatch):
    whole = look(path)
    monkeypatch.setattr(look_module, "_BUFFER", 2)
    assert vars(look(path)) | {"lengths": 0} == vars(whole) | {"lengths": 0}
    assert (look(path).lengths.counts == whole.lengths.counts).all()


def test_a_sample_is_even_and_always_the_same(tmp_path):
    (tmp_path / "many.txt").write_text("<end>".join(f"document {k}" for k in range(5000)))
    first, again = look(tmp_path / "many.txt"), look(tmp_path / "many.txt")
    assert first.excerpts == again.excerpts
    numbers = [int(one.text.split()[1]) for one in first.excerpts]
    assert len(numbers) == look_module.SAMPLED
    assert numbers == sorted(set(numbers))
    tenths = Counter(number // 500 for number in numbers)
    assert len(tenths) == 10
    assert all(5 <= n <= 40 for n in tenths.values())  # 20 each, more or less


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300), st.floats(0, 1))
def test_a_quantile_is_near_the_exact_one(numbers, part):
    lengths = Lengths()
    for half in np.array_split(np.array(numbers), 2):
        lengths.add(half)
    exact = float(np.quantile(numbers, part, method="inverted_cdf"))
    assert lengths.quantile(part) == pytest.approx(exact, rel=0.046, abs=1)
    assert (lengths.least, lengths.greatest, lengths.total) == (min(numbers), max(numbers), sum(numbers))
    bins = lengths.histogram()
    assert sum(number for _, _, number in bins) == len(numbers)
    for low, high, number in bins:
        assert number == pytest.approx(sum(low <= max(1, n) < high for n in numbers))


def test_no_documents_have_no_lengths():
    assert (Lengths().quantile(0.5), Lengths().mean, Lengths().histogram()) == (0, 0, [])
