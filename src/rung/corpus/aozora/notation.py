"""The notation in the text of an Aozora Bunko file: ruby, notes, gaiji, accents, iteration marks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rung.corpus.aozora.gaiji import MISSING, compose_accents, resolve, without_page

Readings = Literal["drop", "parentheses"]


@dataclass
class Tally:
    """What was found in texts, by kind. All characters of the texts are ``kept`` or counted in ``dropped``.

    What stands in the place of notation is ``inserted``: the cleaned texts have ``kept + inserted`` characters.
    """

    kept: int = 0
    inserted: int = 0
    found: Counter[str] = field(default_factory=Counter)  # kind of notation: how many
    dropped: Counter[str] = field(default_factory=Counter)  # kind of notation: its characters
    gaiji: Counter[str] = field(default_factory=Counter)  # how it was resolved, or "unresolved": characters
    unresolved: dict[str, Counter[str]] = field(default_factory=dict)  # gaiji note: file: how many
    unknown: dict[str, Counter[str]] = field(default_factory=dict)  # note of no kind that is known: file: how many
    ill_formed: list[dict[str, Any]] = field(default_factory=list)  # kept as text: {"file", "line", "text"}

    def drop(self, kind: str, characters: int) -> None:
        self.found[kind] += 1
        self.dropped[kind] += characters

    def add(self, other: Tally) -> None:
        """Add the counts of another."""
        self.kept += other.kept
        self.inserted += other.inserted
        for name in ("found", "dropped", "gaiji"):
            getattr(self, name).update(getattr(other, name))
        for name in ("unresolved", "unknown"):
            for note, files in getattr(other, name).items():
                getattr(self, name).setdefault(note, Counter()).update(files)
        self.ill_formed += other.ill_formed

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON has it, in an order that depends on nothing but the counts."""
        counts = {name: _ordered(getattr(self, name)) for name in ("found", "dropped", "gaiji")}
        lists = {
            name: {note: dict(sorted(files.items())) for note, files in sorted(getattr(self, name).items())}
            for name in ("unresolved", "unknown")
        }
        return {"kept": self.kept, "inserted": self.inserted, **counts, **lists, "ill_formed": self.ill_formed}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Tally:
        """Return the tally that ``as_json`` gave."""
        tally = cls(said["kept"], said["inserted"], ill_formed=list(said["ill_formed"]))
        for name in ("found", "dropped", "gaiji"):
            getattr(tally, name).update(said[name])
        for name in ("unresolved", "unknown"):
            getattr(tally, name).update({note: Counter(files) for note, files in said[name].items()})
        return tally


def clean(text: str, *, readings: Readings = "drop", name: str = "", first_line: int = 1) -> tuple[str, Tally]:
    """Return a text without its notation, and the tally of it.

    A line of nothing but notes goes with its line break. Notation that is ill-formed (a bracket that is not closed in
    its line, ruby on nothing) stays as text and is listed.

    Args:
        text: lines ended by LF.
        readings: of ruby: dropped, or put in parentheses after what they are the reading of.
        name: of the file, for the lists of the tally.
        first_line: the number, in the file, of the first line.
    """
    tally = Tally()
    lines = text.split("\n")
    out = []
    for number, line in enumerate(lines):
        last = number == len(lines) - 1
        if not _SPECIAL.search(line):
            out.append(line if last else line + "\n")
            tally.kept += len(out[-1])
            continue
        following = "" if last else lines[number + 1]
        cleaned = _Line(line, following, readings, name, first_line + number, tally).cleaned()
        if not last:
            if cleaned is None:
                tally.drop("line of notes", 1)
            else:
                tally.kept += 1
        out.append((cleaned or "") + ("" if last or cleaned is None else "\n"))
    return "".join(out), tally


def kind_of_note(note: str) -> str | None:
    """Return the kind of a note by what it says outside quotation; None for one that is not known."""
    said, before = note.strip(" 　"), ""
    while said != before:
        said, before = _QUOTED.sub("", said), said
    return next((kind for kind, pattern in _KINDS if pattern.search(said)), None)


# Helpers

_SPECIAL = re.compile("[［］※《》｜／〔]")
_TOKEN = re.compile('※*［[ 　]?＃|［※[0-9０-９]+］|《|》|｜|／[″゛”"]?＼')
_NOTE_BEGIN = re.compile("［[ 　]?＃")
_SHOWN = 40  # characters of what is ill-formed, in the list of it
_BRACKET = re.compile("[［］]")
_RUBY = re.compile("《([^《》]*)》")
_RUBY_BASE = re.compile("｜[^《｜]+《[^《》]+》")
_ACCENT_BRACKETS = re.compile("〔([^〔〕]*)〕")
_QUOTED = re.compile("「[^「」]*」|［＃[^［］]*］|※")

_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("return mark", "^[一二三四五六上中下甲乙丙丁天地人レ]+$"),
        ("okurigana", "^（.+）$"),
        ("source", "底本|ママ$|誤記|誤植|判然|刷時点|親本"),
        ("heading", "見出し"),
        ("emphasis", "傍点|傍線|太字|斜体|波線|破線|鎖線|圏点"),
        ("page", "ページ|改頁|改丁|改段|段組|段目|改見開き|本文終わり"),
        ("figure", "入る$|挿絵|写真|キャプション"),
        ("reading", "ルビ|注記|読み"),
        ("indent", "字下げ|字上げ|字詰め|地付き|地寄せ|天付き|中央|右寄せ|字アキ|行アキ"),
        (
            "layout",
            "縦中横|横組み|縦組み|縦書き|横書き|小書き|[上下]付き|小さな文字|大きな文字|割り注|囲み|罫|改行|分数",
        ),
        (
            "character",
            "水準|U\\+|付き|矢印|右上がり|波括弧|ローマ数字|図形|代わりに|代えて|加える|つくり|、[0-9０-９]+-",
        ),
    )
)


def _ordered(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


class _Line:
    """One line being read: from left to right, what is kept going to ``out``."""

    def __init__(self, line: str, following: str, readings: Readings, name: str, number: int, tally: Tally):
        self.line, self.following, self.readings = line, following, readings
        self.name, self.number, self.tally = name, number, tally
        self.out: list[str] = []
        self.at = 0
        self.dropped_only_notes = True
        self.has_base = False  # whether anything stands before that ruby may be the reading of
        self.closings: dict[int, int] | None = None  # where each bracket ［ is closed, once asked for

    def cleaned(self) -> str | None:
        """Return the line without notation; None where nothing but notes stood in it."""
        for found in iter(lambda: _TOKEN.search(self.line, self.at), None):
            self._keep(found.start())
            token = found[0]
            if token.endswith("＃"):
                self._note_or_gaiji(token.index("［"))
            elif token.startswith("［※"):
                self._drop("note mark", found.end())
            elif token == "《":
                self._ruby()
            elif token == "｜":
                self._ruby_mark()
            elif token == "》":
                self._ill_formed(1)
            else:
                mark = "〳〵" if len(token) == 2 else "〴〵"
                self._drop("iteration mark", found.end(), mark)
        had_notation = self.at > 0 and not self.out
        self._keep(len(self.line))
        text = self._with_accents("".join(self.out))
        if text.count("］") > text.count("［"):
            self._list("］")
        return None if had_notation and not text and self.dropped_only_notes else text

    def _keep(self, end: int) -> None:
        if end > self.at:
            self._put(self.line[self.at : end])
            self.tally.kept += end - self.at
            self.at = end

    def _put(self, text: str) -> None:
        self.out.append(text)
        self.has_base = self.has_base or not text.isspace()

    def _drop(self, kind: str, end: int, instead: str = "") -> None:
        self.tally.drop(kind, end - self.at)
        if instead:
            self._put(instead)
            self.tally.inserted += len(instead)
        self.at = end

    def _ill_formed(self, length: int) -> None:
        self._list(self.line[self.at : self.at + _SHOWN])
        self._keep(self.at + length)

    def _list(self, text: str) -> None:
        self.tally.ill_formed.append({"file": self.name, "line": self.number, "text": text})

    def _note_or_gaiji(self, marks: int) -> None:
        """Read ``marks`` times ※ and the notes right after."""
        begin = self.at + marks
        found = self._notes(begin)
        first_note = next(found, None)
        if first_note is None:
            self._ill_formed(marks + 1)
            return
        if not marks:
            self._note(first_note)
            return
        notes = [first_note, *found]
        # The note of the character comes first, but for ※［＃「※」に傍点］［＃「てへん＋劣」、第3水準1-84-77］.
        notes_said = [self._said(*place) for place in notes]
        resolved = [resolve(said) for said in notes_said]
        of_character = (n for n, said in enumerate(notes_said) if kind_of_note(said) in (None, "character", "layout"))
        first = next((n for n, character in enumerate(resolved) if character), next(of_character, 0))
        if character := resolved[first]:
            self._keep(begin - 1)  # a ※ more is one of the text
            marks = 1
            self.tally.gaiji[character[1]] += 1
            instead = character[0]
        else:
            note = without_page(notes_said[first])
            self.tally.unresolved.setdefault(note, Counter())[self.name] += marks
            self.tally.gaiji["unresolved"] += marks
            instead = MISSING * marks
        self.tally.drop("gaiji", marks)
        self._put(instead)
        self.tally.inserted += len(instead)
        self.at = begin
        for place in notes[: first + 1]:
            if place == notes[first]:
                self.tally.dropped["gaiji"] += place[1] - place[0]
                self.at = place[1]
            else:
                self._note(place)

    def _notes(self, begin: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each whole note from ``begin`` on without text between."""
        while (found := _NOTE_BEGIN.match(self.line, begin)) is not None:
            end = self._note_end(begin)
            if end is None:
                return
            yield found.start(), end
            begin = end

    def _note_end(self, begin: int) -> int | None:
        if self.closings is None:
            self.closings, opened = {}, []
            for bracket in _BRACKET.finditer(self.line):
                if bracket[0] == "［":
                    opened.append(bracket.start())
                elif opened:
                    self.closings[opened.pop()] = bracket.end()
        return self.closings.get(begin)

    def _said(self, begin: int, end: int) -> str:
        return self.line[self.line.index("＃", begin) + 1 : end - 1]

    def _note(self, place: tuple[int, int]) -> None:
        said = self._said(*place)
        kind = kind_of_note(said)
        if kind is None:
            self.tally.unknown.setdefault(said, Counter())[self.name] += 1
        self._drop(f"note: {kind or 'other'}", place[1])

    def _ruby(self) -> None:
        found = _RUBY.match(self.line, self.at)
        if not found or not self.has_base:
            self._ill_formed(1)
            return
        self.dropped_only_notes = False
        self._drop("ruby", found.end(), self._reading(found[1]) if self.readings == "parentheses" else "")

    def _reading(self, text: str) -> str:
        # The counts of what stands within go with the reading, which is counted whole.
        inner = Tally()
        cleaned = _Line(text, "", "drop", self.name, self.number, inner).cleaned()
        self.tally.gaiji.update(inner.gaiji)
        for note, files in inner.unresolved.items():
            self.tally.unresolved.setdefault(note, Counter()).update(files)
        return f"（{cleaned}）" if cleaned else ""

    def _ruby_mark(self) -> None:
        # At the end of a line it is of what begins the next.
        line = self.line + self.following if self.at == len(self.line) - 1 else self.line
        if _RUBY_BASE.match(line, self.at):
            self.dropped_only_notes = False
            self._drop("ruby mark", self.at + 1)
        else:
            self._ill_formed(1)

    def _with_accents(self, text: str) -> str:
        if "〔" not in text:
            return text
        return _ACCENT_BRACKETS.sub(self._composed, text)

    def _composed(self, found: re.Match[str]) -> str:
        text, count = compose_accents(found[1])
        if not count:
            return found[0]  # brackets of the text
        self.tally.found["accent"] += count
        # What was counted as kept, and is not: the brackets, and letters and marks, which the composed ones replace.
        dropped = 2 + len(found[1]) - (len(text) - count)
        self.tally.dropped["accent"] += dropped
        self.tally.kept -= dropped
        self.tally.inserted += count
        return text
