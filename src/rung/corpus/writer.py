"""Writing a corpus folder, so that work which is cut short goes on from the last whole shard."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from rung.corpus.folder import CORPUS, COUNTED, FORMAT, LAST, Corpus, Shard, is_corpus
from rung.disk import cannot, check_replaceable, locked, publish, write_json
from rung.errors import GOES_ON, RungError, note_kept

SHARD_BYTES = 64 << 20  # a shard is closed at the first document that ends beyond


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
                write_json(self._partial / _PROGRESS, said)

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
                **{name: sum(getattr(one, name) for one in self._shards) for name in COUNTED},
                "shards": [vars(shard) for shard in self._shards],
                "sources": self._about["sources"],
                "settings": self._about["settings"],
                "report": dict(report or {}),
            }
            write_json(self._partial / CORPUS, info)
            (self._partial / _PROGRESS).unlink(missing_ok=True)
            self._unlock()
            publish(self._partial, self.out)
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

    def _disk(self) -> AbstractContextManager[None]:
        return cannot(f"write {self.out}", self._way_out())

    def _way_out(self) -> str:
        hint = "look at the disk and the folder"
        return f"{hint}; {GOES_ON}" if self._shards else f"{hint}, or name another with --out"


# Helpers

_PROGRESS = "progress.json"
_LOCK = "lock"
_BLOCK_BYTES = 1 << 18


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
        self._put(LAST)
        self.documents += 1

    def copy(self, file: BinaryIO, length: int, n_bytes: int, n_characters: int) -> None:
        block = b""
        while length and (block := file.read(min(length, _BLOCK_BYTES))):
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


def _check_replaceable(out: Path, overwrite: bool) -> None:
    if not overwrite:
        raise RungError(f"{out} exists", "name another folder, or replace it with --overwrite")
    if not is_corpus(out):
        raise RungError(f"{out} is not a corpus, so it is not overwritten", "name another folder with --out")
    files = (re.escape(CORPUS), r"documents-\d{5,}\.jsonl")
    check_replaceable(out, files, (), "move it elsewhere, or name another folder with --out")
