"""The token store: a folder of shards and a ``dataset.json``, as docs/formats.md specifies it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rung.config import DataConfig
from rung.corpus.documents import Document, OnProgress, Scan, documents, even_pieces, scan
from rung.corpus.sources import Source, fingerprint, resolve
from rung.corpus.workers import Engine
from rung.disk import cannot, check_apart, check_replaceable, make_public, publish, write_json
from rung.errors import RungError
from rung.tokens.encoding import encoded
from rung.tokens.in_place import bare_tokens, open_splits
from rung.tokens.mapped import Tokens
from rung.tokens.shards import misplaced, read_shard
from rung.tokens.split import Split, hold_out
from rung.tokens.tokenizer import Tokenizer
from rung.tokens.writing import Begin, End, Part, StoreWriter, shard_name

VERSION = 1
DATASET = "dataset.json"
TOKENIZER = "tokenizer.json"  # a copy of the one that made the tokens
SPLITS = ("train", "validation", "test")
SHARD_TOKENS = 1 << 27

_TAMPERED = "the store was tampered with; build it again"

# What of the config decides the tokens; the store remembers it.
_SETTINGS = ("encoding", "format", "text_column", "separator", "validation", "validation_fraction")


class TokenStore:
    """The tokens of a text, by split, and what they were made from.

    ``splits``: the names of its splits. ``info``: what dataset.json says. ``empty_documents``: how many documents had
    no text and are not in the store. ``tokenizer_hash``, ``vocab_size``: None for a bare file of tokens. ``identity``:
    SHA-256 that changes with the text, the tokenizer or the settings that the store was made from.
    """

    def __init__(self, path: Path, info: dict[str, Any], splits: dict[str, Tokens]):
        self.path = path
        self.info = info
        self.splits = tuple(splits)
        self.identity = _identity(path, info)
        self.empty_documents: int = info.get("empty_documents", 0)
        self.tokenizer_hash: str | None = info.get("tokenizer", {}).get("hash")
        self.vocab_size: int | None = info.get("tokenizer", {}).get("vocab_size")
        self._splits = splits

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of text in all splits; 0 for a bare file of tokens, which does not know."""
        return sum(tokens.text_bytes for tokens in self._splits.values())

    def describe(self) -> str:
        """Return one line on what is in the store, for people."""
        counts = [
            f"{name} {len(tokens):,} tokens ({_counted(tokens.n_documents)}, {tokens.text_bytes:,} bytes)"
            for name, tokens in self._splits.items()
        ]
        empty = f"; {_many(self.empty_documents, 'empty document')} left out" if self.empty_documents else ""
        return ", ".join(counts) + empty

    def split(self, name: str) -> Tokens:
        """Return one split.

        Raises:
            RungError: the store has no such split.
        """
        if name not in self._splits:
            raise RungError(f"{self.path} has no {name} split", f"it has {', '.join(self.splits)}")
        return self._splits[name]

    @classmethod
    def open(cls, path: str | Path, tokenizer: Tokenizer | None = None) -> TokenStore:
        """Open a store folder, or a bare file of ids (``tokens.files``) as the split ``train``.

        A bare file may have ``document_starts``; else the end of text tells, where ``tokenizer`` is given. Of tokens
        that lie elsewhere, nothing is read but samples of the files that may have changed.

        Raises:
            RungError: nothing there, an unfinished or newer store, shards that do not match dataset.json.
        """
        path = Path(path)
        if path.is_file():
            return cls(path, {}, {"train": bare_tokens(path, tokenizer)})
        if not (path / DATASET).is_file():
            hint = f"a store is a folder with {DATASET}: rung tokens build makes one"
            raise RungError(f"no token store at {path}", hint)
        try:
            info = json.loads((path / DATASET).read_text(encoding="utf-8"))
            version = info["version"]
        except (ValueError, KeyError, TypeError):
            raise RungError(f"{path / DATASET} is not a dataset file", "build the token store again") from None
        if version != VERSION:
            problem = f"{path} is of version {version}, and version {VERSION} is known here"
            raise RungError(problem, "build the token store again")
        if "files" in info:
            return cls(path, info, open_splits(path, info))
        return cls(path, info, {name: _split_of(path, info, name) for name in SPLITS if name in info["splits"]})

    def differences(
        self, sources: Sequence[str | Path], tokenizer: Tokenizer | None = None, data: DataConfig | None = None
    ) -> list[str]:
        """Return one line for each thing that has changed since the store was made: text, settings, tokenizer.

        Raises:
            RungError: a source that is missing or empty.
        """
        found = []
        if tokenizer and tokenizer.hash != self.tokenizer_hash:
            found.append(f"tokenizer: {tokenizer.hash[:12]} now, {(self.tokenizer_hash or 'none')[:12]} in the store")
        if data:
            for name, was in self.info.get("data", {}).items():
                now = _plain(getattr(data, name))
                if now != was:
                    found.append(f"data.{name}: {now!r} now, {was!r} in the store")
            found += self._changed("validation_sources", resolve(data.validation) if data.validation else [])
        return found + self._changed("sources", resolve(sources))

    def _changed(self, key: str, sources: list[Source]) -> list[str]:
        was = {entry["name"]: entry for entry in self.info.get(key, ())}
        now = {source.name: source for source in sources}
        found = [f"{name}: not in the store" for name in now if name not in was]
        found += [f"{name}: in the store, but no longer named" for name in was if name not in now]
        for name in now.keys() & was.keys():
            entry = fingerprint(now[name], full=not was[name]["sampled"])
            if entry["bytes"] != was[name]["bytes"]:
                found.append(f"{name}: {entry['bytes']} bytes now, {was[name]['bytes']} in the store")
            elif entry["sha256"] != was[name]["sha256"]:
                found.append(f"{name}: its content has changed")
        if not found and list(now) != list(was):
            found.append("the order of the sources has changed")
        return sorted(found)


def build_store(
    sources: Sequence[str | Path] | Sequence[Source],
    tokenizer: Tokenizer,
    out: str | Path,
    data: DataConfig,
    *,
    counted: Scan | None = None,
    overwrite: bool = False,
    full_hash: bool = False,
    engine: Engine | None = None,
    workers: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    on_progress: OnProgress | None = None,
) -> TokenStore:
    """Encode documents into a token store at ``out``: whole, or not at all.

    What is encoded is kept beside ``out`` every few seconds, so that the same call goes on from there after an
    interruption. The store depends neither on that nor on the engine and its workers.

    Args:
        sources: what ``resolve`` takes or returns.
        counted: a scan of the same sources, where it has been made; else it is made here.
        overwrite: replace a store that is there.
        full_hash: fingerprint large files whole, not by samples.
        engine: where text is encoded; None: by threads of this process.
        workers: threads, where there is no engine; 0 is one a core.
        shard_tokens: tokens in every shard but the last of a split.
        on_progress: told (bytes done, bytes in all) of the text encoded, after the scan.

    Raises:
        RungError: unreadable text, a split of under 2 tokens, something at ``out`` already, a disk that is full.
    """
    out = Path(out)
    training, validation = _as_sources(sources), _as_sources(data.validation) if data.validation else []
    shared = {source.path.resolve() for source in training} & {source.path.resolve() for source in validation}
    if shared:
        raise RungError(f"{sorted(shared)[0]} is both training and validation text", "hold out other files")
    check_free(out, overwrite, [source.path for source in (*training, *validation)])
    made_from = {
        "data": {name: _plain(getattr(data, name)) for name in _SETTINGS},
        "sources": [fingerprint(source, full_hash) for source in training],
        "validation_sources": [fingerprint(source, full_hash) for source in validation],
    }
    with StoreWriter(out, tokenizer, shard_tokens, made_from) as writer:
        counted = counted or writer.scan or scan(training, data)
        writer.keep_scan(counted)
        held_out = Split() if validation else hold_out(counted, data.validation_fraction)
        parts = _parts(training, validation, held_out, data, on_progress)
        for _ in itertools.islice(parts, writer.taken):  # written before an interruption
            pass
        for split, part, ids in encoded(parts, tokenizer, engine, workers):
            writer.write(split, part, ids)
        tokenizer.save(writer.folder / TOKENIZER)
        write_json(writer.folder / DATASET, {"version": VERSION} | writer.finish() | made_from)
        writer.tidy()
        publish(writer.folder, out)
    return TokenStore.open(out)


def check_free(out: Path, overwrite: bool, sources: Sequence[Path]) -> None:
    """Look whether a store may be made at ``out``.

    Raises:
        RungError: something is there and is not to be replaced, is no store, or has in it what is not Rung's or what
            the store is made of.
    """
    check_apart(out, sources)
    if not out.exists():
        return
    if not overwrite:
        raise RungError(f"{out} exists", "name another folder with --out, or replace it with --overwrite")
    if not (out / DATASET).is_file():
        raise RungError(f"{out} is not a token store, so it is not overwritten", "name another folder with --out")
    files = (re.escape(DATASET), re.escape(TOKENIZER), rf"({'|'.join(SPLITS)})-\d{{5,}}-of-\d{{5,}}\.safetensors")
    check_replaceable(out, files, (), "move it elsewhere, or name another folder with --out")


@contextlib.contextmanager
def new_store(out: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes ``out`` when the block ends well, and vanishes when it does not.

    Raises:
        RungError: the disk did not take it.
    """
    with cannot(f"write {out}", "look at the disk and the folder"):
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
        try:
            yield partial
            make_public(partial)
            publish(partial, out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


# Which text goes where


_EMPTY = End(whole=False)  # with nothing begun: a document without text


def _parts(
    training: list[Source], validation: list[Source], held_out: Split, data: DataConfig, on_progress: OnProgress | None
) -> Iterator[Part]:
    sizes = [sum(source.size for source in sources) for sources in (training, validation)]

    def told(before: int) -> OnProgress | None:
        return (lambda done, _: on_progress(before + done, sum(sizes))) if on_progress else None

    number = 0
    for document in documents(training, data, told(0)):
        first = next(document.pieces, None)
        if first is None:
            yield "train", _EMPTY
            continue
        if held_out.cut is not None:
            yield from _cut(document, first, held_out.cut)
        else:
            yield from _whole("validation" if number in held_out.documents else "train", document, first)
        number += 1
    for document in documents(validation, data, told(sizes[0])):
        first = next(document.pieces, None)
        yield from [("validation", _EMPTY)] if first is None else _whole("validation", document, first)


def _whole(split: str, document: Document, first: str) -> Iterator[Part]:
    yield split, Begin(document.name)
    yield split, first
    for piece in document.pieces:
        yield split, piece
    yield split, End(whole=True)


def _cut(document: Document, first: str, cut: int) -> Iterator[Part]:
    """Yield the text before character ``cut`` for training, the rest for validation; neither is a whole document."""
    pieces = itertools.chain([first], document.pieces)
    rest: list[str] = []

    def before() -> Iterator[str]:
        left = cut
        for piece in pieces:
            if len(piece) > left:
                rest.append(piece[left:])
                yield piece[:left]
                return
            left -= len(piece)
            yield piece

    for split, offset, text in (("train", 0, before()), ("validation", cut, itertools.chain(rest, pieces))):
        yield split, Begin(document.name, offset)
        for piece in even_pieces(text):
            yield split, piece
        yield split, End(whole=False)


# Reading


def _split_of(path: Path, info: dict[str, Any], name: str) -> Tokens:
    said = info["splits"][name]
    places = [path / shard_name(name, k, said["shards"]) for k in range(said["shards"])]
    shards = [read_shard(place) for place in places]
    tokens = [tokens for tokens, _ in shards]
    starts = np.concatenate([starts for _, starts in shards if starts is not None] or [np.empty(0, np.int64)])
    found = (sum(map(len, tokens)), len(starts), {str(part.dtype) for part in tokens})
    if found != (said["tokens"], said["documents"], {info["dtype"]}):
        raise RungError(
            f"{path}: the {name} shards hold {found[0]} tokens of {found[1]} documents, "
            f"and {DATASET} says {said['tokens']} of {said['documents']}",
            _TAMPERED,
        )
    if wrong := misplaced(starts, found[0]):
        raise RungError(f"{path}: in the {name} shards, {wrong}", _TAMPERED)
    return Tokens(
        tokens,
        starts,
        said["text_bytes"],
        info["tokenizer"]["end_id"],
        said["names"] or (),
        vocab_size=info["tokenizer"]["vocab_size"],
        origins=[(str(place), 0) for place in places],
        way_out=_TAMPERED,
    )


# Helpers


def _as_sources(sources: Sequence[str | Path] | Sequence[Source]) -> list[Source]:
    if sources and all(isinstance(source, Source) for source in sources):
        return list(sources)  # type: ignore[arg-type]
    return resolve(sources)  # type: ignore[arg-type]


def _identity(path: Path, info: dict[str, Any]) -> str:
    if not info:
        made_from: Any = fingerprint(Source(path.name, path, path.stat().st_size))
    else:
        # A name may change with the folder that a text is read from; its content may not.
        sources = {key: [entry["sha256"] for entry in info[key]] for key in ("sources", "validation_sources")}
        # Of tokens that lie elsewhere, whether somebody has counted what is in them makes no difference.
        ignored = ("names", "shards") if "files" not in info else ("documents", "text_bytes", "estimated")
        splits = {name: {**said, **dict.fromkeys(ignored)} for name, said in info["splits"].items()}
        settings = {name: value for name, value in info["data"].items() if name != "validation"}
        made_from = [info.get("version", VERSION), info["tokenizer"], sources, splits, settings]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _counted(number: int | None) -> str:
    return "uncounted documents" if number is None else _many(number, "document")


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _plain(value: Any) -> Any:
    """Return a setting as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value
