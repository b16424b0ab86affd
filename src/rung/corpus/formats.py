"""What a file holds, by its name or as the user says, and the reader for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rung.config import DataConfig
from rung.corpus import markup, rows
from rung.corpus.epub import epub
from rung.corpus.folder import Record
from rung.corpus.unpacking import File
from rung.errors import RungError

_BY_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".md": "markdown",
    ".markdown": "markdown",
    ".epub": "epub",
}
_PARQUET = b"PAR1"


def format_of(file: File, wanted: str) -> str:
    """Return what a file holds: ``text``, ``jsonl``, ``parquet``, ``html``, ``markdown`` or ``epub``.

    Args:
        file: the file, unpacked.
        wanted: what it holds, or ``auto``: by its suffix; Parquet and EPUB also by content; text where neither says.

    Raises:
        RungError: it should be Parquet or EPUB, and is not.
    """
    is_parquet = file.head.startswith(_PARQUET)
    found = wanted if wanted != "auto" else "parquet" if is_parquet else _BY_SUFFIX.get(file.suffix, "text")
    if found == "parquet" and not is_parquet:
        raise RungError(f"{file.name} is not Parquet, whose files begin with PAR1", _or_else(wanted))
    if found == "epub" and not file.is_zip:
        raise RungError(f"{file.name} is not an EPUB, which is a zip", _or_else(wanted))
    return found


def records(file: File, kind: str, config: DataConfig, metadata: bool, left_out: Counter[str]) -> Iterator[Record]:
    """Yield the documents of a file that is not plain text.

    Raises:
        RungError: as the reader of its format.
    """
    if kind == "jsonl":
        return rows.json_lines(file, config.encoding, config.text_column, left_out)
    if kind == "parquet":
        return rows.parquet(file, config.text_column, metadata, left_out)
    if kind == "html":
        return markup.html(file, config.encoding, left_out)
    if kind == "markdown":
        return markup.markdown(file, config.encoding, left_out)
    assert kind == "epub", f"no reader of {kind}"
    return epub(file, left_out)


def _or_else(wanted: str) -> str:
    if wanted != "auto":
        return "leave --format out, or name what it is"
    return "get it again: it was cut short or changed; or say what it is: --format text"
