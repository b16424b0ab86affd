from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.decode.window import bucket, window_start, window_step


@given(n=st.integers(1, 5000), context=st.integers(1, 300))
def test_the_window_is_never_empty_nor_longer_than_the_context(n, context):
    length = n - window_start(n, context)
    assert 1 <= length <= context
    assert length == n or length > context - window_step(context)  # after a move about half of the context is left


@given(context=st.integers(1, 300))
def test_the_start_moves_forward_and_rarely(context):
    starts = [window_start(n, context) for n in range(1, 6 * context)]
    assert starts == sorted(starts)
    assert len(set(starts)) <= 1 + -(-5 * context // window_step(context))


def test_an_example():
    # Context 8, so steps of 4: 9 tokens begin at 4, which lasts until the window is full at 12.
    assert [window_start(n, 8) for n in range(7, 14)] == [0, 0, 4, 4, 4, 4, 8]


@pytest.mark.parametrize(("length", "expected"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 100), (100, 100)])
def test_buckets_are_powers_of_two_within_the_context(length, expected):
    assert bucket(length, 100) == expected
    assert bucket(1, 7) == 7
