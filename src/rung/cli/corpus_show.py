"""``rung corpus show``: a look at text."""

from __future__ import annotations

from collections.abc import Sequence

from rung.cli.flags import Parser, add_settings, given_settings, print_result, typed
from rung.config import Config, override
from rung.errors import RungError

_SETTINGS = {
    "encoding": "data.encoding",
    "format": "data.format",
    "text-column": "data.text_column",
    "separator": "data.separator",
}


def show(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("corpus show", "Sizes, scripts, lengths and samples of a text or a corpus; all of it is read once.")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="a corpus, files, folders, globs, or -")
    parser.add_argument("--samples", default="5", metavar="N", help="documents to show (default: 5)")
    parser.add_argument("--html", metavar="FILE", help="write a page with plots, too")
    add_settings(parser, short_names=_SETTINGS, only=_SETTINGS.values())
    parsed = parser.parse_args(arguments)
    samples = typed("--samples", int, parsed.samples)
    if samples < 0:
        raise RungError(f"--samples is {samples}", "give 0 or more")

    from rung.run.look import look_at_text

    data = override(Config(), given_settings(parsed), "flag").data
    result = look_at_text(parsed.sources, data, samples=samples, html=parsed.html)
    lines = result.pop("lines")
    print_result(result, parsed.json, "\n".join([*lines, *([f"\npage: {parsed.html}"] if parsed.html else [])]))
    return 0
