"""How numbers, durations and odd characters are shown to people."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from html import escape
from typing import Any

NOTHING = "–"  # where there is no number to show
NEWLINE, TAB = "⏎", "⇥"


def count(number: float) -> str:
    """Return a whole number with its thousands apart: 1,234,567."""
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """Return how many there are of something: 1 step, 2,000 steps."""
    return f"{count(number)} {noun if number == 1 else noun + 's'}"


def short(number: float) -> str:
    """Return a number to three digits with K, M, B or T: 1.23M."""
    if not math.isfinite(number):
        return str(number)
    if abs(number) >= 1e15:
        return f"{number:.2e}"
    for size, letter in _SIZES:
        # 999,999 is shown as 1M, not as 1000K: the limit is where three digits round up to the next letter.
        if abs(number) >= size * 0.9995:
            return _three_digits(number / size) + letter
    return _three_digits(number)


def decimal(number: float, places: int = 3) -> str:
    """Return a measured number with fixed places, or in powers of ten where those would show nothing of it."""
    if not math.isfinite(number):
        return "not a number" if math.isnan(number) else str(number)
    if number and not 10.0**-places <= abs(number) < 1e6:
        return f"{number:.2e}"
    return f"{number:,.{places}f}"


def shown(value: Any) -> str:
    """Return the value of a setting as text; of one that is not known, none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return count(value)
    if isinstance(value, float):
        return f"{value:,g}"
    if isinstance(value, list | tuple):
        return ", ".join(shown(one) for one in value) or "none"
    return str(value) or "“”"


def duration(seconds: float) -> str:
    """Return seconds as a person says them: 0.8 s, 3 min 12 s, 1 h 05 min, 2 d 03 h."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def listed(numbers: Sequence[int], most: int = 8) -> str:
    """Return the first of some numbers, and how many more there are: 3, 7, 11 and 2 more."""
    shown = ", ".join(count(number) for number in numbers[:most])
    return f"{shown} and {count(len(numbers) - most)} more" if len(numbers) > most else shown


def visible(text: str) -> str:
    r"""Return ``text`` with control characters (but newline and tab) and half surrogate pairs spelled, as in ``\x1b``.

    A model may write any character; none of them may move the reader's cursor or end the page.
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def safe(value: object) -> str:
    """Return a value as text that may stand anywhere in an HTML page: escaped, and ``visible``."""
    return escape(visible(str(value)))


def excerpt(text: str, lines: int = 2, columns: int = 76) -> list[str]:
    """Return the beginning of ``text`` as a few lines for a terminal, the last ending in "..." where the text goes on.

    Line ends and tabs of the text are shown as marks, other control characters as ``visible`` has them.

    Args:
        lines: at least 1.
        columns: of each line, where a wide (East Asian) character takes two.
    """
    rest = visible(text).replace("\n", NEWLINE).replace("\t", TAB)
    shown: list[str] = []
    while rest and len(shown) < lines - 1:
        end = _fitting(rest, columns)
        if end < len(rest):  # better between words, where there is a space near the end
            end = rest.rfind(" ", end * 3 // 4, end + 1) + 1 or end
        shown.append(rest[:end].rstrip(" "))
        rest = rest[end:]
    if _fitting(rest, columns) < len(rest):
        rest = rest[: _fitting(rest, columns - len(" ..."))] + " ..."
    return [*shown, rest] if rest else shown


_SIZES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def _fitting(text: str, columns: int) -> int:
    """Return how many characters of ``text``, from its start, take no more than so many columns."""
    for n, character in enumerate(text):
        wide = unicodedata.east_asian_width(character) in ("W", "F")
        columns -= 2 if wide else unicodedata.category(character) not in ("Mn", "Me", "Cf")
        if columns < 0:
            return n
    return len(text)


def _three_digits(number: float) -> str:
    text = f"{number:.3g}"
    return f"{float(text):.0f}" if "e+" in text else text
