"""``rung corpus``: text from where it is published, cleaned, as a folder that the other commands read."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from rung.errors import RungError, nearest

ACTIONS = {
    "aozora": "works of Aozora Bunko, from the files as they are published or from a data set of the Hub",
    "files": "text files, rows, pages and books of any kind, packed or not",
    "hub": "a data set of the Hugging Face Hub",
    "clean": "a corpus without what is too short, repetitive, double, or held out elsewhere",
    "show": "a look at a text or a corpus: sizes, scripts, lengths, samples",
}
_IN = {
    "aozora": "corpus_aozora.aozora",
    "files": "corpus_sources.files",
    "hub": "corpus_sources.hub",
    "clean": "corpus_clean.clean",
    "show": "corpus_show.show",
}


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: rung corpus ACTION ...\n")
        print("\n".join(f"  {name:<7} {text}" for name, text in ACTIONS.items()))
        print("\n`rung corpus ACTION --help` says more of each.")
        return 0
    if arguments[0] not in ACTIONS:
        raise RungError(f"unknown action {arguments[0]!r} of rung corpus", nearest(arguments[0], ACTIONS))
    module, _, function = _IN[arguments[0]].partition(".")
    return getattr(importlib.import_module(f"rung.cli.{module}"), function)(arguments[1:])
