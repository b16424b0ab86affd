"""Cleaning a corpus as a job of its own, with progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rung.config import CleanConfig, DataConfig
from rung.corpus.cleaning import Cleaned, clean
from rung.corpus.documents import Scan
from rung.corpus.folder import Corpus
from rung.corpus.workers import EngineName, engine
from rung.report.progress import track
from rung.tokens.split import hold_out

Say = Callable[[str], None]


def clean_corpus(
    source: str | Path,
    out: str | Path | None,
    settings: CleanConfig,
    *,
    data: DataConfig | None = None,
    engine_name: EngineName = "local",
    workers: int = 0,
    overwrite: bool = False,
    say: Say,
) -> Cleaned:
    """Write the documents of a corpus that stay into another, or with ``out`` None only report what would go.

    Raises:
        RungError: as ``rung.corpus.cleaning.clean``; an engine that is not installed or does not answer.
    """

    def choose(counted: Scan) -> frozenset[int]:
        return hold_out(counted, settings.held_out).documents

    total = 2 * sum(shard.file_bytes for shard in Corpus.open(source).shards)
    with engine(engine_name, workers) as made, track(total, "cleaning") as on_progress:
        cleaned = clean(
            source, out, settings, made, data=data, choose=choose, overwrite=overwrite, on_progress=on_progress
        )
    if cleaned.resumed:
        say(f"{cleaned.resumed:,} bytes were judged before, and were not judged again")
    return cleaned
