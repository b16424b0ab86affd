"""Which files a user means: files, folders, globs, corpus folders and standard input, checked and fingerprinted."""

from __future__ import annotations

import glob
import hashlib
import os
import shlex
import shutil
import stat
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from rung.corpus.folder import Corpus, fingerprint_corpus, is_corpus
from rung.disk import reason
from rung.errors import RungError

STDIN = "-"

_WHOLE_BYTES = 16 << 20  # files up to this size are hashed whole
_HEADER_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 16
_BLOCKS = 64


@dataclass(frozen=True)
class Source:
    """One file of text, or one corpus folder (``kind``).

    ``name`` is for people and for document names: the file's name, or its path from the folder that was named.
    A stream (standard input, a pipe) is spooled to a temporary file, which lives as long as its Source.
    """

    name: str
    path: Path
    size: int  # bytes: of the file; of all text of a corpus
    kind: Literal["text", "corpus"] = "text"

    def open(self) -> BinaryIO:
        """Open the file for reading bytes.

        Raises:
            RungError: the file cannot be read (permission, removed since).
        """
        try:
            return self.path.open("rb")
        except OSError as error:
            raise _unreadable(self.name, error) from None


def resolve(sources: Sequence[str | Path]) -> list[Source]:
    """Return the files that ``sources`` name: files, folders (all files within, sorted by path), globs, ``-``.

    A corpus folder, named or within a folder, is one source. Hidden files of a folder (a name that begins with a dot)
    are not taken; a path that exists is never read as a glob.

    Raises:
        RungError: nothing named, a missing or empty file, a token store, a folder or glob without files, a file named
            twice.
    """
    if not sources:
        raise RungError("no text named", "name a file, a folder, a glob, or - for standard input")
    found = [source for name in sources for source in _resolve_one(str(name))]
    seen: dict[Path, Source] = {}
    for source in found:
        real = source.path.resolve()
        if real in seen:
            hint = "name each file once: a copy would count double, or leak into validation"
            raise RungError(f"{source.name} is named twice", hint)
        seen[real] = source
    if not any(source.size for source in found):
        raise RungError(f"{', '.join(map(str, sources))}: no text, 0 bytes", "name a file that has text in it")
    return found


def fingerprint(source: Source, full: bool = False) -> dict[str, Any]:
    """Return what identifies a file's content: ``{"name", "bytes", "sha256", "sampled"}``.

    A file of up to 16 MiB, or any with ``full``, is hashed whole. Of a larger one the size, the first MiB, 64 evenly
    spaced blocks of 64 KiB and the last block are hashed ("sampled"): that sees any change of length and most edits.
    Of a corpus, the sizes and hashes of its shards are hashed.
    """
    if source.kind == "corpus":

        def hash_shard(path: Path) -> dict[str, Any]:
            return fingerprint(Source(path.name, path, path.stat().st_size), full)

        return fingerprint_corpus(Corpus.open(source.path), hash_shard) | {"name": source.name}
    sampled = not full and source.size > _WHOLE_BYTES
    digest = hashlib.sha256()
    with source.open() as file:
        if not sampled:
            while block := file.read(_HEADER_BYTES):
                digest.update(block)
        else:
            digest.update(str(source.size).encode())
            digest.update(file.read(_HEADER_BYTES))
            for k in range(1, _BLOCKS + 1):
                file.seek((source.size - _BLOCK_BYTES) * k // _BLOCKS)
                digest.update(file.read(_BLOCK_BYTES))
    return {"name": source.name, "bytes": source.size, "sha256": digest.hexdigest(), "sampled": sampled}


# Helpers


_OF_A_STORE = ("dataset.json", "tokenizer.json")  # what a token store has in it, beside its tokens


def _resolve_one(name: str) -> list[Source]:
    if name == STDIN:
        return [_spooled(STDIN, sys.stdin.buffer)]
    path = Path(name)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise _unreadable(name, error) from None
        if glob.has_magic(name):
            return _matching(name)
        raise RungError(f"no file or folder {name}", _nearby(path)) from None
    if stat.S_ISDIR(mode):
        return [_corpus(path.name or path.resolve().name, path)] if is_corpus(path) else _folder(path)
    if stat.S_ISFIFO(mode):
        with path.open("rb") as stream:
            return [_spooled(name, stream)]
    if not stat.S_ISREG(mode):
        raise RungError(f"{name} is not a regular file", "name a text file, a folder, or - for standard input")
    if not path.stat().st_size:
        raise RungError(f"{name} is empty", "name a file that has text in it")
    return [_source(path.name, path)]


def _matching(pattern: str) -> list[Source]:
    paths = sorted(glob.glob(pattern, recursive=True))
    found: list[Source] = []
    for path in map(Path, paths):
        if path.is_file():
            found.append(_source(str(path), path))
        elif "**" not in pattern:  # ** has already gone into the folders
            found += _resolve_one(str(path))
    if not found:
        raise RungError(f"no file matches {pattern}", "look at the pattern; ** matches folders at any depth")
    return found


def _folder(folder: Path) -> list[Source]:
    if all((folder / name).is_file() for name in _OF_A_STORE):
        hint = f"`rung train {shlex.quote(str(folder))}` takes it; here name the text that it was made of"
        raise RungError(f"{folder} is a token store, and no text", hint)
    if not os.access(folder, os.R_OK | os.X_OK):
        raise RungError(f"{folder} cannot be read: permission denied", "make the folder readable")
    name = Path(folder.name or folder.resolve().name)
    found = [
        (_corpus if path.is_dir() else _source)(str(name / path.relative_to(folder)), path) for path in _walk(folder)
    ]
    if not found:
        raise RungError(f"no files in folder {folder}", "hidden files are not taken; name a folder that has text files")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and the folders below, and the corpus folders."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if is_corpus(entry):
                yield entry
            elif not entry.is_symlink():  # a link to a folder may lead round in a circle
                yield from _walk(entry)
        elif entry.is_file():
            yield entry


def _source(name: str, path: Path) -> Source:
    return Source(name, path, path.stat().st_size)


def _corpus(name: str, path: Path) -> Source:
    return Source(name, path, Corpus.open(path).bytes, "corpus")


def _spooled(name: str, stream: BinaryIO) -> Source:
    handle, path = tempfile.mkstemp(prefix="rung-")
    with os.fdopen(handle, "wb") as spool:
        shutil.copyfileobj(stream, spool)
        size = spool.tell()
    source = Source(name, Path(path), size)
    weakref.finalize(source, os.unlink, path)
    if not size:
        raise RungError(f"{'standard input' if name == STDIN else name} is empty", "pipe some text in")
    return source


def _unreadable(name: str, error: OSError) -> RungError:
    return RungError(f"{name} cannot be read: {reason(error)}", "look at the path and its permissions")


def _nearby(path: Path) -> str:
    import difflib

    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"there is no folder {path.parent} either"
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"did you mean {path.parent / close[0]}?" if close else f"look for it in {path.parent.resolve()}"
