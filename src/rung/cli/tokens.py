"""``rung tokens``: tokenize text once, to train on it many times."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rung.cli.engine_flags import add_engine, workers_of
from rung.cli.flags import Parser, add_settings, given_settings, print_result, say, typed
from rung.config import Config, override
from rung.errors import RungError, nearest
from rung.setting import check_bounds, fields

if TYPE_CHECKING:
    from rung.tokens.store import TokenStore

ACTIONS = {
    "build": "encode text into a token store, which `rung train` takes as its source",
    "import": "make a token store of files of ids that other programs made, used where they are",
    "show": "a look at a store: sizes, most frequent tokens, lengths, and what a batch shows the model",
}

_FRACTION = dict(fields(Config))["data.validation_fraction"].metadata["setting"]

# What of the config decides the tokens, by short name.
_SETTINGS = {
    "encoding": "data.encoding",
    "format": "data.format",
    "text-column": "data.text_column",
    "separator": "data.separator",
    "validation": "data.validation",
    "validation-fraction": "data.validation_fraction",
}


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: rung tokens ACTION ...\n")
        print("\n".join(f"  {name:<7} {text}" for name, text in ACTIONS.items()))
        print("\n`rung tokens ACTION --help` says more of each.")
        return 0
    if arguments[0] not in ACTIONS:
        raise RungError(f"unknown action {arguments[0]!r} of rung tokens", nearest(arguments[0], ACTIONS))
    return {"build": _build, "import": _import, "show": _show}[arguments[0]](arguments[1:])


def _build(arguments: Sequence[str]) -> int:
    parser = Parser("tokens build", "Tokenize text into a token store, which `rung train` takes as its source.")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="files, folders, globs, or - for standard input")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
    _add_flags(parser)
    add_engine(parser)
    add_settings(parser, short_names=_SETTINGS, only=_SETTINGS.values())
    parsed = parser.parse_args(arguments)
    data = override(Config(), given_settings(parsed), "flag").data

    from rung.run.store import build

    store = build(
        parsed.sources,
        parsed.tokenizer,
        parsed.out,
        data,
        engine_name=parsed.engine,
        workers=workers_of(parsed),
        allow_lossy=parsed.allow_lossy,
        overwrite=parsed.overwrite,
        say=say,
    )
    return _print_store(store, parsed.json)


def _import(arguments: Sequence[str]) -> int:
    parser = Parser(
        "tokens import",
        "Make a token store of files of ids: safetensors with one tensor named tokens, .npy, or nanoGPT's and llm.c's\n"
        ".bin. The files stay where they are, and nothing is copied or loaded, whatever their size.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="files of ids, in order")
    parser.add_argument("--out", metavar="DIR", help="the folder to make (default: tokens/<name of the first file>)")
    parser.add_argument("--dtype", choices=["uint16", "uint32"], default="", help="of .bin files (default: uint16)")
    parser.add_argument(
        "--validation", action="append", default=[], metavar="FILE", help="a file held out, instead of the end"
    )
    parser.add_argument(
        "--validation-fraction", metavar="X", help="part held out at the end (default: a tenth, at most 10,485,760)"
    )
    parser.add_argument("--verify", action="store_true", help="look at every id, and count documents and bytes")
    _add_flags(parser)
    parsed = parser.parse_args(arguments)
    fraction = None
    if parsed.validation_fraction is not None:
        fraction = typed("--validation-fraction", float, parsed.validation_fraction)
        check_bounds("--validation-fraction", _FRACTION, fraction, "")
        if parsed.validation:
            raise RungError("both --validation and --validation-fraction are given", "keep one of them")

    from rung.run.store import import_tokens

    store = import_tokens(
        parsed.files,
        parsed.tokenizer,
        parsed.out,
        validation=parsed.validation,
        validation_fraction=fraction,
        bin_type=parsed.dtype,
        verify=parsed.verify,
        allow_lossy=parsed.allow_lossy,
        overwrite=parsed.overwrite,
        say=say,
    )
    return _print_store(store, parsed.json)


def _show(arguments: Sequence[str]) -> int:
    parser = Parser("tokens show", "Sizes, frequent tokens, lengths, and rows of a batch as the model will see them.")
    parser.add_argument("stores", nargs="+", metavar="STORE", help="a store, several as a mixture, ids, or a run")
    parser.add_argument("--tokenizer", metavar="FILE", help="that made a bare file of ids")
    parser.add_argument("--context-length", default="0", metavar="N", help="of the rows (default: the run's, or 256)")
    parser.add_argument("--step", default="1", metavar="N", help="whose batch is shown (default: 1)")
    parser.add_argument("--rows", default="3", metavar="N", help="of the batch (default: 3)")
    parser.add_argument("--all", action="store_true", help="look at every token of a large store, not at a sample")
    parser.add_argument("--html", metavar="FILE", help="write a page with plots, too")
    parsed = parser.parse_args(arguments)
    numbers = {}
    for name, least in (("context_length", 0), ("step", 1), ("rows", 1)):
        flag = f"--{name.replace('_', '-')}"
        numbers[name] = typed(flag, int, getattr(parsed, name))
        if numbers[name] < least:
            raise RungError(f"{flag} is {numbers[name]}", f"give {least} or more")

    from rung.run.look import look_at_tokens

    result = look_at_tokens(
        parsed.stores, tokenizer_file=parsed.tokenizer, every_token=parsed.all, html=parsed.html, **numbers
    )
    lines = result.pop("lines")
    print_result(result, parsed.json, "\n".join([*lines, *([f"\npage: {parsed.html}"] if parsed.html else [])]))
    return 0


def _add_flags(parser: Parser) -> None:
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help="tokenizer.json, or GPT-2's files")
    parser.add_argument(
        "--allow-lossy",
        "--tokenizer.allow-lossy",
        dest="allow_lossy",
        action="store_true",
        help="accept a tokenizer that cannot give every text back",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a store that is there")


def _print_store(store: TokenStore, as_json: bool) -> int:
    splits = {name: store.split(name) for name in store.splits}
    result = {"store": str(store.path)} | {
        name: {"tokens": len(split), "documents": split.n_documents} for name, split in splits.items()
    }
    from rung.report.words import plural

    lines = []
    for name, split in splits.items():
        documents = "uncounted documents" if split.n_documents is None else plural(split.n_documents, "document")
        n_bytes = f"{'about ' if split.estimated else ''}{split.text_bytes:,}"
        lines.append(f"{name:<10}  {len(split):>14,} tokens  {documents:>19}  {n_bytes:>15} bytes")
    print_result(result, as_json, "\n".join([*lines, f"next: rung train {shlex.quote(str(store.path))}"]))
    return 0
