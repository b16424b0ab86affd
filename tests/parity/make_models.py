"""Tiny random models made by transformers: what our architectures are compared with.

Every weight is drawn afresh, biases and norms too, so that a weight that is forgotten, swapped or transposed shows in
the logits; at their own initialisation biases are 0 and norms 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Reference:
    """A model as transformers has it."""

    config: dict[str, Any]  # as in its config.json
    weights: dict[str, np.ndarray]  # float32, by transformers' names; a tied output layer is there under both its names
    tokens_BT: np.ndarray  # int64
    logits_BTV: np.ndarray  # float32, of ``tokens_BT``
    parameters: int  # tied weights counted once


def gpt2(
    *,
    seed: int = 0,
    tied: bool = True,
    vocab_size: int = 61,
    n_positions: int = 32,
    n_layers: int = 3,
    n_heads: int = 4,
) -> Reference:
    """Return a GPT-2: learned positions, LayerNorm, tanh-approximated GELU, biases everywhere, width 8 a head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=n_positions,
        n_embd=8 * n_heads,
        n_layer=n_layers,
        n_head=n_heads,
        tie_word_embeddings=tied,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _reference(GPT2LMHeadModel, config, seed, n_positions)


def llama(
    *,
    seed: int = 0,
    tied: bool = False,
    vocab_size: int = 61,
    n_positions: int = 32,
    n_layers: int = 3,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    d_head: int = 8,
    d_ff: int = 44,
    rope_base: float = 10_000.0,
) -> Reference:
    """Return a Llama: RoPE, RMSNorm, SwiGLU, grouped-query attention, no biases."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=n_positions,
        hidden_size=d_head * n_heads,
        intermediate_size=d_ff,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": rope_base},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    return _reference(LlamaForCausalLM, config, seed, n_positions)


def _reference(model_class: Any, config: Any, seed: int, length: int) -> Reference:
    import torch

    random = np.random.default_rng(seed)
    # Eager attention is plain matrix products and a softmax: the reading that leaves least to a kernel.
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            centre, spread = (1.0, 0.2) if _is_norm_scale(name) else (0.0, 0.2)
            weight.copy_(torch.from_numpy(random.normal(centre, spread, tuple(weight.shape)).astype(np.float32)))
        tokens_BT = random.integers(config.vocab_size, size=(2, length))
        logits_BTV = model(torch.from_numpy(tokens_BT)).logits.numpy()
    weights = {name: weight.detach().numpy().copy() for name, weight in model.state_dict().items()}
    parameters = sum(weight.numel() for weight in model.parameters())
    return Reference(config.to_dict(), weights, tokens_BT, logits_BTV, parameters)


def _is_norm_scale(name: str) -> bool:
    return name.endswith((".ln_1.weight", ".ln_2.weight", ".ln_f.weight", "norm.weight"))
