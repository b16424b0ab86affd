"""GPT-2 and Llama weights as ``transformers`` names them, read into our weight tree, and their configs into ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from rung.config import Config, ModelConfig, from_dict, resolve
from rung.errors import RungError
from rung.model.decoder import Decoder
from rung.model.weights import Tree, unflatten

State = Mapping[str, np.ndarray]
"""Arrays by the names that ``transformers`` gives them."""

_GPT2_BUFFERS = (".attn.bias", ".attn.masked_bias")  # the causal mask, in files of older versions
_LLAMA_BUFFERS = (".rotary_emb.inv_freq",)
_GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def read_state(path: str | Path) -> dict[str, np.ndarray]:
    """Read the arrays of a safetensors file, by name.

    Raises:
        RungError: the file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise RungError(f"no weights at {path}", "name a model.safetensors file") from None
    except SafetensorError as error:
        raise RungError(f"{path} is damaged: {error}", "download it again") from None


def config_from_gpt2(values: Mapping[str, Any]) -> ModelConfig:
    """Return our config of a GPT-2 from the values of its ``config.json``, resolved.

    Raises:
        RungError: a value asks for a variant of GPT-2 that this decoder is not.
    """
    _refuse(values, "scale_attn_weights", True)
    _refuse(values, "scale_attn_by_inverse_layer_idx", False)
    _refuse(values, "add_cross_attention", False)
    rates = {
        "embedding": values.get("embd_pdrop", 0.1),
        "attention": values.get("attn_pdrop", 0.1),
        "residual": values.get("resid_pdrop", 0.1),
    }
    return _resolved(
        vocab_size=values["vocab_size"],
        context_length=values["n_positions"],
        n_layers=values["n_layer"],
        n_heads=values["n_head"],
        d_model=values["n_embd"],
        d_ff=values.get("n_inner") or 0,
        activation=_choice(values, "activation_function", "gelu_new", _GPT2_ACTIVATIONS),
        norm_epsilon=values.get("layer_norm_epsilon", 1e-5),
        tied=values.get("tie_word_embeddings", True),
        init_std=values.get("initializer_range", 0.02),
        **_dropout(rates),
    )


def config_from_llama(values: Mapping[str, Any]) -> ModelConfig:
    """Return our config of a Llama from the values of its ``config.json``, resolved.

    Raises:
        RungError: a value asks for a variant of Llama that this decoder is not.
    """
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise RungError(f"this Llama's rope_type is {kind!r}", "only plain RoPE is here, rope_type default")
    return _resolved(
        vocab_size=values["vocab_size"],
        context_length=values["max_position_embeddings"],
        n_layers=values["num_hidden_layers"],
        n_heads=values["num_attention_heads"],
        n_kv_heads=values.get("num_key_value_heads") or 0,
        d_model=values["hidden_size"],
        d_head=values.get("head_dim") or 0,
        d_ff=values["intermediate_size"],
        activation=_choice(values, "hidden_act", "silu", {"silu": "swiglu"}),
        norm="rmsnorm",
        norm_epsilon=values.get("rms_norm_eps", 1e-6),
        positions="rope",
        rope_base=float(rope.get("rope_theta", values.get("rope_theta", 10_000.0))),
        qkv_bias=values.get("attention_bias", False),
        attention_output_bias=values.get("attention_bias", False),
        mlp_bias=values.get("mlp_bias", False),
        tied=values.get("tie_word_embeddings", False),
        init_std=values.get("initializer_range", 0.02),
        **_dropout({"attention": values.get("attention_dropout", 0.0)}),
    )


def from_gpt2(state: State, config: ModelConfig) -> Tree:
    """Return our float32 weights from those of a ``GPT2LMHeadModel`` or ``GPT2Model``.

    Raises:
        RungError: an array is missing, has another shape than ``config`` says, or has no place in our table.
    """
    c, arrays = config, _Arrays(state, "transformer.", _GPT2_BUFFERS)
    D, H, K, F = c.d_model, c.n_heads, c.d_head, c.d_ff
    ours = {"embedding.tokens": arrays.take("wte.weight", c.vocab_size, D)}
    ours["embedding.positions"] = arrays.take("wpe.weight", c.n_positions, D)
    for number in range(c.n_layers):
        theirs, layer = f"h.{number}", f"layers.{number}"
        for name, norm in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            ours[f"{layer}.{norm}.scale"] = arrays.take(f"{theirs}.{name}.weight", D)
            ours[f"{layer}.{norm}.bias"] = arrays.take(f"{theirs}.{name}.bias", D)
        # GPT-2 keeps its projections as [inputs, outputs], and queries, keys and values side by side.
        qkv = arrays.take(f"{theirs}.attn.c_attn.weight", D, 3 * H * K).T.reshape(3, H, K, D)
        qkv_bias = arrays.take(f"{theirs}.attn.c_attn.bias", 3 * H * K).reshape(3, H, K)
        for index, name in enumerate(("query", "key", "value")):
            ours[f"{layer}.attention.{name}"] = qkv[index]
            ours[f"{layer}.attention.{name}_bias"] = qkv_bias[index]
        output = arrays.take(f"{theirs}.attn.c_proj.weight", H * K, D)
        ours[f"{layer}.attention.output"] = output.T.reshape(D, H, K)
        ours[f"{layer}.attention.output_bias"] = arrays.take(f"{theirs}.attn.c_proj.bias", D)
        ours[f"{layer}.mlp.up"] = arrays.take(f"{theirs}.mlp.c_fc.weight", D, F).T
        ours[f"{layer}.mlp.up_bias"] = arrays.take(f"{theirs}.mlp.c_fc.bias", F)
        ours[f"{layer}.mlp.down"] = arrays.take(f"{theirs}.mlp.c_proj.weight", F, D).T
        ours[f"{layer}.mlp.down_bias"] = arrays.take(f"{theirs}.mlp.c_proj.bias", D)
    ours["final_norm.scale"] = arrays.take("ln_f.weight", D)
    ours["final_norm.bias"] = arrays.take("ln_f.bias", D)
    return _complete(ours, arrays, config)


def from_llama(state: State, config: ModelConfig) -> Tree:
    """Return our float32 weights from those of a ``LlamaForCausalLM`` or ``LlamaModel``.

    Raises:
        RungError: an array is missing, has another shape than ``config`` says, or has no place in our table.
    """
    c, arrays = config, _Arrays(state, "model.", _LLAMA_BUFFERS)
    D, H, G, K, F = c.d_model, c.n_heads, c.n_kv_heads, c.d_head, c.d_ff
    ours = {"embedding.tokens": arrays.take("embed_tokens.weight", c.vocab_size, D)}
    for number in range(c.n_layers):
        theirs, layer = f"layers.{number}", f"layers.{number}"
        ours[f"{layer}.attention_norm.scale"] = arrays.take(f"{theirs}.input_layernorm.weight", D)
        ours[f"{layer}.mlp_norm.scale"] = arrays.take(f"{theirs}.post_attention_layernorm.weight", D)
        for name, heads, letter in (("query", H, "q"), ("key", G, "k"), ("value", G, "v")):
            matrix = arrays.take(f"{theirs}.self_attn.{letter}_proj.weight", heads * K, D)
            ours[f"{layer}.attention.{name}"] = matrix.reshape(heads, K, D)
            if c.qkv_bias:
                bias = arrays.take(f"{theirs}.self_attn.{letter}_proj.bias", heads * K)
                ours[f"{layer}.attention.{name}_bias"] = bias.reshape(heads, K)
        output = arrays.take(f"{theirs}.self_attn.o_proj.weight", D, H * K)
        ours[f"{layer}.attention.output"] = output.reshape(D, H, K)
        if c.attention_output_bias:
            ours[f"{layer}.attention.output_bias"] = arrays.take(f"{theirs}.self_attn.o_proj.bias", D)
        for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            ours[f"{layer}.mlp.{name}"] = arrays.take(f"{theirs}.mlp.{name}_proj.weight", *shape)
            if c.mlp_bias:
                ours[f"{layer}.mlp.{name}_bias"] = arrays.take(f"{theirs}.mlp.{name}_proj.bias", shape[0])
    ours["final_norm.scale"] = arrays.take("norm.weight", D)
    return _complete(ours, arrays, config)


# Helpers


class _Arrays:
    """The arrays of a state, each taken once; names with or without the prefix of the whole model."""

    def __init__(self, state: State, prefix: str, buffers: tuple[str, ...]):
        self._named = {name: (name.removeprefix(prefix), array) for name, array in state.items()}
        self._left = {short: array for short, array in self._named.values() if not short.endswith(buffers)}

    def take(self, name: str, *shape: int) -> np.ndarray:
        if name not in self._left:
            raise RungError(f"the state has no array {name}", "its config belongs to another model")
        array = self._left.pop(name)
        if array.shape != shape:
            raise RungError(f"{name} is {array.shape}, and the config says {shape}", "they belong to different models")
        return np.asarray(array, np.float32)

    def left(self) -> list[str]:
        """Return the names of the arrays that nobody took."""
        return sorted(self._left)


def _complete(ours: dict[str, np.ndarray], arrays: _Arrays, config: ModelConfig) -> Tree:
    """Add the output layer, and return the tree of all the weights, each checked against the table."""
    embedding = ours["embedding.tokens"]
    if not config.tied:
        ours["head.weight"] = arrays.take("lm_head.weight", *embedding.shape)
    elif "lm_head.weight" in arrays.left() and not np.array_equal(
        arrays.take("lm_head.weight", *embedding.shape), embedding
    ):
        raise RungError(
            "lm_head.weight differs from the embedding, and the config ties them", "set tie_word_embeddings to false"
        )
    if arrays.left():
        raise RungError(
            f"the model of this config has no place for {', '.join(arrays.left())}",
            "its config belongs to another model",
        )
    shapes = {weight.path: weight.shape for weight in Decoder(config).weights()}
    for path in shapes.keys() ^ ours.keys():
        raise RungError(
            f"weight {path} is {'not in the state' if path in shapes else 'not in the model'}",
            "the config asks for parts that this architecture does not have: take it from config.json",
        )
    assert shapes == {path: array.shape for path, array in ours.items()}, "each array is reshaped to its weight"
    return unflatten({path: jnp.asarray(array) for path, array in ours.items()})


def _resolved(**values: Any) -> ModelConfig:
    return resolve(from_dict({"model": values}, Config(), where="config.json")).model


def _refuse(values: Mapping[str, Any], name: str, ours: bool) -> None:
    if values.get(name, ours) != ours:
        raise RungError(f"this model has {name} {values[name]}", f"only models with {name} {ours} can be read")


def _choice(values: Mapping[str, Any], name: str, default: str, known: Mapping[str, str]) -> str:
    value = values.get(name, default)
    if value not in known:
        raise RungError(f"this model's {name} is {value!r}", f"known: {', '.join(known)}")
    return known[value]


def _dropout(rates: Mapping[str, float]) -> dict[str, Any]:
    """Return our one rate and its sites from a rate for each site."""
    sites = [site for site, rate in rates.items() if rate]
    if len({rates[site] for site in sites}) > 1:
        raise RungError(f"this model has several dropout rates: {dict(rates)}", "make those that are not 0 equal")
    return {"dropout": rates[sites[0]], "dropout_sites": sites} if sites else {"dropout": 0.0}
