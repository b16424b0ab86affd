"""Tiny models of every kind, with weights large enough that their predictions differ from place to place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rung.config import Config, override, resolve
from rung.decode.window import window_start
from rung.model import Decoder
from rung.model.weights import initialize

SHAPES = {
    "gpt2": {"activation": "gelu_tanh"},
    "llama": {
        "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "n_kv_heads": 2, "qk_norm": True, "tied": False,
        "qkv_bias": False, "attention_output_bias": False, "mlp_bias": False,
    },
    "nanolm": {"activation": "relu", "tied": False, "head_bias": True},
}  # fmt: skip


@functools.cache
def tiny(shape: str = "gpt2", vocab_size: int = 40, context_length: int = 32, n_layers: int = 2):
    """Return (model, weights)."""
    sizes = {
        "n_layers": n_layers,
        "n_heads": 4,
        "d_model": 32,
        "vocab_size": vocab_size,
        "context_length": context_length,
    }
    settings = {**sizes, **SHAPES[shape], "init_std": 0.2}
    model = Decoder(resolve(override(Config(), {f"model.{name}": value for name, value in settings.items()})).model)
    return model, initialize(model.weights(), seed=0)


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, weights, tokens_BT):
    return model.unembed(weights, model.hidden(weights, tokens_BT))


def next_logits(model, weights, tokens) -> np.ndarray:
    """Return the logits [V] that follow ``tokens``, by one pass over the window without any cache."""
    context = model.config.context_length
    window = np.asarray(tokens)[window_start(len(tokens), context) :]
    padded = jnp.asarray(np.pad(window, (0, context - len(window))))[None]
    return np.asarray(_logits(model, weights, padded))[0, len(window) - 1]


def uncached_greedy(model, weights, prompt, count: int, vocab_size: int, end_id: int | None = None) -> list[int]:
    """Return what greedy decoding generates, one whole pass for each token."""
    tokens = list(prompt)
    for _ in range(count):
        token = int(np.argmax(next_logits(model, weights, tokens)[:vocab_size]))
        if token == end_id:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
