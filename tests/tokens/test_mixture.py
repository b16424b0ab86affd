"""Mixtures: exact shares in every window, each store read as if alone, one identity over all."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.config import DataConfig, TokenizerConfig
from rung.corpus.documents import Document, even_pieces
from rung.errors import RungError
from rung.tokens.batches import IGNORED, Batches
from rung.tokens.mapped import Tokens
from rung.tokens.mixture import MixedStore, Mixture, Schedule, parts, training_batches, whole_numbers
from rung.tokens.store import build_store
from rung.tokens.tokenizer import Tokenizer

BOUND = 3.36  # rows: 1 + the sum of the reciprocals of Fibonacci's numbers 1, 2, 3, 5, ...

weights = st.lists(st.integers(1, 10**6), min_size=1, max_size=12)


def first(schedule: Schedule, n: int) -> np.ndarray:
    return schedule(np.arange(n))[0]


@given(weights, st.integers(0, 10**9), st.integers(1, 3000))
def test_every_window_has_the_shares_within_the_bound(weights, start, length):
    schedule = Schedule(weights)
    sources, _ = schedule(np.arange(start, start + length))
    ideal = length * np.array(weights) / sum(weights)
    deviation = np.abs(np.bincount(sources, minlength=len(weights)) - ideal).max()
    assert deviation < {1: 1e-9, 2: 1}.get(len(weights), BOUND)


@pytest.mark.parametrize(
    "weights",
    [[3, 1], [7, 2, 1], [1] * 7, [1, 1, 2, 3, 5, 8, 13, 21, 34], [1000, 1, 1], [2**k for k in range(10)], [5, 4, 3, 3]],
)
def test_every_window_of_a_period_by_brute_force(weights):
    total = sum(weights)
    sources = first(Schedule(weights), 2 * total)
    taken = np.zeros((2 * total + 1, len(weights)), np.int64)
    taken[1:] = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    off = taken - np.arange(2 * total + 1)[:, None] * np.array(weights) / total
    # The widest window of a source is between where it is furthest ahead and furthest behind.
    widest = (off.max(axis=0) - off.min(axis=0)).max()
    assert widest < (1 if len(weights) == 2 else BOUND)
    assert (taken[total] == weights).all()
    assert (sources[:total] == sources[total:]).all()


@given(weights, st.integers(0, 10**12))
def test_the_rows_of_a_source_are_all_its_rows_in_order(weights, start):
    schedule = Schedule(weights)
    sources, own = schedule(np.arange(start, start + 500))
    for source, count in enumerate(schedule.counts(start)):
        assert own[sources == source].tolist() == list(range(count, count + (sources == source).sum()))
    assert sum(schedule.counts(start)) == start


@given(weights, st.lists(st.integers(0, 10**12), min_size=1, max_size=20))
def test_a_row_does_not_depend_on_what_else_is_asked_for(weights, rows):
    schedule = Schedule(weights)
    sources, own = schedule(np.array(rows))
    for row, source, number in zip(rows, sources, own, strict=True):
        assert [part.tolist() for part in schedule(np.array([row]))] == [[source], [number]]


def test_three_to_one_is_spread_and_not_in_blocks():
    sources = first(Schedule([3, 1]), 400).tolist()
    assert Counter(sources) == {0: 300, 1: 100}
    at = [n for n, source in enumerate(sources) if source == 1]
    assert {later - earlier for earlier, later in pairwise(at)} == {4}


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ((3, 1), [3, 1]),
        ((0.7, 0.2, 0.1), [7, 2, 1]),  # in decimals, not in what floats make of them
        ((75, 25), [3, 1]),
        ((0.5,), [1]),
        ((1e-3, 1), [1, 1000]),
        ((float(2**20), float(2**21)), [1, 2]),
    ],
)
def test_weights_are_taken_as_they_are_written(weights, whole):
    assert whole_numbers(weights) == whole


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=9))
def test_odd_weights_become_whole_numbers_near_them(weights):
    whole = whole_numbers(weights)
    assert min(whole) >= 1
    assert sum(whole) <= 2**31
    np.testing.assert_allclose(np.array(whole) / sum(whole), np.array(weights) / sum(weights), rtol=1e-6, atol=2**-29)


# Rows


def stream(n: int, value: int, starts=(0,)) -> Tokens:
    """Return tokens that say by their ten thousands which stream they are of, and by the rest where in it."""
    return Tokens([10_000 * value + np.arange(1, n + 1, dtype=np.uint32)], np.array(starts, np.int64), end_id=0)


def mixture(weights=(3, 1), *, batch_size=4, sizes=(900, 130), windows="contiguous") -> Mixture:
    made = [
        Batches(
            stream(n, k, (0, n // 2)), context_length=16, batch_size=batch_size, seed=k, windows=windows, segments=True
        )
        for k, n in enumerate(sizes)
    ]
    return Mixture([f"store-{k}" for k in range(len(made))], made, weights)


def test_each_store_is_read_as_if_it_were_alone():
    mixed = mixture()
    batches = [mixed(step) for step in range(200)]
    rows = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    of = first(mixed.schedule, 800)
    seen = rows["targets"].max(axis=1)  # none in a row that lies outside of the text
    assert (of[seen > 0] == seen[seen > 0] // 10_000).all()
    for source, alone in enumerate(mixed.sources):
        taken = np.flatnonzero(of == source)
        expected = alone.at(np.arange(len(taken)))
        for name, values in expected.items():
            np.testing.assert_array_equal(rows[name][taken], values)
    # So every target of a store comes once an epoch of that store.
    taken = rows["targets"][of == 1][: mixed.sources[1].windows_per_epoch]
    assert Counter(taken[taken != IGNORED].tolist()) == Counter(range(10_002, 10_131))


@pytest.mark.parametrize("windows", ["contiguous", "random"])
def test_the_order_depends_on_no_batch_size_and_no_split_of_the_batch(windows):
    small, large = mixture(batch_size=4, windows=windows), mixture(batch_size=12, windows=windows)
    for step in range(20):
        whole = large(step)
        for name, values in whole.items():
            parts_of = [small(3 * step + k)[name] for k in range(3)]
            np.testing.assert_array_equal(np.concatenate(parts_of), values)
            pieces = [large.rows(step, start, stop)[name] for start, stop in ((0, 1), (1, 1), (1, 7), (7, 12))]
            np.testing.assert_array_equal(np.concatenate(pieces), values)


def test_passes_are_counted_for_each_store_and_together():
    mixed = mixture()
    alone = [batches.windows_per_epoch for batches in mixed.sources]
    assert mixed.epochs(0) == {"store-0": 0, "store-1": 0}
    assert mixed.epochs(100) == {"store-0": 300 / alone[0], "store-1": 100 / alone[1]}
    assert mixed.epoch(100) == 400 / sum(alone)


def test_documents_are_numbered_on_from_store_to_store():
    mixed = mixture()
    found = {number for step in range(100) for number in mixed.documents(step)}
    assert found == {0, 1, 2, 3}
    for step in range(20):
        seen = mixed(step)["targets"].max(axis=1) // 10_000
        assert any(number >= 2 for number in mixed.documents(step)) == (1 in seen)
    assert mixed.document_name(3) == "store-1"
    assert mixed.document_name(4) is None


# Stores


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    byte = Tokenizer.train([], TokenizerConfig(kind="byte"))
    made = []
    for name, text in (("prose", "It was a dark night. " * 90), ("verse", "roses are red\n" * 30)):
        (folder / f"{name}.txt").write_text(text)
        made.append(build_store([folder / f"{name}.txt"], byte, folder / name, DataConfig()))
    return made


def test_what_identifies_a_mixture_is_all_of_it(stores):
    one, two = stores
    identity = MixedStore(stores, (3, 1)).identity
    assert MixedStore(stores, (0.75, 0.25)).identity == identity  # the same ratio
    others = [MixedStore(stores, (2, 1)), MixedStore([two, one], (3, 1)), MixedStore([two, one], (1, 3))]
    assert len({identity, one.identity, two.identity, *(other.identity for other in others)}) == 6


def test_without_weights_stores_are_read_equally_often(stores):
    mixed = MixedStore(stores)
    made = training_batches(mixed, context_length=8, batch_size=4, seed=0, windows="random", cross_documents=False)
    prose, verse = made.epochs(10_000).values()
    assert prose == pytest.approx(verse, rel=1e-2)
    assert sum(part.share for part in parts(mixed, "train")) == pytest.approx(1)


def test_each_store_has_a_shuffle_of_its_own(stores):
    copy = MixedStore(stores, (1, 1))
    made = training_batches(copy, context_length=8, batch_size=4, seed=0, windows="contiguous", cross_documents=False)
    assert made.sources[0].seed != made.sources[1].seed
    alone = training_batches(
        stores[0], context_length=8, batch_size=4, seed=5, windows="contiguous", cross_documents=False
    )
    assert isinstance(alone, Batches)
    assert alone.seed == 5


def test_what_makes_no_mixture_is_refused(stores, tmp_path):
    (tmp_path / "other.txt").write_text("other " * 30)
    other = build_store(
        [tmp_path / "other.txt"],
        Tokenizer.train([Document("", even_pieces(iter(["other"])))], TokenizerConfig(kind="char")),
        tmp_path / "other",
        DataConfig(),
    )
    with pytest.raises(RungError, match="are of different tokenizers"):
        MixedStore([stores[0], other], (1, 1))
    with pytest.raises(RungError, match=r"3 of data\.weights are given, and there are 2 sources"):
        MixedStore(stores, (1, 2, 3))
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(RungError, match=r"data\.weights has"):
            MixedStore(stores, (1, wrong))
    with pytest.raises(RungError, match="is named twice"):
        MixedStore([stores[0], stores[0]], (1, 1))


def test_a_split_that_one_store_lacks_is_that_of_the_others(stores, tmp_path):
    (tmp_path / "whole.txt").write_text("all of it " * 30)
    byte = Tokenizer.train([], TokenizerConfig(kind="byte"))
    whole = build_store([tmp_path / "whole.txt"], byte, tmp_path / "whole", DataConfig(validation_fraction=0))
    mixed = MixedStore([*stores, whole], (3, 1, 4))
    assert [(part.name, part.share) for part in parts(mixed, "validation")] == [("prose", 0.75), ("verse", 0.25)]
    with pytest.raises(RungError, match="none of the stores has a test split"):
        parts(mixed, "test")
