"""One shard of tokens: a safetensors file, written as a stream and read through the page cache."""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rung.errors import RungError

_HEADER_BYTES = 512  # reserved while the lengths are not known; the format lets a header end in spaces
_DTYPES = {"U8": "<u1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8"}
_TENSORS = ("tokens", "document_starts")
_CODES = {"uint16": "U16", "uint32": "U32"}


class ShardWriter:
    """Writes ``tokens`` as they come, then ``document_starts``; the file is a safetensors file once closed.

    A file that holds ``n_tokens`` already is cut after them and goes on; ``document_starts`` are those that it has.
    """

    def __init__(self, path: Path, dtype: str, n_tokens: int = 0, document_starts: Iterable[int] = ()):
        self.path = path
        self.n_tokens = n_tokens
        self.document_starts = array("q", document_starts)  # positions in the whole split
        self._dtype = dtype
        self._file: BinaryIO = path.open("r+b" if n_tokens else "wb")
        if n_tokens:
            self._file.truncate(8 + _HEADER_BYTES + n_tokens * np.dtype(dtype).itemsize)
            self._file.seek(0, os.SEEK_END)
        else:
            self._file.write(b"\0" * (8 + _HEADER_BYTES))

    def write(self, tokens: np.ndarray) -> None:
        self._file.write(tokens.astype(self._dtype).tobytes())
        self.n_tokens += len(tokens)

    def flush(self) -> None:
        """Wait until the disk has the tokens so far."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what follows the tokens, then the header, and wait until the disk has all of it."""
        starts = np.array(self.document_starts, "<i8")
        self._file.write(starts.tobytes())
        end = self.n_tokens * np.dtype(self._dtype).itemsize
        header = {
            "tokens": {"dtype": _CODES[self._dtype], "shape": [self.n_tokens], "data_offsets": [0, end]},
            "document_starts": {"dtype": "I64", "shape": [len(starts)], "data_offsets": [end, end + starts.nbytes]},
        }
        self._file.seek(0)
        self._file.write(struct.pack("<Q", _HEADER_BYTES) + json.dumps(header).encode().ljust(_HEADER_BYTES))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is, for it to be removed."""
        self._file.close()


def read_shard(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Return ``tokens`` (memory-mapped, [n]) and ``document_starts`` (int64, or None where the file has none).

    Raises:
        RungError: the file is missing, cut short, not safetensors, or has no one-dimensional whole-number ``tokens``.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 2 <= length <= min(100_000_000, path.stat().st_size - 8):  # the format's own bound
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
            tensors = {
                name: _tensor(path, name, entry, 8 + length) for name, entry in header.items() if name in _TENSORS
            }
    except FileNotFoundError:
        raise RungError(f"no file {path}", "build the token store again") from None
    except (ValueError, KeyError, TypeError, struct.error) as error:
        hint = "it may be cut short; build the token store again"
        raise RungError(f"{path} is not a safetensors file of tokens: {error}", hint) from None
    if "tokens" not in tensors:
        raise RungError(f"{path} has no tensor named tokens", f"it has {', '.join(header)}; see docs/formats.md")
    starts = tensors.get("document_starts")
    return tensors["tokens"], None if starts is None else np.array(starts, np.int64)


def misplaced(starts: np.ndarray, n_tokens: int) -> str:
    """Return what is wrong with where documents are said to begin, "" where nothing is.

    Args:
        starts: int64, which must ascend and lie within the tokens.
        n_tokens: from position 0 on.
    """
    outside = (starts < 0) | (starts >= n_tokens)
    back = np.diff(starts, prepend=starts[:1] - 1) <= 0
    after = "which does not come after the one before"
    for wrong, why in ((outside, f"and there are {n_tokens:,} tokens"), (back, after)):
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            return f"document start {at:,} is at token {int(starts[at]):,}, {why}"
    return ""


def _tensor(path: Path, name: str, entry: dict[str, Any], base: int) -> np.ndarray:
    """Return one tensor of the file, memory-mapped; the data of all tensors begin at byte ``base``."""
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in _DTYPES or len(entry["shape"]) != 1:
        raise ValueError(f"{name} is {entry['dtype']} {entry['shape']}, not one row of whole numbers")
    dtype, (count,) = np.dtype(_DTYPES[entry["dtype"]]), entry["shape"]
    if end - begin != count * dtype.itemsize or base + end > path.stat().st_size:
        raise ValueError(f"{name} should take {count * dtype.itemsize} bytes, and the file ends before")
    if not count:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", base + begin, (count,))
