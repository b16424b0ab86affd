"""Corpora of files of any kind, and of data sets of the Hub: each a corpus folder, resumable."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rung.config import DataConfig
from rung.corpus.documents import documents
from rung.corpus.folder import Corpus
from rung.corpus.hub import HubDataset
from rung.corpus.sources import fingerprint, resolve
from rung.corpus.writer import SHARD_BYTES, CorpusWriter
from rung.disk import check_apart
from rung.errors import RungError
from rung.report.progress import track
from rung.report.words import plural

Say = Callable[[str], None]


def collect_files(
    sources: Sequence[str],
    out: str | Path,
    data: DataConfig,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    say: Say,
) -> Corpus:
    """Make a corpus of the documents of files, with their metadata; cut short, it goes on from its last whole shard.

    Raises:
        RungError: unreadable text, no document with text, something at ``out`` already, a disk that is full.
    """
    files = resolve(sources)
    check_apart(Path(out), (file.path for file in files))
    made_from = [_as_source(fingerprint(file)) for file in files]
    settings = {name: getattr(data, name) for name in ("encoding", "format", "text_column", "separator")}
    with CorpusWriter(
        out, "files", sources=made_from, settings=settings, overwrite=overwrite, shard_bytes=shard_bytes
    ) as writer:
        _say_resumed(writer, say)
        before: int = writer.state["read"] if writer.state else 0
        read = empty = 0
        left_out = Counter[str]()

        def state() -> dict[str, int]:
            return {"read": read}

        with track(sum(file.size for file in files), "reading") as on_progress:
            # Those before are read again, to be counted; they are written already.
            for document in documents(files, data, on_progress, metadata=True, left_out=left_out):
                read += 1
                first = next(document.pieces, None)
                if first is None:
                    empty += 1
                elif read > before:
                    writer.write(document.name, itertools.chain([first], document.pieces), document.metadata)
                if read > before:
                    writer.mark(state)
        return _finished(writer, ", ".join(map(str, sources)), read, empty, left_out)


def collect_hub(
    name: str,
    out: str | Path,
    *,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    streaming: bool = False,
    column: str = "text",
    n_documents: int = 0,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    say: Say,
) -> Corpus:
    """Make a corpus of a data set of the Hub, a document a row; cut short, it goes on from its last whole shard.

    Args:
        name: ``owner/name``, or a folder laid out like one.
        out: the corpus folder to make.
        config: of the data set.
        split: of the data set.
        revision: a branch, tag or commit.
        streaming: read over the network what is needed, instead of fetching all first.
        column: that holds the text; the others are metadata.
        n_documents: take exactly so many documents with text; 0: all.
        overwrite: replace a corpus that is there.
        shard_bytes: of a shard.
        say: told what was gone on from, and what was left out.

    Raises:
        RungError: as ``HubDataset``; fewer than ``n_documents``; something at ``out`` already; a disk that is full.
    """
    source = HubDataset(name, config=config, split=split, revision=revision, streaming=streaming, column=column)
    asked = {"config": source.config, "split": split, "revision": revision, "text_column": column}
    settings = {"name": source.title, **asked, "documents": n_documents}
    with CorpusWriter(
        out, "hub", sources=source.files, settings=settings, overwrite=overwrite, shard_bytes=shard_bytes
    ) as writer:
        _say_resumed(writer, say)
        read, empty = (writer.state["read"], writer.state["empty"]) if writer.state else (0, 0)

        def state() -> dict[str, int]:
            return {"read": read, "empty": empty}

        with track(None, "reading") as on_progress:
            for row in source.rows(read) if not n_documents or writer.documents < n_documents else ():
                read += 1
                if row.text:
                    writer.write(f"{source.title}#{read}", row.text, row.metadata)
                else:
                    empty += 1
                writer.mark(state)
                on_progress(writer.bytes, None)
                if writer.documents == n_documents:
                    break
        if writer.documents < n_documents:
            raise RungError(
                f"{name} has {plural(writer.documents, 'document')} with text in {split!r}, "
                f"and {n_documents:,} are asked",
                f"ask for --documents {writer.documents}, or leave it out",
            )
        return _finished(writer, f"{name}, {split!r}", read, empty, source.left_out)


# Helpers


def _as_source(fingerprint: dict[str, Any]) -> dict[str, Any]:
    return {"size" if key == "bytes" else key: value for key, value in fingerprint.items()}


def _say_resumed(writer: CorpusWriter, say: Say) -> None:
    if writer.resumed:
        say(f"going on after {plural(writer.resumed, 'document')} written before")


def _finished(writer: CorpusWriter, name: str, read: int, empty: int, left_out: Counter[str]) -> Corpus:
    if not writer.documents:
        raise RungError(f"no text in {name}", "name a source that has text in it")
    return writer.finish({"read": read, "empty": empty, "left_out": dict(sorted(left_out.items()))})
