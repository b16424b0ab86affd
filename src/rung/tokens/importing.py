"""Files of ids become a token store that refers to them: a small folder, and the files stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rung.disk import write_json
from rung.tokens.files import BinType, blocks, check_starts, count_ids, listed_starts
from rung.tokens.in_place import at, lay_out, placed
from rung.tokens.store import DATASET, TOKENIZER, VERSION, TokenStore, check_free, new_store
from rung.tokens.tokenizer import Tokenizer

OnProgress = Callable[[int, int], None]  # (bytes done, bytes in all)


def import_store(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    validation: Sequence[str | Path] = (),
    validation_fraction: float | None = None,
    bin_type: BinType = "",
    verify: bool = False,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> TokenStore:
    """Write a store at ``out`` that refers to files of ids, without copying or loading any.

    Args:
        files: safetensors, ``.npy`` or ``.bin``, one after the other.
        tokenizer: that made the ids.
        out: the folder to make.
        validation: files held out, instead of the end of ``files``.
        validation_fraction: of the tokens held out; ``None``: a tenth, at most 10,485,760.
        bin_type: of ids in ``.bin`` files: uint16, where it is not given.
        verify: look at every id and at what stands before each listed document, and count documents and bytes exactly.
        overwrite: replace a store that is there.
        on_progress: told of the bytes looked at.

    Raises:
        RungError: as ``tokens.in_place.lay_out``; something at ``out`` already; with ``verify`` any id that the
            tokenizer does not know, and a document of the file's list that does not follow an end of text.
    """
    out = Path(out)
    check_free(out, overwrite, [Path(file) for file in (*files, *validation)])
    info = lay_out(
        [Path(file) for file in files],
        tokenizer,
        validation=[Path(file) for file in validation],
        fraction=validation_fraction,
        bin_type=bin_type,
    )
    if verify:
        _count(info, tokenizer, on_progress)
    with new_store(out) as partial:
        tokenizer.save(partial / TOKENIZER)
        write_json(partial / DATASET, {"version": VERSION, **placed(info, out)})
    return TokenStore.open(out)


def _count(info: dict[str, Any], tokenizer: Tokenizer, on_progress: OnProgress | None) -> None:
    """Put what a pass over every id finds into ``info``: documents and bytes of text."""
    pieces = [piece for split in info["files"].values() for piece in split]
    total = sum(piece["tokens"] * np.dtype(piece["dtype"]).itemsize for piece in pieces)
    done = 0
    for name, said in info["splits"].items():
        counts_V = np.zeros(tokenizer.vocab_size, np.int64)
        last = -1
        listed = listed_starts(Path(info["files"][name][0]["path"])) if said["documents_by"] == "list" else None
        for piece, start, ids in _read(info["files"][name]):
            counts_V += count_ids(piece["path"], ids, start, tokenizer.vocab_size)
            if listed is not None:
                check_starts(piece["path"], listed, ids, start, tokenizer.end_id)
            last = int(ids[-1])
            done += ids.nbytes
            if on_progress:
                on_progress(done, total)
        ends = int(counts_V[tokenizer.end_id])
        if said["documents_by"] == "none" and ends:
            said["documents_by"] = "end"
        if said["documents_by"] == "end":
            said["documents"] = ends + (last != tokenizer.end_id)
        elif said["documents_by"] == "none":
            said["documents"] = 1
        said |= {"text_bytes": int(counts_V @ tokenizer.token_bytes), "estimated": False}


def _read(pieces: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int, np.ndarray]]:
    """Yield (piece, position in its file, ids), block by block."""
    for piece in pieces:
        path = at(Path(), piece["path"])
        for start, ids in blocks(path, np.dtype(piece["dtype"]), piece["offset"], piece["tokens"]):
            yield piece, piece["first"] + start, ids
