"""``rung compare``: several runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rung.cli.flags import Parser, print_result, say


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser(
        "compare", "Overlay the curves of runs by tokens, steps and time, and show how their settings differ."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="two runs or more: folders, or names under runs/")
    parser.add_argument(
        "--out",
        default="comparison",
        metavar="DIR",
        help="where to write page, picture and numbers (default: comparison)",
    )
    parsed = parser.parse_args(arguments)

    from rung.run.compare import compare

    result = compare(parsed.runs, parsed.out, say=say)
    text = [*result.pop("table"), "", f"page:     {result['html']}", f"picture:  {result['png']}"]
    print_result(result, parsed.json, "\n".join([*text, f"numbers:  {result['json']}"]))
    return 0
