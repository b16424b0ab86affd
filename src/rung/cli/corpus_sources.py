"""``rung corpus files`` and ``rung corpus hub``: files of any kind, and data sets of the Hub, as a corpus."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rung.cli.flags import Parser, add_settings, given_settings, print_result, say, typed
from rung.config import Config, override
from rung.errors import RungError

if TYPE_CHECKING:
    from rung.corpus.folder import Corpus

# What of the config decides how files are read, by short name.
_SETTINGS = {
    "encoding": "data.encoding",
    "format": "data.format",
    "text-column": "data.text_column",
    "separator": "data.separator",
}


def files(arguments: Sequence[str]) -> int:
    """Run ``rung corpus files``."""
    parser = Parser(
        "corpus files",
        "Gather text into a corpus: plain text, JSON lines, Parquet, HTML, Markdown and EPUB, compressed or in zips.",
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="files, folders, globs, or - for standard input")
    _add_out(parser)
    add_settings(parser, short_names=_SETTINGS, only=_SETTINGS.values())
    parsed = parser.parse_args(arguments)
    data = override(Config(), given_settings(parsed), "flag").data

    from rung.run.collecting import collect_files

    corpus = collect_files(parsed.sources, parsed.out, data, overwrite=parsed.overwrite, say=say)
    return _print(corpus, parsed.json)


def hub(arguments: Sequence[str]) -> int:
    """Run ``rung corpus hub``."""
    parser = Parser(
        "corpus hub", "Gather a data set of the Hugging Face Hub into a corpus (extra hub): a document a row."
    )
    parser.add_argument("name", metavar="NAME", help="owner/name, or a folder laid out like a data set")
    parser.add_argument("--config", metavar="NAME", help="config of the data set, where it has several")
    parser.add_argument("--split", metavar="NAME", default="train", help="split of the data set (default: train)")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit (default: the newest)")
    parser.add_argument(
        "--streaming", action="store_true", help="read over the network what is needed, instead of fetching all first"
    )
    parser.add_argument(
        "--column", "--text-column", dest="column", metavar="NAME", default="text", help="that holds the text"
    )
    parser.add_argument("--documents", metavar="N", help="take exactly so many documents (default: all)")
    _add_out(parser)
    parsed = parser.parse_args(arguments)
    n_documents = typed("--documents", int, parsed.documents) if parsed.documents is not None else 0
    if parsed.documents is not None and n_documents < 1:
        raise RungError(f"--documents is {parsed.documents}", "ask for 1 at least, or leave it out for all")

    from rung.run.collecting import collect_hub

    corpus = collect_hub(
        parsed.name,
        parsed.out,
        config=parsed.config,
        split=parsed.split,
        revision=parsed.revision,
        streaming=parsed.streaming,
        column=parsed.column,
        n_documents=n_documents,
        overwrite=parsed.overwrite,
        say=say,
    )
    return _print(corpus, parsed.json)


def _add_out(parser: Parser) -> None:
    parser.add_argument("--out", required=True, metavar="DIR", help="the corpus folder to make")
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that is there")


def _print(corpus: Corpus, as_json: bool) -> int:
    from rung.report.words import plural

    report = corpus.report
    for name, count in report["left_out"].items():
        say(f"left out: {name}, {plural(count, 'time')}")
    if report["empty"]:
        say(f"left out: {plural(report['empty'], 'empty document')}")
    result = {"corpus": str(corpus.path), "documents": corpus.documents, "bytes": corpus.bytes}
    result |= {"characters": corpus.characters, "empty": report["empty"], "left_out": report["left_out"]}
    sizes = ((corpus.documents, "document"), (corpus.bytes, "byte"), (corpus.characters, "character"))
    text = f"{corpus.path}: {', '.join(plural(number, noun) for number, noun in sizes)}"
    print_result(result, as_json, f"{text}\nnext: rung train {shlex.quote(str(corpus.path))}")
    return 0
