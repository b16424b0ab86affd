"""Compressed files and archives: each file that is in them, as a stream, with every damage named."""

from __future__ import annotations

import contextlib
import errno
import io
import lzma
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from rung.corpus.sources import Source
from rung.disk import reason
from rung.errors import RungError

HEAD_BYTES = 1 << 12  # what a file's kind is told by

_BUFFER_BYTES = 1 << 18
_ARCHIVES_WITHIN = 2  # an archive, and archives in it
_SPOOL_MEMORY = 16 << 20  # of an archive within something packed; what is over lies in a temporary file

_COMPRESSED = (
    (b"\x1f\x8b\x08", "gzip"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"BZh", "bzip2"),
    (b"\x28\xb5\x2f\xfd", "Zstandard"),
)
_PACKED = frozenset(kind for _, kind in _COMPRESSED)
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")  # after the fourth byte: the first block, or the end
_SUFFIXES = (".gz", ".zst", ".xz", ".bz2", ".bz", ".zstd")
_ZIP = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
_EPUB = re.compile(rb".{30}mimetype.{0,60}application/epub\+zip", re.DOTALL)  # its first member says it
_TAR_MAGIC = (257, b"ustar")
_TAR_BLOCK = 512
_OFFICE = {"word/": "Word", "xl/": "Excel", "ppt/": "PowerPoint"}


@dataclass(frozen=True)
class File:
    """One file of bytes, which may stand in an archive or be compressed.

    ``name`` is for people: ``novels.zip/snow.txt.gz``. ``suffix`` tells what it is, whatever it is packed in: ``.txt``.
    ``stream`` is read once, from its beginning; ``seekable`` says whether it can go back too.
    ``packed`` is the compression it comes out of, if any: what is wrong with it may be damage.
    """

    name: str
    suffix: str
    stream: io.BufferedReader
    seekable: bool
    is_zip: bool = False
    packed: str = ""

    @property
    def head(self) -> bytes:
        return self.stream.peek(HEAD_BYTES)[:HEAD_BYTES]

    def open(self) -> BinaryIO:
        return self.stream


def unpacked(source: Source, on_bytes: Callable[[int], None] | None = None) -> Iterator[File]:
    """Yield the files that a source comes to: itself, decompressed, or those of an archive in the order of their paths.

    What a file is packed in is told by its content, not its name. Hidden files of an archive (a name that begins with a
    dot, macOS's own folder) are not taken, as with folders; nor are links. Archives in an archive may hold no archives.
    A zip whose suffix is ``.epub``, or that says so itself, is a file. Each file is to be read before the next.

    Args:
        source: a file.
        on_bytes: told of the source's bytes as they are read, ``source.size`` of them in the end.

    Raises:
        RungError: a damaged, cut or encrypted archive or compression, named with the place; archives in archives.
    """
    meter = _Meter(source.size, on_bytes or (lambda count: None))
    with contextlib.ExitStack() as open_files:
        raw = open_files.enter_context(source.open())
        stream = _stream(raw, source.name, _Span(meter, 0, source.size), source.size)
        yield from _unpacked(stream, source.name, source.name, _Span(meter, 0, source.size), _ARCHIVES_WITHIN, True)
        meter.reach(source.size)


def file_of_zip(member: BinaryIO, name: str) -> File:
    """Return a member of a zip, opened, as a file whose damages are named."""
    return File(name, PurePosixPath(name).suffix.lower(), _stream(member, name, None, 0, "zip"), False)


# Progress


class _Meter:
    def __init__(self, size: int, on_bytes: Callable[[int], None]):
        self._size, self._on_bytes, self._told = size, on_bytes, 0

    def reach(self, done: float) -> None:
        whole = min(int(done), self._size)
        if whole > self._told:
            self._on_bytes(whole - self._told)
            self._told = whole


@dataclass(frozen=True)
class _Span:
    """Which of a source's bytes a stream stands for."""

    meter: _Meter
    begin: float
    end: float

    def reach(self, part: float) -> None:
        self.meter.reach(self.begin + part * (self.end - self.begin))

    def part(self, begin: float, end: float) -> _Span:
        width = self.end - self.begin
        return _Span(self.meter, self.begin + begin * width, self.begin + end * width)


class _Stream(io.RawIOBase):
    """A file that tells how far it has been read, and whose failures are RungErrors."""

    def __init__(self, file: Any, name: str, kind: str, span: _Span | None, length: int):
        self._file, self._name, self._kind, self._span, self._length = file, name, kind, span, length
        self._at, self._lines = 0, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def tell_no_more(self) -> None:
        """Be silent on how far it is read: an archive's members tell instead."""
        self._span = None

    def readinto(self, buffer: Any) -> int:
        view, filled = memoryview(buffer), 0
        try:
            # Decompressors give little at a time: a peek at the head should see all of it.
            while filled < min(len(view), HEAD_BYTES):
                data = self._read(len(view) - filled)
                if not data:
                    break
                self._lines += data.count(b"\n") if self._kind in _PACKED else 0
                view[filled : filled + len(data)] = data
                filled += len(data)
        except _damages() as error:
            self._at += filled
            raise self._damaged(error) from None
        self._at += filled
        if self._span and self._length:
            self._span.reach(min(1.0, self._at / self._length))
        return filled

    def _read(self, size: int) -> bytes:
        # Of damaged data, what comes before the damage; a plain read would lose it.
        data: bytes = self._file.read1(size) if hasattr(self._file, "read1") else self._file.read(size)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = self._file.seek(offset, whence)
        return self._at

    def tell(self) -> int:
        return self._at

    def _damaged(self, error: Exception) -> RungError:
        if isinstance(error, OSError) and error.errno is not None:
            return RungError(f"{self._name} cannot be read: {reason(error)}", "look at the disk")
        if "password" in str(error):
            return RungError(f"{self._name} is encrypted", "unpack it with its password first")
        if isinstance(error, NotImplementedError):
            return RungError(f"{self._name} is packed in a way that is not known here", "unpack it first")
        if "memory" in str(error):
            hint = "unpack it first: zstdcat --long=31 FILE | rung ... -"
            return RungError(f"{self._name} takes a window of over 128 MiB to decompress", hint)
        cut = isinstance(error, EOFError) or "unexpected end" in str(error)
        how = "ends too soon" if cut else f"is damaged ({_first_line(error)})"
        place = f"{self._at:,} bytes of text" + (f", {self._lines:,} whole lines" if self._lines else "")
        problem = f"{self._name}: the {self._kind} data {how}, after {place}"
        return RungError(problem, "get the file again: it was cut short or changed on its way")


def _stream(file: Any, name: str, span: _Span | None, length: int, kind: str = "file") -> io.BufferedReader:
    return io.BufferedReader(_Stream(file, name, kind, span, length), _BUFFER_BYTES)


def _damages() -> tuple[type[Exception], ...]:
    known: list[type[Exception]] = [OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile]
    known += [tarfile.TarError, RuntimeError, NotImplementedError]
    with contextlib.suppress(ImportError):
        known.append(_zstd().ZstdError)
    return tuple(known)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# What is in what


def _unpacked(
    stream: io.BufferedReader, name: str, path: str, span: _Span, archives: int, seekable: bool
) -> Iterator[File]:
    outer, kind = stream.raw, _compression(stream.peek(HEAD_BYTES))
    if kind:
        stream = _stream(_decompressor(kind, stream, name), name, None, 0, kind)
        seekable = False
        path = _without_suffix(path)
    head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
    suffix = PurePosixPath(path).suffix.lower()
    is_zip = head.startswith(_ZIP)
    is_epub = is_zip and (suffix == ".epub" or _EPUB.match(head) is not None)
    is_tar = head[_TAR_MAGIC[0] :].startswith(_TAR_MAGIC[1]) or (suffix == ".tar" and len(head) >= _TAR_BLOCK)
    if is_epub or not (is_zip or is_tar):
        yield File(name, ".epub" if is_epub else suffix, stream, seekable, is_zip, kind or "")
        return
    assert isinstance(outer, _Stream)
    outer.tell_no_more()
    if not archives:
        raise RungError(f"{name} is an archive in an archive in an archive", "unpack the outer ones first")
    with contextlib.ExitStack() as open_files:
        if not seekable:
            stream = open_files.enter_context(spooled(stream, name))
        members = _zip_members if is_zip else _tar_members
        yield from members(stream, name, span, archives, open_files)


def spooled(stream: BinaryIO, name: str) -> Any:
    """Return a copy of a stream that can go back: in memory as far as it is small, else in a temporary file.

    Raises:
        RungError: no room for it.
    """
    spool = tempfile.SpooledTemporaryFile(_SPOOL_MEMORY, prefix="rung-")  # noqa: SIM115 - the caller closes it
    try:
        shutil.copyfileobj(stream, spool, _BUFFER_BYTES)
    except BaseException as error:
        spool.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = f"{name} does not fit into {tempfile.gettempdir()} unpacked"
            raise RungError(problem, "unpack it yourself, or name a larger place: TMPDIR=DIR rung ...") from None
        raise
    spool.seek(0)
    return spool


def _zip_members(
    stream: Any, name: str, span: _Span, archives: int, open_files: contextlib.ExitStack
) -> Iterator[File]:
    try:
        archive = open_files.enter_context(zipfile.ZipFile(stream))
    except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
        raise _bad_archive(name, "zip", error) from None
    found = [info for info in archive.infolist() if not info.is_dir()]
    _refuse_office(name, [info.filename for info in found])
    taken = _taken(name, {info.filename: info for info in found}, [info.filename for info in found])
    total, done = sum(info.compress_size for info in taken) or 1, 0
    for info in taken:
        part = span.part(done / total, (done + info.compress_size) / total)
        done += info.compress_size
        inner = f"{name}/{info.filename}"
        try:
            member = archive.open(info)
        except (*_damages(),) as error:
            raise _Stream(None, inner, "zip", None, 0)._damaged(error) from None
        with member:
            yield from _members_file(member, inner, info.filename, part, info.file_size, "zip", archives)


def _tar_members(
    stream: Any, name: str, span: _Span, archives: int, open_files: contextlib.ExitStack
) -> Iterator[File]:
    try:
        archive = open_files.enter_context(tarfile.TarFile(fileobj=stream))
        found = [info for info in archive if info.isreg()]
        # The library takes a damaged header for the end.
        stream.seek(archive.offset)
        if stream.read(_TAR_BLOCK) != bytes(_TAR_BLOCK):
            raise tarfile.ReadError(f"no end of the archive at offset {archive.offset:,}")
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise _bad_archive(name, "tar", error) from None
    taken = _taken(name, {info.name: info for info in found}, [info.name for info in found])
    total, done = sum(info.size for info in taken) or 1, 0
    for info in taken:
        part = span.part(done / total, (done + info.size) / total)
        done += info.size
        member = archive.extractfile(info)
        assert member is not None, "a regular file has content"
        with member:
            yield from _members_file(member, f"{name}/{info.name}", info.name, part, info.size, "tar", archives)


def _members_file(
    member: Any, name: str, path: str, span: _Span, size: int, kind: str, archives: int
) -> Iterator[File]:
    yield from _unpacked(_stream(member, name, span, size, kind), name, path, span, archives - 1, False)
    span.reach(1.0)


def _taken(name: str, members: dict[str, Any], names: list[str]) -> list[Any]:
    """Return the members that are not hidden, in the order of a folder's files."""
    if len(members) < len(names):
        twice = next(one for one in names if names.count(one) > 1)
        raise RungError(f"{name} holds {twice} twice", "unpack it, and name the folder: its copies would count double")
    shown = [one for one in members if not any(_is_hidden(part) for part in PurePosixPath(one).parts)]
    if not shown:
        raise RungError(f"{name}: no files in the archive", "hidden files are not taken; name one that has text files")
    return [members[one] for one in sorted(shown, key=lambda one: PurePosixPath(one).parts)]


def _is_hidden(part: str) -> bool:
    return (part.startswith(".") and part not in (".", "..")) or part == "__MACOSX"


def _refuse_office(name: str, members: list[str]) -> None:
    if "[Content_Types].xml" in members:
        kind = next((kind for folder, kind in _OFFICE.items() if any(one.startswith(folder) for one in members)), "")
        raise RungError(f"{name} is an Office document{f' ({kind})' if kind else ''}", "save it as plain text first")
    if "META-INF/manifest.xml" in members and "content.xml" in members:
        raise RungError(f"{name} is an OpenDocument file", "save it as plain text first")


def _bad_archive(name: str, kind: str, error: Exception) -> RungError:
    reason = _first_line(error)
    return RungError(f"{name}: the {kind} archive is damaged ({reason})", "get it again: it was cut short or changed")


# Compression


def _compression(head: bytes) -> str | None:
    for magic, kind in _COMPRESSED:
        if head.startswith(magic) and (kind != "bzip2" or head[4:].startswith(_BZIP2_BLOCKS)):
            return kind
    return None


def _without_suffix(path: str) -> str:
    if path.lower().endswith((".tgz", ".txz", ".tbz2", ".tzst")):
        return f"{path.rpartition('.')[0]}.tar"
    return next((path[: -len(end)] for end in _SUFFIXES if path.lower().endswith(end)), path)


def _decompressor(kind: str, stream: BinaryIO, name: str) -> Any:
    if kind == "gzip":
        import gzip

        return gzip.GzipFile(fileobj=stream)
    if kind == "bzip2":
        import bz2

        return bz2.BZ2File(stream)
    if kind == "xz":
        return lzma.LZMAFile(stream)
    try:
        return _zstd().ZstdFile(stream)
    except ImportError:
        hint = "pip install 'rung[zstd]', or decompress it first: zstdcat FILE | rung ... -"
        raise RungError(f"{name} is compressed with Zstandard, and no library for it is installed", hint) from None


def _zstd() -> Any:
    try:
        from compression import zstd  # Python 3.14's own
    except ImportError:
        from backports import zstd
    return zstd
