"""Files of token ids that other programs made, recognised and memory-mapped: safetensors, ``.npy``, raw ``.bin``."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from rung.disk import reason
from rung.errors import RungError
from rung.tokens.mapped import known, unknown_id
from rung.tokens.shards import misplaced, read_shard

SUFFIXES = (".safetensors", ".bin", ".npy")
SAMPLE_BLOCKS = 65  # looked through where a file is not read whole
SAMPLE_BYTES = 1 << 16  # of each
WHOLE_BYTES = 16 << 20  # files up to this size are looked through whole

_AGAIN = "it may be cut short, or be something else; copy or make it again"
_STARTS = "document_starts ascend, from 0 on within the tokens of the file; make the file again, or without them"
_WIDER = "say of what type it is: rung tokens import --dtype uint32"

# llm.c begins its .bin files with 256 int32: a magic number, a version, the number of tokens
# (github.com/karpathy/llm.c, dev/data/data_common.py).
_LLM_C_HEADER = 1024
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}

BinType = Literal["", "uint16", "uint32"]


@dataclass(frozen=True)
class TokenFile:
    """One file of ids: ``count`` of them, of ``dtype``, from byte ``offset`` on.

    ``document_starts``: int64, where the file says where its documents begin, else None.
    """

    path: Path
    dtype: np.dtype
    offset: int
    count: int
    document_starts: np.ndarray | None = None

    def ids(self) -> np.ndarray:
        """Return the ids, memory-mapped: [count]."""
        return map_ids(self.path, self.dtype, self.offset, self.count)


@dataclass(frozen=True)
class Sample:
    """What blocks of a file, spread evenly over it, were found to hold; of a small file all of it (``whole``)."""

    tokens: int
    text_bytes: int
    ends: int  # ends of text
    whole: bool


def is_token_file(path: Path) -> bool:
    """Return whether a file's name says that it holds token ids."""
    return path.suffix in SUFFIXES and path.is_file()


def open_token_file(path: Path, vocab_size: int, bin_type: BinType = "") -> TokenFile:
    """Read the header of a file of ids; of a raw ``.bin``, which has none, the type is ``bin_type`` or uint16.

    Raises:
        RungError: no such file, damaged, not one row of whole numbers, or too few bits for the vocabulary.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise RungError(f"{path} {what}", "name files of token ids: .safetensors, .npy, or nanoGPT's .bin")
    if bin_type and path.suffix != ".bin":
        raise _says_itself(path)
    readers = {".safetensors": _safetensors, ".npy": _npy, ".bin": lambda path: _bin(path, vocab_size, bin_type)}
    if path.suffix not in readers:
        raise RungError(f"{path} is no file of token ids", f"known by their names: {', '.join(SUFFIXES)}")
    try:
        found = readers[path.suffix](path)
    except OSError as error:
        raise RungError(f"{path} cannot be read: {reason(error)}", _AGAIN) from None
    if not found.count:
        raise RungError(f"{path} holds no tokens", "name a file that has some")
    return found


def map_ids(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """Return ``count`` ids from byte ``offset`` of a file on, memory-mapped."""
    return np.memmap(path, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)


def look_into(file: TokenFile, vocab_size: int, end_id: int, token_bytes: np.ndarray) -> Sample:
    """Look through blocks of a file, all of a small one.

    Args:
        vocab_size: that the ids must be below.
        end_id: of the end of text.
        token_bytes: int32 [vocab_size], bytes of text that each id stands for.

    Raises:
        RungError: an id that is not in the vocabulary; a .bin whose every second id is 0, as of a wider type.
    """
    ids = file.ids()
    width = file.dtype.itemsize
    whole = file.count * width <= WHOLE_BYTES
    length = file.count if whole else SAMPLE_BYTES // width
    starts = [0] if whole else [(file.count - length) * k // (SAMPLE_BLOCKS - 1) for k in range(SAMPLE_BLOCKS)]
    counts_V = np.zeros(vocab_size, np.int64)
    zeros = np.zeros(2, np.int64)  # at even and at odd positions of a block
    for start in starts:
        block = np.asarray(ids[start : start + length])
        zeros += [np.count_nonzero(block[k::2] == 0) for k in (start % 2, 1 - start % 2)]
        counts_V += count_ids(str(file.path), block, start, vocab_size)
    tokens = int(counts_V.sum())
    if file.path.suffix == ".bin" and width == 2 and tokens > 2 and zeros[1] == tokens // 2 > zeros[0]:
        raise RungError(f"{file.path}: every second uint16 is 0, as in a file of uint32", _WIDER)
    return Sample(tokens, int(counts_V @ token_bytes), int(counts_V[end_id]), whole)


def count_ids(name: str, ids: np.ndarray, first: int, vocab_size: int) -> np.ndarray:
    """Return how often each id occurs: int64 [vocab_size].

    Args:
        name: of the file, for the mistake.
        ids: some of its ids, at least one.
        first: the position in the file of the first of them.

    Raises:
        RungError: an id that is not in the vocabulary; it is named with its position.
    """
    if not known(ids, vocab_size):
        at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise unknown_id(name, first + at, int(ids[at]), vocab_size)
    return np.bincount(ids.astype(np.intp), minlength=vocab_size)


def listed_starts(path: Path) -> np.ndarray | None:
    """Return where a safetensors file says that its documents begin: int64, None where it does not say.

    Raises:
        RungError: a damaged file; starts that do not ascend, or lie outside of the tokens.
    """
    return _safetensors(path).document_starts


def check_starts(name: str, starts: np.ndarray, ids: np.ndarray, first: int, end_id: int) -> None:
    """Check that before each document but the file's first stands an end of text.

    Args:
        name: of the file, for the mistake.
        starts: int64, ascending, where its documents begin.
        ids: some of its ids.
        first: the position in the file of the first of them.
        end_id: of the end of text.

    Raises:
        RungError: another token before a document that begins right after one of ``ids``.
    """
    low, high = np.searchsorted(starts, [first + 1, first + len(ids) + 1])
    wrong = np.flatnonzero(ids[starts[low:high] - 1 - first] != end_id)
    if len(wrong):
        number = int(low + wrong[0])
        at = int(starts[number])
        raise RungError(
            f"{name}: document start {number:,} is at token {at:,}, and the token before, "
            f"{int(ids[at - 1 - first])}, is not the end of text, {end_id}",
            _STARTS,
        )


def blocks(
    path: Path, dtype: np.dtype, offset: int, count: int, block_tokens: int = 1 << 20
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (position of the first, ids) of a file's ids from byte ``offset`` on, block by block.

    Read and not mapped, so that the memory of the process does not seem to grow with the file.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for start in range(0, count, block_tokens):
            wanted = min(block_tokens, count - start)
            ids = np.fromfile(file, dtype, wanted)
            if len(ids) < wanted:
                raise RungError(f"{path} ends before token {start + wanted:,}", _AGAIN)
            yield start, ids


# The formats


def _safetensors(path: Path) -> TokenFile:
    try:
        tokens, starts = read_shard(path)
    except RungError as error:
        raise RungError(error.problem, error.hint if "no tensor" in error.problem else _AGAIN) from None
    if starts is not None and (wrong := misplaced(starts, len(tokens))):
        raise RungError(f"{path}: {wrong}", _STARTS)
    return TokenFile(path, tokens.dtype, getattr(tokens, "offset", 0), len(tokens), starts)


def _npy(path: Path) -> TokenFile:
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            if version not in read:
                raise ValueError(f"version {version[0]}.{version[1]} of the format is not known")
            shape, _, dtype = read[version](file)
        except ValueError as error:
            reason = str(error).split("\n")[0].rstrip(".")
            raise RungError(f"{path} is not a .npy file: {reason}", _AGAIN) from None
        offset = file.tell()
    if len(shape) != 1 or dtype.kind not in "ui":
        raise RungError(
            f"{path} is {dtype} {list(shape)}, not one row of whole numbers", "save the ids as one row: ids.ravel()"
        )
    return _checked_size(path, dtype, offset, shape[0])


def _says_itself(path: Path) -> RungError:
    return RungError(
        f"{path} says itself of what type its ids are", "leave --dtype out: it is for .bin files without a header"
    )


def _bin(path: Path, vocab_size: int, bin_type: BinType) -> TokenFile:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(12)
    if len(start) == 12:
        magic, version, count = struct.unpack("<3i", start)
        if code := _LLM_C.get((magic, version)):
            if bin_type:
                raise _says_itself(path)
            return _checked_size(path, np.dtype(code), _LLM_C_HEADER, count)
    dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[bin_type or "uint16"])
    if vocab_size > 1 << 16 and not bin_type:
        raise RungError(
            f"{path} is taken for uint16, which the vocabulary of {vocab_size:,} does not fit",
            _WIDER,
        )
    if size % dtype.itemsize:
        raise RungError(f"{path} has {size:,} bytes, which is no whole number of {dtype}", _AGAIN)
    return TokenFile(path, dtype, 0, size // dtype.itemsize)


def _checked_size(path: Path, dtype: np.dtype, offset: int, count: int) -> TokenFile:
    size, said = path.stat().st_size, offset + count * dtype.itemsize
    if count < 0 or size != said:  # more: the rest would go unread
        raise RungError(f"{path} has {size:,} bytes, and its header says {said:,}", _AGAIN)
    return TokenFile(path, dtype, offset, count)
