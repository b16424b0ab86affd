"""Tokenizers and token stores as jobs of their own, with progress."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from rung.config import Config, DataConfig
from rung.corpus import sources as corpus_sources
from rung.corpus.workers import EngineName, engine
from rung.disk import cannot
from rung.errors import RungError
from rung.report.progress import track
from rung.report.words import plural
from rung.run.prepare import Say, make_tokenizer
from rung.run.tokens import say_of_in_place
from rung.tokens.files import BinType
from rung.tokens.importing import import_store
from rung.tokens.store import TokenStore, build_store, check_free
from rung.tokens.tokenizer import Tokenizer


def build(
    sources: Sequence[str],
    tokenizer_file: str | Path,
    out: str | Path,
    data: DataConfig,
    *,
    engine_name: EngineName = "local",
    workers: int = 0,
    allow_lossy: bool = False,
    overwrite: bool = False,
    say: Say,
) -> TokenStore:
    """Encode text into a token store at ``out``, with its tokenizer beside the tokens.

    ``workers`` encode at once, by default as many as there are cores; the store does not depend on them.

    Raises:
        RungError: unreadable text, a tokenizer that is missing or lossy, something at ``out`` already; an engine that
            is not installed or does not answer.
    """
    check_free(Path(out), overwrite, ())
    tokenizer = Tokenizer.load(tokenizer_file, allow_lossy=allow_lossy)
    files = corpus_sources.resolve(sources)
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(engine("ray", workers)) if engine_name == "ray" else None
        on_progress = stack.enter_context(track(sum(file.size for file in files), "tokenizing"))
        store = build_store(
            files, tokenizer, out, data, engine=made, workers=workers, overwrite=overwrite, on_progress=on_progress
        )
    if store.empty_documents:
        say(f"left out: {plural(store.empty_documents, 'empty document')}")
    return store


def import_tokens(
    files: Sequence[str],
    tokenizer_file: str | Path,
    out: str | Path | None = None,
    *,
    validation: Sequence[str] = (),
    validation_fraction: float | None = None,
    bin_type: BinType = "",
    verify: bool = False,
    allow_lossy: bool = False,
    overwrite: bool = False,
    say: Say,
) -> TokenStore:
    """Make a token store of files of ids that stay where they are; ``out`` is ``tokens/<name of the first>``.

    Raises:
        RungError: as ``rung.tokens.importing.import_store``; a tokenizer that is missing or lossy.
    """
    out = Path(out) if out else Path("tokens") / Path(files[0]).stem
    check_free(out, overwrite, ())
    tokenizer = Tokenizer.load(tokenizer_file, allow_lossy=allow_lossy)
    sizes = [Path(file).stat().st_size for file in [*files, *validation] if Path(file).is_file()]
    with track(sum(sizes), "looking at every id") as on_progress:
        store = import_store(
            files,
            tokenizer,
            out,
            validation=validation,
            validation_fraction=validation_fraction,
            bin_type=bin_type,
            verify=verify,
            overwrite=overwrite,
            on_progress=on_progress,
        )
    say_of_in_place(store, say)
    return store


def train_tokenizer(
    sources: Sequence[str], config: Config, out: str | Path, *, overwrite: bool = False, say: Say
) -> Tokenizer:
    """Learn a tokenizer from text and write it to ``out``.

    Raises:
        RungError: unreadable text, a vocabulary too small, something at ``out`` already, or no way to write there.
    """
    out = Path(out)
    if out.is_dir() or (out.exists() and not overwrite):
        raise RungError(f"{out} exists", "name another file" if out.is_dir() else "replace it with --overwrite")
    if out.exists() and not _is_tokenizer(out):
        raise RungError(f"{out} is no tokenizer, so it is not overwritten", "name another file with --out")
    files = corpus_sources.resolve(sources)
    with cannot(f"write {out}", "name another file with --out"):
        # Before the work, which may be long.
        out.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(out.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        tokenizer = make_tokenizer(files, config, say)
        tokenizer.save(out)
    return tokenizer


def _is_tokenizer(path: Path) -> bool:
    try:
        Tokenizer.load(path, allow_lossy=True)
    except RungError:
        return False
    return True
