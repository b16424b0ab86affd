"""``rung tokens``: tokenize text once, to train on it many times."""

from __future__ import annotations

from collections.abc import Sequence

from rung.cli.flags import Parser, add_settings, given_settings, print_result, say
from rung.config import Config, override
from rung.errors import RungError, nearest

ACTIONS = {"build": "encode text into a token store, which `rung train` takes as its source"}

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
    return _build(arguments[1:])


def _build(arguments: Sequence[str]) -> int:
    parser = Parser("tokens build", "Tokenize text into a token store, which `rung train` takes as its source.")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="files, folders, globs, or - for standard input")
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help="tokenizer.json, or GPT-2's files")
    parser.add_argument(
        "--allow-lossy",
        "--tokenizer.allow-lossy",
        dest="allow_lossy",
        action="store_true",
        help="accept a tokenizer that cannot give every text back",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument("--overwrite", action="store_true", help="replace a store that is there")
    add_settings(parser, short_names=_SETTINGS, only=_SETTINGS.values())
    parsed = parser.parse_args(arguments)
    data = override(Config(), given_settings(parsed), "flag").data

    from rung.run.store import build

    store = build(
        parsed.sources,
        parsed.tokenizer,
        parsed.out,
        data,
        allow_lossy=parsed.allow_lossy,
        overwrite=parsed.overwrite,
        say=say,
    )
    result = {"store": str(store.path)} | {
        name: {"tokens": len(store.split(name)), "documents": len(store.split(name).document_starts)}
        for name in store.splits
    }
    lines = [
        f"{name:<10}  {len(store.split(name)):>13,} tokens  {len(store.split(name).document_starts):>9,} documents  "
        f"{store.split(name).text_bytes:>15,} bytes"
        for name in store.splits
    ]
    print_result(result, parsed.json, "\n".join([*lines, f"next: rung train {store.path} "]))
    return 0
