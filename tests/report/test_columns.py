"""Columns line up, whatever is in them."""

from __future__ import annotations

from rung.report.columns import columns


def test_columns_line_up_and_empty_ones_are_left_out():
    lines = columns(("run", "state", "nothing", "loss"), [("a", "done", "", "1.5"), ("long", "x", "", "10.25")], left=2)
    assert lines == ["run   state   loss", "a     done     1.5", "long  x      10.25"]


def test_wide_characters_take_two_columns_and_nothing_breaks_a_line():
    lines = columns(("run", "n"), [("日本", "1"), ("a\nb\x1b[3m", "2"), ("e\u0301", "3")])
    assert lines[1:] == ["日本        1", r"a b\x1b[3m  2", "e\u0301           3"]


def test_no_rows_have_no_columns():
    assert columns(("a", "b"), []) == [""]
