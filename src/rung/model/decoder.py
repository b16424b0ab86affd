"""The decoder-only Transformer: one set of functions that is NanoLM, GPT-2 or Llama by its config."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from rung.config import ComputeConfig, ModelConfig
from rung.model import layers
from rung.model.dropout import dropout, keep_mask
from rung.model.losses import Objective, capped, cross_entropy
from rung.model.weights import Tree, Weight, WeightTable

Cache = dict[str, list[jax.Array]]
"""Keys and values of each layer, [B, S, G, K]: row s belongs to position s."""

# Names for profiles and for finding where a value went wrong; they are no part of what is computed.
_named = jax.named_scope

_USES_PER_LAYER = 64  # numbers of dropout masks set aside for a layer: its sites, and the blocks of its attention


@dataclass(frozen=True)
class Decoder:
    """A decoder of the shape of ``config``, resolved (``rung.config.resolve``) and with its vocabulary size known.

    ``compute`` is how it is computed, which changes nothing of what it is; ``objective`` what training minimises.
    """

    config: ModelConfig
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    objective: Objective = field(default_factory=Objective)

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
        causal mask, as is usual (Kaplan et al. 2020, arXiv:2001.08361; Chowdhery et al. 2022, arXiv:2204.02311).
        """
        c = self.config
        in_products = sum(w.size for w in self.weights() if w.n_inputs and not w.path.startswith("embedding."))
        if c.tied:
            in_products += c.vocab_size * c.d_model
        return 6 * in_products + 12 * c.n_layers * c.n_heads * c.d_head * c.context_length

    # What it computes

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
            )
        return loss_sum, targets, {"cross_entropy": plain}

    def hidden(
        self,
        weights: Tree,
        tokens_BT: jax.Array,
        segments_BT: jax.Array | None = None,
        keys_B: jax.Array | None = None,
    ) -> jax.Array:
        """Return the final hidden states [B, T, D] of ``tokens_BT``, T at most the context length."""

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            keep = self._attention_keep(layer, keys_B)
            return layers.causal_attention(q, k, v, segments_BT, keep, self.config.dropout)

        return self._forward(weights, tokens_BT, self._positions(tokens_BT), attend, keys_B)

    def unembed(self, weights: Tree, x: jax.Array) -> jax.Array:
        """Return float32 logits [..., V] of final hidden states [..., D]."""
        head_VD, bias_V = self._head(weights)
        logits = jax.lax.dot_general(
            x, head_VD.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return capped(logits if bias_V is None else logits + bias_V, self.config.logit_soft_cap)

    def empty_cache(self, batch_size: int) -> Cache:
        """Return a zeroed cache of keys and values for ``batch_size`` sequences of the context length."""
        c = self.config
        shape = (batch_size, c.context_length, c.n_kv_heads, c.d_head)
        return {name: [jnp.zeros(shape, c.compute_dtype) for _ in range(c.n_layers)] for name in ("keys", "values")}

    def prefill(self, weights: Tree, tokens_BT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Return ``(hidden states [B, T, D], cache)`` of sequences from position 0; fills the cache's first T rows.

        Sequences shorter than T may be padded at their end: what is computed there is wrong, harmless to what comes
        before it, and overwritten as ``decode`` reaches it.
        """
        filled: Cache = {"keys": list(cache["keys"]), "values": list(cache["values"])}

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            for name, new in (("keys", k), ("values", v)):
                filled[name][layer] = jax.lax.dynamic_update_slice(cache[name][layer], new, (0, 0, 0, 0))
            return layers.causal_attention(q, k, v)

        return self._forward(weights, tokens_BT, self._positions(tokens_BT), attend, None), filled

    def decode(self, weights: Tree, token_B: jax.Array, position_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Return ``(hidden state [B, D], cache)`` of each sequence's next token, below the context length."""
        filled: Cache = {"keys": list(cache["keys"]), "values": list(cache["values"])}
        rows_B, position_B1 = jnp.arange(token_B.shape[0]), position_B[:, None]

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            for name, new in (("keys", k), ("values", v)):
                filled[name][layer] = cache[name][layer].at[rows_B, position_B].set(new[:, 0])
            return layers.cached_attention(q, filled["keys"][layer], filled["values"][layer], position_B1)

        return self._forward(weights, token_B[:, None], position_B1, attend, None)[:, 0], filled

    # How

    def _forward(
        self,
        weights: Tree,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        attend: Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array],
        keys_B: jax.Array | None,
    ) -> jax.Array:
        c = self.config
        with _named("embedding"):
            x = weights["embedding"]["tokens"][tokens_BT]
            if c.positions == "learned":
                x = x + weights["embedding"]["positions"][positions_BT]
            x = self._drop("embedding", x.astype(c.compute_dtype), keys_B, use=0)
        for number, layer in enumerate(weights.get("layers", ())):
            use = (number + 1) * _USES_PER_LAYER
            with _named(f"layers.{number}"):
                y = self._norm(layer, "attention_norm", x)
                y = self._attention(layer["attention"], y, number, positions_BT, attend)
                x = x + self._drop("residual", y, keys_B, use)
                y = self._mlp(layer["mlp"], self._norm(layer, "mlp_norm", x), keys_B, use + 1)
                x = x + self._drop("residual", y, keys_B, use + 2)
        return self._norm(weights, "final_norm", x)

    @_named("attention")
    def _attention(
        self, w: Tree, x_BTD: jax.Array, number: int, positions_BT: jax.Array, attend: Callable
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

    @_named("mlp")
    def _mlp(self, w: Tree, x_BTD: jax.Array, keys_B: jax.Array | None, use: int) -> jax.Array:
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

    def _drop(self, site: str, x: jax.Array, keys_B: jax.Array | None, use: int) -> jax.Array:
        return dropout(x, self.config.dropout, keys_B, use) if site in self.config.dropout_sites else x

    def _attention_keep(
        self, layer: int, keys_B: jax.Array | None
    ) -> Callable[[int, tuple[int, ...]], jax.Array] | None:
        if keys_B is None or not self.config.dropout or "attention" not in self.config.dropout_sites:
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
