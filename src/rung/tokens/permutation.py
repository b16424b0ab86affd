"""A shuffle without memory: keyed permutations and keyed draws, computed where they are asked for."""

from __future__ import annotations

import numpy as np

_ROUNDS = 6
_SORTED_SIZE = 1 << 11  # up to here an order is sorted out: quick, and a Feistel network of few bits shuffles badly
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_MASK = 0xFFFFFFFFFFFFFFFF


def mix(values: np.ndarray) -> np.ndarray:
    """Return 64 well-mixed bits for each uint64 of ``values`` (splitmix64's finalizer: Steele, Lea, Flood 2014)."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def key_of(*parts: int) -> int:
    """Return one 64-bit key made from whole numbers; their order counts."""
    key = 0
    for part in parts:
        key = _mixed((key + _GOLDEN) ^ _mixed((part + _GOLDEN) & _MASK))
    return key


def permute(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return where the permutation of ``range(size)`` given by ``key`` sends each index.

    A Feistel network over the smallest power of two that holds ``size``, walked along its cycle until the result is
    below ``size`` (Black and Rogaway 2002). Constant memory whatever the size, under two walks on average. Up to 2,048,
    the order of as many random numbers.

    Args:
        indices: whole numbers in [0, size), any shape.
        size: at least 1, at most 2**62.
        key: any 64-bit whole number; another key is another permutation.

    Returns:
        int64, the shape of ``indices``.
    """
    if size <= _SORTED_SIZE:
        order = np.argsort(mix(mix(np.arange(size, dtype=np.uint64) + np.uint64(_GOLDEN)) ^ np.uint64(key_of(key))))
        return order[np.asarray(indices, np.int64)].astype(np.int64)
    flat = np.asarray(indices, np.uint64).reshape(-1)
    bits = (size - 1).bit_length()
    round_keys = [np.uint64(key_of(key, number)) for number in range(_ROUNDS)]
    out = _feistel(flat, bits, round_keys)
    while (outside := np.flatnonzero(out >= np.uint64(size))).size:
        out[outside] = _feistel(out[outside], bits, round_keys)
    return out.astype(np.int64).reshape(np.shape(indices))


def draw(counters: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return a uniform draw from ``range(size)`` for each counter; a pure function of counter and key.

    Args:
        counters: whole numbers, any shape.
        size: at least 1; the bias of the remainder is below size / 2**64.

    Returns:
        int64, the shape of ``counters``.
    """
    values = np.asarray(counters, np.uint64)
    stirred = mix(mix(values + np.uint64(_GOLDEN)) ^ np.uint64(key_of(key)))
    return (stirred % np.uint64(size)).astype(np.int64)


# Helpers


def _feistel(values: np.ndarray, bits: int, round_keys: list[np.uint64]) -> np.ndarray:
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
    for round_key in round_keys:  # an even number, so that halves of unequal width end where they began
        left, right = right, left ^ (mix(right ^ round_key) & np.uint64((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _mixed(value: int) -> int:
    """``mix`` for one Python number, which overflows without a warning here."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
