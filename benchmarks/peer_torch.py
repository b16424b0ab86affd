"""The peer: a plain GPT in PyTorch and its training loop, to compare speed and loss with.

It is what one writes in PyTorch without tricks: pre-LayerNorm blocks, queries, keys and values in one matrix, the
library's causal attention, a tied output layer, fused AdamW. Without arguments it trains the usual character-level
Shakespeare recipe (the preset ``shakespeare-char-classic``). With ``--transformers`` the model is that library's GPT-2
of the same shape, with the biases that it has. The last line of standard output is JSON.

With ``--rounds`` it waits for lines on standard input: ``go 50`` trains 50 steps and prints their seconds, ``validate``
prints the validation loss, ``memory`` the peak of resident memory above what importing took; an empty line or the end
of the input ends it. So two programs can be timed in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from rung.host import begin_peak, resident_bytes

SHAKESPEARE = Path(__file__).parents[1] / "../shared/data/tinyshakespeare.txt"


class Attention(nn.Module):
    """Causal self-attention; x is [B, T, D]."""

    def __init__(self, shape: argparse.Namespace):
        super().__init__()
        self.n_heads = shape.n_heads
        self.dropout = shape.dropout
        width = shape.d_head * shape.n_heads if shape.d_head else shape.d_model
        self.qkv = nn.Linear(shape.d_model, 3 * width, bias=shape.bias)
        self.output = nn.Linear(width, shape.d_model, bias=shape.bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        q, k, v = (part.view(B, T, self.n_heads, -1).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y_BHTK = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.output(y_BHTK.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    """One pre-norm block; x is [B, T, D]."""

    def __init__(self, shape: argparse.Namespace):
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.d_model, bias=shape.bias)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.d_model, bias=shape.bias)
        self.mlp = nn.Sequential(
            nn.Linear(shape.d_model, 4 * shape.d_model, bias=shape.bias),
            {"gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"), "relu": nn.ReLU()}[shape.activation],
            nn.Linear(4 * shape.d_model, shape.d_model, bias=shape.bias),
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.norm1(x_BTD)))
        return x_BTD + self.dropout(self.mlp(self.norm2(x_BTD)))


class GPT(nn.Module):
    """The whole model, with GPT-2's initialisation."""

    def __init__(self, shape: argparse.Namespace):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.positions = nn.Embedding(shape.n_positions or shape.context_length, shape.d_model)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.LayerNorm(shape.d_model, bias=shape.bias)
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=shape.head_bias)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("output.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.n_layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        if not shape.untied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Return the cross-entropy in nats, averaged or summed over the targets."""
        x_BTD = self.dropout(self.embedding(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]])
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction=reduction)


class Gpt2(nn.Module):
    """GPT-2 of the library transformers, of a shape; called as ``GPT`` is."""

    def __init__(self, shape: argparse.Namespace):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        if shape.d_head or shape.head_bias:
            sys.exit("the GPT-2 of transformers has heads of d_model / n_heads, and no bias on the output layer")
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=shape.vocab_size,
                n_positions=shape.n_positions or shape.context_length,
                n_embd=shape.d_model,
                n_layer=shape.n_layers,
                n_head=shape.n_heads,
                activation_function={"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}[shape.activation],
                resid_pdrop=shape.dropout,
                embd_pdrop=shape.dropout,
                attn_pdrop=shape.dropout,
                tie_word_embeddings=not shape.untied,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
            )
        )

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Return the cross-entropy in nats, averaged or summed over the targets."""
        logits_BTV = self.model(tokens_BT).logits
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction=reduction)


class Peer:
    """A model in training: ``train`` goes on by some steps, ``validate`` measures."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        if args.random_tokens:
            tokens = np.random.default_rng(args.seed).integers(args.vocab_size, size=args.random_tokens)
            self.train_tokens, self.validation_tokens = np.split(tokens, [int(0.9 * len(tokens))])
        else:
            self.train_tokens, self.validation_tokens, vocab_size = read_characters(args.text, args.validation_fraction)
            args.vocab_size = args.vocab_size or vocab_size
        torch.manual_seed(args.seed)
        self.random = np.random.default_rng(args.seed)
        self.model = Gpt2(args) if args.transformers else GPT(args)
        self.forward = torch.compile(self.model) if args.compile else self.model
        self.optimizer = make_optimizer(self.model, args)
        self.step = 0
        self.loss = math.nan

    def train(self, steps: int) -> float:
        """Train ``steps`` more steps; return the seconds they took."""
        start = time.perf_counter()
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.args)
            loss = self.forward(*self.batch())
            loss.backward()
            if self.args.clip_norm:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
        self.loss = loss.item() if steps else self.loss
        return time.perf_counter() - start

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets [B, T] of the training part, from uniformly random offsets."""
        T = self.args.context_length
        starts_B = self.random.integers(len(self.train_tokens) - T, size=self.args.batch_size)
        windows = torch.from_numpy(self.train_tokens[starts_B[:, None] + np.arange(T + 1)])
        return windows[:, :-1], windows[:, 1:]

    @torch.no_grad()
    def validate(self) -> tuple[float, int]:
        """Return the mean loss over every target of the validation part, in contiguous windows, and their number."""
        self.model.eval()
        T, rows, tokens = self.args.context_length, 64, torch.from_numpy(self.validation_tokens)
        whole = (len(tokens) - 1) // T * T
        inputs, targets = tokens[:whole].view(-1, T), tokens[1 : whole + 1].view(-1, T)
        pieces = list(zip(inputs.split(rows), targets.split(rows), strict=True))
        if whole < len(tokens) - 1:
            pieces.append((tokens[None, whole:-1], tokens[None, whole + 1 :]))
        total = sum(self.model(x, y, reduction="sum").item() for x, y in pieces)
        self.model.train()
        return total / (len(tokens) - 1), len(tokens) - 1


def read_characters(path: Path, validation_fraction: float) -> tuple[np.ndarray, np.ndarray, int]:
    """Return a text as character ids [N] int64, cut into a training and a validation part, and the alphabet's size."""
    codes = np.frombuffer(path.read_text(encoding="utf-8").encode("utf-32-le"), np.uint32)
    alphabet, tokens = np.unique(codes, return_inverse=True)
    cut = int(len(tokens) * (1 - validation_fraction))
    return tokens[:cut].astype(np.int64), tokens[cut:].astype(np.int64), len(alphabet)


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW that decays matrices only; its fused kernel exists for CPU too."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, args.learning_rate, (args.beta1, args.beta2), fused=not args.no_fused)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine to ``final_learning_rate_ratio`` of the peak at the last step."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / (args.warmup_steps + 1)
    done = min(1.0, (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps))
    ratio = args.final_learning_rate_ratio
    return args.learning_rate * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * done)))


def main() -> None:
    """Train as the arguments say, whole or in rounds."""
    args = parse()
    torch.set_num_threads(args.threads)
    if args.transformers:
        import transformers  # noqa: F401 (so that it is not in the memory that training takes)
    imported = begin_peak()
    peer = Peer(args)
    tokens_a_step = args.batch_size * args.context_length
    if args.rounds:
        serve_rounds(peer, tokens_a_step, imported)
        return
    first = min(10, args.steps)  # the first steps allocate, or compile: not part of the speed
    peer.train(first)
    seconds = peer.train(args.steps - first)
    result = {
        "parameters": sum(weight.numel() for weight in peer.model.parameters()),
        "steps": peer.step,
        "train_loss": peer.loss,
        "seconds": seconds,
        "tokens_per_second": (args.steps - first) * tokens_a_step / seconds if args.steps > first else math.nan,
    }
    if args.validate:
        result["validation_loss"], result["validation_targets"] = peer.validate()
    print(json.dumps(result))


def serve_rounds(peer: Peer, tokens_a_step: int, imported: int) -> None:
    """Answer each line of standard input with one line of JSON; ``imported`` is the memory before there was a model."""
    for line in sys.stdin:
        words = line.split()
        if not words:
            break
        if words[0] == "go":
            seconds = peer.train(int(words[1]))
            answer = {"step": peer.step, "seconds": seconds, "tokens": int(words[1]) * tokens_a_step, "loss": peer.loss}
        elif words[0] == "validate":
            loss, targets = peer.validate()
            answer = {"step": peer.step, "validation_loss": loss, "validation_targets": targets}
        elif words[0] == "memory":
            answer = {"peak_bytes": resident_bytes("VmHWM") - imported, "imported_bytes": imported}
        else:
            sys.exit(f"expected 'go STEPS', 'validate' or 'memory', not {line!r}")
        print(json.dumps(answer), flush=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments; the defaults are the usual character-level Shakespeare recipe."""
    parser = argparse.ArgumentParser(description="Train a plain PyTorch GPT, to compare with.")
    add = parser.add_argument
    add("--text", type=Path, default=SHAKESPEARE, help="UTF-8 text, one token a character")
    add("--random-tokens", type=int, default=0, help="so many random tokens of --vocab-size instead of a text")
    add("--transformers", action="store_true", help="the GPT-2 of transformers instead of the plain model")
    add("--validation-fraction", type=float, default=0.1, help="part held out, at the end of the text")
    add("--vocab-size", type=int, default=0, help="rows of the embedding; 0: the characters of the text")
    add("--context-length", type=int, default=64)
    add("--n-positions", type=int, default=0, help="rows of the position table; 0: the context length")
    add("--n-layers", type=int, default=4)
    add("--n-heads", type=int, default=4)
    add("--d-head", type=int, default=0, help="width of a head; 0: d_model / n_heads")
    add("--d-model", type=int, default=128)
    add("--activation", choices=["gelu", "gelu_tanh", "relu"], default="gelu")
    add("--bias", action="store_true", help="biases in all linear layers and norms")
    add("--untied", action="store_true", help="an output layer of its own")
    add("--head-bias", action="store_true", help="bias on the output layer")
    add("--dropout", type=float, default=0.0)
    add("--batch-size", type=int, default=12)
    add("--steps", type=int, default=2000)
    add("--learning-rate", type=float, default=1e-3)
    add("--final-learning-rate-ratio", type=float, default=0.1)
    add("--warmup-steps", type=int, default=100)
    add("--beta1", type=float, default=0.9)
    add("--beta2", type=float, default=0.99)
    add("--weight-decay", type=float, default=0.1)
    add("--clip-norm", type=float, default=1.0, help="0: no clipping")
    add("--seed", type=int, default=1337)
    add("--threads", type=int, default=2)
    add("--compile", action="store_true", help="use torch.compile")
    add("--no-fused", action="store_true", help="the optimizer without its fused kernel")
    add("--validate", action="store_true", help="measure the loss over the whole validation part at the end")
    add("--rounds", action="store_true", help="train on request, as lines of standard input say")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
