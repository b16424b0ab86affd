"""Text in the columns of tables: JSON lines and Parquet, a document a row, read in bounded memory."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rung.corpus.decoding import text_chunks
from rung.corpus.folder import Record
from rung.corpus.unpacking import File, spooled
from rung.errors import RungError

_BATCH_BYTES = 4 << 20  # of text decoded at once from Parquet
_MOST_ROWS = 4096
_MOST_SHOWN = 20  # columns in a hint
_BUFFER_BYTES = 1 << 20


def json_lines(file: File, encoding: str, column: str, left_out: Counter[str]) -> Iterator[Record]:
    """Yield a document for each line of a JSON-lines file that is not blank, named by the line's number.

    The other keys are its metadata; numbers that JSON has not, as NaN, are counted in ``left_out``. A text that is
    ``null`` is an empty document. A line is in memory whole.

    Raises:
        RungError: a line that is not a JSON object, that has no ``column``, or whose text is none; a key that an object
            has twice; an undecodable byte.
    """
    for number, line in enumerate(_lines(text_chunks(file, encoding)), start=1):
        if not line or line.isspace():
            continue
        where = f"{file.name}, line {number}"
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except _TwiceError as error:
            hint = "only one of the two values could be kept: write the line again, with one"
            raise RungError(f"{where} has the key {error.args[0]!r} twice in one object", hint) from None
        except json.JSONDecodeError as error:
            hint = "each line is one JSON object; if the file is plain text, --format text"
            if file.packed:
                hint = f"each line is one JSON object; if they were when packed, the {file.packed} file is damaged: "
                hint += "get it again"
            raise RungError(f"{where} is not JSON: {error.msg} at character {error.colno}", hint) from None
        except (RecursionError, ValueError) as error:
            raise RungError(f"{where} cannot be read: {_first_line(error)}", "leave the line out") from None
        if not isinstance(row, dict):
            hint = 'each line is one JSON object, as in {"text": "..."}'
            raise RungError(f"{where} is {_kind(row)}, not an object", hint)
        if column not in row:
            raise no_column(where, column, row)
        text = row.pop(column)
        if text is not None and not isinstance(text, str):
            raise not_text(where, column, _kind(text))
        if "\\u" in line:
            _check_whole(text, where)
        yield Record(f"{file.name}#{number}", as_json(row, left_out), iter((text,) if text else ()))


def parquet(file: File, column: str, metadata: bool, left_out: Counter[str]) -> Iterator[Record]:
    """Yield a document for each row of a Parquet file, named by the row's number, from 1.

    The other columns are its metadata, read only with ``metadata``; of these, columns of bytes are left out, and
    counted in ``left_out``. A missing text is an empty document. Some megabytes of text are in memory at once, whatever
    the size of a row group.

    Raises:
        RungError: a damaged file, no ``column``, or one that is not of text; pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise RungError(
            f"{file.name} is Parquet, and pyarrow is not installed", "pip install 'rung[parquet]'"
        ) from None
    with contextlib.ExitStack() as open_files:
        stream = file.stream if file.seekable else open_files.enter_context(spooled(file.stream, file.name))
        row = 0
        try:
            # Without pre-buffering, and with a buffer, a row group is not loaded whole.
            table = open_files.enter_context(pq.ParquetFile(stream, pre_buffer=False, buffer_size=_BUFFER_BYTES))
            _check_column(file.name, table.schema_arrow, column)
            columns = [column, *(_other_columns(table.schema_arrow, column, left_out) if metadata else ())]
            for batch in table.iter_batches(_rows_at_once(table.metadata, columns), columns=columns, use_threads=False):
                texts = batch.column(column).to_pylist()
                rest = batch.drop_columns([column]).to_pylist() if len(columns) > 1 else [{}] * len(texts)
                for text, others in zip(texts, rest, strict=True):
                    row += 1
                    yield Record(f"{file.name}#{row}", as_json(others, left_out), iter((text,) if text else ()))
        except UnicodeDecodeError as error:
            problem = f"{file.name}, after row {row}: column {column!r} is not UTF-8 ({error.reason})"
            raise RungError(problem, "write the file again with its text in UTF-8") from None
        except (pa.ArrowException, OSError, EOFError) as error:
            problem = f"{file.name}, after row {row}: damaged Parquet ({_first_line(error)})"
            raise RungError(problem, "get the file again: it was cut short or changed on its way") from None


def no_column(where: str, column: str, known: Mapping[str, Any] | list[str]) -> RungError:
    """Return the error that there is no such column; its hint names the nearest there is."""
    if not known:
        return RungError(f"{where} has no column {column!r}", "it has no columns at all")
    if column == "text" and len(known) == 1:
        return RungError(f"{where} has no column 'text'", f"name the one it has: --text-column {next(iter(known))}")
    if close := difflib.get_close_matches(column, known, n=1):
        return RungError(f"{where} has no column {column!r}", f"did you mean --text-column {close[0]}?")
    shown = ", ".join([*known][:_MOST_SHOWN]) + (" ..." if len(known) > _MOST_SHOWN else "")
    return RungError(f"{where} has no column {column!r}", f"name one of {shown}: --text-column NAME")


def not_text(where: str, column: str, kind: str) -> RungError:
    """Return the error that a column holds something else than text."""
    return RungError(f"{where}: column {column!r} is {kind}, not text", "name the column of text: --text-column NAME")


def as_json(value: Any, left_out: Counter[str]) -> Any:
    """Return a value of a table as JSON has it: times and decimals as text, NaN as null, infinities as text.

    Args:
        left_out: each NaN and infinity is counted here.
    """
    if isinstance(value, dict):
        return {str(key): as_json(one, left_out) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one, left_out) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        left_out["NaN in metadata (null instead)" if math.isnan(value) else "infinity in metadata (text instead)"] += 1
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


# Helpers


class _TwiceError(Exception):
    """An object of JSON has a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise _TwiceError(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return found


_SURROGATE = re.compile("[\ud800-\udfff]")


def _lines(chunks: Iterator[str]) -> Iterator[str]:
    """Yield the lines of a text, which end at LF and nowhere else, in time that grows with their length."""
    held: list[str] = []
    for chunk in chunks:
        first, *others = chunk.split("\n")
        held.append(first)
        if others:
            yield "".join(held)
            yield from others[:-1]
            held = [others[-1]]
    if last := "".join(held):
        yield last


def _check_whole(text: str | None, where: str) -> None:
    if text and (half := _SURROGATE.search(text)):
        problem = f"{where}: the text has half a surrogate pair, \\u{ord(half[0]):04x}, which is no character"
        raise RungError(problem, "the program that wrote the line cut a character in two: write it again")


def _check_column(name: str, schema: Any, column: str) -> None:
    import pyarrow.types as types

    if column not in schema.names:
        raise no_column(name, column, schema.names)
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)):
        raise not_text(name, column, str(kind))


def _other_columns(schema: Any, column: str, left_out: Counter[str]) -> list[str]:
    others = []
    for field in schema:
        if _holds_bytes(field.type):
            left_out[f"column {field.name} (bytes)"] += 1
        elif field.name != column:
            others.append(field.name)
    return others


def _holds_bytes(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(k).type) for k in range(kind.num_fields))


def _rows_at_once(about: Any, columns: list[str]) -> int:
    """Return how many rows hold some megabytes, by the widest row group."""
    most = 1
    for group in range(about.num_row_groups):
        group = about.row_group(group)
        chunks = [group.column(k) for k in range(group.num_columns)]
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns)
        most = max(most, size // max(1, group.num_rows))
    return int(min(_MOST_ROWS, max(1, _BATCH_BYTES // most)))


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
