"""Bytes become text: strictly, in bounded memory, and alike under every locale."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol

from rung.errors import RungError, nearest

# The longer marks first: that of UTF-32 LE begins with that of UTF-16 LE.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Without a mark these would take the byte order of the machine.
_UNMARKED = {"utf-16": "utf-16-le", "utf-32": "utf-32-le", "utf-8-sig": "utf-8"}

_READ_BYTES = 1 << 18
_PROBE_BYTES = 1 << 16
_BINARY_NULS = 0.1  # share of NUL bytes over which a file that should be UTF-8 is not text

_SIGNATURES = (
    (b"\x1f\x8b", "gzip", "decompress it first: zcat FILE | rung ... -"),
    (b"\xfd7zXZ", "xz", "decompress it first: xzcat FILE | rung ... -"),
    (b"BZh", "bzip2", "decompress it first: bzcat FILE | rung ... -"),
    (b"\x28\xb5\x2f\xfd", "Zstandard", "decompress it first: zstdcat FILE | rung ... -"),
    (b"PK\x03\x04", "zip", "unpack it first, and name the text files"),
    (b"%PDF", "PDF", "extract its text first"),
    (b"\x89PNG", "PNG", "name text files"),
    (b"\xff\xd8\xff", "JPEG", "name text files"),
    (b"\x7fELF", "program", "name text files"),
    (b"PAR1", "Parquet", "name text files"),
)
# An encoding is suggested when enough of the characters beyond ASCII are the ones that are frequent in its languages.
_SUGGESTIONS = (
    ("cp932", re.compile("[\u3000-\u30ff]"), 0.2),
    ("euc_jp", re.compile("[\u3000-\u30ff]"), 0.2),
    ("cp949", re.compile("[이다는을가에의고지한]"), 0.1),
    ("gb18030", re.compile("[的一是不了在人有我他这中]"), 0.04),
    ("cp1252", re.compile("[\u00a0-\u00ff\u2013-\u2026\u20ac]"), 0.8),
)

# What a person is reminded of; any other text encoding of Python's works too.
_COMMON = (
    *("utf-8", "utf-16", "cp932", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr", "cp949"),
    *("latin-1", "cp1252", "iso8859-15", "cp1251", "koi8-r", "cp1250", "cp1253", "cp1256", "tis-620"),
)
# Spellings of names and of source code, which are no encodings of files.
_NOT_FOR_FILES = ("idna", "punycode", "unicode_escape", "raw_unicode_escape", "undefined")


class Readable(Protocol):
    """What text is read from: a source, or a file that was in one."""

    @property
    def name(self) -> str: ...

    def open(self) -> BinaryIO: ...


def text_chunks(source: Readable, encoding: str, on_bytes: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yield the text of a file in chunks of at most 256 KiB of bytes; line endings stay as they are.

    A byte-order mark wins over ``encoding`` and is not part of the text. ``on_bytes`` is told of the bytes read.

    Raises:
        RungError: an undecodable byte (named with its offset), a binary file, an unknown encoding.
    """
    check_encoding(encoding)
    packed = getattr(source, "packed", "")
    damage = f"; if it was text when it was packed, the {packed} file is damaged: get it again" if packed else ""
    with source.open() as file:
        head = file.read(_PROBE_BYTES)
        mark, encoding = _marked(head, encoding)
        if encoding == "utf-8" and head.count(0) > _BINARY_NULS * len(head):
            nuls = f"{head.count(0)} of its first {len(head)} bytes are NUL"
            raise RungError(f"{source.name} looks binary: {nuls}", _hint(head) + damage)
        decoder = codecs.getincrementaldecoder(encoding)("strict")
        offset, block = len(mark), head[len(mark) :]
        if on_bytes and mark:
            on_bytes(len(mark))
        while block:
            yield _decoded(decoder, block, offset, source.name, encoding, head, file, damage)
            offset += len(block)
            if on_bytes:
                on_bytes(len(block))
            block = file.read(_READ_BYTES)
        yield _decoded(decoder, b"", offset, source.name, encoding, head, file, damage)


def check_encoding(encoding: str) -> None:
    """Raise a RungError when Python knows no text encoding of this name."""
    try:
        codec = codecs.lookup(encoding)
        known = codec._is_text_encoding and codec.name not in _NOT_FOR_FILES  # the flag bytes.decode looks at
    except (LookupError, ValueError):
        known = False
    if not known:
        raise RungError(f"unknown encoding {encoding!r}", nearest(encoding, _COMMON))


# Helpers


def _marked(head: bytes, encoding: str) -> tuple[bytes, str]:
    for mark, marked in _MARKS:
        if head.startswith(mark):
            return mark, marked
    name = codecs.lookup(encoding).name
    return b"", _UNMARKED.get(name, name)


def _decoded(
    decoder: codecs.IncrementalDecoder,
    block: bytes,
    offset: int,
    name: str,
    encoding: str,
    head: bytes,
    file: BinaryIO,
    damage: str,
) -> str:
    """Decode a block (empty: the end of the file) that begins at byte ``offset``; ``file`` stands after it."""
    pending = decoder.getstate()[0]
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        # Decoders differ in what error.start counts from; decoding the pending bytes and the block afresh does not.
        data = pending + block
        start = error.start
        try:
            data.decode(encoding)
        except UnicodeDecodeError as whole:
            start = whole.start
        where = offset - len(pending) + start
        around = b"" if where < len(head) else (data[start:] + file.read(_PROBE_BYTES))[:_PROBE_BYTES]
        problem = f"{name}: byte 0x{data[start]:02x} at offset {where} is not {encoding}"
        raise RungError(problem, _hint(head + around) + damage) from None


def _hint(sample: bytes) -> str:
    for signature, kind, way_out in _SIGNATURES:
        if sample.startswith(signature):
            return f"it is a {kind} file; {way_out}"
    encoding = _suggestion(sample)
    if encoding:
        return f"it would decode as {encoding}: if that is what it is, --encoding {encoding}"
    return "if it is text, name its encoding, for example --encoding cp932; if not, leave it out"


def _suggestion(sample: bytes) -> str | None:
    if sample.count(0) > _BINARY_NULS * len(sample):
        pairs = len(sample) // 2
        if sample[1::2].count(0) > 0.4 * pairs and not sample[::2].count(0) > 0.1 * pairs:
            return "utf-16-le"
        if sample[::2].count(0) > 0.4 * pairs and not sample[1::2].count(0) > 0.1 * pairs:
            return "utf-16-be"
        return None
    for encoding, usual, share in _SUGGESTIONS:
        try:
            # The sample may end within a character, which is no error.
            text = codecs.getincrementaldecoder(encoding)("strict").decode(sample)
        except UnicodeDecodeError:
            continue
        beyond = [character for character in text if character > "\x7f"]
        control = sum(character < " " and character not in "\t\n\r\f\x1a" for character in text)
        if beyond and not control and len(usual.findall(text)) >= share * len(beyond):
            return encoding
    return None
