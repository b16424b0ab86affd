"""A corpus folder: documents with their metadata in shards of JSON lines, written resumably, read in bounded memory."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rung.disk import reason
from rung.errors import RungError

FORMAT = 1
CORPUS = "corpus.json"
COUNTED = ("documents", "bytes", "characters")
LAST = '"}\n'  # after the text of a document, which ends its line


@dataclass(frozen=True)
class Shard:
    """One file of a corpus: ``file_bytes`` on disk, which hold ``documents`` with ``bytes`` of text in UTF-8."""

    name: str
    documents: int
    bytes: int
    characters: int
    file_bytes: int


@dataclass(frozen=True)
class Record:
    """One document as it is stored; ``pieces`` may be read once, and before the next record is asked for.

    ``offset``: where its line begins in the file of its shard.
    """

    name: str
    metadata: Mapping[str, Any]
    pieces: Iterator[str]
    offset: int = 0


@dataclass(frozen=True)
class Corpus:
    """A corpus folder, opened. ``info`` is its corpus.json; ``bytes`` and ``characters`` are of text."""

    path: Path
    info: Mapping[str, Any]
    shards: Sequence[Shard]

    @property
    def kind(self) -> str:
        return self.info["kind"]

    @property
    def documents(self) -> int:
        return self.info["documents"]

    @property
    def bytes(self) -> int:
        return self.info["bytes"]

    @property
    def characters(self) -> int:
        return self.info["characters"]

    @property
    def report(self) -> Mapping[str, Any]:
        return self.info["report"]

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Open a corpus folder; nothing but its corpus.json is read.

        Raises:
            RungError: no corpus folder, a version that is not known here, a shard that is missing or cut short.
        """
        path = Path(path)
        info = _info(path)
        if info is None:
            hint = f"a corpus is a folder with {CORPUS}: `rung corpus` makes one"
            raise RungError(f"no corpus at {path}", hint)
        if info["format"] != FORMAT:
            problem = f"{path} is a corpus of format {info['format']}, and format {FORMAT} is known here"
            raise RungError(problem, "make the corpus again")
        try:
            corpus = cls(path, info, [Shard(**said) for said in info["shards"]])
            if any(info[name] != sum(getattr(shard, name) for shard in corpus.shards) for name in COUNTED):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise RungError(f"{path / CORPUS} is damaged", "make the corpus again") from None
        for shard in corpus.shards:
            file = path / shard.name
            found = file.stat().st_size if file.is_file() else None
            if found != shard.file_bytes:
                here = "is missing" if found is None else f"has {found} bytes"
                problem = f"{file} {here}, and {CORPUS} says {shard.file_bytes} bytes"
                raise RungError(problem, "the corpus was changed after it was made; make it again")
        return corpus

    def records(self, first_shard: int = 0, stop_shard: int | None = None) -> Iterator[Record]:
        """Yield the documents of the shards from ``first_shard`` on, in order.

        Raises:
            RungError: a line that is no document, named with its number.
        """
        for shard in self.shards[first_shard:stop_shard]:
            yield from read_lines(self.path / shard.name)


def is_corpus(path: str | Path) -> bool:
    """Return whether a folder is a corpus, by its corpus.json; other files of that name do not make it one.

    Raises:
        RungError: it has the shards of a corpus, but a corpus.json that cannot be read.
    """
    return _info(Path(path)) is not None


def read_lines(path: Path, start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """Yield the documents of one shard; a line is in memory whole only up to 4 MiB.

    Args:
        path: of the shard.
        start: where to begin, the offset of a line.
        stop: where to end, the offset of a line.

    Raises:
        RungError: a line that is no document, named with its number.
    """
    with path.open("rb") as file:
        file.seek(start)
        number = 0
        while (stop is None or file.tell() < stop) and (head := file.readline(_LINE_BYTES)):
            number += 1
            offset = file.tell() - len(head)
            where = f"{path.parent.name}/{path.name}, line {number}{f' from byte {start} on' if start else ''}"
            if head.endswith(b"\n") or len(head) < _LINE_BYTES:
                yield _record(head, where, offset)
                continue
            begun = _begun(head)
            if begun is None:  # another program's long line, in an order of its own
                yield _record(head + file.readline(), where, offset)
                continue
            name, metadata, rest = begun
            record = Record(name, metadata, _streamed(file, rest, where), offset)
            yield record
            for _ in record.pieces:  # what was left unread stands before the next line
                pass


def fingerprint_corpus(corpus: Corpus, hash_file: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Return what identifies a corpus's content: ``{"name", "bytes", "sha256", "sampled"}``, of all its shards.

    Args:
        hash_file: returns ``{"bytes", "sha256", "sampled"}`` of one file.
    """
    hashes = [hash_file(corpus.path / shard.name) for shard in corpus.shards]
    digest = hashlib.sha256()
    for one in hashes:
        digest.update(f"{one['bytes']} {one['sha256']}\n".encode())
    sampled = any(one["sampled"] for one in hashes)
    return {"name": corpus.path.name, "bytes": corpus.bytes, "sha256": digest.hexdigest(), "sampled": sampled}


# Helpers

_LINE_BYTES = 4 << 20  # a longer line is read as a stream
_STREAM_BYTES = 1 << 18
# As much of a JSON string as does not end within an escape, nor between the two of a character beyond the basic plane.
_WHOLE = re.compile(
    r"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB]..(?:\\u[dD][c-fC-F]..|(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])....)))*+"
)


def _info(path: Path) -> dict[str, Any] | None:
    try:
        text = (path / CORPUS).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise RungError(f"{path / CORPUS} cannot be read: {reason(error)}", "look at its permissions") from None
    with contextlib.suppress(ValueError):
        info = json.loads(text)
        if isinstance(info, dict) and {"format", "kind", "shards"} <= info.keys():
            return info
    if (path / "documents-00000.jsonl").exists():
        raise RungError(f"{path / CORPUS} is damaged", "make the corpus again")
    return None


def _record(line: bytes, where: str, offset: int) -> Record:
    try:
        said = json.loads(line)
        text, name, metadata = said["text"], said["name"], said.get("metadata", {})
        if not (isinstance(text, str) and isinstance(name, str) and isinstance(metadata, dict)):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _no_document(where) from None
    return Record(name, metadata, iter((text,) if text else ()), offset)


def _no_document(where: str) -> RungError:
    return RungError(
        f"{where} is not a document of a corpus", "the corpus was changed after it was made; make it again"
    )


def _begun(head: bytes) -> tuple[str, dict[str, Any], bytes] | None:
    """Return name, metadata and the first bytes of the text of a line in the order that we write."""
    text = head.decode("utf-8", "ignore")  # the head may end within a character
    decoder = json.JSONDecoder()
    values, at = [], 0
    try:
        for before in ('{"name": ', ', "metadata": '):
            if not text.startswith(before, at):
                return None
            value, at = decoder.raw_decode(text, at + len(before))
            values.append(value)
    except ValueError:
        return None
    last = ', "text": "'
    if not text.startswith(last, at):
        return None
    return values[0], values[1], head[len(text[: at + len(last)].encode()) :]


def _streamed(file: BinaryIO, held: bytes, where: str) -> Iterator[str]:
    """Yield the text of a line's last string in pieces, and leave the file at the next line."""
    decode = codecs.getincrementaldecoder("utf-8")("strict").decode
    waiting = ""
    while True:
        ended = held.endswith(b"\n") or not held
        try:
            waiting += decode(held)
            if ended:
                if not waiting.endswith(LAST):
                    raise ValueError
                if text := json.loads(f'"{waiting[: -len(LAST)]}"'):
                    yield text
                return
            # The last characters may be those that end the line.
            found = _WHOLE.match(waiting, 0, len(waiting) - len(LAST))
            cut = found.end() if found else 0
            text, waiting = json.loads(f'"{waiting[:cut]}"'), waiting[cut:]
        except ValueError:
            raise _no_document(where) from None
        if text:
            yield text
        held = file.readline(_STREAM_BYTES)
