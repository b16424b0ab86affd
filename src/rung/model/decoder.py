"""The decoder-only Transformer: one set of functions that is NanoLM, GPT-2 or Llama by its config."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

from rung.config import ComputeConfig, Config, ModelConfig
from rung.model import layers
from rung.model.attention import Backend, Choice, Keep, attention, cached_attention, choose
from rung.model.dropout import dropout, keep_mask
from rung.model.losses import Objective, cross_entropy
from rung.model.stack import run_layers
from rung.model.weights import Tree, Weight, WeightTable

Cache = dict[str, list[jax.Array]]
"""Keys and values of each layer, [B, S, G, K]: row s belongs to position s."""

_UNROLLED = ComputeConfig()  # of the layers where nothing is to be differentiated

# Names for profiles and for finding where a value went wrong; they are no part of what is computed.
_named = jax.named_scope

_USES_PER_LAYER = 64  # numbers of dropout masks set aside for a layer: its sites, and the blocks of its attention

Attend = Callable[[jax.Array | int, jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention of a layer: of its number, and of queries, keys and values."""


def _at_precision(method: Callable) -> Callable:
    """Return the method with products of float32 as precise as ``compute.matmul_precision`` says.

    The backward passes are traced later, when nothing says so any more: those written out take it from their forward
    pass, and JAX's own from the product itself.
    """

    @functools.wraps(method)
    def at_precision(self, *args, **kwargs):
        with jax.default_matmul_precision(self.matmul_precision):
            return method(self, *args, **kwargs)

    return at_precision


@dataclass(frozen=True)
class Decoder:
    """A decoder of the shape of ``config``, resolved (``rung.config.resolve``) and with its vocabulary size known.

    ``compute`` is how it is computed, which changes nothing of what it is; ``objective`` what training minimises;
    ``devices`` how many the rows of a batch are split over (``mesh.data``).
    """

    config: ModelConfig
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    objective: Objective = field(default_factory=Objective)
    devices: int = 1

    @classmethod
    def of(cls, config: Config) -> Decoder:
        """Return the model that a resolved config, its vocabulary size known, describes and trains."""
        return cls(config.model, config.compute, Objective.of(config.train), config.mesh.data)

    def __post_init__(self) -> None:
        assert self.config.vocab_size > 0, "the vocabulary size comes from the tokenizer before the model is built"
        assert self.config.d_head > 0, "the config is resolved before the model is built"

    # What the model is

    def weights(self) -> WeightTable:
        """Return the table of weights."""
        return tuple(_weights(self.config))

    def flops_per_token(self) -> float:
        """Return nominal floating-point operations per trained token.

        6 for each parameter of a matrix product (2 forward, 4 backward), and attention counted whole, as if it had no
        causal mask, as is usual (Kaplan et al. 2020, arXiv:2001.08361; Chowdhery et al. 2022, arXiv:2204.02311); of a
        sliding window, its width.
        """
        c = self.config
        in_products = sum(w.size for w in self.weights() if w.n_inputs and not w.path.startswith("embedding."))
        if c.tied:
            in_products += c.vocab_size * c.d_model
        seen = min(c.attention_window or c.context_length, c.context_length)
        return 6 * in_products + 12 * c.n_layers * c.n_heads * c.d_head * seen

    @property
    def matmul_precision(self) -> str:
        """The precision of matrix products, by JAX's name for it; products of bfloat16 have no other than their own."""
        return "bfloat16" if self.config.compute_dtype == "bfloat16" else self.compute.matmul_precision

    def attention_backend(self, *, segments: bool, training: bool = True) -> Choice:
        """Return what computes attention over whole sequences on this machine, and why.

        Args:
            segments: whether batches say which tokens are of one document.
            training: with dropout, where the model has it.

        Raises:
            RungError: ``compute.attention`` asks for what cannot be.
        """
        return self._backend(self.compute.attention, segments, training and self._drops_attention)

    # What it computes

    @_at_precision
    def loss(
        self, weights: Tree, batch: dict[str, jax.Array], keys_B: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """Return ``(sum of losses in nats, number of targets, {"cross_entropy": sum})`` of a batch.

        The loss is the objective in training, and plain cross-entropy where ``keys_B`` is ``None``.

        Args:
            weights: nested dict in the shape of the table.
            batch: ``tokens`` and ``targets`` int32 [B, T] (targets -1 where there is none), and, where a token is to
                see its own document only, ``segments`` int32 [B, T].
            keys_B: one PRNG key a row for dropout; ``None``: the batch is evaluated, not trained on.
        """
        x_BTD = self.hidden(weights, batch["tokens"], batch.get("segments"), keys_B)
        with _named("loss"):
            terms = Objective() if keys_B is None else self.objective
            loss_sum, targets, plain = cross_entropy(
                x_BTD,
                *self._head(weights),
                batch["targets"],
                soft_cap=self.config.logit_soft_cap,
                label_smoothing=terms.label_smoothing,
                z_loss=terms.z_loss,
                devices=self.devices,
            )
        return loss_sum, targets, {"cross_entropy": plain}

    @_at_precision
    def hidden(
        self,
        weights: Tree,
        tokens_BT: jax.Array,
        segments_BT: jax.Array | None = None,
        keys_B: jax.Array | None = None,
    ) -> jax.Array:
        """Return the final hidden states [B, T, D] of ``tokens_BT``, T at most the context length."""
        chosen = self.attention_backend(segments=segments_BT is not None, training=keys_B is not None)
        attend = functools.partial(self._attend, chosen, segments_BT, keys_B)
        return self._forward(weights, tokens_BT, self._positions(tokens_BT), attend, keys_B, self.compute)

    @_at_precision
    def unembed(self, weights: Tree, x: jax.Array) -> jax.Array:
        """Return float32 logits [..., V] of final hidden states [..., D]."""
        head_VD, bias_V = self._head(weights)
        logits = jax.lax.dot_general(
            x, head_VD.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return layers.capped(logits if bias_V is None else logits + bias_V, self.config.logit_soft_cap)

    def empty_cache(self, batch_size: int) -> Cache:
        """Return a zeroed cache of keys and values for ``batch_size`` sequences of the context length."""
        c = self.config
        shape = (batch_size, c.context_length, c.n_kv_heads, c.d_head)
        return {name: [jnp.zeros(shape, c.compute_dtype) for _ in range(c.n_layers)] for name in ("keys", "values")}

    @_at_precision
    def prefill(self, weights: Tree, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Return ``(hidden states [B, T, D], cache)`` of sequences from position 0; fills the cache's first T rows.

        Sequences shorter than T may be padded at their end: what is computed there is wrong, harmless to what comes
        before it, and overwritten as ``decode`` reaches it.
        """
        filled: Cache = {"keys": list(cache["keys"]), "values": list(cache["values"])}
        # Not the one that training asks for: text is generated on other machines too.
        chosen = self._backend("auto", segments=False, dropout=False)

        def attend(layer: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            for name, new in (("keys", k), ("values", v)):
                filled[name][layer] = jax.lax.dynamic_update_slice(cache[name][layer], new, (0, 0, 0, 0))
            return self._attend(chosen, None, None, layer, q, k, v)

        return self._forward(weights, tokens_BT, self._positions(tokens_BT), attend, None), filled

    @_at_precision
    def decode(self, weights: Tree, token_B: jax.Array, position_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Return ``(hidden state [B, D], cache)`` of each sequence's next token, below the context length."""
        filled: Cache = {"keys": list(cache["keys"]), "values": list(cache["values"])}
        rows_B, position_B1 = jnp.arange(token_B.shape[0]), position_B[:, None]

        def attend(layer: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            for name, new in (("keys", k), ("values", v)):
                filled[name][layer] = cache[name][layer].at[rows_B, position_B].set(new[:, 0])
            c = self.config
            return cached_attention(
                q,
                filled["keys"][layer],
                filled["values"][layer],
                position_B1,
                window=c.attention_window,
                soft_cap=c.attention_soft_cap,
            )

        return self._forward(weights, token_B[:, None], position_B1, attend, None)[:, 0], filled

    # How

    def _forward(
        self,
        weights: Tree,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        attend: Attend,
        keys_B: jax.Array | None,
        compute: ComputeConfig = _UNROLLED,
    ) -> jax.Array:
        c = self.config
        with _named("embedding"):
            x = weights["embedding"]["tokens"][tokens_BT]
            if c.positions == "learned":
                x = x + weights["embedding"]["positions"][positions_BT]
            x = self._drop("embedding", x.astype(c.compute_dtype), keys_B, use=0)
        layer = functools.partial(self._layer, positions_BT, attend, keys_B)
        x = run_layers(layer, weights.get("layers", ()), x, compute)
        return self._norm(weights, "final_norm", x)

    def _layer(
        self,
        positions_BT: jax.Array,
        attend: Attend,
        keys_B: jax.Array | None,
        number: jax.Array | int,
        w: Tree,
        x: jax.Array,
    ) -> jax.Array:
        use = (number + 1) * _USES_PER_LAYER
        with _named(f"layers.{number}" if isinstance(number, int) else "layers"):
            y = self._attention(w["attention"], self._norm(w, "attention_norm", x), number, positions_BT, attend)
            x = x + self._drop("residual", y, keys_B, use)
            y = self._mlp(w["mlp"], self._norm(w, "mlp_norm", x), keys_B, use + 1)
            return x + self._drop("residual", y, keys_B, use + 2)

    @_named("attention")
    def _attention(
        self, w: Tree, x_BTD: jax.Array, number: jax.Array | int, positions_BT: jax.Array, attend: Attend
    ) -> jax.Array:
        c = self.config
        names, biases = ("query", "key", "value"), ("query_bias", "key_bias", "value_bias")
        if x_BTD.shape[1] > 1:
            # One product for the three: beside many positions the weights are small, and one large product is faster.
            weight = jnp.concatenate([w[name] for name in names])
            bias = jnp.concatenate([w[name] for name in biases]) if c.qkv_bias else None
            heads = [c.n_heads, c.n_heads + c.n_kv_heads]
            q, k, v = jnp.split(layers.project(x_BTD, weight, bias), heads, axis=2)
        else:
            q, k, v = (layers.project(x_BTD, w[name], w.get(bias)) for name, bias in zip(names, biases, strict=True))
        if c.qk_norm:
            q = layers.rms_norm(q, w["query_norm"], c.norm_epsilon)
            k = layers.rms_norm(k, w["key_norm"], c.norm_epsilon)
        if c.positions == "rope":
            q = layers.rotary(q, positions_BT, c.rope_base)
            k = layers.rotary(k, positions_BT, c.rope_base)
        y_BTHK = attend(number, q, k, v)
        return layers.project(y_BTHK, w["output"], w.get("output_bias"), n_inputs=2)

    def _attend(
        self,
        chosen: Choice,
        segments_BT: jax.Array | None,
        keys_B: jax.Array | None,
        number: jax.Array | int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> jax.Array:
        c = self.config
        return attention(
            q,
            k,
            v,
            window=c.attention_window,
            soft_cap=c.attention_soft_cap,
            segments_BT=segments_BT,
            keep=self._attention_keep(number, keys_B),
            dropout_rate=c.dropout,
            backend=chosen.backend,
        )

    def _backend(self, asked: Literal["auto"] | Backend, segments: bool, dropout: bool) -> Choice:
        c = self.config
        return choose(
            asked,
            dtype=c.compute_dtype,
            d_head=c.d_head,
            soft_cap=c.attention_soft_cap,
            segments=segments,
            dropout=dropout,
            n_devices=self.devices,
        )

    @_named("mlp")
    def _mlp(self, w: Tree, x_BTD: jax.Array, keys_B: jax.Array | None, use: jax.Array | int) -> jax.Array:
        activation = layers.ACTIVATIONS[self.config.activation]
        up_BTF = layers.project(x_BTD, w["up"], w.get("up_bias"))
        if self.config.activation == "swiglu":
            h_BTF = activation(layers.project(x_BTD, w["gate"], w.get("gate_bias"))) * up_BTF
        else:
            h_BTF = activation(up_BTF)
        return layers.project(self._drop("mlp", h_BTF, keys_B, use), w["down"], w.get("down_bias"))

    def _norm(self, weights: Tree, name: str, x: jax.Array) -> jax.Array:
        w = weights[name]
        with _named(name):
            if self.config.norm == "rmsnorm":
                return layers.rms_norm(x, w["scale"], self.config.norm_epsilon)
            return layers.layer_norm(x, w["scale"], w.get("bias"), self.config.norm_epsilon)

    def _head(self, weights: Tree) -> tuple[jax.Array, jax.Array | None]:
        head = weights.get("head", {})
        return weights["embedding"]["tokens"] if self.config.tied else head["weight"], head.get("bias")

    def _drop(self, site: str, x: jax.Array, keys_B: jax.Array | None, use: jax.Array | int) -> jax.Array:
        return dropout(x, self.config.dropout, keys_B, use) if site in self.config.dropout_sites else x

    @property
    def _drops_attention(self) -> bool:
        return bool(self.config.dropout) and "attention" in self.config.dropout_sites

    def _attention_keep(self, layer: jax.Array | int, keys_B: jax.Array | None) -> Keep | None:
        if keys_B is None or not self._drops_attention:
            return None
        first = (layer + 1) * _USES_PER_LAYER + 3
        return lambda block, shape: keep_mask(shape, self.config.dropout, keys_B, first + block)

    def _positions(self, tokens_BT: jax.Array) -> jax.Array:
        assert tokens_BT.shape[1] <= self.config.n_positions, "more tokens than positions"
        return jnp.arange(tokens_BT.shape[1])[None]


def _weights(c: ModelConfig) -> Iterator[Weight]:
    """Yield the weights of a decoder in the order of the forward pass.

    ``init = "gpt2"``: normal with deviation ``init_std``, the projections that write into the residual stream divided
    by sqrt(2 n_layers), the number of them (Radford et al. 2019, section 2.3). ``"fan_in"``: variance 1 / inputs for
    each product (LeCun et al. 1998), 1 / d_model for embeddings. Biases are zero, norms one.
    """
    D, H, G, K, F, V = c.d_model, c.n_heads, c.n_kv_heads, c.d_head, c.d_ff, c.vocab_size

    def std(fan_in: int, residual: bool = False) -> float:
        if c.init == "fan_in":
            return 1 / math.sqrt(fan_in)
        return c.init_std / math.sqrt(2 * c.n_layers) if residual else c.init_std

    def norm(path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.scale", (D,), ("embed",), constant=1.0)
        if c.norm == "layernorm" and c.norm_bias:
            yield Weight(f"{path}.bias", (D,), ("embed",))

    matrix = functools.partial(Weight, decay=True, hidden=True)
    yield Weight("embedding.tokens", (V, D), ("vocab", "embed"), int(c.tied), std=std(D), decay=True)
    if c.positions == "learned":
        yield Weight("embedding.positions", (c.n_positions, D), ("position", "embed"), std=std(D), decay=True)
    for number in range(c.n_layers):
        layer = f"layers.{number}"
        yield from norm(f"{layer}.attention_norm")
        attention = f"{layer}.attention"
        for name, heads, axis in (("query", H, "heads"), ("key", G, "kv_heads"), ("value", G, "kv_heads")):
            yield matrix(f"{attention}.{name}", (heads, K, D), (axis, "head", "embed"), 1, std=std(D))
            if c.qkv_bias:
                yield Weight(f"{attention}.{name}_bias", (heads, K), (axis, "head"))
        if c.qk_norm:
            yield Weight(f"{attention}.query_norm", (K,), ("head",), constant=1.0)
            yield Weight(f"{attention}.key_norm", (K,), ("head",), constant=1.0)
        yield matrix(f"{attention}.output", (D, H, K), ("embed", "heads", "head"), 2, std=std(H * K, residual=True))
        if c.attention_output_bias:
            yield Weight(f"{attention}.output_bias", (D,), ("embed",))
        yield from norm(f"{layer}.mlp_norm")
        for name in ("gate", "up") if c.activation == "swiglu" else ("up",):
            yield matrix(f"{layer}.mlp.{name}", (F, D), ("mlp", "embed"), 1, std=std(D))
            if c.mlp_bias:
                yield Weight(f"{layer}.mlp.{name}_bias", (F,), ("mlp",))
        yield matrix(f"{layer}.mlp.down", (D, F), ("embed", "mlp"), 1, std=std(F, residual=True))
        if c.mlp_bias:
            yield Weight(f"{layer}.mlp.down_bias", (D,), ("embed",))
    yield from norm("final_norm")
    if not c.tied:
        yield Weight("head.weight", (V, D), ("vocab", "embed"), 1, std=std(D), decay=True)
    if c.head_bias:
        yield Weight("head.bias", (V,), ("vocab",))


def predicted_logit_variance(model: Decoder) -> float:
    """Return the variance of the logits at initialisation, which the weight table gives.

    The final norm leaves hidden states of unit mean square, so a logit, a sum over d_model of hidden states times
    entries of the output layer, has d_model times their variance. The initial loss is near ln(V) plus half of this.
    """
    path = "embedding.tokens" if model.config.tied else "head.weight"
    output = next(weight for weight in model.weights() if weight.path == path)
    return model.config.d_model * output.std**2


def with_vocabulary(config: ModelConfig, tokenizer_size: int) -> ModelConfig:
    """Return the model's config with its vocabulary size: its own where it is set, else the tokenizer's."""
    return dataclasses.replace(config, vocab_size=config.vocab_size or tokenizer_size)
