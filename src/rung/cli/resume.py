"""``rung resume``: continue a run from its last checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from rung.cli.flags import Parser, say, typed
from rung.cli.train import conclude


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("resume", "Continue a run from its last whole checkpoint, as if it had not stopped.")
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument("--steps", metavar="N", help="a new length of the run")
    parsed = parser.parse_args(arguments)
    steps = None if parsed.steps is None else typed("--steps", int, parsed.steps)

    from rung.run.training import resume

    return conclude(resume(parsed.run, steps, say=say), parsed.json)
