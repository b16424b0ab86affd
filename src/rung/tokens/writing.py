"""A token store being written: its splits and shards, and what to go on from after an interruption."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import zipfile
from array import array
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from rung.corpus.documents import MAX_NAMES, Scan, utf8_length
from rung.disk import cannot, locked, whole_file
from rung.errors import GOES_ON, RungError, note_kept
from rung.tokens.engines import UnknownCharacter
from rung.tokens.shards import ShardWriter
from rung.tokens.tokenizer import Tokenizer

_SPLITS = ("train", "validation")
_MIN_TOKENS = 2  # one input and its target
_SAVE_TOKENS = 1 << 24  # between two times that the state is kept: some seconds of work
_PROGRESS = "progress.npz"
_SCAN = "scan.npz"
_LOCK = "lock"


@dataclass(frozen=True)
class Begin:
    """A document begins, or a part of it that is ``offset`` characters in."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class End:
    """A document ends; an end of text follows a ``whole`` one."""

    whole: bool


Part = tuple[str, Begin | str | End]
"""The split, and what comes next in it; a string is a piece of text."""


class StoreWriter:
    """Writes the shards of a store into a hidden folder beside ``out``, and keeps there what to go on from.

    Within ``with``: the folder stays after an interruption where there is something to go on from, and else vanishes.

    ``folder``: where the store is made. ``taken``: how many parts it has already; the caller goes on after them.
    ``scan``: of the sources, where it was kept.

    Args:
        out: the store to be.
        tokenizer: that encodes.
        shard_tokens: tokens in every shard but the last of a split.
        made_from: what decides the tokens besides; what was begun from anything else is removed.

    Raises:
        RungError: a disk that is full, another process that makes the same store, a split that ends up too small.
    """

    def __init__(self, out: Path, tokenizer: Tokenizer, shard_tokens: int, made_from: Mapping[str, Any]):
        self.folder = out.parent / f".{out.name}.partial"
        self.taken = 0
        self.scan: Scan | None = None
        self._out = out
        self._tokenizer = tokenizer
        self._dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        about = [tokenizer.hash, shard_tokens, self._dtype, made_from]
        self._identity = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        self._splits = {name: _SplitWriter(self.folder, name, self._dtype, shard_tokens) for name in _SPLITS}
        self._empty = 0
        self._unsaved = 0  # tokens
        self._saved = False

    def __enter__(self) -> StoreWriter:
        with self._disk():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = locked(self.folder / _LOCK, self._out)
            self._take_up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        note_kept(error, self._saved)
        for writer in self._splits.values():
            writer.abandon()
        if error is not None and not self._saved:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
        if isinstance(error, OSError):
            with self._disk():
                raise error

    def keep_scan(self, scan: Scan) -> None:
        """Keep a scan of the sources, which takes a pass over them, for a time after an interruption."""
        if self.scan is None:
            counts = {"chars": np.array(scan.chars, np.int64), "bytes": np.array(scan.bytes, np.int64)}
            with self._disk():
                self._save(_SCAN, [scan.names, scan.empty], counts)

    def write(self, split: str, part: Begin | str | End, ids: np.ndarray | UnknownCharacter | None) -> None:
        """Write the next part; ``ids`` are those of a text, or what is wrong with it."""
        writer = self._splits[split]
        match part:
            case Begin():
                writer.begin(part)
            case str():
                if isinstance(ids, UnknownCharacter):
                    raise ids.at(writer.offset, writer.document) from None
                assert ids is not None
                writer.write(ids, utf8_length(part), len(part))
                self._unsaved += len(ids)
            case End():
                if not writer.document:
                    self._empty += 1
                writer.end(self._tokenizer.end_id if part.whole else None)
        self.taken += 1
        if self._unsaved >= _SAVE_TOKENS:
            self._keep()

    def finish(self) -> dict[str, Any]:
        """Close the shards, and return what dataset.json says of them."""
        written = {name: writer for name, writer in self._splits.items() if name == "train" or writer.n_documents}
        for name, writer in written.items():
            if writer.n_tokens < _MIN_TOKENS:
                raise RungError(
                    f"the {name} split is too small: {writer.n_chars} characters make {writer.n_tokens} tokens, "
                    f"and it takes {_MIN_TOKENS}",
                    "give more text, or another --data.validation-fraction",
                )
        tokenizer, learned = self._tokenizer, self._tokenizer.trained_on
        return {
            "dtype": self._dtype,
            "tokenizer": {name: getattr(tokenizer, name) for name in ("hash", "kind", "vocab_size", "end_id")},
            **({"tokenizer_trained_on": vars(learned)} if learned else {}),
            "empty_documents": self._empty,
            "splits": {name: writer.finish() for name, writer in written.items()},
        }

    def tidy(self) -> None:
        """Remove what is not of the store, which has all of its files now."""
        for name in (_PROGRESS, _SCAN, _LOCK):
            (self.folder / name).unlink(missing_ok=True)

    def _keep(self) -> None:
        self._unsaved = 0
        states = {name: writer.state() for name, writer in self._splits.items()}
        said = [self.taken, self._empty, {name: state for name, (state, _) in states.items()}]
        self._save(_PROGRESS, said, {name: starts for name, (_, starts) in states.items()})
        self._saved = True

    def _save(self, name: str, said: list[Any], arrays: dict[str, np.ndarray]) -> None:
        words = np.frombuffer(json.dumps([self._identity, *said]).encode(), np.uint8)
        with whole_file(self.folder / name) as file:
            np.savez(file, allow_pickle=False, said=words, **arrays)

    def _take_up(self) -> None:
        """Go on from what is whole of the same work; remove all else."""
        keep = {_LOCK}
        for path in self.folder.glob("*-of-*.safetensors"):  # cut short while the shards got their names
            path.rename(self.folder / re.sub("-of-.*", "", path.name))
        if kept := self._kept(_SCAN):
            (names, empty), arrays = kept
            chars, sizes = (array("q", arrays[name].tolist()) for name in ("chars", "bytes"))
            self.scan = Scan(chars, sizes, names, empty)
            keep.add(_SCAN)
        if kept := self._kept(_PROGRESS):
            (taken, empty, states), arrays = kept
            if all(writer.take_up(states[name], arrays[name]) for name, writer in self._splits.items()):
                self.taken, self._empty, self._saved = taken, empty, True
                keep |= {_PROGRESS, *(path.name for writer in self._splits.values() for path in writer.paths)}
        for path in self.folder.iterdir():
            if path.name not in keep:
                path.unlink()

    def _kept(self, name: str) -> tuple[list[Any], dict[str, np.ndarray]] | None:
        """Return what was kept of the same work under a name."""
        with (
            contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile),
            np.load(self.folder / name) as file,
        ):
            identity, *said = json.loads(file["said"].tobytes())
            if identity == self._identity:
                return said, {array_name: file[array_name] for array_name in file.files if array_name != "said"}
        return None

    def _disk(self) -> AbstractContextManager[None]:
        way_out = f"; {GOES_ON}" if self._saved else ", or name another with --out"
        return cannot(f"write {self._out}", f"look at the disk and the folder{way_out}")


class _SplitWriter:
    """Spreads one split's tokens over shards of a fixed size."""

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int):
        self.n_tokens = self.n_documents = self.n_bytes = self.n_chars = 0
        self.document = ""  # the name of the one that is being written
        self.offset = 0  # characters of it that are written, or belong to another split
        self._folder, self._name, self._dtype, self._shard_tokens = folder, name, dtype, shard_tokens
        self._shard: ShardWriter | None = None
        self._n_shards = 0
        self._names: list[str] = []
        self._starts: list[int] = []  # of documents that have begun, but have no token yet

    @property
    def paths(self) -> list[Path]:
        """The files of the shards, until they get their names."""
        return [self._folder / f"{self._name}-{k:05d}" for k in range(self._n_shards)]

    def begin(self, document: Begin) -> None:
        self.document, self.offset = document.name, document.offset
        self.n_documents += 1
        if len(self._names) < MAX_NAMES:
            self._names.append(document.name)
        self._starts.append(self.n_tokens)

    def write(self, tokens: np.ndarray, n_bytes: int, n_chars: int) -> None:
        self.n_bytes += n_bytes
        self.n_chars += n_chars
        self.offset += n_chars
        self._append(tokens)

    def end(self, end_id: int | None) -> None:
        self.document = ""
        if end_id is not None:
            self._append(np.array([end_id]))

    def finish(self) -> dict[str, Any]:
        self._close()
        for k, path in enumerate(self.paths):
            path.rename(self._folder / shard_name(self._name, k, self._n_shards))
        return {
            "tokens": self.n_tokens,
            "documents": self.n_documents,
            "text_bytes": self.n_bytes,
            "text_chars": self.n_chars,
            "shards": self._n_shards,
            "names": self._names if self.n_documents <= MAX_NAMES else None,
        }

    def abandon(self) -> None:
        if self._shard:
            self._shard.abandon()
            self._shard = None

    def state(self) -> tuple[dict[str, Any], np.ndarray]:
        """Wait until the disk has all tokens; return what ``take_up`` goes on from."""
        if self._shard:
            self._shard.flush()
        said = {name: getattr(self, name) for name in _STATE}
        said["in_shard"] = self._shard.n_tokens if self._shard else 0
        return said, np.array(self._shard.document_starts if self._shard else (), np.int64)

    def take_up(self, said: Mapping[str, Any], starts: np.ndarray) -> bool:
        """Go on from a state; return whether the files for it are there."""
        for name in _STATE:
            setattr(self, name, said[name])
        if not all(path.is_file() for path in self.paths):
            return False
        if said["in_shard"]:
            self._shard = ShardWriter(self.paths[-1], self._dtype, said["in_shard"], starts.tolist())
        return True

    def _append(self, tokens: np.ndarray) -> None:
        while len(tokens):
            if self._shard is None:
                self._n_shards += 1
                self._shard = ShardWriter(self.paths[-1], self._dtype)
            self._shard.document_starts.extend(self._starts)
            self._starts = []
            part, tokens = np.split(tokens, [self._shard_tokens - self._shard.n_tokens])
            self._shard.write(part)
            self.n_tokens += len(part)
            if self._shard.n_tokens == self._shard_tokens:
                self._close()

    def _close(self) -> None:
        if self._shard:
            self._shard.close()
            self._shard = None


_STATE = (
    *("n_tokens", "n_documents", "n_bytes", "n_chars", "document", "offset"),
    *("_n_shards", "_names", "_starts"),
)


def shard_name(split: str, k: int, count: int) -> str:
    """Return the file name of a shard of a finished store."""
    return f"{split}-{k:05d}-of-{count:05d}.safetensors"
