"""Text becomes documents: split by file or separator, streamed in pieces of bounded size, and counted."""

from __future__ import annotations

import itertools
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rung.config import DataConfig
from rung.corpus.decoding import text_chunks
from rung.corpus.folder import Corpus, Record
from rung.corpus.formats import format_of, records
from rung.corpus.sources import Source
from rung.corpus.unpacking import File, unpacked

PIECE_CHARS = 1 << 16
MAX_NAMES = 10_000  # documents beyond this are counted but not listed by name

OnProgress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True)
class Document:
    """One document; ``"".join(pieces)`` is its text.

    ``name`` says where it is from: ``novel.txt``, ``novel.txt#3`` (the third between separators), ``-``,
    ``corpus/novel`` (of a corpus folder).
    ``pieces`` may be read once, and before the next document is asked for. ``metadata`` is what a source says of it
    beside the text, such as title and author.
    """

    name: str
    pieces: Iterator[str]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def documents(
    sources: Sequence[Source],
    config: DataConfig,
    on_progress: OnProgress | None = None,
    *,
    metadata: bool = False,
    left_out: Counter[str] | None = None,
) -> Iterator[Document]:
    """Yield the documents of ``sources`` in order, in bounded memory.

    Compressed files and archives are unpacked, whatever they hold; what a file holds is told by ``config.format`` or
    its name. A row of JSON lines or Parquet, an HTML page, a Markdown file and an EPUB book are a document each, and so
    is a text file. With ``config.separator`` a text file is split at each occurrence of it. The separator is not part
    of the text, nor is the one line break (LF, CR LF) right after it, unless the separator itself ends in a line break:
    a separator on a line of its own leaves no trace. Nothing before the first or after the last separator is no
    document; nothing between two is an empty document, and is yielded; so is a file that holds nothing else.

    Args:
        sources: files and corpus folders.
        config: the settings of the text.
        on_progress: told (bytes done, bytes in all), of files as they are, packed or not.
        metadata: also read the columns of Parquet beside the text.
        left_out: what is left out of markup is counted here, by its name.

    Raises:
        RungError: a file that cannot be read or decoded, an unknown encoding.
    """
    total, done = sum(source.size for source in sources), 0
    left_out = Counter() if left_out is None else left_out

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if on_progress:
            on_progress(done, total)

    for source in sources:
        if source.kind == "corpus":
            yield from _of_corpus(source, on_bytes)
            continue
        for file in unpacked(source, on_bytes):
            kind = format_of(file, config.format)
            if kind == "text":
                yield from _of_text(file, config)
            else:
                yield from _of_records(file.name, records(file, kind, config, metadata, left_out))


def even_pieces(chunks: Iterator[str], limit: int = PIECE_CHARS) -> Iterator[str]:
    """Yield the same text in pieces of at most ``limit`` characters, however it comes in chunks.

    A piece ends between a non-space character and a space, where one is in reach: there the pieces encode to the same
    ids as the whole under GPT-2's pattern, whose tokens never hold white space after anything else. Else it ends
    before other white space, and at ``limit`` where there is none (a line of 100 MB without a space).
    """
    held, start = "", 0
    for chunk in chunks:
        held, start = held[start:] + chunk, 0
        while len(held) - start > limit:
            cut = _cut(held, start, start + limit)
            yield held[start:cut]
            start = cut
    if start < len(held):
        yield held[start:]


@dataclass
class Scan:
    """What one streaming pass over the documents counts. Empty documents are counted apart, in no other number."""

    chars: array = field(default_factory=lambda: array("q"))  # of each document
    bytes: array = field(default_factory=lambda: array("q"))  # of each document, in UTF-8
    names: list[str] = field(default_factory=list)  # of the first MAX_NAMES documents
    empty: int = 0

    @property
    def n_documents(self) -> int:
        return len(self.chars)


def scan(sources: Sequence[Source], config: DataConfig, on_progress: OnProgress | None = None) -> Scan:
    """Count documents, characters and UTF-8 bytes; 16 bytes of memory a document.

    Raises:
        RungError: a file that cannot be read or decoded, an unknown encoding.
    """
    counted = Scan()
    for document in documents(sources, config, on_progress):
        chars = size = 0
        for piece in document.pieces:
            chars += len(piece)
            size += utf8_length(piece)
        if not chars:
            counted.empty += 1
            continue
        if counted.n_documents < MAX_NAMES:
            counted.names.append(document.name)
        counted.chars.append(chars)
        counted.bytes.append(size)
    return counted


def text_size(sources: Sequence[Source], config: DataConfig) -> int:
    """Return the UTF-8 bytes of text in ``sources``: of plain files their size; what is packed or marked up is read.

    Raises:
        RungError: a file that cannot be read or decoded, an unknown encoding.
    """
    other = [source for source in sources if not _is_plain(source, config)]
    plain = sum(source.size for source in sources) - sum(source.size for source in other)
    return plain + sum(scan(other, config).bytes)


def utf8_length(text: str) -> int:
    """Return the number of bytes of ``text`` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


# Helpers

_BEFORE_SPACE = re.compile(r"(?<=\S) ")
_BEFORE_WHITE = re.compile("(?<=\\S)[ \t\n\r\u3000]")
_NEAR = 4096  # characters at the end of a piece that are searched first; nearly always enough


def _cut(text: str, start: int, stop: int) -> int:
    """Return the last good place to end the piece of ``text`` that begins at ``start``, at most ``stop``."""
    for pattern in (_BEFORE_SPACE, _BEFORE_WHITE):
        for low in (max(start, stop - _NEAR), start):
            cut = max((found.start() for found in pattern.finditer(text, low, stop + 1)), default=start)
            if cut > start:
                return cut
    return stop


def _is_plain(source: Source, config: DataConfig) -> bool:
    """Return whether a source's size is that of its text, as far as encodings go."""
    if source.kind == "corpus":
        return True
    file = next(unpacked(source))
    return file.seekable and file.name == source.name and format_of(file, config.format) == "text"


def _of_text(file: File, config: DataConfig) -> Iterator[Document]:
    chunks = text_chunks(file, config.encoding)
    if not config.separator:
        yield from _read_through(Document(file.name, even_pieces(chunks)))
        return
    number = 0
    for number, part in enumerate(_split(chunks, config.separator), start=1):
        yield from _read_through(Document(f"{file.name}#{number}", even_pieces(part)))
    if not number:
        yield Document(file.name, iter(()))


def _of_records(name: str, found: Iterator[Record]) -> Iterator[Document]:
    empty = True
    for record in found:
        empty = False
        yield from _read_through(Document(record.name, even_pieces(record.pieces), record.metadata))
    if empty:
        yield Document(name, iter(()))


def _of_corpus(source: Source, on_bytes: Callable[[int], None]) -> Iterator[Document]:
    for record in Corpus.open(source.path).records():
        pieces = even_pieces(_told(record.pieces, on_bytes))
        yield from _read_through(Document(f"{source.name}/{record.name}", pieces, record.metadata))


def _told(pieces: Iterator[str], on_bytes: Callable[[int], None]) -> Iterator[str]:
    for piece in pieces:
        yield piece
        on_bytes(utf8_length(piece))


def _read_through(document: Document) -> Iterator[Document]:
    yield document
    for _ in document.pieces:  # what the consumer left unread still stands before the next document
        pass


def _split(chunks: Iterator[str], separator: str) -> Iterator[Iterator[str]]:
    """Yield the text of each document between separators, as an iterator to be read before the next is asked for."""
    events = _events(chunks, separator)
    end = object()
    first = True
    while (event := next(events, end)) is not end:
        if isinstance(event, str):
            # The part goes on until the next separator (None) or the end of the file.
            yield itertools.chain([event], iter(lambda: next(events, None), None))
        elif not first:
            yield iter(())
        first = False


def _events(chunks: Iterator[str], separator: str) -> Iterator[str | None]:
    """Yield the stretches of text between separators, and None at each separator."""
    line_break = "" if separator.endswith(("\n", "\r")) else r"(?:\r?\n)?"
    pattern = re.compile(re.escape(separator) + line_break)
    held = ""
    for chunk in chunks:
        held += chunk
        start = 0
        # A match near the end waits for more text: its line break (two characters at most) may be yet to come.
        while (found := pattern.search(held, start)) and found.end() + 2 <= len(held):
            if found.start() > start:
                yield held[start : found.start()]
            yield None
            start = found.end()
        keep = found.start() if found else max(start, len(held) - len(separator) + 1)
        if keep > start:
            yield held[start:keep]
        held = held[keep:]
    start = 0
    for found in pattern.finditer(held):
        if found.start() > start:
            yield held[start : found.start()]
        yield None
        start = found.end()
    if start < len(held):
        yield held[start:]
