"""Which documents stand in a corpus before: the same text, or nearly the same by MinHash."""

from __future__ import annotations

import hashlib
import unicodedata
from functools import cache
from typing import Any

import numpy as np

from rung.corpus.words import ngrams

_SEED = 1  # of the permutations; a constant, so that what goes does not depend on the run
_BATCH = 4096  # word sequences permuted at once: a few MB of memory
# A near-duplicate that the bands miss is a worse mistake than a pair that is compared in vain.
_WEIGHTS = (0.1, 0.9)


class TextKey:
    """Hashes a text as its pieces come: alike for texts that differ in white space or in Unicode's composition only."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._begun = self._gap = False

    def add(self, piece: str) -> None:
        """Take in a piece; the text is composed (NFC) piece by piece."""
        words = unicodedata.normalize("NFC", piece).split()
        if not words:
            self._gap = self._gap or bool(piece)
            return
        gap = self._begun and (self._gap or piece[0].isspace())
        self._digest.update((" " * gap + " ".join(words)).encode("utf-8", "surrogatepass"))
        self._begun, self._gap = True, piece[-1].isspace()

    def value(self) -> np.ndarray:
        """Return the hash: uint64 [2]."""
        return np.frombuffer(self._digest.digest(), "<u8")


class Signature:
    """MinHash of a document (Broder 1997) over its sequences of words; two agree in as large a part as they share.

    Of P permutations the estimate has a standard deviation of sqrt(J (1 - J) / P): 0.035 at J = 0.8 and P = 128.
    """

    def __init__(self, permutations: int, shingle_words: int):
        from datasketch import MinHash

        self._words = shingle_words
        self._empty = True
        made = _permutations(permutations)
        self._sketch = MinHash(permutations, seed=_SEED, hashfunc=int, permutations=made, scheme="affine32")

    def add(self, hashes: np.ndarray) -> None:
        """Take in the words of a window, and before them the last of the window before (``shingle_words`` - 1)."""
        sequences = np.unique(ngrams(hashes, self._words) >> np.uint64(32)).tolist()
        for start in range(0, len(sequences), _BATCH):
            self._sketch.update_batch(sequences[start : start + _BATCH])
        self._empty = self._empty and not sequences

    def value(self) -> np.ndarray:
        """Return the signature: uint32 [permutations]; all zero for a text of fewer words than one sequence."""
        return np.zeros_like(self._sketch.hashvalues) if self._empty else self._sketch.hashvalues


def same_text(keys_N2: np.ndarray) -> np.ndarray:
    """Return for each text the first with the same key, or -1 where it is the first itself: int64 [N]."""
    n = len(keys_N2)
    order = np.lexsort((np.arange(n), keys_N2[:, 1], keys_N2[:, 0]))
    ordered = keys_N2[order]
    is_first = np.ones(n, bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    firsts = order[np.flatnonzero(is_first)][np.cumsum(is_first) - 1] if n else order
    twins = np.full(n, -1, np.int64)
    twins[order] = np.where(is_first, -1, firsts)
    return twins


def nearly_same_text(signatures_NP: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Return for each document the first earlier one that stays and is like it, or -1, and the similarity: [N], [N].

    Documents are gone through in order; one goes when its estimated similarity to one that stays is ``threshold`` or
    more. Candidates are those that agree in all of a band of the signature (locality-sensitive hashing, Indyk and
    Motwani 1998), which finds few pairs far below the threshold and misses some: ``chance_found`` says how many.
    """
    n, permutations = signatures_NP.shape
    buckets_NB = _buckets(signatures_NP, *bands(permutations, threshold))
    twins, similarity = np.full(n, -1, np.int64), np.zeros(n, np.float32)
    staying: dict[tuple[int, int], list[int]] = {}
    for number in np.flatnonzero((buckets_NB >= 0).any(axis=1)).tolist():
        places = [(band, bucket) for band, bucket in enumerate(buckets_NB[number].tolist()) if bucket >= 0]
        candidates = sorted({one for place in places for one in staying.get(place, ())})
        if candidates:
            shares = (signatures_NP[candidates] == signatures_NP[number]).mean(axis=1)
            like = np.flatnonzero(shares >= threshold)
            if like.size:
                twins[number], similarity[number] = candidates[like[0]], shares[like[0]]
                continue
        for place in places:
            staying.setdefault(place, []).append(number)
    return twins, similarity


def bands(permutations: int, threshold: float) -> tuple[int, int]:
    """Return the bands of a signature and the rows of each, as datasketch chooses them for a threshold."""
    from datasketch import MinHashLSH

    chosen = MinHashLSH(threshold=threshold, num_perm=permutations, weights=_WEIGHTS)
    return chosen.b, chosen.r


def chance_found(similarity: float, permutations: int, threshold: float) -> float:
    """Return the probability that a pair of this similarity agrees in a band at least."""
    n_bands, rows = bands(permutations, threshold)
    return 1 - (1 - similarity**rows) ** n_bands


# Helpers


def _buckets(signatures_NP: np.ndarray, n_bands: int, rows: int) -> np.ndarray:
    """Return for each document and band the bucket that it shares with others, or -1: int32 [N, B]."""
    buckets_NB = np.full((len(signatures_NP), n_bands), -1, np.int32)
    present = np.flatnonzero(_present(signatures_NP))
    for band in range(n_bands):
        keys = np.empty(len(signatures_NP), np.uint64)
        for low in range(0, len(keys), _BATCH):
            part = signatures_NP[low : low + _BATCH, band * rows : (band + 1) * rows].astype(np.uint64)
            keys[low : low + _BATCH] = ngrams(part.T, rows)[0]
        _, numbers, counts = np.unique(keys[present], return_inverse=True, return_counts=True)
        buckets_NB[present, band] = np.where(counts[numbers] > 1, numbers, -1)
    return buckets_NB


def _present(signatures_NP: np.ndarray) -> np.ndarray:
    present = np.empty(len(signatures_NP), bool)
    for low in range(0, len(present), _BATCH):
        present[low : low + _BATCH] = signatures_NP[low : low + _BATCH].any(axis=1)
    return present


@cache
def _permutations(count: int) -> Any:
    from datasketch import MinHash

    return MinHash(count, seed=_SEED).permutations
