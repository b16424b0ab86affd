"""Token files used where they lie: which part of which file is training and validation, without copying any."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rung.corpus.sources import Source, fingerprint
from rung.disk import reason
from rung.errors import RungError
from rung.tokens.files import BinType, Sample, TokenFile, listed_starts, look_into, map_ids, open_token_file
from rung.tokens.mapped import Tokens
from rung.tokens.tokenizer import Tokenizer

LISTED_TOKENS = 1 << 23  # in a split of up to so many, documents are looked for when it is opened
MOST_HELD_OUT = 10_485_760  # tokens, unless a fraction is asked: as many as the usual validation shard of FineWeb

_MIN_TOKENS = 2  # of a split: one input and its target
_NEAR = 0.5  # a document's end is taken for the cut when it moves the cut by at most this much of what is held out
_NEAR_TOKENS = 1 << 17  # and at most by so many

# What tells documents apart: a list in the file, the end of text in the stream, or nothing: one document.
Marks = Literal["list", "end", "none"]


@dataclass(frozen=True)
class _Piece:
    """A part of a file that lies in one split."""

    file: TokenFile
    start: int  # its first token, within the file
    count: int


def lay_out(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    validation: Sequence[Path] = (),
    fraction: float | None = None,
    bin_type: BinType = "",
) -> dict[str, Any]:
    """Return what dataset.json says of files of ids, one after the other; paths are absolute.

    Nothing is read but headers and samples; a file of up to 16 MiB whole.

    Args:
        files: in order.
        tokenizer: that made the ids.
        validation: files held out; else the end of ``files``, cut between two documents where two meet near there.
        fraction: of the tokens held out; ``None``: a tenth, at most ``MOST_HELD_OUT``.
        bin_type: of ids in ``.bin`` files.

    Raises:
        RungError: a file that cannot be what it should be, ids that the tokenizer does not know, too few tokens.
    """
    _check_once([*files, *validation])
    opened = [open_token_file(path, tokenizer.vocab_size, bin_type) for path in files]
    held_out = [open_token_file(path, tokenizer.vocab_size, bin_type) for path in validation]
    samples = [_sample(file, tokenizer) for file in opened]
    n_tokens = sum(file.count for file in opened)
    if n_tokens < _MIN_TOKENS:
        raise RungError(f"{files[0]} holds {n_tokens} tokens", f"training takes {_MIN_TOKENS} at least")
    if held_out:
        fraction = 0.0
    elif fraction is None:
        fraction = min(0.1, MOST_HELD_OUT / n_tokens)
    marks = _marks(opened, samples)
    whole = [_Piece(file, 0, file.count) for file in opened]
    cut = _cut(whole, marks, tokenizer, fraction)
    splits = {"train": _part(whole, 0, cut), "validation": _part(whole, cut, n_tokens)}
    of_split = {"train": samples, "validation": samples}
    marked = {"train": marks, "validation": marks}
    if held_out:
        splits["validation"] = [_Piece(file, 0, file.count) for file in held_out]
        of_split["validation"] = [_sample(file, tokenizer) for file in held_out]
        own = _marks(held_out, of_split["validation"])
        marked["validation"] = "end" if own == "none" and marks == "end" else own
    splits = {name: pieces for name, pieces in splits.items() if pieces}
    return {
        "dtype": str(np.result_type(*(file.dtype for file in [*opened, *held_out])).newbyteorder("=")),
        "tokenizer": {name: getattr(tokenizer, name) for name in ("hash", "kind", "vocab_size", "end_id")},
        "empty_documents": 0,
        "splits": {name: _said(pieces, of_split[name], marked[name], tokenizer) for name, pieces in splits.items()},
        "data": {"validation": [str(path) for path in validation], "validation_fraction": fraction},
        "sources": [_fingerprint(file.path) for file in opened],
        "validation_sources": [_fingerprint(file.path) for file in held_out],
        "files": {name: [_recorded(piece) for piece in pieces] for name, pieces in splits.items()},
    }


def open_splits(folder: Path, info: Mapping[str, Any]) -> dict[str, Tokens]:
    """Return the splits of what ``lay_out`` returned; paths may be relative to ``folder``.

    Raises:
        RungError: a file that is gone or has changed.
    """
    for entry in [*info["sources"], *info["validation_sources"]]:
        _check_unchanged(folder, entry)
    return {name: _tokens(folder, info, name) for name in info["files"]}


def bare_tokens(path: Path, tokenizer: Tokenizer | None = None) -> Tokens:
    """Return all of one file of ids; its documents by its own list, else by the end of text of ``tokenizer``.

    Raises:
        RungError: it cannot be what it should be.
    """
    file = open_token_file(path, tokenizer.vocab_size if tokenizer else 0)
    ids, end_id = file.ids(), tokenizer.end_id if tokenizer else None
    marks: Marks = "list" if file.document_starts is not None else "end" if end_id is not None else "none"
    if marks == "end" and len(ids) > LISTED_TOKENS:
        return Tokens([ids], np.empty(0, np.int64), end_id=end_id, ends_tell=True)
    return Tokens([ids], _starts(file.document_starts, 0, [ids], marks, end_id), end_id=end_id)


def placed(info: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``info`` for a store at ``folder``: files near it are named relative to it, so that both may move.

    Near is within the folder that the store is in.
    """

    def moved(entry: dict[str, Any]) -> dict[str, Any]:
        path, near = Path(entry["path"]), folder.resolve().parent
        return {**entry, "path": os.path.relpath(path, folder.resolve()) if path.is_relative_to(near) else str(path)}

    return {
        **info,
        **{key: [moved(entry) for entry in info[key]] for key in ("sources", "validation_sources")},
        "files": {name: [moved(piece) for piece in pieces] for name, pieces in info["files"].items()},
    }


def at(folder: Path, path: str) -> Path:
    """Return where a file named in dataset.json is."""
    return Path(os.path.normpath(folder.resolve() / path))


# Laying out


def _sample(file: TokenFile, tokenizer: Tokenizer) -> Sample:
    return look_into(file, tokenizer.vocab_size, tokenizer.end_id, tokenizer.token_bytes)


def _check_once(paths: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise RungError(f"{path} is named twice", "name each file once: a copy would leak into validation")
        seen.add(path.resolve())


def _marks(files: Sequence[TokenFile], samples: Sequence[Sample]) -> Marks:
    if len(files) == 1 and files[0].document_starts is not None:
        return "list"
    return "end" if any(sample.ends for sample in samples) else "none"


def _cut(whole: Sequence[_Piece], marks: Marks, tokenizer: Tokenizer, fraction: float) -> int:
    """Return the token that the validation split begins with; the number of all where none is held out."""
    n_tokens = sum(piece.count for piece in whole)
    held_out = round(fraction * n_tokens)
    if held_out < _MIN_TOKENS:
        return n_tokens
    cut = n_tokens - held_out
    reach = min(int(_NEAR * held_out), _NEAR_TOKENS)
    low, high = max(cut - reach, _MIN_TOKENS), min(cut + reach, n_tokens - _MIN_TOKENS)
    if low > high or marks == "none":
        return cut
    if marks == "list":
        starts = np.asarray(whole[0].file.document_starts)
    else:
        shards = [piece.file.ids() for piece in whole]
        read = Tokens(shards, np.zeros(1, np.int64)).read(low - 1, high)
        starts = low + np.flatnonzero(read == tokenizer.end_id)
    near = starts[(starts >= low) & (starts <= high)]
    return int(near[np.argmin(np.abs(near - cut))]) if len(near) else cut


def _part(whole: Sequence[_Piece], start: int, stop: int) -> list[_Piece]:
    """Return the pieces from token ``start`` to before ``stop``."""
    pieces, first = [], 0
    for piece in whole:
        low, high = max(start - first, 0), min(stop - first, piece.count)
        if low < high:
            pieces.append(_Piece(piece.file, piece.start + low, high - low))
        first += piece.count
    return pieces


def _said(pieces: Sequence[_Piece], samples: Sequence[Sample], marks: Marks, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what dataset.json says of a split that lies in ``pieces``; what is not counted is estimated."""
    tokens = sum(piece.count for piece in pieces)
    documents, text_bytes = None, None
    counted = all(sample.whole for sample in samples) and tokens <= LISTED_TOKENS
    if counted or marks == "list":
        shards = [piece.file.ids()[piece.start : piece.start + piece.count] for piece in pieces]
        documents = len(_starts(pieces[0].file.document_starts, pieces[0].start, shards, marks, tokenizer.end_id))
        if counted:
            text_bytes = sum(int(tokenizer.token_bytes[shard].sum(dtype=np.int64)) for shard in shards)
    seen = sum(sample.tokens for sample in samples)
    return {
        "tokens": tokens,
        "documents": documents,
        "text_bytes": round(tokens * sum(s.text_bytes for s in samples) / seen) if text_bytes is None else text_bytes,
        "estimated": text_bytes is None,
        "text_chars": None,
        "documents_by": marks,
        "shards": 0,
        "names": None,
    }


def _recorded(piece: _Piece) -> dict[str, Any]:
    file = piece.file
    begin = file.offset + piece.start * file.dtype.itemsize
    path = str(file.path.resolve())
    return {"path": path, "dtype": file.dtype.str, "offset": begin, "first": piece.start, "tokens": piece.count}


def _fingerprint(path: Path) -> dict[str, Any]:
    status = path.stat()
    made = fingerprint(Source(path.name, path, status.st_size))
    return {**made, "path": str(path.resolve()), "modified": status.st_mtime_ns}


# Opening


def _check_unchanged(folder: Path, entry: Mapping[str, Any]) -> None:
    path = at(folder, entry["path"])
    try:
        status = path.stat()
    except OSError as error:
        raise RungError(
            f"{path}: {reason(error)}; {folder} has its tokens there",
            "put the file back, or import it again from its place",
        ) from None
    same = status.st_size == entry["bytes"]
    # A file that was copied or touched has another time; what it holds decides.
    if same and status.st_mtime_ns != entry["modified"]:
        same = fingerprint(Source(path.name, path, status.st_size))["sha256"] == entry["sha256"]
    if not same:
        raise RungError(f"{path} has changed since {folder} was made from it", "import it again")


def _tokens(folder: Path, info: Mapping[str, Any], name: str) -> Tokens:
    said, pieces = info["splits"][name], info["files"][name]
    vocab_size, end_id = info["tokenizer"]["vocab_size"], info["tokenizer"]["end_id"]
    places = [at(folder, piece["path"]) for piece in pieces]
    shards = [
        map_ids(path, np.dtype(piece["dtype"]), piece["offset"], piece["tokens"])
        for path, piece in zip(places, pieces, strict=True)
    ]
    marks: Marks = said["documents_by"]
    ends_tell = marks == "end" and said["tokens"] > LISTED_TOKENS
    listed = listed_starts(places[0]) if marks == "list" else None
    starts = np.empty(0, np.int64) if ends_tell else _starts(listed, pieces[0]["first"], shards, marks, end_id)
    return Tokens(
        shards,
        starts,
        said["text_bytes"],
        end_id,
        ends_tell=ends_tell,
        n_documents=said["documents"],
        estimated=said["estimated"],
        vocab_size=vocab_size,
        origins=[(str(path), piece["first"]) for path, piece in zip(places, pieces, strict=True)],
    )


def _starts(
    listed: np.ndarray | None, first: int, shards: Sequence[np.ndarray], marks: Marks, end_id: int | None
) -> np.ndarray:
    """Return where the documents of a split begin: int64; the first at 0, whatever is cut off before."""
    found = [np.zeros(1, np.int64)]
    n_tokens, before = sum(map(len, shards)), 0
    if marks == "list":
        assert listed is not None
        found.append(listed - first)
    elif marks == "end":
        for shard in shards:
            found.append(before + 1 + np.flatnonzero(shard == end_id))
            before += len(shard)
    starts = np.concatenate(found).astype(np.int64)
    return np.unique(starts[(starts >= 0) & (starts < n_tokens)])  # an end of text at the very end begins nothing
