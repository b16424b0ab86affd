"""Attention and its gradient, by every backend, against a naive one in float64; which keys are computed; the choice."""

from __future__ import annotations

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rung.errors import RungError
from rung.model import attention as module
from rung.model.attention import attention, cached_attention, choose, query_blocks

K = 4


@jax.jit
def naive(q_BTHK, k_BSGK, v_BSGK, dy, seen_BTS, kept_BHTS, cap):
    """Return the output and the gradients by q, k and v of its product with ``dy``; a cap of 0 is none."""

    def weighted(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = jnp.einsum("BTHK,BSHK->BHTS", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(cap > 0, cap * jnp.tanh(scores / jnp.where(cap > 0, cap, 1)), scores)
        exps = jnp.where(seen_BTS[:, None], jnp.exp(scores), 0)
        total = jnp.sum(exps, -1, keepdims=True)
        weights = exps / jnp.where(total > 0, total, 1) * kept_BHTS
        y = jnp.einsum("BHTS,BSHK->BTHK", weights, v)
        return jnp.sum(y * dy), y

    gradients, y = jax.grad(weighted, (0, 1, 2), has_aux=True)(q_BTHK, k_BSGK, v_BSGK)
    return y, *gradients


def expected(q, k, v, dy, seen_BTS, kept_BHTS=1.0, soft_cap=0.0):
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v, dy)]
        kept = jnp.broadcast_to(jnp.asarray(kept_BHTS, jnp.float64), (len(q), q.shape[2], *seen_BTS.shape[1:]))
        return naive(*wide, jnp.asarray(seen_BTS), kept, jnp.float64(soft_cap))


def found(q, k, v, dy, **options):
    def weighted(q, k, v):
        y = attention(q, k, v, **options)
        return jnp.sum(y * dy), y

    gradients, y = jax.jit(jax.grad(weighted, (0, 1, 2), has_aux=True))(q, k, v)
    return y, *gradients


def assert_equal(ours, theirs, tolerance=1e-5):
    """Check that no number is off by more than ``tolerance`` of the largest in its array (which may all be 0)."""
    for name, one, other in zip(("y", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert np.all(np.isfinite(one)), name
        largest = max(np.max(np.abs(other)), 0.1)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest, err_msg=name)


def arrays(B, T, S, H, G, K=K, seed=0):
    random = np.random.default_rng(seed)
    shapes = (B, T, H, K), (B, S, G, K), (B, S, G, K), (B, T, H, K)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def seen_by_rule(T, S, causal, window, segments=None, key_segments=None, B=2):
    """Return which keys are seen, [B, T, S], from the definition of each mask."""
    seen = np.ones((B, T, S), bool)
    for b, t, s in np.ndindex(B, T, S):
        if causal:
            seen[b, t, s] &= s <= t and (not window or t - s < window)
        if segments is not None:
            seen[b, t, s] &= segments[b, t] == (segments if key_segments is None else key_segments)[b, s]
    return seen


SHORT = 8  # blocks of so few queries compile in no time
KINDS = {
    "length": [16, 20],  # a multiple of the block, and not
    "heads": [(2, 2), (4, 2)],
    "causal": [True, False],
    "window": [0, 1, 5, 11, 40],
    "segments": ["none", "own", "keys"],
    "soft_cap": [0.0, 1.5],
    "rate": [0.0, 0.4],
}
ALL = [kind for kind in itertools.product(*KINDS.values()) if kind[2] or not kind[3]]  # without a mask no window
PAIRWISE = [
    (20, (4, 2), True, 0, "none", 0.0, 0.4),
    (16, (2, 2), True, 1, "keys", 1.5, 0.0),
    (20, (2, 2), True, 1, "none", 0.0, 0.0),
    (20, (4, 2), True, 1, "own", 0.0, 0.4),
    (16, (2, 2), True, 5, "keys", 0.0, 0.4),
    (20, (4, 2), True, 5, "none", 1.5, 0.0),
    (20, (2, 2), True, 5, "own", 1.5, 0.4),
    (16, (2, 2), True, 11, "keys", 1.5, 0.4),
    (20, (2, 2), True, 11, "none", 0.0, 0.0),
    (16, (4, 2), True, 11, "own", 1.5, 0.4),
    (20, (4, 2), True, 40, "keys", 0.0, 0.4),
    (16, (2, 2), True, 40, "none", 1.5, 0.0),
    (16, (2, 2), True, 40, "own", 1.5, 0.0),
    (20, (4, 2), False, 0, "keys", 1.5, 0.0),
    (16, (2, 2), False, 0, "none", 1.5, 0.4),
    (20, (2, 2), False, 0, "own", 0.0, 0.0),
]


def test_any_two_values_meet_in_the_list():
    def pairs(kind):
        return set(itertools.combinations(enumerate(kind), 2))

    assert set().union(*map(pairs, PAIRWISE)) == set().union(*map(pairs, ALL))


@pytest.mark.parametrize(
    tuple(KINDS),
    [*PAIRWISE, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in ALL if kind not in PAIRWISE)],
)
def test_in_blocks(length, heads, causal, window, segments, soft_cap, rate):
    B, (H, G) = 2, heads
    S = length if causal or segments == "own" else 13
    q, k, v, dy = arrays(B, length, S, H, G)
    random = np.random.default_rng(length)
    options, ids = {}, {}
    if segments != "none":
        ids["segments"] = np.sort(random.integers(0, 3, (B, length)), -1).astype(np.int32)
        options["segments_BT"] = ids["segments"]
    if segments == "keys":
        # Some queries have no key at all: no key is of segment 1.
        ids["key_segments"] = np.sort(random.choice([0, 2], (B, S)), -1).astype(np.int32)
        options["key_segments_BS"] = ids["key_segments"]
    kept_BHTS = random.random((B, H, length, S)) >= rate

    def keep(number, shape):
        block = query_blocks(length, S, causal, window if window < S else 0)[number]
        return kept_BHTS[:, :, block.start : block.stop, block.first : block.last].reshape(shape)

    if rate:
        options |= {"keep": keep, "dropout_rate": rate}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MIN_QUERY_BLOCK", SHORT)
        ours = found(q, k, v, dy, causal=causal, window=window, soft_cap=soft_cap, **options)
    seen = seen_by_rule(length, S, causal, window, **ids)
    assert_equal(ours, expected(q, k, v, dy, seen, kept_BHTS / (1 - rate), soft_cap))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window": 37, "soft_cap": 1.5, "segments": "own"},
        {"causal": False, "segments": "keys"},
    ],
    ids=str,
)
def test_splash_in_the_interpreter(options):
    # 130 positions are two blocks of 128, the second nearly all padding.
    options = {"window": 0, "soft_cap": 0.0, "segments": "none"} | options
    T, S = 130, (130 if options["causal"] else 128)
    q, k, v, dy = arrays(2, T, S, 4, 2)
    ids = {}
    if options["segments"] != "none":
        ids["segments"] = np.repeat([[0, 1, 2], [0, 0, 1]], [50, 30, 50], axis=1).astype(np.int32)
    if options["segments"] == "keys":
        ids["key_segments"] = np.repeat([[0, 1, 2], [0, 0, 1]], [20, 30, 78], axis=1).astype(np.int32)
    names = {"segments": "segments_BT", "key_segments": "key_segments_BS"}
    masks = {"causal": options["causal"], "window": options["window"]}
    given_ids = {names[name]: value for name, value in ids.items()}
    capped = {"soft_cap": options["soft_cap"]}
    ours = found(q, k, v, dy, backend="splash", interpret=True, **masks, **given_ids, **capped)
    seen = seen_by_rule(T, S, **masks, **ids)
    assert_equal(ours, expected(q, k, v, dy, seen, **capped))


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 5), (False, 0)])
def test_cudnn_is_asked_for_the_same(monkeypatch, causal, window):
    # What cuDNN is told is computed here by JAX's own implementation of the same arguments.
    asked, real = [], jax.nn.dot_product_attention

    def by_xla(*arguments, implementation, **options):
        asked.append(implementation)
        return real(*arguments, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    q, k, v, dy = arrays(2, 20, 20, 4, 2)
    ours = found(q, k, v, dy, causal=causal, window=window, backend="cudnn")
    assert asked == ["cudnn"]
    assert_equal(ours, expected(q, k, v, dy, seen_by_rule(20, 20, causal, window)))


def test_lengths_of_several_blocks():
    # The blocks that training has: 64 queries and more.
    q, k, v, dy = arrays(1, 150, 150, 2, 1)
    ours = found(q, k, v, dy, window=70)
    assert_equal(ours, expected(q, k, v, dy, seen_by_rule(150, 150, True, 70, B=1)))


def test_gradient_is_the_slope(monkeypatch):
    monkeypatch.setattr(module, "_MIN_QUERY_BLOCK", SHORT)
    q, k, v, dy = arrays(1, 20, 20, 2, 1)
    towards = arrays(1, 20, 20, 2, 1, seed=1)[:3]
    options = {"window": 9, "soft_cap": 1.5}

    @jax.jit
    def value(q, k, v):
        return jnp.sum(attention(q, k, v, **options) * dy)

    step = 1e-2
    above, below = (value(*(x + sign * step * d for x, d in zip((q, k, v), towards, strict=True))) for sign in (1, -1))
    _, *gradients = found(q, k, v, dy, **options)
    slope = sum(np.sum(np.asarray(g, np.float64) * d) for g, d in zip(gradients, towards, strict=True))
    np.testing.assert_allclose((above - below) / (2 * step), slope, rtol=2e-3)


def test_a_query_without_a_key_gets_zeros():
    q, k, v, dy = arrays(1, 3, 5, 2, 2)
    segments, key_segments = np.int32([[0, 7, 0]]), np.int32([[0, 0, 0, 1, 1]])
    y, dq, _, _ = found(q, k, v, dy, causal=False, segments_BT=segments, key_segments_BS=key_segments)
    assert not np.any(y[:, 1])
    assert not np.any(dq[:, 1])
    assert np.all(y[:, [0, 2]] != 0)


def test_large_scores_are_finite():
    q = jnp.full((1, 5, 1, 4), 1e4)
    y, gradient = jax.jit(jax.value_and_grad(lambda q: jnp.sum(attention(q, q, q / 1e4))))(q)
    np.testing.assert_allclose(y, q.size, rtol=1e-5)
    assert np.all(np.isfinite(gradient))


def test_bfloat16_stays_bfloat16():
    q, k, v, dy = (jnp.bfloat16(x) for x in arrays(1, 20, 20, 2, 1, K=8))
    ours = found(q, k, v, dy)
    assert {x.dtype for x in ours} == {np.dtype(jnp.bfloat16)}
    assert_equal([np.float32(x) for x in ours], expected(q, k, v, dy, seen_by_rule(20, 20, True, 0, B=1)), 0.02)


# Which keys are computed


@given(length=st.integers(1, 3000), window=st.integers(0, 3000))
@example(length=1024, window=64)
def test_blocks_have_the_keys_that_are_seen_and_no_block_of_others(length, window):
    window = window if window < length else 0
    blocks = query_blocks(length, length, True, window)
    assert [query for block in blocks for query in range(block.start, block.stop)] == list(range(length))
    for block in blocks:
        assert block.last == block.stop  # the last query sees the last key, itself
        first_seen = max(0, block.start - window + 1) if window else 0  # by the first query
        assert block.first == first_seen
    size = blocks[0].stop
    assert len(blocks) <= 16  # as many as the numbers of dropout masks allow for
    computed = sum((block.stop - block.start) * (block.last - block.first) for block in blocks)
    assert computed <= length * ((size + window - 1) if window else (length + size) / 2)


def test_what_the_mask_hides_is_not_computed():
    shapes = [jax.ShapeDtypeStruct((1, 1024, 2, 16), jnp.float32)] * 3

    def flops(**options):
        gradient = jax.grad(lambda q, k, v: jnp.sum(attention(q, k, v, **options)), (0, 1, 2))
        return jax.jit(gradient).lower(*shapes).cost_analysis()["flops"]

    whole = flops(causal=False)
    assert flops() < 0.6 * whole
    assert flops(window=64) < 0.15 * whole


# The cache


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (6, 0.0), (6, 1.5)])
def test_cached_attention_sees_up_to_its_position(window, soft_cap):
    q, k, v, dy = arrays(2, 40, 40, 4, 2)
    positions = np.array([[7], [31]])
    of_positions = functools.partial(np.take_along_axis, indices=positions[:, :, None, None], axis=1)
    ours = cached_attention(of_positions(q), k, v, positions, window=window, soft_cap=soft_cap)
    theirs, *_ = expected(q, k, v, dy, seen_by_rule(40, 40, True, window), soft_cap=soft_cap)
    np.testing.assert_allclose(ours, of_positions(np.asarray(theirs)), atol=3e-6)


# The choice


def device(platform, version="", capability=""):
    client = types.SimpleNamespace(platform_version=version)
    return types.SimpleNamespace(platform=platform, client=client, compute_capability=capability)


CPU, TPU = device("cpu"), device("tpu")
AMPERE, HOPPER = device("gpu", "PJRT C API\ncuda 12090", "8.0"), device("gpu", "PJRT C API\ncuda 12090", "9.0")
TURING, AMD = device("gpu", "PJRT C API\ncuda 12090", "7.5"), device("gpu", "PJRT C API\nrocm 60300")


@pytest.mark.parametrize(
    ("on", "options", "backend", "reason"),
    [
        (CPU, {}, "blocked", "a CPU"),
        (AMPERE, {}, "cudnn", "an NVIDIA GPU"),
        (AMPERE, {"d_head": 128}, "cudnn", "NVIDIA"),
        (HOPPER, {"d_head": 256}, "cudnn", "NVIDIA"),
        (AMPERE, {"d_head": 256}, "blocked", "256 wide"),
        (AMPERE, {"d_head": 12}, "blocked", "12 wide"),
        (AMPERE, {"dtype": "float32"}, "blocked", "float32"),
        (AMPERE, {"soft_cap": 50.0}, "blocked", "no soft cap"),
        (AMPERE, {"segments": True}, "blocked", "no document segments"),
        (AMPERE, {"dropout": True}, "blocked", "no dropout"),
        (TURING, {}, "blocked", "7.5"),
        (AMD, {}, "blocked", "an AMD GPU"),
        (TPU, {"dtype": "float32", "soft_cap": 50.0, "segments": True}, "splash", "a TPU"),
        (TPU, {"dropout": True}, "blocked", "no dropout"),
        (TPU, {"n_devices": 4}, "blocked", "split over 4"),
    ],
)
def test_auto_takes_the_kernel_of_the_device_where_it_can(on, options, backend, reason):
    options = {"dtype": "bfloat16", "d_head": 64} | options  # on one of the four devices that there are
    choice = choose("auto", device=on, **options)
    assert choice.backend == backend
    assert reason in choice.reason
    assert "\n" not in str(choice)
    assert choose("blocked", device=on, **options).backend == "blocked"
    for kernel in {"cudnn", "splash"} - {backend}:
        with pytest.raises(RungError, match=f"compute.attention {kernel} cannot be used: ") as error:
            choose(kernel, device=on, **options)
        assert "auto" in error.value.hint
    if backend != "blocked":
        assert choose(backend, device=on, **options).backend == backend
