"""Batches: a pure function of the step that shows every target once an epoch, against brute force."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.errors import RungError
from rung.tokens.batches import IGNORED, Batches, validation_batches
from rung.tokens.store import Tokens


def stream(n: int, starts=(0,), shards: int = 1) -> Tokens:
    """Return tokens whose values are their positions plus 1, so that a batch shows where it was read."""
    values = np.arange(1, n + 1, dtype=np.uint32)
    return Tokens(np.array_split(values, shards), np.array(sorted(starts), np.int64), end_id=0)


def batches(n, T, B, *, seed=0, windows="contiguous", segments=False, starts=(0,)):
    return Batches(stream(n, starts), context_length=T, batch_size=B, seed=seed, windows=windows, segments=segments)


@st.composite
def shapes(draw):
    return draw(st.integers(2, 120)), draw(st.integers(1, 30)), draw(st.integers(1, 7)), draw(st.integers(0, 2**32 - 1))


@given(shapes())
def test_every_target_exactly_once_an_epoch(shape):
    n, T, B, seed = shape
    made = batches(n, T, B, seed=seed)
    W = made.windows_per_epoch
    rows = [made.rows(row // B, row % B, row % B + 1) for row in range(3 * W)]
    for epoch in range(3):
        seen = Counter()
        for batch in rows[epoch * W : (epoch + 1) * W]:
            tokens, targets = batch["tokens"], batch["targets"]
            assert tokens.shape == targets.shape == (1, T)
            assert tokens.dtype == targets.dtype == np.int32
            known = targets != IGNORED
            assert np.array_equal(targets[known], tokens[known] + 1)  # the next position, and no other
            seen.update(targets[known].tolist())
        assert seen == Counter(range(2, n + 1))


def test_the_order_is_fresh_each_epoch_and_for_each_seed():
    made, other = batches(10_000, 16, 8), batches(10_000, 16, 8, seed=1)
    W = made.windows_per_epoch
    per_epoch = -(-W // 8)
    firsts = [made._starts(step).tolist() for step in range(3 * per_epoch)]
    orders = [list(itertools.chain(*firsts))[epoch * W : (epoch + 1) * W] for epoch in range(3)]
    assert orders[0] != sorted(orders[0])
    assert orders[0] != orders[1] != orders[2]
    assert len({order[0] % 16 for order in orders}) > 1  # windows are cut elsewhere, too
    assert firsts[0] != other._starts(0).tolist()
    assert made.epoch(0) == 0
    assert made.epoch(W) == 8


@given(shapes(), st.sampled_from(["contiguous", "random"]), st.integers(0, 50))
def test_rows_are_rows_of_the_whole_and_a_step_is_a_pure_function(shape, windows, step):
    n, T, B, seed = shape
    n += T
    starts = {0, n // 3, n // 2}
    made = batches(n, T, B, seed=seed, windows=windows, segments=True, starts=starts)
    whole = made(step)
    made(step + 1)
    for name, value in batches(n, T, B, seed=seed, windows=windows, segments=True, starts=starts)(step).items():
        assert np.array_equal(value, whole[name])
    for start, stop in ((0, B), (0, 1), (B // 2, B), (B - 1, B), (B, B)):
        part = made.rows(step, start, stop)
        assert part.keys() == whole.keys()
        assert all(np.array_equal(part[name], whole[name][start:stop]) for name in whole)


def test_random_windows_are_full_and_reach_every_offset_alike():
    n, T, B = 70, 20, 100
    made = batches(n, T, B, windows="random")
    counts = np.zeros(n)
    for step in range(200):
        batch = made(step)
        assert np.array_equal(batch["targets"], batch["tokens"] + 1)
        counts += np.bincount(batch["tokens"][:, 0] - 1, minlength=n)
    assert not counts[n - T :].any()
    expected = 200 * B / (n - T)
    assert ((counts[: n - T] - expected) ** 2 / expected).sum() < 49 + 6 * np.sqrt(98)  # chi-square
    assert made.epoch(69) == pytest.approx(100 * 20)


@given(st.integers(2, 90), st.integers(1, 25), st.integers(1, 5), st.integers(0, 9), st.sets(st.integers(1, 89)))
def test_segments_are_the_documents_of_a_brute_force(n, T, B, step, starts):
    starts = {0} | {start for start in starts if start < n}
    made = batches(n, T, B, segments=True, starts=starts)
    rows = made._starts(step)
    for start, segments in zip(rows.tolist(), made(step)["segments"], strict=True):
        # The document of the token that position i predicts from: that which begins at i + 1 or before.
        documents = [sum(0 < d <= i + 1 for d in starts) if i >= 0 else -1 for i in range(start, start + T)]
        assert segments.dtype == np.int32
        assert [a == b for a in segments for b in segments] == [a == b for a in documents for b in documents]


def test_the_end_of_text_begins_the_segment_of_the_next_document():
    tokens = Tokens([np.array([5, 6, 0, 7, 8, 9, 0, 4, 0], np.uint16)], np.array([0, 3, 7]), end_id=0)
    (batch,) = validation_batches(tokens, context_length=8, batch_size=1, segments=True)
    assert batch["tokens"].tolist() == [[5, 6, 0, 7, 8, 9, 0, 4]]
    assert batch["targets"].tolist() == [[6, 0, 7, 8, 9, 0, 4, 0]]
    assert batch["segments"].tolist() == [[0, 0, 1, 1, 1, 1, 2, 2]]


@given(st.integers(2, 90), st.integers(1, 25), st.integers(1, 5), st.sets(st.integers(1, 89)))
def test_documents_of_a_batch_are_those_that_it_has_tokens_of(n, T, B, starts):
    starts = sorted({0} | {start for start in starts if start < n})
    made = batches(n, T, B, starts=starts)
    for step in range(3):
        positions = {int(token) - 1 for token in made(step)["tokens"].ravel() if token}
        assert made.documents(step) == sorted({sum(d <= i for d in starts) - 1 for i in positions})


@given(st.integers(2, 120), st.integers(1, 30), st.integers(1, 7), st.booleans())
def test_validation_shows_each_target_once_in_order_and_in_full_batches(n, T, B, segments):
    seen = []
    for batch in validation_batches(stream(n), context_length=T, batch_size=B, segments=segments):
        assert batch["tokens"].shape == batch["targets"].shape == (B, T)
        assert ("segments" in batch) == segments
        known = batch["targets"] != IGNORED
        assert known.any()
        assert np.array_equal(batch["targets"][known], batch["tokens"][known] + 1)
        seen += batch["targets"][known].tolist()
    assert seen == list(range(2, n + 1))


def test_too_few_tokens_say_what_is_too_small():
    with pytest.raises(RungError, match="1 tokens is too short"):
        batches(1, 8, 2)
    with pytest.raises(RungError, match="1 tokens is too short"):
        list(validation_batches(stream(1), context_length=8, batch_size=2, segments=False))
    with pytest.raises(RungError, match="8 training tokens are too few for a random window of 8"):
        batches(8, 8, 2, windows="random")
    assert (batches(9, 8, 2, windows="random")(0)["targets"] != IGNORED).all()
    assert (batches(2, 256, 2)(0)["targets"] != IGNORED).sum() == 2  # one target, once an epoch
