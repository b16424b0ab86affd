"""``rung tokenizer``: train a tokenizer, encode and decode with one, look at its pieces."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rung.cli.flags import Parser, add_settings, as_text, given_settings, print_result, say, standard_input
from rung.config import Config, override
from rung.errors import RungError, nearest

if TYPE_CHECKING:
    from rung.tokens.tokenizer import Tokenizer

ACTIONS = {
    "train": "learn a vocabulary from text",
    "encode": "standard input to token ids, separated by spaces",
    "decode": "token ids on standard input to text",
    "show": "the pieces and ids of a text, coloured",
}

# What of the config has a say in training a tokenizer, by short name.
_SETTINGS = {
    "kind": "tokenizer.kind",
    "vocab-size": "tokenizer.vocab_size",
    "min-frequency": "tokenizer.min_frequency",
    "byte-fallback": "tokenizer.byte_fallback",
    "training-memory": "tokenizer.training_memory",
    "encoding": "data.encoding",
    "format": "data.format",
    "text-column": "data.text_column",
    "separator": "data.separator",
}

_COLOURS = (24, 58, 53, 22, 88)  # backgrounds of the 256-colour table that white text is legible on


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: rung tokenizer ACTION ...\n")
        print("\n".join(f"  {name:<7} {text}" for name, text in ACTIONS.items()))
        print("\n`rung tokenizer ACTION --help` says more of each.")
        return 0
    if arguments[0] not in ACTIONS:
        raise RungError(f"unknown action {arguments[0]!r} of rung tokenizer", nearest(arguments[0], ACTIONS))
    return {"train": _train, "encode": _encode, "decode": _decode, "show": _show}[arguments[0]](arguments[1:])


def _train(arguments: Sequence[str]) -> int:
    parser = Parser("tokenizer train", "Learn a tokenizer from text: byte-level BPE, or one token a character or byte.")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="files, folders, globs, or - for standard input")
    parser.add_argument("--out", required=True, metavar="FILE", help="the tokenizer.json to write")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    add_settings(parser, short_names=_SETTINGS, only=_SETTINGS.values())
    parsed = parser.parse_args(arguments)
    config = override(Config(), given_settings(parsed), "flag")

    from rung.run.store import train_tokenizer

    tokenizer = train_tokenizer(parsed.sources, config, parsed.out, overwrite=parsed.overwrite, say=say)
    result = {
        "tokenizer": parsed.out,
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "hash": tokenizer.hash,
        "trained_on": tokenizer.trained_on and vars(tokenizer.trained_on),
    }
    print_result(result, parsed.json, f"{parsed.out}: {tokenizer.kind}, {tokenizer.vocab_size:,} entries")
    return 0


def _encode(arguments: Sequence[str]) -> int:
    tokenizer, as_json = _loaded("tokenizer encode", ACTIONS["encode"], arguments)
    ids = tokenizer.encode(standard_input()).tolist()
    print_result({"ids": ids}, as_json, "" if as_json else " ".join(map(str, ids)) or " ")
    return 0


def _decode(arguments: Sequence[str]) -> int:
    tokenizer, as_json = _loaded("tokenizer decode", ACTIONS["decode"], arguments)
    words = standard_input().split()
    for word in words:
        if not re.fullmatch("[0-9]{1,18}", word):
            raise RungError(f"standard input: {word[:40]!r} is no token id", "give ids separated by spaces")
    ids = [int(word) for word in words]
    if as_json:
        print_result({"text": tokenizer.decode(ids)}, as_json, "")
        _say_of_decoding(tokenizer, ids, "shown as U+FFFD")
        return 0
    # Bytes, so that what was encoded comes back as it was, to the last line end.
    sys.stdout.buffer.write(tokenizer.decode_bytes(ids))
    sys.stdout.buffer.flush()
    _say_of_decoding(tokenizer, ids, "written as they are")
    return 0


def _say_of_decoding(tokenizer: Tokenizer, ids: Sequence[int], broken_are: str) -> None:
    """Say which ids are not in the text that was decoded, and where its bytes are no whole characters."""
    from rung.report.words import plural

    silent = Counter(token for token in ids if not tokenizer.token_bytes[token])
    if silent:
        named = ", ".join(tokenizer.show(token) or str(token) for token, _ in silent.most_common(3))
        more = ", ..." if len(silent) > 3 else ""
        say(f"left out: {plural(silent.total(), 'id')} without text ({named}{more})")
    data = tokenizer.decode_bytes(ids)
    # U+FFFD may be in the text itself.
    if broken := data.decode("utf-8", "replace").count("\ufffd") - data.count("\ufffd".encode()):
        say(f"bytes that are no whole character, in {plural(broken, 'place')}: {broken_are}")


def _loaded(command: str, description: str, arguments: Sequence[str]) -> tuple[Tokenizer, bool]:
    parser = Parser(command, description)
    _add_tokenizer(parser)
    parsed = parser.parse_args(arguments)

    from rung.tokens.tokenizer import Tokenizer

    return Tokenizer.load(parsed.tokenizer, allow_lossy=parsed.allow_lossy), parsed.json


def _show(arguments: Sequence[str]) -> int:
    parser = Parser("tokenizer show", "Print the pieces of a text and their ids.")
    parser.add_argument("text", metavar="TEXT", help="the text")
    _add_tokenizer(parser)
    parsed = parser.parse_args(arguments)

    from rung.tokens.tokenizer import Tokenizer

    pieces = Tokenizer.load(parsed.tokenizer, allow_lossy=parsed.allow_lossy).pieces(as_text("the text", parsed.text))
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    shown = [_piece(piece, number, coloured) for number, (piece, _) in enumerate(pieces)]
    text = ("" if coloured else " / ").join(shown) + "\n" + " ".join(str(token) for _, token in pieces)
    result = {"pieces": [piece for piece, _ in pieces], "ids": [token for _, token in pieces]}
    print_result(result, parsed.json, text)
    return 0


def _add_tokenizer(parser: Parser) -> None:
    parser.add_argument(
        "--tokenizer", required=True, metavar="FILE", help="tokenizer.json, GPT-2's files, or a run folder"
    )
    parser.add_argument(
        "--allow-lossy",
        "--tokenizer.allow-lossy",
        dest="allow_lossy",
        action="store_true",
        help="accept a tokenizer that cannot give every text back",
    )


def _piece(piece: str, number: int, coloured: bool) -> str:
    visible = piece.replace("\n", "\u21b5").replace("\t", "\u21e5")
    if coloured:
        return f"\x1b[48;5;{_COLOURS[number % len(_COLOURS)]};97m{visible}\x1b[0m"
    return visible
