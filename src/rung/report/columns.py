"""Tables for a terminal: columns of plain text."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from rung.report.words import visible

GAP = "  "


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return a table as lines: the heads, and the rows below them.

    Args:
        head: names of the columns. A column that is empty in all rows is left out.
        rows: of as many cells each.
        left: so many columns, the first ones, are set to the left; the others, of numbers, to the right.
    """
    cells = [[" ".join(visible(cell).split()) for cell in row] for row in (head, *rows)]
    kept = [n for n in range(len(head)) if any(row[n] for row in cells[1:])]
    widths = {n: max(_width(row[n]) for row in cells) for n in kept}
    return [GAP.join(_padded(row[n], widths[n], n < left) for n in kept).rstrip() for row in cells]


def _padded(cell: str, width: int, to_left: bool) -> str:
    space = " " * (width - _width(cell))
    return cell + space if to_left else space + cell


def _width(text: str) -> int:
    """Return the columns of a terminal that a text takes, where a wide (East Asian) character takes two."""
    return sum(
        0 if unicodedata.category(letter) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(letter) in "WF")
        for letter in text
    )
