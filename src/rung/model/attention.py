"""Attention: one function of queries, keys and values, with several ways to compute it and the choice among them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from rung.errors import RungError
from rung.model.layers import capped, matmul_precision

Backend = Literal["blocked", "cudnn", "splash"]

MASKED = -1e30
"""The score of a key that a query may not see: finite, so that a row without any key stays finite too."""

Keep = Callable[[int, tuple[int, ...]], jax.Array]
"""Dropout of attention weights: of the number of a block of queries and the shape [B, G, R, t, s] of its weights, gives
a bool array, false where a weight is dropped."""

_MIN_QUERY_BLOCK = 64  # shorter blocks skip more masked keys but make matrix products too small to be fast
_MAX_QUERY_BLOCKS = 8  # more blocks skip little more, and each is compiled on its own
_MAX_WINDOW_BLOCKS = 16  # under a window a shorter block needs fewer keys at both ends
_SPLASH_BLOCKS = (512, 256, 128)  # lengths that the kernel's grid may have; 128 is the width of a vector register


def attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    *,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    segments_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
    keep: Keep | None = None,
    dropout_rate: float = 0.0,
    backend: Backend = "blocked",
    interpret: bool = False,
) -> jax.Array:
    """Return softmax attention (Vaswani et al. 2017, arXiv:1706.03762, equation 1).

    A query that sees no key at all gets zeros from ``blocked``, and no gradient flows from it; the kernels leave
    undefined what it gets.

    Args:
        q_BTHK: queries. k_BSGK, v_BSGK: keys and values, G dividing H; head h uses key head ``h // (H / G)``.
        causal: a query sees the keys at its own and earlier positions only; T and S are equal then.
        window: of those it sees the last so many, its own counted (Beltagy et al. 2020, arXiv:2004.05150); 0: all.
        soft_cap: scores s become ``soft_cap * tanh(s / soft_cap)`` (Gemma 2, arXiv:2408.00118); 0: they stay.
        segments_BT: int32; a query sees keys of its own segment only. ``None``: one segment.
        key_segments_BS: those of the keys, where they are not those of the queries; padding has one that no query has.
        keep: dropout of the attention weights; ``None``: none. Of ``blocked`` only.
        dropout_rate: what part ``keep`` drops; the other weights are scaled by ``1 / (1 - dropout_rate)``.
        backend: as ``choose`` returns it.
        interpret: run the splash kernel in the interpreter of Pallas, on any device.

    Returns:
        [B, T, H, K] in the dtype of the queries.
    """
    assert not causal or q_BTHK.shape[1] == k_BSGK.shape[1], "causal attention is of a sequence to itself"
    assert causal or not window, "a window looks back from a query's own position"
    window = window if window < k_BSGK.shape[1] else 0
    if key_segments_BS is None:
        key_segments_BS = segments_BT
    segments = None if segments_BT is None or key_segments_BS is None else (segments_BT, key_segments_BS)
    if backend == "blocked":
        return _blocked(q_BTHK, k_BSGK, v_BSGK, causal, window, soft_cap, segments, keep, dropout_rate)
    assert keep is None, f"{backend} has no dropout of attention weights"
    if backend == "splash":
        return _splash(q_BTHK, k_BSGK, v_BSGK, causal, window, soft_cap, segments, interpret)
    assert not soft_cap, "cuDNN has no soft cap"
    assert segments is None, "cuDNN has no segments"
    return _cudnn(q_BTHK, k_BSGK, v_BSGK, causal, window)


def cached_attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    positions_BT: jax.Array,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> jax.Array:
    """Return attention of queries at ``positions_BT`` over a cache, of which each sees positions up to its own.

    Args:
        q_BTHK: queries. k_BSGK, v_BSGK: the cache, whose row s is position s.
        positions_BT: int32.
        window, soft_cap: as in ``attention``.

    Returns:
        [B, T, H, K].
    """
    back_BTS = positions_BT[:, :, None] - jnp.arange(k_BSGK.shape[1])
    seen_BTS = (back_BTS >= 0) & (back_BTS < window) if window else back_BTS >= 0
    q_BGRTK, seen = _grouped(q_BTHK, k_BSGK.shape[2]), seen_BTS[:, None, None]
    form = _Form(soft_cap=soft_cap, precision=matmul_precision())
    k_BGSK, v_BGSK = jnp.swapaxes(k_BSGK, 1, 2), jnp.swapaxes(v_BSGK, 1, 2)
    return _ungrouped(_attend(q_BGRTK, k_BGSK, v_BGSK, seen, None, form))


# The choice of a backend


@dataclass(frozen=True)
class Choice:
    """Which backend computes attention, and why, in a few words."""

    backend: Backend
    reason: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.reason})"


def choose(
    asked: Literal["auto"] | Backend,
    *,
    dtype: str,
    d_head: int,
    soft_cap: float = 0.0,
    segments: bool = False,
    dropout: bool = False,
    device: jax.Device | None = None,
    n_devices: int = 1,
) -> Choice:
    """Return the backend for attention of a kind on a device: the one asked, or by ``auto`` the device's own if it can.

    Args:
        asked: ``compute.attention``.
        dtype, d_head: of queries, keys and values.
        soft_cap: whether there is one. segments: whether tokens see their own segment only. dropout: of weights.
        device: one of those that compute it; ``None``: the default one.
        n_devices: that the batch is split over, of however many there are.

    Raises:
        RungError: the backend asked cannot compute it here.
    """
    device = device or jax.devices()[0]
    kind = _kind(device)
    obstacles = {
        "cudnn": _cudnn_obstacle(device, kind, dtype, d_head, soft_cap, segments, dropout),
        "splash": _splash_obstacle(kind, dropout, n_devices),
    }
    if asked == "blocked":
        return Choice(asked, "as asked")
    if asked != "auto":
        if obstacles[asked]:
            raise RungError(
                f"compute.attention {asked} cannot be used: {obstacles[asked]}", "take compute.attention auto"
            )
        return Choice(asked, "as asked")
    own = _OWN.get(kind)
    if own is None:
        return Choice("blocked", f"the one for {_DEVICES.get(kind, kind)}")
    if obstacles[own]:
        return Choice("blocked", f"not {own}: {obstacles[own]}")
    return Choice(own, f"the one for {_DEVICES[kind]}")


_DEVICES = {"cpu": "a CPU", "cuda": "an NVIDIA GPU", "rocm": "an AMD GPU", "tpu": "a TPU"}


_OWN: dict[str, Backend] = {"cuda": "cudnn", "tpu": "splash"}


def _kind(device: jax.Device) -> str:
    """Return ``cpu``, ``tpu``, ``cuda`` or ``rocm``: JAX calls both of the last two a gpu."""
    if device.platform != "gpu":
        return device.platform
    return "cuda" if "cuda" in device.client.platform_version else "rocm"


def _cudnn_obstacle(
    device: jax.Device, kind: str, dtype: str, d_head: int, soft_cap: float, segments: bool, dropout: bool
) -> str:
    """Return why cuDNN's flash attention cannot be used, as ``jax.nn.dot_product_attention`` offers it; empty: it can.

    Ampere (8.0) is the first to have it; heads up to 256 wide need Hopper (9.0).
    """
    if kind != "cuda":
        return f"it is for NVIDIA GPUs, and this is {_DEVICES.get(kind, kind)}"
    capability = tuple(int(part) for part in str(device.compute_capability).split("."))
    if capability < (8, 0):
        return f"this GPU's compute capability is {device.compute_capability}, below 8.0"
    if dtype != "bfloat16":
        return f"it computes in bfloat16, and model.compute_dtype is {dtype}"
    widest = 256 if capability >= (9, 0) else 128
    if d_head % 8 or d_head > widest:
        return f"heads are {d_head} wide, not a multiple of 8 up to {widest}"
    return _lacks({"soft cap": bool(soft_cap), "document segments": segments, "dropout of weights": dropout})


def _splash_obstacle(kind: str, dropout: bool, n_devices: int) -> str:
    if kind != "tpu":
        return f"it is for TPUs, and this is {_DEVICES.get(kind, kind)}"
    if n_devices > 1:
        return f"it runs on one device, and the batch is split over {n_devices}"
    return _lacks({"dropout of weights": dropout})


def _lacks(wanted: dict[str, bool]) -> str:
    return next((f"it has no {name}" for name, is_wanted in wanted.items() if is_wanted), "")


# In blocks of queries, by XLA


@dataclass(frozen=True)
class Block:
    """Queries ``[start, stop)``, and all keys that one of them may see by their positions: ``[first, last)``."""

    start: int
    stop: int
    first: int
    last: int


def query_blocks(n_queries: int, n_keys: int, causal: bool, window: int) -> list[Block]:
    """Return the blocks in which ``blocked`` takes the queries.

    Of causal attention about half of the products are thus never computed; under a window all but
    ``window + block - 1`` keys a query are not.
    """
    if not causal:
        return [Block(0, n_queries, 0, n_keys)]
    size = max(_MIN_QUERY_BLOCK, -(-n_queries // (_MAX_WINDOW_BLOCKS if window else _MAX_QUERY_BLOCKS)))
    starts = range(0, n_queries, size)
    stops = [min(start + size, n_queries) for start in starts]
    return [
        Block(start, stop, max(0, start - window + 1) if window else 0, stop)
        for start, stop in zip(starts, stops, strict=True)
    ]


def _blocked(q_BTHK, k_BSGK, v_BSGK, causal, window, soft_cap, segments, keep, dropout_rate):
    k_BGSK, v_BGSK = jnp.swapaxes(k_BSGK, 1, 2), jnp.swapaxes(v_BSGK, 1, 2)
    q_BGRTK = _grouped(q_BTHK, k_BGSK.shape[1])
    hidden_rows = segments is not None and segments[0] is not segments[1]  # else each query sees itself at least
    form = _Form(dropout_rate, soft_cap, hidden_rows, matmul_precision())
    outputs = []
    for number, block in enumerate(query_blocks(q_BTHK.shape[1], k_BSGK.shape[1], causal, window)):
        queries, keys = slice(block.start, block.stop), slice(block.first, block.last)
        q_BGRtK = q_BGRTK[:, :, :, queries]
        keep_BGRts = None if keep is None else keep(number, (*q_BGRtK.shape[:4], block.last - block.first))
        seen = _seen(block, causal, window, segments)
        k_BGsK, v_BGsK = k_BGSK[:, :, keys], v_BGSK[:, :, keys]
        outputs.append(_attend(q_BGRtK, k_BGsK, v_BGsK, seen, keep_BGRts, form))
    return _ungrouped(jnp.concatenate(outputs, 3) if len(outputs) > 1 else outputs[0])


def _seen(block, causal, window, segments):
    """Return which keys of a block its queries see: bool, to be broadcast to [B, G, R, t, s]; ``None``: all of them."""
    seen = None
    if causal:
        t, s = jnp.arange(block.start, block.stop)[:, None], jnp.arange(block.first, block.last)[None, :]
        seen = (t >= s) & (t - s < window) if window else t >= s
    if segments is not None:
        of_queries, of_keys = segments
        same_Bts = of_queries[:, block.start : block.stop, None] == of_keys[:, None, block.first : block.last]
        seen = (same_Bts if seen is None else seen & same_Bts)[:, None, None]
    return seen


class _Form(NamedTuple):
    """What of attention is known when it is compiled; ``hidden_rows``: a query may see no key at all."""

    rate: float = 0.0
    soft_cap: float = 0.0
    hidden_rows: bool = False
    precision: str | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q_BGRTK, k_BGSK, v_BGSK, seen, keep_BGRTS, form):
    """Return attention [B, G, R, T, K] of queries that are scaled already.

    Its gradient is written out, because the normalised weights need not be made: their sum is divided out of the
    narrower output instead. The row sums of weights times their gradients equal those of output times its gradient
    (Dao et al. 2022, arXiv:2205.14135, appendix B), which are shorter; but XLA on a CPU then computes each of them anew
    for every key.
    """
    return _attend_forward(q_BGRTK, k_BGSK, v_BGSK, seen, keep_BGRTS, form)[0]


def _attend_forward(q_BGRTK, k_BGSK, v_BGSK, seen, keep_BGRTS, form):
    scores = _scores(q_BGRTK, k_BGSK, form)
    scores = capped(scores, form.soft_cap)
    if seen is not None:
        scores = jnp.where(seen, scores, MASKED)
    largest = jnp.max(scores, -1, keepdims=True)
    if form.hidden_rows:  # their weights are exp(MASKED / 2) = 0
        largest = jnp.maximum(largest, MASKED / 2)
    exps = jnp.exp(scores - largest)
    sums = jnp.sum(exps, -1, keepdims=True)
    inverse_sum = 1 / (jnp.maximum(sums, 1) if form.hidden_rows else sums)  # a row that sees a key sums to 1 or more
    exps = exps.astype(v_BGSK.dtype)
    kept = _kept(exps, keep_BGRTS, form.rate)
    y = _einsum("BGRTS,BGSK->BGRTK", kept, v_BGSK, form.precision, jnp.float32)
    y = (y * inverse_sum).astype(v_BGSK.dtype)
    return y, (q_BGRTK, k_BGSK, v_BGSK, keep_BGRTS, exps, inverse_sum)


def _attend_backward(form, saved, dy):
    precision = form.precision
    q_BGRTK, k_BGSK, v_BGSK, keep_BGRTS, exps, inverse_sum = saved
    dy = (dy * inverse_sum).astype(v_BGSK.dtype)
    dv_BGSK = _einsum("BGRTS,BGRTK->BGSK", _kept(exps, keep_BGRTS, form.rate), dy, precision)
    d_exps = _einsum("BGRTK,BGSK->BGRTS", dy, v_BGSK, precision, jnp.float32)
    weighted = exps * _kept(d_exps, keep_BGRTS, form.rate)
    row_sums = jnp.sum(weighted.astype(jnp.float32), -1, keepdims=True)
    d_scores = weighted - exps * (row_sums * inverse_sum)
    if form.soft_cap:
        # Made anew: that costs a product, and to keep them the memory of the weights once more.
        d_scores = d_scores * (1 - jnp.tanh(_scores(q_BGRTK, k_BGSK, form) / form.soft_cap) ** 2)
    d_scores = d_scores.astype(q_BGRTK.dtype)
    dq_BGRTK = _einsum("BGRTS,BGSK->BGRTK", d_scores, k_BGSK, precision)
    dk_BGSK = _einsum("BGRTS,BGRTK->BGSK", d_scores, q_BGRTK, precision)
    return dq_BGRTK, dk_BGSK, dv_BGSK, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _scores(q_BGRTK, k_BGSK, form):
    return _einsum("BGRTK,BGSK->BGRTS", q_BGRTK, k_BGSK, form.precision, jnp.float32)


def _einsum(subscripts, one, other, precision, dtype=None):
    return jnp.einsum(subscripts, one, other, precision=precision, preferred_element_type=dtype)


def _kept(x, keep, rate):
    """Return ``x`` after dropout: zero where ``keep`` is false, else scaled up."""
    return x if keep is None else jnp.where(keep, x * (1 / (1 - rate)), 0).astype(x.dtype)


def _grouped(q_BTHK: jax.Array, n_groups: int) -> jax.Array:
    """Return queries by key head, scaled for the product with keys: [B, G, R, T, K]."""
    B, T, H, K = q_BTHK.shape
    return jnp.moveaxis(q_BTHK.reshape(B, T, n_groups, H // n_groups, K), 1, 3) * (1 / math.sqrt(K))


def _ungrouped(y_BGRTK: jax.Array) -> jax.Array:
    B, G, R, T, K = y_BGRTK.shape
    return jnp.moveaxis(y_BGRTK, 3, 1).reshape(B, T, G * R, K)


# By the kernels of others


def _cudnn(q_BTHK, k_BSGK, v_BSGK, causal, window):
    # Theirs is the number of keys before a query's own.
    back = (window - 1, 0) if window else None
    return jax.nn.dot_product_attention(
        q_BTHK, k_BSGK, v_BSGK, is_causal=causal, local_window_size=back, implementation="cudnn"
    )


def _splash(q_BTHK, k_BSGK, v_BSGK, causal, window, soft_cap, segments, interpret):
    """Return attention by the kernel that JAX ships for TPUs, which skips blocks that a static mask hides.

    Tested in the interpreter of Pallas only, never on a TPU.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    (B, T, H, K), S = q_BTHK.shape, k_BSGK.shape[1]
    block = next(size for size in _SPLASH_BLOCKS if size == _SPLASH_BLOCKS[-1] or size <= min(T, S))
    queries, keys = -T % block, -S % block
    if segments is None and not causal and keys:
        segments = (jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32))
    if segments is not None:
        # Padding is a segment of its own; each of its queries sees the first of its keys, if no other.
        highest = jnp.iinfo(jnp.int32).max
        segments = tuple(
            jnp.pad(ids, ((0, 0), (0, padding)), constant_values=highest)
            for ids, padding in zip(segments, (queries, keys), strict=True)
        )
    q, k, v = (
        jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, padding), (0, 0)))
        for x, padding in ((q_BTHK * (1 / math.sqrt(K)), queries), (k_BSGK, keys), (v_BSGK, keys))
    )
    shape = (T + queries, S + keys)
    mask: splash.Mask = splash.CausalMask(shape) if causal else splash.FullMask(shape)
    if window:
        mask = splash.LocalMask(shape, (window - 1, 0), offset=0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * H),
        # All of the same length: queries and keys, forward, and backward to each of the three.
        block_sizes=splash.BlockSizes(block, block, block, block, block, block, block, block),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap or None,
        interpret=interpret,
    )
    ids = None if segments is None else splash.SegmentIds(*segments)
    y_BHTK = jax.vmap(kernel, (0, 0, 0, None if ids is None else 0))(q, k, v, ids)
    return jnp.swapaxes(y_BHTK, 1, 2)[:, :T].astype(q_BTHK.dtype)
