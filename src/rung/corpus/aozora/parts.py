"""The parts of an Aozora Bunko file: title block and legend, text, colophon."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from rung.corpus.aozora.notation import Readings, Tally, clean


@dataclass(frozen=True)
class Work:
    """One work, read: its text without notation, and what the file says of it.

    ``characters`` says what became of all characters of the file: those of ``header``, ``colophon``, ``surrounding``
    (line breaks around the text) and ``body``, whose parts are in ``tally``. ``has_header`` and ``has_colophon``:
    whether there was one to take off.
    """

    text: str
    metadata: dict[str, Any]
    tally: Tally
    characters: dict[str, int] = field(default_factory=dict)
    has_header: bool = True
    has_colophon: bool = True


def parse(text: str, *, name: str = "", readings: Readings = "drop") -> Work:
    """Read the text of a whole file, its lines ended by LF.

    A header is a block of at most eight lines (title, subtitles, author, translator) before a blank line, and the
    legend of notation after it. The colophon begins with the line of the source edition (``底本：``). A file that has
    neither is text from the first line to the last.
    """
    lines = text.split("\n")
    end = _colophon_begin(lines)
    head = _title_block(lines[:end])
    begin = _legend_end(lines[:end], head[1]) if head else 0
    is_plain = end == len(lines) and begin == (head[1] if head else 0)
    if is_plain:  # no colophon and no legend: what looks like a title may be text
        head, begin = None, 0
    body = lines[begin:end]
    first, last = 0, len(body)
    while first < last and not body[first]:
        first += 1
    while last > first and not body[last - 1]:
        last -= 1
    cleaned, tally = clean("\n".join(body[first:last]), readings=readings, name=name, first_line=begin + first + 1)
    trimmed = cleaned.strip("\n")  # where the first or the last line was a note
    at_ends = len(cleaned) - len(trimmed)
    tally.kept -= at_ends
    size = {
        "header": sum(map(len, lines[:begin])) + begin,
        "body": sum(map(len, body[first:last])) + max(0, last - first - 1) - at_ends,
        "colophon": len("\n".join(lines[end:])),
    }
    size["surrounding"] = len(text) - sum(size.values())
    metadata = _people(lines[head[0] : head[1]]) if head else {}
    if colophon := "\n".join(lines[end:]).strip():
        metadata["colophon"] = colophon
    return Work(trimmed, metadata, tally, size, head is not None, end < len(lines))


# Helpers

_RULE = re.compile("-{5,}$")
_BLANK = re.compile("[ 　]*$")
_LEGEND = re.compile("[【［].*(?:記号|表記|について|凡例)")
_TITLE_LINES = 8
_LEGEND_LINES = 200
_COLOPHON = re.compile("[ 　]*【?(?:翻訳の|本文の)?(?:底本|定本)】?(?:[：:「『]|[ 　]*$)")
_COLOPHON_GOES_ON = re.compile("[ 　]*(?:入力|校正|ファイル作成|青空文庫|このファイルは|.*公開$|.*(?:作成|修正)$)")
_COLOPHON_WITHOUT_SOURCE = re.compile("[ 　]*(?:青空文庫(?:作成|収録)?ファイル|入力[：:]|初出[：:]|このファイルは、)")
_TEXT_END = re.compile("［＃本文終わり］$")
_COLOPHON_LINES = 300
_INPUTTERS_NOTES = re.compile("[●※○ 　]*入力者(?:による)?(?:注|補注|註)")
_ROLE = re.compile("(?:[共編校]?[訳譯]|編[纂集者]?|校訂|校注|訂)$|^[Tt]ranslated by ")


def _colophon_begin(lines: list[str]) -> int:
    """Return the line that the colophon begins with; the number of lines where there is none."""
    low = max(0, len(lines) - _COLOPHON_LINES)
    goes_on = [n for n in range(low, len(lines)) if _COLOPHON_GOES_ON.match(lines[n])]
    sources = [n for n in range(low, len(lines)) if _COLOPHON.match(lines[n]) and goes_on and n < goes_on[-1]]
    others = [n for n in range(low, len(lines)) if _COLOPHON_WITHOUT_SOURCE.match(lines[n])]
    ends = [n for n in range(low, len(lines)) if _TEXT_END.match(lines[n])]
    if ends and (sources or others):
        return ends[-1]
    if not sources and not others:
        return len(lines)
    begin = sources[0] if sources else others[0]
    return _with_notes(lines, begin)


def _with_notes(lines: list[str], begin: int) -> int:
    """Return where the notes of the inputter begin, if they stand between two rules before the colophon."""
    before = [n for n in range(begin) if not _BLANK.match(lines[n])]
    if not before or not _RULE.match(lines[before[-1]]):
        return begin
    begin = before[-1]
    rules = [n for n in before[:-1] if _RULE.match(lines[n])]
    if rules and any(_INPUTTERS_NOTES.match(lines[n]) for n in range(rules[-1], begin)):
        begin = rules[-1]
    return begin


def _title_block(lines: list[str]) -> tuple[int, int] | None:
    """Return the first line of the title block and the line after it; None where nothing looks like one."""
    begin = next((n for n, line in enumerate(lines) if not _BLANK.match(line)), None)
    if begin is None:
        return None
    end = next((n for n in range(begin, len(lines)) if _BLANK.match(lines[n]) or _RULE.match(lines[n])), None)
    return None if end is None or not 0 < end - begin <= _TITLE_LINES else (begin, end)


def _legend_end(lines: list[str], begin: int) -> int:
    """Return the line after the legend of notation; ``begin`` where there is none."""
    shown = [n for n in range(begin, min(len(lines), begin + _LEGEND_LINES)) if not _BLANK.match(lines[n])]
    if shown and _RULE.match(lines[shown[0]]):
        shown = shown[1:]
    if not shown or not _LEGEND.match(lines[shown[0]]):
        return begin
    return next((n + 1 for n in shown if _RULE.match(lines[n])), begin)


def _people(block: list[str]) -> dict[str, Any]:
    """Return title, subtitles, author and translators of a title block."""
    block = [clean(line)[0].strip(" 　") for line in block]
    title, rest = block[0], block[1:]
    said: dict[str, Any] = {"title": title}
    roles: list[str] = []
    while rest and _ROLE.search(rest[-1]):
        roles.insert(0, rest.pop())
    if rest:
        said["author"] = rest.pop()
    if rest:
        said["subtitle"] = rest[0] if len(rest) == 1 else rest
    if roles:
        said["contributors"] = roles
    return said
