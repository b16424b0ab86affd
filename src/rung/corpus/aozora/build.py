"""A corpus of works: of raw Aozora Bunko files, or of rows of a data set made from them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rung.corpus.aozora.files import Found, RawFile, decode, find, read
from rung.corpus.aozora.notation import Readings, Tally
from rung.corpus.aozora.orthography import orthography
from rung.corpus.aozora.parts import Work, parse
from rung.corpus.folder import Corpus
from rung.corpus.hub import Row
from rung.corpus.sources import Source, fingerprint
from rung.corpus.writer import SHARD_BYTES, CorpusWriter
from rung.errors import RungError

HUB_DATASET = "globis-university/aozorabunko-clean"
HUB_ORTHOGRAPHY = "新字新仮名"
_MANY_SOURCES = 100  # more are written as one entry of corpus.json

OnProgress = Callable[[int, "int | None"], None]  # (bytes done, bytes in all)
Say = Callable[[str], Any]


@dataclass(frozen=True)
class Choices:
    """What a corpus of works is made with.

    Args:
        works: how many, the first ones; None: all.
        orthography: only works in this spelling; None: in any.
        readings: of ruby.
        all_versions: every file, where a work has several.
        encoding: of all files; ``auto`` finds out.
    """

    works: int | None = None
    orthography: str | None = None
    readings: Readings = "drop"
    all_versions: bool = False
    encoding: str = "auto"


def build_from_files(
    sources: Sequence[Source],
    out: str | Path,
    choices: Choices,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    on_progress: OnProgress | None = None,
    say: Say = str,
) -> Corpus:
    """Make a corpus of raw files: one document a work, with title, author, card number and colophon as metadata.

    Raises:
        RungError: no text file, a file of no encoding that is known, fewer works than asked for, something at ``out``.
    """
    found = find(sources, all_versions=choices.all_versions)
    if not found.files:
        others = ", ".join(f"{count} {kind}" for kind, count in found.passed_over.most_common(3)) or "nothing"
        raise RungError(f"no text files in the sources: {others}", "name files, folders or archives of .txt files")
    total = sum(source.size for source in sources)
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if on_progress:
            on_progress(done, total)

    with CorpusWriter(
        out, "aozora", sources=_described(sources), settings=vars(choices), overwrite=overwrite, shard_bytes=shard_bytes
    ) as writer:
        counts = _taken_up(writer, say)
        for file, data in read(sources, found.files[counts.done :], on_bytes):
            if writer.documents == choices.works:
                break
            _add_file(writer, file, data, choices, counts)
        _check_number(writer, choices, counts)
        return writer.finish(counts.report(found))


def build_from_rows(
    rows: Callable[[int], Iterable[Row]],
    out: str | Path,
    choices: Choices,
    *,
    sources: Sequence[Mapping[str, Any]],
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    on_progress: OnProgress | None = None,
    say: Say = str,
) -> Corpus:
    """Make a corpus of the rows of a data set such as ``globis-university/aozorabunko-clean``, whose texts are clean.

    Of ``choices``, works and orthography are used.

    Args:
        rows: returns them from a number on; beside the text ``meta``, the fields of Aozora Bunko's index, and
            ``footnote``, the colophon.
        sources: what identifies the rows: the data set's name, its files and their versions.

    Raises:
        RungError: a row without these fields, fewer works than asked for, something at ``out``.
    """
    settings = {"works": choices.works, "orthography": choices.orthography}
    with CorpusWriter(
        out, "aozora", sources=sources, settings=settings, overwrite=overwrite, shard_bytes=shard_bytes
    ) as writer:
        counts = _taken_up(writer, say)
        for row in rows(counts.done):
            if writer.documents == choices.works:
                break
            _add_row(writer, row, choices, counts)
            if on_progress:
                on_progress(writer.bytes, None)
        _check_number(writer, choices, counts)
        return writer.finish(counts.report_of_rows())


# Helpers


@dataclass
class _Counts:
    """What was counted so far, over all files or rows that are ``done``."""

    done: int = 0
    tally: Tally = field(default_factory=Tally)
    characters: Counter[str] = field(default_factory=Counter)
    encodings: Counter[str] = field(default_factory=Counter)
    orthographies: Counter[str] = field(default_factory=Counter)
    works: int = 0
    left_out: int = 0  # in another spelling than the one asked for
    without_header: list[str] = field(default_factory=list)
    without_colophon: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)  # without these, and without notation
    empty: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "tally": self.tally.as_json()}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> _Counts:
        counters = {name: Counter(said[name]) for name in ("characters", "encodings", "orthographies")}
        return cls(**{**said, "tally": Tally.from_json(said["tally"]), **counters})

    def report(self, found: Found) -> dict[str, Any]:
        tally = self.tally.as_json()
        of_gaiji = tally["gaiji"]
        return {
            "files": self.done,
            "works": self.works,
            "orthography_left_out": self.left_out,
            "orthographies": dict(sorted(self.orthographies.items())),
            "encodings": dict(sorted(self.encodings.items())),
            "characters": {
                **dict(sorted(self.characters.items())),
                "kept": tally["kept"],
                "notation": sum(tally["dropped"].values()),
                "inserted": tally["inserted"],
            },
            "notation": {
                kind: {"found": tally["found"][kind], "characters": dropped}
                for kind, dropped in tally["dropped"].items()
            },
            "gaiji": {"resolved": sum(of_gaiji.values()) - of_gaiji.get("unresolved", 0), **of_gaiji},
            "unresolved_gaiji": tally["unresolved"],
            "unknown_notes": tally["unknown"],
            "ill_formed": tally["ill_formed"],
            "without_header": self.without_header,
            "without_colophon": self.without_colophon,
            "plain": self.plain,
            "empty": self.empty,
            "other_versions": found.other_versions,
            "passed_over": dict(sorted(found.passed_over.items())),
        }

    def report_of_rows(self) -> dict[str, Any]:
        return {
            "rows": self.done,
            "works": self.works,
            "orthography_left_out": self.left_out,
            "orthographies": dict(sorted(self.orthographies.items())),
            "characters": {"kept": self.tally.kept},
            "empty": self.empty,
        }


def _taken_up(writer: CorpusWriter, say: Say) -> _Counts:
    """Return the counts of what is there already."""
    if not writer.state:
        return _Counts()
    say(f"going on after {writer.resumed:,} works, which are there already")
    return _Counts.from_json(writer.state)


def _add_file(writer: CorpusWriter, file: RawFile, data: bytes, choices: Choices, counts: _Counts) -> None:
    text, encoding = decode(data, file.name, choices.encoding)
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    work = parse(lines, name=file.name, readings=choices.readings)
    spelling = orthography(work.text)
    counts.done += 1
    counts.encodings[encoding] += 1
    counts.orthographies[spelling or "not told"] += 1
    if choices.orthography and spelling != choices.orthography:
        counts.left_out += 1
    else:
        _count_work(work, file.name, counts)
        counts.characters["files"] += len(text)
        counts.characters["carriage returns"] += len(text) - len(lines)
        if work.text:
            writer.write(file.name, work.text, _metadata(work, file, spelling))
            counts.works += 1
    writer.mark(counts.as_json)


def _count_work(work: Work, name: str, counts: _Counts) -> None:
    counts.tally.add(work.tally)
    counts.characters.update(work.characters)
    for there, names in (
        (work.has_header, counts.without_header),
        (work.has_colophon, counts.without_colophon),
        (bool(work.text), counts.empty),
    ):
        if not there:
            names.append(name)
    if work.text and not (work.has_header or work.has_colophon or work.tally.found):
        counts.plain.append(name)


def _metadata(work: Work, file: RawFile, spelling: str | None) -> dict[str, Any]:
    said = {"title": Path(file.name).stem, **work.metadata}
    known = {"card": file.card, "person": file.person, "orthography": spelling}
    return {**{name: value for name, value in known.items() if value}, **said}


def _add_row(writer: CorpusWriter, row: Row, choices: Choices, counts: _Counts) -> None:
    meta = row.metadata.get("meta")
    if not isinstance(meta, Mapping) or "文字遣い種別" not in meta:
        fields = ", ".join(row.metadata)
        raise RungError(
            f"row {counts.done} has no meta with 文字遣い種別; beside the text it has {fields or 'nothing'}",
            "`rung corpus hub` reads other data sets",
        )
    spelling = meta["文字遣い種別"]
    name = f"{meta.get('作品ID') or counts.done}"
    counts.done += 1
    counts.orthographies[spelling or "not told"] += 1
    if choices.orthography and spelling != choices.orthography:
        counts.left_out += 1
    elif not row.text:
        counts.empty.append(name)
    else:
        writer.write(name, row.text, _metadata_of_row(row, meta))
        counts.works += 1
        counts.tally.kept += len(row.text)
    writer.mark(counts.as_json)


def _metadata_of_row(row: Row, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same names as for files, and all that the index says besides, under its own names."""
    said = {
        "card": str(meta.get("作品ID") or "").lstrip("0"),
        "person": meta.get("人物ID"),
        "orthography": meta.get("文字遣い種別"),
        "title": meta.get("作品名"),
        "author": f"{meta.get('姓') or ''}{meta.get('名') or ''}",
        "colophon": row.metadata.get("footnote"),
    }
    return {**{name: value for name, value in said.items() if value}, "index": meta}


def _check_number(writer: CorpusWriter, choices: Choices, counts: _Counts) -> None:
    """Refuse to give fewer works than were asked for, and a corpus of none."""
    number = writer.documents
    if number < (choices.works or 1):
        asked = "" if choices.works is None else f", and {choices.works:,} are asked for"
        spelling = f" in {choices.orthography}" if choices.orthography else ""
        others = ", ".join(f"{count:,} {name}" for name, count in counts.orthographies.most_common())
        writer.abandon()
        raise RungError(
            f"the sources have {number:,} works{spelling}{asked}",
            f"ask for fewer, or for another --orthography; there are {others or 'none'}",
        )


def _described(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return what identifies the sources; many of them, as of a folder, as one."""
    each = []
    for source in sources:
        said = fingerprint(source)
        each.append({"name": said["name"], "size": said["bytes"], "sha256": said["sha256"], "sampled": said["sampled"]})
    if len(each) <= _MANY_SOURCES:
        return each
    digest = hashlib.sha256()
    for one in each:
        digest.update(json.dumps([one["name"], one["size"], one["sha256"]]).encode() + b"\n")
    roots = sorted({one["name"].partition("/")[0] for one in each})
    name = roots[0] if len(roots) == 1 else f"{roots[0]} and more"
    return [
        {
            "name": name,
            "files": len(each),
            "size": sum(one["size"] for one in each),
            "sha256": digest.hexdigest(),
            "sampled": any(one["sampled"] for one in each),
        }
    ]
