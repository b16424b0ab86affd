"""``rung resume``: continue a run from its last checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from rung.cli.flags import Parser, add_settings, say
from rung.cli.train import conclude
from rung.cli.training_flags import add_mesh_flag, add_running_flags, changes_of, profiled_steps, time_limit_of


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("resume", "Continue a run from its last whole checkpoint, as if it had not stopped.")
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument(
        "--reschedule", action="store_true", help="with --steps: let the learning rate jump to the new schedule"
    )
    add_running_flags(parser)
    add_mesh_flag(parser)
    add_settings(parser)
    parsed = parser.parse_args(arguments)
    changes = changes_of(parsed)
    steps = changes.pop("train.steps", None)

    from rung.run.resuming import resume

    result = resume(
        parsed.run,
        steps,
        changes,
        reschedule=parsed.reschedule,
        time_limit=time_limit_of(parsed),
        profile=profiled_steps(parsed),
        say=say,
    )
    return conclude(result, parsed.json)
