"""Corpora as jobs of their own, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rung.corpus import sources as corpus_sources
from rung.corpus.aozora.build import Choices, Say, build_from_files, build_from_rows
from rung.corpus.folder import Corpus
from rung.corpus.hub import HubDataset
from rung.disk import check_apart
from rung.report.progress import track


def aozora(sources: Sequence[str], out: str | Path, choices: Choices, *, overwrite: bool = False, say: Say) -> Corpus:
    """Make a corpus of raw Aozora Bunko files at ``out``: one document a work.

    Raises:
        RungError: no text file, a file of no encoding that is known, fewer works than asked for, something at ``out``.
    """
    files = corpus_sources.resolve(sources)
    check_apart(Path(out), (file.path for file in files))
    with track(sum(file.size for file in files), "reading Aozora Bunko") as on_progress:
        return build_from_files(files, out, choices, overwrite=overwrite, on_progress=on_progress, say=say)


def aozora_of_hub(
    name: str, out: str | Path, choices: Choices, *, revision: str | None = None, overwrite: bool = False, say: Say
) -> Corpus:
    """Make a corpus of the rows of a data set of clean works, as a stream: no more of it is fetched than is used.

    Raises:
        RungError: no such data set, no network, rows of another kind, fewer works than asked for, something at ``out``.
    """
    dataset = HubDataset(name, revision=revision, streaming=True)
    sources = [{"name": dataset.title, "config": dataset.config, "files": dataset.files}]
    with track(None, "reading Aozora Bunko") as on_progress:
        return build_from_rows(
            dataset.rows, out, choices, sources=sources, overwrite=overwrite, on_progress=on_progress, say=say
        )
