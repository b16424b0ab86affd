"""A look at tokens: every count against plain counting, samples that reach both ends, rows as the model gets them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.config import TokenizerConfig
from rung.tokens import look as look_module
from rung.tokens.batches import Batches
from rung.tokens.look import look_at_split, windows
from rung.tokens.mapped import Tokens
from rung.tokens.mixture import Mixture
from rung.tokens.tokenizer import Tokenizer

BYTE = Tokenizer.train([], TokenizerConfig(kind="byte"))
END = BYTE.end_id


def test_everything_is_counted_as_by_plain_counting():
    ids = [*BYTE.encode("to be, or not to be").tolist(), END, *BYTE.encode("that").tolist(), END]
    found = look_at_split(Tokens([np.array(ids)], np.array([0, 20]), end_id=END), BYTE)
    times = Counter(ids)
    assert found.counts_V.tolist() == [times[token] for token in range(257)]
    assert found.most_frequent(3) == sorted(times.items(), key=lambda pair: (-pair[1], pair[0]))[:3]
    assert found.bytes_per_token == 23 / 25
    assert found.unused == 257 - len(times)
    assert found.ranks().tolist() == sorted(times.values(), reverse=True)
    assert (found.lengths.number, found.lengths.least, found.lengths.greatest) == (2, 5, 20)
    assert found.whole


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 50))
def test_lengths_are_those_of_the_documents_also_where_only_ends_tell_them_apart(sizes, block):
    ids = np.concatenate([[*[7] * (size - 1), END] for size in sizes])
    starts = np.cumsum([0, *sizes[:-1]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look_module, "_BLOCK_TOKENS", block)
        listed = look_at_split(Tokens([ids], starts, end_id=END), BYTE)
        told = look_at_split(Tokens([ids], np.empty(0, np.int64), end_id=END, ends_tell=True), BYTE)
    assert (listed.lengths.counts == told.lengths.counts).all()
    assert told.lengths.total == listed.lengths.total == len(ids)
    assert (told.counts_V == listed.counts_V).all()


@pytest.mark.parametrize("most", [100, 101, 999])
def test_a_sample_is_of_blocks_at_both_ends_and_between(most, monkeypatch):
    monkeypatch.setattr(look_module, "_BLOCK_TOKENS", 10)
    ids = np.full(10_000, 7)
    ids[[0, -1]] = (8, 9)
    found = look_at_split(Tokens([ids], np.empty(0, np.int64), end_id=END, ends_tell=True), BYTE, most)
    assert not found.whole
    assert 0.9 * most <= found.seen <= most
    assert found.counts_V.sum() == found.seen
    assert (found.counts_V[8], found.counts_V[9]) == (1, 1)
    assert found.lengths.number == 0  # no document lies whole within


def test_rows_are_those_of_the_batch():
    tokens = [Tokens([np.arange(1, 200)], np.array([0, 100]), end_id=0) for _ in range(2)]
    made = [
        Batches(one, context_length=16, batch_size=6, seed=k, windows="contiguous", segments=True)
        for k, one in enumerate(tokens)
    ]
    alone, mixed = made[0], Mixture(["a", "b"], made, [1, 1])
    for batches in (alone, mixed):
        for window in windows(batches, 3, 4):
            for name, values in (
                ("tokens", window.tokens_T),
                ("targets", window.targets_T),
                ("segments", window.segments_T),
            ):
                np.testing.assert_array_equal(values, batches(3)[name][window.row])
    assert sorted(window.source for window in windows(mixed, 0, 4)) == ["a", "a", "b", "b"]
    assert {window.source for window in windows(alone, 0, 99)} == {""}
    assert len(windows(alone, 0, 99)) == 6
