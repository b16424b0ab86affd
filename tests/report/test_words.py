import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from rung.report.words import count, decimal, duration, excerpt, listed, plural, safe, short, visible


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (7, "7"), (999, "999"), (999.7, "1K"), (1000, "1K"), (12_345, "12.3K"), (999_999, "1M"),
     (124_439_808, "124M"), (89_456_768, "89.5M"), (3e12, "3T"), (-2500, "-2.5K"), (float("nan"), "nan")],
)  # fmt: skip
def test_short(number, text):
    assert short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (0.84, "0.8 s"), (9.96, "10 s"), (59.6, "1 min 00 s"), (192, "3 min 12 s"), (3599.7, "1 h 00 min"),
     (3900, "1 h 05 min"), (86_399, "1 d 00 h"), (183_600, "2 d 03 h"), (float("nan"), "?"), (-1, "?")],
)  # fmt: skip
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.6814, "1.681"), (0, "0.000"), (0.00042, "4.20e-04"), (1234.5, "1,234.500"), (3e7, "3.00e+07"),
     (float("nan"), "not a number"), (float("inf"), "inf")],
)  # fmt: skip
def test_decimal(number, text):
    assert decimal(number) == text


def test_count():
    assert count(1234567) == "1,234,567"
    assert [plural(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


def test_listed():
    assert [listed(range(n), 3) for n in (0, 1, 3, 4, 1005)] == [
        "",
        "0",
        "0, 1, 2",
        "0, 1, 2 and 1 more",
        "0, 1, 2 and 1,002 more",
    ]


@given(st.text(st.characters(exclude_categories=("Cc", "Cs"))), st.integers(1, 4), st.integers(8, 40))
def test_an_excerpt_is_the_beginning_of_the_text_within_its_columns(text, lines, columns):
    shown = excerpt(text, lines, columns)
    assert len(shown) <= lines
    assert all(cell_len(line) <= columns for line in shown)
    assert "\n" not in "".join(shown)
    joined, whole = "".join(shown).replace(" ", ""), text.replace(" ", "")
    assert joined == whole or (joined.endswith("...") and whole.startswith(joined.removesuffix("...")))


def test_an_excerpt_without_spaces_fills_its_columns():
    assert excerpt("x" * 30, 2, 10) == ["x" * 10, "xxxxxx ..."]
    assert excerpt("one two three\nfour", 2, 9) == ["one two", "three ..."]


@given(st.text(st.characters(exclude_categories=())))
def test_visible_text_has_no_control_characters_and_keeps_the_rest(text):
    shown = visible(text)
    assert all(unicodedata.category(c) not in ("Cc", "Cs") or c in "\n\t" for c in shown)
    if all(unicodedata.category(c) not in ("Cc", "Cs") for c in text):
        assert shown == text


def test_safe_text_spells_and_escapes():
    assert safe("<b>\x1b[31m & \"'\udc80") == "&lt;b&gt;\\x1b[31m &amp; &quot;&#x27;\\xdc80"
