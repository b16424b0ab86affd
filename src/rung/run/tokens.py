"""Tokens that were made before: a token store, or a bare file of tokens whose end is held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rung.errors import RungError
from rung.tokens.shards import read_shard
from rung.tokens.store import DATASET, Tokens, TokenStore
from rung.tokens.tokenizer import Tokenizer

_BLOCK_TOKENS = 1 << 24
_MIN_TOKENS = 2  # of a split: one input and its target
_NEAR = 0.5  # a document's end is taken for the cut when it moves the cut by at most this much of what is held out


def is_tokens(source: str | Path) -> bool:
    """Return whether ``source`` names a token store or a safetensors file, rather than text."""
    path = Path(source)
    return (path / DATASET).exists() or (path.suffix == ".safetensors" and path.is_file())


def open_tokens(path: Path, tokenizer: Tokenizer, validation_fraction: float) -> TokenStore:
    """Open a token store; or a bare safetensors file with one ``tokens`` tensor, its last part the validation split.

    Args:
        path: of the folder or file.
        tokenizer: that the tokens of a bare file were made with.
        validation_fraction: of a bare file that is held out; cut between two documents where two meet near there.

    Raises:
        RungError: nothing there, a damaged file, too few tokens, an id that is not in the vocabulary.
    """
    store = TokenStore.open(path, tokenizer)
    if not path.is_file():
        return store
    starts = store.split("train").document_starts
    tokens, _ = read_shard(path)
    if len(tokens) < _MIN_TOKENS:
        raise RungError(f"{path} holds {len(tokens)} tokens", f"training takes {_MIN_TOKENS} at least")
    cut = _cut(len(tokens), starts, validation_fraction)
    splits = {"train": _part(path, tokens[:cut], starts[starts < cut], tokenizer)}
    if cut < len(tokens):
        splits["validation"] = _part(path, tokens[cut:], starts[starts >= cut] - cut, tokenizer)
    return TokenStore(path, {}, splits)


def _cut(n_tokens: int, starts: np.ndarray, fraction: float) -> int:
    """Return the token that the validation split begins with; ``n_tokens`` where none is held out."""
    held_out = round(fraction * n_tokens)
    if held_out < _MIN_TOKENS:
        return n_tokens
    cut = n_tokens - held_out
    near = starts[np.abs(starts - cut) <= _NEAR * held_out]
    near = near[(near >= _MIN_TOKENS) & (near <= n_tokens - _MIN_TOKENS)]
    return int(near[np.argmin(np.abs(near - cut))]) if len(near) else cut


def _part(path: Path, tokens: np.ndarray, starts: np.ndarray, tokenizer: Tokenizer) -> Tokens:
    if not len(starts) or starts[0] != 0:
        starts = np.concatenate([[0], starts])  # a document that begins in the split before
    text_bytes = 0
    for low in range(0, len(tokens), _BLOCK_TOKENS):
        ids = np.asarray(tokens[low : low + _BLOCK_TOKENS], np.int64)
        if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
            wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)][0]
            raise RungError(
                f"{path} has the token id {wrong}, and the tokenizer's vocabulary is {tokenizer.vocab_size}",
                "name the tokenizer that made these tokens",
            )
        text_bytes += int(tokenizer.token_bytes[ids].sum(dtype=np.int64))
    return Tokens([tokens], starts.astype(np.int64), text_bytes, tokenizer.end_id)
