"""One split of tokens, read where it lies: shards in memory or memory-mapped, one after the other."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rung.errors import RungError

RESIDENT_BYTES = 1 << 26  # of mapped files, that the memory of the process seems to grow by before it is let go
_FAULT_BYTES = 1 << 16  # that Linux maps around one byte that is read
OTHER_IDS = "name the tokenizer that made these tokens, or --dtype if the file is of another type"


class Tokens:
    """One split, memory-mapped. ``len`` is its number of tokens.

    ``document_starts``: int64, the position of the first token of each document; empty where only the end of text in
    the stream tells them apart (``ends_tell``), as in files too large to look through. ``n_documents``: None where
    nobody has counted. ``text_bytes``: UTF-8 bytes of its text (0: not known), ``estimated`` from a sample or counted.
    ``end_id``: the id of the end of text (None: not known). ``names``: of its documents, where they are few enough to
    be listed.

    Args:
        vocab_size: every id that is read is held against it, since files may have been changed, or nobody has looked
            through them.
        origins: for each shard its file, and the position in the file of the shard's first token.
        way_out: the hint where an id is not in the vocabulary.
    """

    def __init__(
        self,
        shards: Sequence[np.ndarray],
        document_starts: np.ndarray,
        text_bytes: int = 0,
        end_id: int | None = None,
        names: Sequence[str] = (),
        *,
        ends_tell: bool = False,
        n_documents: int | None = None,
        estimated: bool = False,
        vocab_size: int | None = None,
        origins: Sequence[tuple[str, int]] = (),
        way_out: str = OTHER_IDS,
    ):
        assert not ends_tell or end_id is not None
        self._shards = list(shards)
        self._bounds = np.cumsum([0, *map(len, shards)], dtype=np.int64)  # where each shard begins, and the end
        self._vocab_size, self._origins, self._way_out = vocab_size, origins, way_out
        self._touched = 0  # bytes
        self.n_tokens = int(self._bounds[-1])
        self.document_starts = document_starts
        self.n_documents = n_documents if ends_tell else len(document_starts)
        self.ends_tell = ends_tell
        self.text_bytes = text_bytes
        self.estimated = estimated
        self.end_id = end_id
        self.names = list(names)

    def __len__(self) -> int:
        return self.n_tokens

    @property
    def several_documents(self) -> bool:
        """Whether there is more than one document, so that a token may be kept from seeing another one's."""
        return self.ends_tell or len(self.document_starts) > 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens from ``start`` to before ``stop`` (within the split): int32 [stop - start].

        Raises:
            RungError: an id that is not in the vocabulary, where that has to be looked for.
        """
        assert 0 <= start <= stop <= self.n_tokens, f"[{start}, {stop}) is not within {self.n_tokens} tokens"
        first, last = np.searchsorted(self._bounds, [start, stop], side="right") - 1
        parts = []
        for k in range(first, min(last + 1, len(self._shards))):
            low = max(start - self._bounds[k], 0)
            parts.append(self._shards[k][low : stop - self._bounds[k]])
            self._check(parts[-1][None], np.array([low]), k)
        found = np.concatenate(parts, dtype=np.int32, casting="unsafe") if parts else np.empty(0, np.int32)
        self._let_go(sum(max(part.nbytes, _FAULT_BYTES) for part in parts))
        return found

    def gather(self, starts_B: np.ndarray, length: int) -> np.ndarray:
        """Return the rows that begin at ``starts_B`` (int64 [B]): int32 [B, length].

        Rows may stick out at either end; positions there hold 0.

        Raises:
            RungError: an id that is not in the vocabulary, where that has to be looked for.
        """
        rows_BL = np.zeros((len(starts_B), length), np.int32)
        shards_B = np.searchsorted(self._bounds, starts_B, side="right") - 1
        inside_B = (starts_B >= 0) & (starts_B + length <= self._bounds[np.minimum(shards_B + 1, len(self._shards))])
        for k in np.unique(shards_B[inside_B]).tolist():
            here = np.flatnonzero(inside_B & (shards_B == k))
            starts = starts_B[here] - self._bounds[k]
            found = sliding_window_view(self._shards[k], length)[starts]
            self._check(found, starts, k)
            rows_BL[here] = found
        for row in np.flatnonzero(~inside_B).tolist():
            start = int(starts_B[row])
            low, high = max(start, 0), min(start + length, self.n_tokens)
            if low < high:
                rows_BL[row, low - start : high - start] = self.read(low, high)
        self._let_go(len(starts_B) * max(length * rows_BL.itemsize, _FAULT_BYTES))
        return rows_BL

    def _let_go(self, n_bytes: int) -> None:
        """Count what was read, and now and then take the files out of the process's memory again.

        The pages stay in the system's cache. Without it a run would seem to take as much memory as its files have.
        """
        self._touched += n_bytes
        if self._touched > RESIDENT_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._touched = 0
            for shard in self._shards:
                if isinstance(mapped := getattr(shard, "_mmap", None), mmap.mmap):
                    with contextlib.suppress(OSError, ValueError):
                        mapped.madvise(mmap.MADV_DONTNEED)

    def _check(self, found_NL: np.ndarray, starts_N: np.ndarray, shard: int) -> None:
        """Refuse ids outside the vocabulary; on the file's own type, for a cast to int32 may hide them."""
        if self._vocab_size is None or not found_NL.size or known(found_NL, self._vocab_size):
            return
        row, column = (int(at[0]) for at in np.nonzero((found_NL < 0) | (found_NL >= self._vocab_size)))
        file, first = self._origins[shard]
        at, token_id = first + int(starts_N[row]) + column, int(found_NL[row, column])
        raise unknown_id(file, at, token_id, self._vocab_size, self._way_out)


def known(ids: np.ndarray, vocab_size: int) -> bool:
    """Return whether all of at least one id are in a vocabulary."""
    return bool(ids.max() < vocab_size) and (ids.dtype.kind == "u" or bool(ids.min() >= 0))


def unknown_id(file: str, position: int, token_id: int, vocab_size: int, way_out: str = OTHER_IDS) -> RungError:
    """Return the mistake that a file holds an id which its tokenizer does not know."""
    return RungError(
        f"{file}: token {position:,} has the token id {token_id}, and the tokenizer's vocabulary is {vocab_size}",
        way_out,
    )
