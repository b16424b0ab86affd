"""``rung check``: a step that made a run diverge, run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rung.cli.flags import Parser, print_result, typed
from rung.errors import RungError

_NEWEST = "newest"
_NAMES = 3  # documents named of a row


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser(
        "check", "Run the step again whose update was not finite, and find where in the model it went wrong."
    )
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument(
        "--replay", nargs="?", const=_NEWEST, metavar="STEP", help="the step, as in the log (default: the newest kept)"
    )
    parsed = parser.parse_args(arguments)
    if parsed.replay is None:
        raise RungError("nothing to check is named", "run a step that diverged again with --replay")
    step = None if parsed.replay == _NEWEST else typed("--replay", int, parsed.replay)

    from rung.run.replay import replay

    result = replay(parsed.run, step)
    print_result(result, parsed.json, "\n".join(_lines(result)))
    return 0


def _lines(result: Mapping[str, Any]) -> list[str]:
    from rung.report.words import count, plural

    lines = [f"step {count(result['step'])} of {result['run']}, {_ordinal(result['in_a_row'])}"]
    if result["found_then"]:
        lines.append(f"then: {result['found_then']}")
    told = "again not finite" if result["reproduced"] else "finite here"
    lines.append(f"now:  {told}: {result['found_now']}")
    bad, n_rows = result["rows_not_finite"], result["batch_rows"]
    if len(bad) == n_rows:
        lines.append(f"rows: none of the {plural(n_rows, 'row')} of the batch has a finite loss")
    elif bad:
        lines.append(f"rows: {', '.join(map(str, bad))} of {n_rows}, counted from 0, have no finite loss")
    else:
        lines.append(f"rows: each of the {plural(n_rows, 'row')} of the batch has a finite loss; the largest:")
    for row in result["rows"]:
        lines += _row_lines(row)
    return [*lines, *(f"note: {note}" for note in result["notes"])]


def _row_lines(row: Mapping[str, Any]) -> list[str]:
    from rung.report.words import excerpt, visible

    loss = f"{row['loss']:.4f}"
    named = [f"{one['id']} ({visible(one['name'])})" if one["name"] else str(one["id"]) for one in row["documents"]]
    more = f" and {len(named) - _NAMES} more" if len(named) > _NAMES else ""
    documents = f", of document {', '.join(named[:_NAMES])}{more}" if named else ""
    return [f"  row {row['row']}: loss {loss}{documents}", *(f"    {line}" for line in excerpt(row["text"]))]


def _ordinal(in_a_row: int) -> str:
    return "whose update was not finite" if in_a_row == 1 else f"the last of {in_a_row} updates that were not finite"
