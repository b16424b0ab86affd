"""Looks at text and at tokens: a pass over either, and what was found as lines, values and a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rung.config import DataConfig
from rung.corpus import sources as corpus_sources
from rung.corpus.filters import language_of
from rung.corpus.folder import Corpus, is_corpus
from rung.corpus.look import look_at
from rung.disk import cannot, whole_file
from rung.errors import RungError
from rung.report.data_page import (
    TextView,
    TokenView,
    text_lines,
    text_page,
    text_result,
    token_lines,
    token_page,
    token_result,
)
from rung.report.html import is_page
from rung.report.progress import track
from rung.run.folder import CONFIG, Run
from rung.run.tokens import open_store, tokenizer_of
from rung.tokens.look import MOST_TOKENS, look_at_split, windows
from rung.tokens.mixture import MixedStore, Store, parts, training_batches
from rung.tokens.store import DATASET
from rung.tokens.tokenizer import Tokenizer

_LEAST_CHARS = 20  # of a document whose language is told


def look_at_text(
    sources: Sequence[str], data: DataConfig, *, samples: int = 5, html: str | Path | None = None
) -> dict[str, Any]:
    """Look at all of a text, or of a corpus folder, once.

    Args:
        sources: files, folders, globs, corpus folders.
        data: how they are read.
        samples: documents to show.
        html: a page to write.

    Returns:
        What was found, and ``lines`` for a terminal; ``html`` where a page was written.

    Raises:
        RungError: unreadable text; the page cannot be written, or would replace what is no page.
    """
    files = corpus_sources.resolve(sources)
    if html is not None:
        _check_page(Path(html), [file.path for file in files])
    with track(sum(file.size for file in files), "looking at the text") as on_progress:
        look = look_at(files, data, on_progress)
    about: dict[str, Any] = {}
    if len(sources) == 1 and is_corpus(sources[0]):
        corpus = Corpus.open(sources[0])
        about = {"kind": corpus.kind, **{str(name): value for name, value in corpus.report.items()}}
    told = [one.text for one in look.excerpts if len(one.text) >= _LEAST_CHARS]
    try:
        languages: dict[str, int] | None = dict(Counter(language_of(text) for text in told).most_common())
    except RungError:  # scripts are told all the same
        languages = None
    title = ", ".join(Path(source).name or str(source) for source in sources[:3]) + (", …" if len(sources) > 3 else "")
    listed = [{"name": file.name, "bytes": file.size} for file in files]
    view = TextView(title, listed, look, languages, about, samples)
    return {**text_result(view), "lines": text_lines(view), **_written(html, lambda: text_page(view))}


def look_at_tokens(
    paths: Sequence[str],
    *,
    tokenizer_file: str | Path | None = None,
    context_length: int = 0,
    step: int = 1,
    rows: int = 3,
    every_token: bool = False,
    html: str | Path | None = None,
) -> dict[str, Any]:
    """Look at token stores, or at what a run trains on.

    Args:
        paths: a store, several as a mixture without weights, a file of ids, or a run.
        tokenizer_file: that made a bare file of ids.
        context_length: of the windows that are shown; 0: the run's, else 256.
        step: whose batch is shown, counted from 1.
        rows: of the batch.
        every_token: look at all tokens of a large store, not at a sample.
        html: a page to write.

    Returns:
        What was found, and ``lines`` for a terminal; ``html`` where a page was written.

    Raises:
        RungError: no store or run there; no tokenizer; too few tokens for a window; the page as in ``look_at_text``.
    """
    if html is not None:
        _check_page(Path(html), map(Path, paths))
    run = Run(paths[0]) if len(paths) == 1 and (Path(paths[0]) / CONFIG).is_file() else None
    if tokenizer_file and Path(paths[0]).is_dir():
        raise RungError(
            f"{paths[0]} has its own tokenizer, and {tokenizer_file} is named beside it",
            "leave --tokenizer out: it is for a bare file of ids",
        )
    store, tokenizer = (run.store, run.tokenizer) if run else _opened(paths, tokenizer_file)
    looked, documents, notes = {}, {}, []
    for name in store.splits:
        for part in parts(store, name):
            title = f"{name}, {part.name}" if isinstance(store, MixedStore) else name
            most = None if every_token else MOST_TOKENS
            with track(2 * min(len(part.tokens), most or len(part.tokens)), f"looking at {title}") as on_progress:
                looked[title] = look_at_split(part.tokens, tokenizer, most, on_progress)
            documents[title] = part.tokens.n_documents
            if not looked[title].whole:
                notes.append(
                    f"{title}: {looked[title].seen:,} of {len(part.tokens):,} tokens were looked at, in blocks spread "
                    "evenly; --all looks at each"
                )
    config = run.config if run else None
    shortest = min(len(part.tokens) for part in parts(store, "train"))
    length = context_length or (config.model.context_length if config else min(256, max(1, shortest - 1)))
    batches = training_batches(
        store,
        context_length=length,
        batch_size=config.train.batch_size if config else rows,
        seed=config.train.seed if config else 0,
        windows=config.data.windows if config else "contiguous",
        cross_documents=config.data.cross_documents if config else False,
    )
    view = TokenView(
        title=run.path.resolve().name if run else ", ".join(Path(path).name for path in paths),
        tokenizer=tokenizer,
        splits=looked,
        documents=documents,
        windows=windows(batches, step - 1, rows),
        context_length=length,
        notes=notes,
    )
    return {**token_result(view), "lines": token_lines(view), **_written(html, lambda: token_page(view))}


def _opened(paths: Sequence[str], tokenizer_file: str | Path | None) -> tuple[Store, Tokenizer]:
    first = Path(paths[0])
    if not first.is_file() and not (first / DATASET).is_file():
        raise RungError(f"no token store at {first}", "name a store, a file of ids, or a run")
    tokenizer = tokenizer_of(first, tokenizer_file or "", allow_lossy=True)  # nothing is encoded
    return open_store([Path(path) for path in paths], tokenizer, None, ()), tokenizer


def _check_page(html: Path, sources: Iterable[Path]) -> None:
    """Refuse to write a page in place of anything but another page, or among what it is about."""
    hint = "name another file with --html"
    for source in sources:
        if html.resolve().is_relative_to(source.resolve()):
            where = "is" if html.resolve() == source.resolve() else f"is in {source},"
            raise RungError(f"{html} {where} what is looked at", hint)
    if html.exists() and not is_page(html):
        raise RungError(f"{html} is not a page of Rung's, so it is not overwritten", hint)


def _written(html: str | Path | None, page: Any) -> dict[str, Any]:
    if html is None:
        return {}
    with cannot(f"write {html}", "name another file with --html"), whole_file(html) as file:
        file.write(page().encode("utf-8", errors="backslashreplace"))
    return {"html": str(html)}
