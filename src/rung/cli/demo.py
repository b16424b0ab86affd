"""``rung demo``: the whole of Rung on the novels that ship with it."""

from __future__ import annotations

from collections.abc import Sequence

from rung.cli.flags import Parser, print_result, say, typed
from rung.cli.train import closing_lines, conclude


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("demo", "Train on six novels of Jane Austen for a few minutes; print held-out loss and a sample.")
    parser.add_argument("--run", metavar="DIR", help="the run folder (default: runs/demo, or the next number)")
    parser.add_argument("--steps", metavar="N", help="optimizer steps (default: the preset's)")
    parsed = parser.parse_args(arguments)
    steps = None if parsed.steps is None else typed("--steps", int, parsed.steps)

    from rung.run.demo import demo

    result = demo(parsed.run, steps, say=say)
    if result["stopped"]:
        return conclude(result, parsed.json)
    text = "\n".join(["", result["sample"], "", *closing_lines(result, "It is a truth universally acknowledged")])
    print_result(result, parsed.json, text)
    return 0
