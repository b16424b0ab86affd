"""Several stores as one data set: which row is from which store, the rows, and what identifies the whole."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rung.errors import RungError
from rung.tokens.batches import Batch, Batches
from rung.tokens.mapped import Tokens
from rung.tokens.permutation import key_of
from rung.tokens.store import SPLITS, TokenStore

_MIXTURE = 0x6D6978  # use of the seed
_MOST_PARTS = 1 << 31  # that weights are made whole numbers of, so that products stay within 64 bits


@dataclass(frozen=True)
class Part:
    """One store's part in a split: its ``share`` of the rows of a mixture, all shares being 1 together."""

    name: str
    tokens: Tokens
    share: float


class MixedStore:
    """Token stores of one tokenizer, each with a weight; to training what a ``TokenStore`` is.

    Args:
        stores: two or more.
        weights: one for each, over 0; only their ratios count. None given: the stores' numbers of training tokens, so
            that all of them are read equally often.

    Raises:
        RungError: a number of weights that is not that of stores, a weight that is not over 0, a store named twice, or
            stores whose tokenizers differ.
    """

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float] = ()):
        _check(stores, weights)
        self.stores = list(stores)
        self.names = _names([store.path for store in stores])
        self.weights = tuple(weights) or tuple(float(len(store.split("train"))) for store in stores)
        self.whole_weights = whole_numbers(self.weights)
        self.splits = tuple(name for name in SPLITS if any(name in store.splits for store in stores))
        self.identity = _identity(stores, self.whole_weights)
        self.path = stores[0].path
        self.info: dict[str, Any] = {}
        self.empty_documents = sum(store.empty_documents for store in stores)
        self.tokenizer_hash, self.vocab_size = stores[0].tokenizer_hash, stores[0].vocab_size

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of text in all stores."""
        return sum(store.text_bytes for store in self.stores)


Store = TokenStore | MixedStore


def parts(store: Store, split: str) -> list[Part]:
    """Return what a split consists of: of a mixture each store that has it.

    Raises:
        RungError: no such split.
    """
    if isinstance(store, TokenStore):
        return [Part(store.path.name, store.split(split), 1.0)]
    having = [k for k, one in enumerate(store.stores) if split in one.splits]
    if not having:
        raise RungError(f"none of the stores has a {split} split", f"they have {', '.join(store.splits)}")
    total = sum(store.whole_weights[k] for k in having)
    return [Part(store.names[k], store.stores[k].split(split), store.whole_weights[k] / total) for k in having]


def paths_of(store: Store) -> list[Path]:
    """Return where a store, or the stores of a mixture, are."""
    return [store.path] if isinstance(store, TokenStore) else [one.path for one in store.stores]


def training_batches(
    store: Store,
    *,
    context_length: int,
    batch_size: int,
    seed: int,
    windows: Literal["contiguous", "random"],
    cross_documents: bool,
) -> Batches | Mixture:
    """Return the training batches of a store, or of a mixture of stores.

    Raises:
        RungError: a store that is too short for a target, or for a random window.
    """
    found = parts(store, "train")
    segments = keep_apart(found, cross_documents)
    made = [
        Batches(
            part.tokens,
            context_length=context_length,
            batch_size=batch_size,
            # Every store has a shuffle of its own.
            seed=seed if isinstance(store, TokenStore) else key_of(seed, _MIXTURE, number),
            windows=windows,
            segments=segments,
        )
        for number, part in enumerate(found)
    ]
    return made[0] if isinstance(store, TokenStore) else Mixture(store.names, made, store.whole_weights)


def keep_apart(parts: Sequence[Part], cross_documents: bool) -> bool:
    """Return whether batches say which document a token is of: where there is more than one to tell apart."""
    return not cross_documents and any(part.tokens.several_documents for part in parts)


class Mixture:
    """The training batches of several stores: to the loop what ``Batches`` are.

    Global row r is a row of the store that ``Schedule`` names for it, and the next of that store's own rows: each store
    has its own windows, shuffle and epochs, as if it were trained on alone.
    """

    def __init__(self, names: Sequence[str], sources: Sequence[Batches], weights: Sequence[int]):
        self.names, self.sources = list(names), list(sources)
        self.schedule = Schedule(weights)
        self.batch_size = sources[0].batch_size
        self.context_length = sources[0].context_length

    def __call__(self, step: int) -> Batch:
        """Return the global batch of ``step``: int32 arrays [B, T]."""
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Return rows ``start`` to ``stop`` of the global batch of ``step``; nothing else is read."""
        sources_B, rows_B = self.schedule(self._rows(step)[start:stop])
        batch: Batch = {}
        for source in np.unique(sources_B).tolist() or [0]:
            here = np.flatnonzero(sources_B == source)
            for name, values in self.sources[source].at(rows_B[here]).items():
                batch.setdefault(name, np.empty((len(sources_B), self.context_length), values.dtype))[here] = values
        return batch

    def epoch(self, step: int) -> float:
        """Return the rows that lie before ``step``, over those that one pass over every store has."""
        return step * self.batch_size / sum(batches.rows_per_epoch for batches in self.sources)

    def epochs(self, step: int) -> dict[str, float]:
        """Return the passes over each store that lie before ``step``, by the store's name."""
        taken = self.schedule.counts(step * self.batch_size)
        return {
            name: rows / batches.rows_per_epoch
            for name, batches, rows in zip(self.names, self.sources, taken, strict=True)
        }

    def documents(self, step: int) -> list[int]:
        """Return the numbers of the documents of a batch; those of a store are counted on from the store before it."""
        sources_B, rows_B = self.schedule(self._rows(step))
        found, before = [], 0
        for source, batches in enumerate(self.sources):
            found += [before + number for number in batches.documents_at(rows_B[sources_B == source])]
            before += len(batches.tokens.document_starts)
        return found

    def document_name(self, number: int) -> str | None:
        """Return the name of a document by its number: that of its store, and its own where the store knows it."""
        for name, batches in zip(self.names, self.sources, strict=True):
            if number < len(batches.tokens.document_starts):
                return ": ".join(filter(None, [name, batches.document_name(number)]))
            number -= len(batches.tokens.document_starts)
        return None

    def _rows(self, step: int) -> np.ndarray:
        return step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)


class Schedule:
    """Which of several sources each row is from: a pure function of the row's number, in the ratios of whole weights.

    Two sources: of the first n rows, floor(n w / W + 1/2) are the one's and the rest the other's, a Sturmian sequence,
    as Bresenham draws a line. So within any window, wherever it begins, each has its share to less than one row. More
    sources are the leaves of a binary tree that is split so at every node, among the rows that reach it. The tree is
    Huffman's. There each step towards the root at least adds up as Fibonacci's numbers do, so a source's deviation, the
    sum over its ancestors below the root of (its weight / theirs), is below 1 + 1 + 1/2 + 1/3 + 1/5 + 1/8 + ... = 3.36
    rows, for any number of sources, any weights and any window. After every W rows the shares are exact.

    Args:
        weights: whole numbers over 0, whose sum W is at most 2^31.
    """

    def __init__(self, weights: Sequence[int]):
        assert weights
        assert min(weights) > 0
        self.weights = list(weights)
        self.total = sum(weights)
        assert self.total <= _MOST_PARTS
        self._tree = _huffman(weights)

    def __call__(self, rows_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each row (int64 [N], at least 0) its source, and which of that source's own rows it is: int64."""
        periods_N, within_N = np.divmod(np.asarray(rows_N, np.int64), self.total)
        sources_N, own_N = np.empty_like(within_N), np.empty_like(within_N)
        waiting = [(self._tree, np.arange(len(within_N)), within_N)]
        while waiting:
            node, places, numbers = waiting.pop()
            if isinstance(node, int):
                sources_N[places], own_N[places] = node, numbers
                continue
            before = node.left_of(numbers)
            left = node.left_of(numbers + 1) > before
            waiting.append((node.left, places[left], before[left]))
            waiting.append((node.right, places[~left], (numbers - before)[~left]))
        return sources_N, own_N + periods_N * np.array(self.weights, np.int64)[sources_N]

    def counts(self, n: int) -> list[int]:
        """Return how many of the first ``n`` rows are from each source."""
        periods, within = divmod(n, self.total)
        found = [periods * weight for weight in self.weights]
        waiting = [(self._tree, within)]
        while waiting:
            node, number = waiting.pop()
            if isinstance(node, int):
                found[node] += number
                continue
            left = int(node.left_of(np.array(number, np.int64)))
            waiting += [(node.left, left), (node.right, number - left)]
        return found


def check_weights(weights: Sequence[float], n_sources: int) -> None:
    """Raise a RungError where weights are not one for each of two or more sources, or one is not over 0."""
    if n_sources < 2:
        raise RungError(
            f"data.weights are given, and there is {n_sources} source to weigh", "leave them out, or name more sources"
        )
    if len(weights) != n_sources:
        raise RungError(
            f"{len(weights)} of data.weights are given, and there are {n_sources} sources",
            "give one for each, in their order: --data.weights 3 --data.weights 1",
        )
    for weight in weights:
        if not (weight > 0 and math.isfinite(weight)):
            raise RungError(f"data.weights has {weight:g}", "a weight is over 0; leave out what is not to be read")


def whole_numbers(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the ratios of ``weights``: as they are written in decimals, 0.7 being 7/10.

    Where the smallest such numbers add up to more than 2^31, the nearest with that sum, none below 1.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(one.denominator for one in exact))
    whole = [int(one * scale) for one in exact]
    whole = [one // math.gcd(*whole) for one in whole]
    total = sum(whole)
    if total <= _MOST_PARTS:
        return whole
    return [max(1, one * (_MOST_PARTS - len(whole)) // total) for one in whole]


# The tree


@dataclass(frozen=True)
class _Node:
    """Splits its rows: of each ``total`` of them ``weight`` go to the left."""

    weight: int
    total: int
    left: _Node | int
    right: _Node | int

    def left_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return how many of the first rows that reach this node go to the left."""
        # To the nearest; both factors are at most 2^31, so that nothing overflows.
        return (numbers * self.weight + self.total // 2) // self.total


def _huffman(weights: Sequence[int]) -> _Node | int:
    waiting: list[tuple[int, int, _Node | int]] = [(weight, k, k) for k, weight in enumerate(weights)]
    heapq.heapify(waiting)
    for number in range(len(weights), 2 * len(weights) - 1):
        (light, _, right), (heavy, _, left) = heapq.heappop(waiting), heapq.heappop(waiting)
        heapq.heappush(waiting, (light + heavy, number, _Node(heavy, light + heavy, left, right)))
    return waiting[0][2]


# Helpers


def _check(stores: Sequence[TokenStore], weights: Sequence[float]) -> None:
    if weights:
        check_weights(weights, len(stores))
    seen: dict[Path, Path] = {}
    for store in stores:
        if store.path.resolve() in seen:
            raise RungError(f"{store.path} is named twice", "name it once, with a greater weight")
        seen[store.path.resolve()] = store.path
        if store.tokenizer_hash != stores[0].tokenizer_hash:
            raise RungError(
                f"{store.path} and {stores[0].path} are of different tokenizers",
                f"tokenize the text of one again: rung tokens build ... --tokenizer {shlex.quote(str(stores[0].path))}",
            )


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each store: its last part, or as many parts as it takes to tell it from the others."""
    found = [path.resolve().parts for path in paths]
    longest = max(map(len, found))
    candidates = (["/".join(part[-length:]) for part in found] for length in range(1, longest + 1))
    return next(names for names in candidates if len(set(names)) == len(names))


def _identity(stores: Sequence[TokenStore], weights: Sequence[int]) -> str:
    made_from: list[Any] = [[store.identity for store in stores], list(weights)]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
