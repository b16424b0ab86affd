"""``rung tokens``: tokenize text once, to train on it many times."""

from __future__ import annotations

from collections.abc import Sequence

from rung.cli.flags import Parser, add_settings, given_settings, print_result, say
from rung.config import Config, DataConfig, override
from rung.errors import RungError, nearest

ACTIONS = ("build",)


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    if arguments and arguments[0] not in ACTIONS and not arguments[0].startswith("-"):
        raise RungError(f"unknown action {arguments[0]!r} of rung tokens", nearest(arguments[0], ACTIONS))
    parser = Parser("tokens", "Tokenize text into a token store, which `rung train` takes as its source.")
    parser.add_argument("action", choices=ACTIONS, help="build: encode text into a store")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="files, folders, globs, or - for standard input")
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help="tokenizer.json, or GPT-2's files")
    parser.add_argument(
        "--allow-lossy", action="store_true", help="accept a tokenizer that cannot give every text back"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument("--overwrite", action="store_true", help="replace a store that is there")
    add_settings(parser, DataConfig, {})
    parsed = parser.parse_args(arguments)
    data = override(
        Config(), {f"data.{path}": value for path, value in given_settings(parsed, DataConfig).items()}
    ).data

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
    print_result(result, parsed.json, "\n".join([*lines, f"next: rung train {store.path} --preset ..."]))
    return 0
