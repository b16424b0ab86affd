"""A corpus folder: documents with their metadata in shards of JSON lines, written resumably, read in bounded memory."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from rung.errors import GOES_ON, RungError, note_kept

FORMAT = 1
CORPUS = "corpus.json"
SHARD_BYTES = 64 << 20  # a shard is closed at the first document that ends beyond


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
            if any(info[name] != sum(getattr(shard, name) for shard in corpus.shards) for name in _COUNTED):
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


class CorpusWriter:
    """Writes a corpus folder: whole or not at all, and after an interruption on from the last whole shard.

    Until it is finished the corpus is a hidden folder beside ``out``. What identifies the work is ``kind``,
    ``sources`` and ``settings``: where a part of the same work is there, ``state`` is what the caller said last when
    a shard was closed (else None), and the caller goes on from there. A part of other work is removed.

    ::

        with CorpusWriter(out, "files", sources=[...], settings={...}) as writer:
            done = writer.state["done"] if writer.state else 0
            for number in range(done, len(texts)):
                writer.write(name, texts[number], metadata)
                writer.mark(lambda: {"done": number + 1})
            writer.finish(report={...})

    Args:
        out: the folder to make.
        kind: what made it, such as ``aozora``.
        sources: what it is made of, ``[{"name", "size", "sha256", ...}]``.
        settings: what decided the text, as JSON has it.
        overwrite: replace a corpus that is there.
        shard_bytes: of a file, beyond which a shard is closed.

    Raises:
        RungError: something at ``out`` already, a disk that is full, another process that makes the same corpus.
    """

    def __init__(
        self,
        out: str | Path,
        kind: str,
        *,
        sources: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ):
        self.out = Path(os.path.normpath(out))
        if self.out.exists():
            _check_replaceable(self.out, overwrite)
        self.state: Any = None
        self._about = _as_json({"kind": kind, "sources": list(sources), "settings": dict(settings or {})})
        self._identity = hashlib.sha256(json.dumps([FORMAT, shard_bytes, self._about]).encode()).hexdigest()
        self._shard_bytes = shard_bytes
        self._shards: list[Shard] = []
        self._open: _ShardFile | None = None
        self._partial = self.out.parent / f".{self.out.name}.partial"
        with self._disk():
            self._partial.mkdir(parents=True, exist_ok=True)
            self._lock = locked(self._partial / _LOCK, self.out)
            self._take_up()

    @property
    def resumed(self) -> int:
        """The documents that were there already when the work began."""
        return self._resumed

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self._shards) + (self._open.documents if self._open else 0)

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of text written so far."""
        return sum(shard.bytes for shard in self._shards) + (self._open.bytes if self._open else 0)

    def write(self, name: str, text: str | Iterable[str], metadata: Mapping[str, Any] | None = None) -> None:
        """Write one document; its text may come in pieces, and is then never whole in memory."""
        with self._disk():
            self._shard().write(name, [text] if isinstance(text, str) else text, metadata or {})

    def copy(self, file: BinaryIO, length: int, n_bytes: int, n_characters: int) -> None:
        """Write one document as the line of another corpus: ``length`` bytes from where ``file`` is."""
        with self._disk():
            self._shard().copy(file, length, n_bytes, n_characters)

    def mark(self, state: Callable[[], Any]) -> None:
        """Say what to go on from if the work is cut short here: called after each document, or each few.

        Args:
            state: returns it, as JSON; called when a shard is full, which is then closed.
        """
        if self._open is not None and self._open.file_bytes >= self._shard_bytes:
            with self._disk():
                self._shards.append(self._open.close())
                self._open = None
                said = {"identity": self._identity, "shards": [vars(one) for one in self._shards], "state": state()}
                _write_json(self._partial / _PROGRESS, said)

    def finish(self, report: Mapping[str, Any] | None = None) -> Corpus:
        """Close the last shard, write corpus.json and give the folder its name.

        Args:
            report: what was counted, as JSON.
        """
        with self._disk():
            if self._open is not None:
                self._shards.append(self._open.close())
                self._open = None
            info = {
                "format": FORMAT,
                "kind": self._about["kind"],
                **{name: sum(getattr(one, name) for one in self._shards) for name in _COUNTED},
                "shards": [vars(shard) for shard in self._shards],
                "sources": self._about["sources"],
                "settings": self._about["settings"],
                "report": dict(report or {}),
            }
            _write_json(self._partial / CORPUS, info)
            (self._partial / _PROGRESS).unlink(missing_ok=True)
            self._unlock()
            _publish(self._partial, self.out)
        return Corpus.open(self.out)

    def abandon(self) -> None:
        """Remove what was made, where there is no use in going on from it."""
        self._unlock()
        if self._open is not None:
            self._open.file.close()
            self._open = None
        shutil.rmtree(self._partial, ignore_errors=True)

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        note_kept(error, bool(self._shards))
        if self._open is not None:
            self._open.file.close()
            self._open = None
        if not self._shards and self._partial.is_dir():  # nothing to go on from
            self.abandon()
        self._unlock()

    def _shard(self) -> _ShardFile:
        if self._open is None:
            self._open = _ShardFile(self._partial, f"documents-{len(self._shards):05d}.jsonl")
        return self._open

    def _take_up(self) -> None:
        """Go on from what is whole of the same work; remove all else."""
        self._resumed = 0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads((self._partial / _PROGRESS).read_text(encoding="utf-8"))
            if said["identity"] == self._identity:
                shards = [Shard(**shard) for shard in said["shards"]]
                if all((self._partial / one.name).stat().st_size == one.file_bytes for one in shards):
                    self._shards, self.state = shards, said["state"]
                    self._resumed = self.documents
        keep = {shard.name for shard in self._shards} | {_LOCK} | ({_PROGRESS} if self._shards else set())
        for entry in self._partial.iterdir():
            if entry.name not in keep:
                entry.unlink()

    def _unlock(self) -> None:
        if self._lock is not None:
            (self._partial / _LOCK).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            problem = f"cannot write {self.out}: {reason}"
            raise RungError(problem, self._way_out()) from None

    def _way_out(self) -> str:
        hint = "look at the disk and the folder"
        return f"{hint}; {GOES_ON}" if self._shards else f"{hint}, or name another with --out"


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


def locked(path: Path, out: Path) -> BinaryIO | None:
    """Hold a lock, which ends with this process; None where the system has no such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise RungError(f"{out} is being made by another process", "wait for it, or name another folder") from None
    return file


# Helpers

_PROGRESS = "progress.json"
_LOCK = "lock"
_COUNTED = ("documents", "bytes", "characters")
_LINE_BYTES = 4 << 20  # a longer line is read as a stream
_STREAM_BYTES = 1 << 18
_END = '"}\n'
# As much of a JSON string as does not end within an escape, nor between the two of a character beyond the basic plane.
_WHOLE = re.compile(
    r"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB]..(?:\\u[dD][c-fC-F]..|(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])....)))*+"
)


class _ShardFile:
    def __init__(self, folder: Path, name: str):
        self.name = name
        self.documents = self.bytes = self.characters = self.file_bytes = 0
        self.file: BinaryIO = (folder / name).open("wb")

    def write(self, name: str, pieces: Iterable[str], metadata: Mapping[str, Any]) -> None:
        # The text comes last, so that a reader knows the rest before it, however long it is.
        head = f'{{"name": {_dumped(name)}, "metadata": {_dumped(metadata)}, "text": "'
        self._put(head)
        for piece in pieces:
            self.bytes += len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogatepass"))
            self.characters += len(piece)
            self._put(_dumped(piece)[1:-1])
        self._put(_END)
        self.documents += 1

    def copy(self, file: BinaryIO, length: int, n_bytes: int, n_characters: int) -> None:
        block = b""
        while length and (block := file.read(min(length, _STREAM_BYTES))):
            self.file_bytes += self.file.write(block)
            length -= len(block)
        if not block.endswith(b"\n"):  # the last line of another program
            self.file_bytes += self.file.write(b"\n")
        self.documents += 1
        self.bytes += n_bytes
        self.characters += n_characters

    def close(self) -> Shard:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return Shard(self.name, self.documents, self.bytes, self.characters, self.file_bytes)

    def _put(self, text: str) -> None:
        try:
            self.file_bytes += self.file.write(text.encode())
        except UnicodeEncodeError:  # half a surrogate pair, which UTF-8 has no bytes for and JSON has an escape for
            escaped = re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)
            self.file_bytes += self.file.write(escaped.encode())


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _as_json(value: Any) -> Any:
    """Return a value as it comes back from JSON."""
    return json.loads(json.dumps(value, allow_nan=False))


def _info(path: Path) -> dict[str, Any] | None:
    try:
        text = (path / CORPUS).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RungError(f"{path / CORPUS} cannot be read: {reason}", "look at its permissions") from None
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
                if not waiting.endswith(_END):
                    raise ValueError
                if text := json.loads(f'"{waiting[: -len(_END)]}"'):
                    yield text
                return
            # The last characters may be those that end the line.
            found = _WHOLE.match(waiting, 0, len(waiting) - len(_END))
            cut = found.end() if found else 0
            text, waiting = json.loads(f'"{waiting[:cut]}"'), waiting[cut:]
        except ValueError:
            raise _no_document(where) from None
        if text:
            yield text
        held = file.readline(_STREAM_BYTES)


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        json.dump(value, file, ensure_ascii=False, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _check_replaceable(out: Path, overwrite: bool) -> None:
    if not overwrite:
        raise RungError(f"{out} exists", "name another folder, or replace it with --overwrite")
    if not is_corpus(out):
        raise RungError(f"{out} is not a corpus, so it is not overwritten", "name another folder with --out")


def _publish(partial: Path, out: Path) -> None:
    """Give the finished folder its name; a corpus that has the name is put aside first, and removed last."""
    aside = None
    if out.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent)) / out.name
        out.rename(aside)
    partial.rename(out)
    if aside:
        shutil.rmtree(aside.parent)
