"""``rung corpus aozora``: works of Aozora Bunko as a corpus."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.cli.flags import Parser, print_result, say, typed
from rung.errors import RungError

if TYPE_CHECKING:
    from rung.corpus.aozora.build import Choices
    from rung.corpus.folder import Corpus

ANY = "any"
_SHOWN = 5  # of each list; corpus.json has all of it


def aozora(arguments: Sequence[str]) -> int:
    """Run ``rung corpus aozora``."""
    parser = _parser()
    parsed = parser.parse_args(arguments)

    from rung.corpus.aozora.build import HUB_DATASET, HUB_ORTHOGRAPHY, Choices

    works = None if parsed.works is None else typed("--works", int, parsed.works)
    if works is not None and works < 1:
        raise RungError(f"--works is {works}", "ask for one work or more")
    spelling = parsed.orthography or (HUB_ORTHOGRAPHY if parsed.hub else ANY)
    choices = Choices(
        works=works,
        orthography=None if spelling == ANY else spelling,
        readings=parsed.ruby,
        all_versions=parsed.all_versions,
        encoding=parsed.encoding,
    )
    if parsed.hub:
        return _of_hub(parsed, choices, HUB_DATASET)
    if parsed.revision is not None:
        raise RungError("--revision is of a data set of the Hub", "leave it out, or ask for one with --hub")
    if not parsed.sources:
        hint = f"name raw files, folders or archives, or ask for {HUB_DATASET} with --hub"
        raise RungError("no source named", hint)

    from rung.run.corpus import aozora as made

    corpus = made(parsed.sources, parsed.out, choices, overwrite=parsed.overwrite, say=say)
    print_result(_result(corpus), parsed.json, "\n".join(lines(corpus)))
    return 0


def _parser() -> Parser:
    from rung.corpus.aozora.files import ENCODINGS
    from rung.corpus.aozora.orthography import ORTHOGRAPHIES

    parser = Parser(
        "corpus aozora",
        "Make a corpus of works of Aozora Bunko: the text without header, colophon and notation, one document a work.",
    )
    parser.add_argument(
        "sources", nargs="*", metavar="SOURCE", help="raw files, and folders or archives of them; with --hub a data set"
    )
    parser.add_argument(
        "--hub", action="store_true", help="read a data set of the Hub whose texts are clean (extra hub)"
    )
    parser.add_argument(
        "--revision", metavar="NAME", help="of the data set: branch, tag or commit (default: the newest)"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the corpus folder to make")
    parser.add_argument("--works", metavar="N", help="take exactly N works, the first ones (default: all)")
    parser.add_argument(
        "--orthography",
        choices=(*ORTHOGRAPHIES, ANY),
        help="only works in this spelling (default: any; with --hub the modern one, 新字新仮名)",
    )
    parser.add_argument(
        "--ruby",
        choices=("drop", "parentheses"),
        default="drop",
        help="readings of characters: dropped, or put after them (default: drop)",
    )
    parser.add_argument("--all-versions", action="store_true", help="every file, also where a work has a newer one")
    parser.add_argument(
        "--encoding", choices=("auto", *ENCODINGS), default="auto", help="of the files (default: auto, which finds out)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that is there")
    return parser


def _of_hub(parsed: Any, choices: Choices, default: str) -> int:
    if len(parsed.sources) > 1:
        raise RungError(f"{len(parsed.sources)} data sets are named", "--hub reads one")
    if parsed.ruby != "drop" or parsed.all_versions or parsed.encoding != "auto":
        raise RungError("--ruby, --all-versions and --encoding are for raw files", "leave them out with --hub")

    from rung.report.words import count, plural
    from rung.run.corpus import aozora_of_hub

    name = parsed.sources[0] if parsed.sources else default
    if Path(name).is_file() or (Path(name).is_dir() and not any(map(_is_data, Path(name).rglob("*")))):
        raise RungError(f"{name} is no data set: it has no rows, as of JSON lines or Parquet", "leave --hub out")
    corpus = aozora_of_hub(name, parsed.out, choices, revision=parsed.revision, overwrite=parsed.overwrite, say=say)
    report = corpus.report
    text = [
        f"{corpus.path}: {plural(corpus.documents, 'work')}, {plural(corpus.characters, 'character')}, "
        f"{plural(corpus.bytes, 'byte')}",
        f"read: {plural(report['rows'], 'row')}; left out: {count(report['orthography_left_out'])} in another "
        f"spelling, {count(len(report['empty']))} empty",
        _next(corpus),
    ]
    print_result(_result(corpus), parsed.json, "\n".join(text))
    return 0


def _result(corpus: Corpus) -> dict[str, Any]:
    result = {"corpus": str(corpus.path), "documents": corpus.documents, "bytes": corpus.bytes}
    return {**result, "characters": corpus.characters, "report": corpus.report}


def lines(corpus: Corpus) -> list[str]:
    """Return what was found and done, for people."""
    from rung.report.columns import columns
    from rung.report.words import count, plural

    report = corpus.report
    characters, gaiji = report["characters"], report["gaiji"]
    told = [
        f"{corpus.path}: {plural(corpus.documents, 'work')}, {plural(corpus.characters, 'character')}, "
        f"{plural(corpus.bytes, 'byte')}, of {plural(report['files'], 'file')} in {' and '.join(report['encodings'])}",
    ]
    if report["other_versions"]:
        told.append(f"{plural(len(report['other_versions']), 'file')} left out, of works that have a newer one")
    if report["passed_over"]:
        others = ", ".join(f"{count(number)} {kind}" for kind, number in report["passed_over"].items())
        told.append(f"files that are no text, passed over: {others}")
    if report["orthography_left_out"]:
        told.append(f"{plural(report['orthography_left_out'], 'work')} left out, in another spelling or one not told")
    spellings = ", ".join(f"{count(number)} {name}" for name, number in report["orthographies"].items())
    told += [f"spelling: {spellings}", ""]
    parts = ("files", "carriage returns", "header", "colophon", "surrounding", "notation", "kept", "inserted")
    told += columns(("characters", "number"), [(name, count(characters[name])) for name in parts])
    told += ["", *_notation(report["notation"]), *_spelled_out(gaiji)]
    told += _listed("not resolved", report["unresolved_gaiji"]) + _listed(
        "notes of no known kind", report["unknown_notes"]
    )
    told += _ill_formed(report["ill_formed"])
    if report["plain"]:
        told.append(f"plain text, without any notation, taken whole: {_some(report['plain'])}")
    for name, said in (("without_header", "header"), ("without_colophon", "colophon"), ("empty", "text")):
        if report[name]:
            told.append(f"without {said}: {_some(report[name])}")
    told += ["", f"all of this is in {corpus.path / 'corpus.json'}"]
    return [*told, _next(corpus)]


# Helpers

_DATA_SUFFIXES = {".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".arrow"}
_HOW = (("jis", "JIS X 0213 number"), ("unicode", "Unicode number"), ("description", "description"))


def _is_data(path: Path) -> bool:
    return not _DATA_SUFFIXES.isdisjoint(path.suffixes)


def _next(corpus: Corpus) -> str:
    return f"next: rung tokenizer train {shlex.quote(str(corpus.path))} --vocab-size 8192 --out tokenizer.json"


def _notation(kinds: Mapping[str, Mapping[str, int]]) -> list[str]:
    from rung.report.columns import columns

    if not kinds:
        return ["no notation"]
    return [*columns(("notation", "found", "characters"), [_row(name, of) for name, of in kinds.items()]), ""]


def _spelled_out(gaiji: Mapping[str, int]) -> list[str]:
    from rung.report.words import count

    how = ", ".join(f"{count(gaiji[name])} by {said}" for name, said in _HOW if gaiji.get(name))
    unresolved = gaiji.get("unresolved", 0)
    told = [f"{count(gaiji['resolved'])} resolved ({how})"] if how else []
    told += [f"{count(unresolved)} not resolved, which stand as 〓"] if unresolved else []
    return [f"characters spelled out: {', '.join(told)}"] if told else []


def _row(name: str, of: Mapping[str, int]) -> tuple[str, str, str]:
    return name, f"{of['found']:,}", f"{of['characters']:,}"


def _listed(name: str, notes: Mapping[str, Mapping[str, int]]) -> list[str]:
    often = sorted(notes.items(), key=lambda item: -sum(item[1].values()))
    shown = [f"{note} ({sum(files.values())} in {_some(list(files), 1)})" for note, files in often[:_SHOWN]]
    return [f"{name}: {'; '.join(shown)}{_more(len(often) - _SHOWN)}"] if often else []


def _ill_formed(found: Sequence[Mapping[str, Any]]) -> list[str]:
    shown = [f"{one['file']}, line {one['line']}: {one['text']}" for one in found[:_SHOWN]]
    return [f"ill-formed, kept as text: {'; '.join(shown)}{_more(len(found) - _SHOWN)}"] if found else []


def _some(names: Sequence[str], most: int = _SHOWN) -> str:
    return f"{', '.join(names[:most])}{_more(len(names) - most)}"


def _more(number: int) -> str:
    return f" and {number:,} more" if number > 0 else ""
