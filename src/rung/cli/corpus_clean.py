"""``rung corpus clean``: take out of a corpus what is too short, repetitive, double, or held out elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rung.cli.engine_flags import add_engine, workers_of
from rung.cli.flags import Parser, add_settings, given_settings, print_result, say
from rung.config import CleanConfig, Config, checked, override
from rung.errors import RungError

# How texts held out are read, by short name.
_DATA = {
    "encoding": "data.encoding",
    "format": "data.format",
    "text-column": "data.text_column",
    "separator": "data.separator",
}
_SHOWN = 5  # overlaps on the terminal; the report has more


def clean(arguments: Sequence[str]) -> int:
    """Run ``rung corpus clean``."""
    parser = Parser("corpus clean", "Take documents out of a corpus, and say which, how many, and why.")
    parser.add_argument("corpus", metavar="CORPUS", help="a corpus folder")
    parser.add_argument("--out", metavar="DIR", help="the corpus folder to make")
    parser.add_argument("--report-only", action="store_true", help="write nothing: say what would go")
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that is there")
    add_engine(parser)
    add_settings(parser, CleanConfig, short_names={})
    add_settings(parser, short_names=_DATA, only=_DATA.values())
    parsed = parser.parse_args(arguments)
    if bool(parsed.out) == parsed.report_only:
        problem = "--report-only writes nothing, and --out is given" if parsed.out else "missing --out"
        raise RungError(problem, "name the folder to make with --out, or ask for --report-only")
    if "contamination" in (parsed.skip or ()):
        problem = "--skip contamination: that step takes nothing unless it is asked to"
        raise RungError(problem, "leave --remove-contaminated out; what is found again is then said only")
    settings = checked(CleanConfig(**given_settings(parsed, CleanConfig)))
    data = override(Config(), given_settings(parsed), "flag").data

    from rung.run.cleaning import clean_corpus

    cleaned = clean_corpus(
        parsed.corpus,
        parsed.out,
        settings,
        data=data,
        engine_name=parsed.engine,
        workers=workers_of(parsed),
        overwrite=parsed.overwrite,
        say=say,
    )
    text = "\n".join(_lines(cleaned.report))
    if cleaned.corpus:
        from rung.report.words import plural

        sizes = f"{plural(cleaned.corpus.documents, 'document')}, {plural(cleaned.corpus.bytes, 'byte')}"
        text += f"\n{cleaned.corpus.path}: {sizes}"
    print_result({"corpus": parsed.out, **cleaned.report}, parsed.json, text)
    return 0


def _lines(report: dict[str, Any]) -> list[str]:
    """Return the report for people."""
    rows = [("read", report["read"]), *report["filters"].items(), ("stay", report["stay"])]
    lines = []
    for name, said in rows:
        lines.append(f"{name:<16}  {said['documents']:>11,} documents  {said['bytes']:>15,} bytes")
        for example in said.get("examples", ()):
            lines.append(f"    {_one_line(example['name'], 40)}: {example['why']}: {_one_line(example['text'], 60)}")
    for name, what in (("contamination", "texts held out"), ("held_out", "documents to be held out")):
        if name in report:
            lines += _overlaps(report[name], what)
    return lines


def _overlaps(found: dict[str, Any], what: str) -> list[str]:
    from rung.report.words import count, plural

    looked_for = f"{what}: {count(found['held_out'])} looked for"
    if found["too_short"]:
        looked_for += f" ({count(found['too_short'])} more too short for that)"
    shared = f"{count(found['found_in_training'])} found again, in parts, in {plural(found['documents'], 'document')}"
    lines = [f"{looked_for}, {shared if found['documents'] else 'none found again'}"]
    for one in found["listed"][:_SHOWN]:
        said = f"{one['document']} has {one['words']:,} words of {one['held_out']}"
        lines.append(f"    {_one_line(said, 80)}: {_one_line(one['text'], 60)}")
    if found["overlaps"] > _SHOWN:
        lines.append(f"    {found['overlaps'] - _SHOWN:,} more; --json lists {len(found['listed']):,}")
    return lines


def _one_line(text: str, most: int) -> str:
    line = " ".join(text.split())
    line = "".join(letter if letter.isprintable() else "\ufffd" for letter in line)
    return line if len(line) <= most else line[: most - 4] + " ..."
