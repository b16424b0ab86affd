"""Tokenizers and token stores as jobs of their own, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rung.config import Config, DataConfig
from rung.corpus import sources as corpus_sources
from rung.report.progress import track
from rung.run.folder import TOKENIZER
from rung.run.prepare import Say, make_tokenizer
from rung.tokens.store import TokenStore, build_store
from rung.tokens.tokenizer import Tokenizer


def build(
    sources: Sequence[str],
    tokenizer_file: str | Path,
    out: str | Path,
    data: DataConfig,
    *,
    allow_lossy: bool = False,
    overwrite: bool = False,
    say: Say,
) -> TokenStore:
    """Encode text into a token store at ``out``, with its tokenizer beside the tokens.

    Raises:
        RungError: unreadable text, a tokenizer that is missing or lossy, something at ``out`` already.
    """
    tokenizer = Tokenizer.load(tokenizer_file, allow_lossy=allow_lossy)
    files = corpus_sources.resolve(sources)
    with track(sum(file.size for file in files), "tokenizing") as on_progress:
        store = build_store(files, tokenizer, out, data, overwrite=overwrite, on_progress=on_progress)
    tokenizer.save(Path(out) / TOKENIZER)
    if store.empty_documents:
        say(f"{store.empty_documents:,} empty documents are not in the store")
    return store


def train_tokenizer(sources: Sequence[str], config: Config, out: str | Path, *, say: Say) -> Tokenizer:
    """Learn a tokenizer from text and write it to ``out``."""
    tokenizer = make_tokenizer(corpus_sources.resolve(sources), config, say)
    tokenizer.save(out)
    return tokenizer
