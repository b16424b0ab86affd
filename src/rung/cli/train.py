"""``rung train``: from text to a trained model, in one command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rung.cli.flags import Parser, print_result, say
from rung.cli.training_flags import (
    add_running_flags,
    add_training_flags,
    base_of,
    changes_of,
    profiled_steps,
    time_limit_of,
)

STOPPED = 3
"""Exit status of a run that stopped early and can be resumed."""


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("train", "Train a model on text: files, folders, globs, - for standard input, or one token store.")
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="what to train on; none: the tokens of --from")
    parser.add_argument("--run", metavar="DIR", help="the run folder (default: runs/<name>)")
    parser.add_argument("--overwrite", action="store_true", help="replace a run that is there")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="RUN[@STEP]",
        help="begin with the weights of another run: its best, or with @STEP or @latest those of a checkpoint",
    )
    parser.add_argument("--keep-optimizer", action="store_true", help="with --from: take the optimizer's state too")
    add_running_flags(parser)
    add_training_flags(parser)
    parsed = parser.parse_args(arguments)
    base, changes = base_of(parsed), changes_of(parsed)

    from rung.run.train import train

    result = train(
        parsed.sources,
        base,
        changes,
        run=parsed.run,
        overwrite=parsed.overwrite,
        start=parsed.start,
        keep_optimizer=parsed.keep_optimizer,
        time_limit=time_limit_of(parsed),
        profile=profiled_steps(parsed),
        say=say,
    )
    return conclude(result, parsed.json)


def conclude(result: Mapping[str, Any], as_json: bool) -> int:
    """Print what a run came to; returns the exit status."""
    print_result(result, as_json, "\n".join(closing_lines(result)))
    return STOPPED if result["stopped"] else 0


def closing_lines(result: Mapping[str, Any], prompt: str = "...") -> list[str]:
    """Return what a run came to as lines for people; ``prompt`` is that of the command they may try next."""
    lines = []
    if result["validation_loss"] is not None:
        bits = "" if result["bits_per_byte"] is None else f"{result['bits_per_byte']:.3f} bits per byte, "
        loss = f"loss {result['validation_loss']:.3f} nats per token, perplexity {result['perplexity']:,.1f}"
        lines.append(f"held-out: {bits}{loss}")
    if result["train_loss"] is not None:
        lines.append(
            f"trained:  loss {result['train_loss']:.3f}, the mean of the last {result['train_loss_steps']} steps"
        )
    lines += [f"report:   {result['report']}", f"run:      {result['run']}"]
    return [*lines, f'next:     rung generate {shlex.quote(str(result["run"]))} "{prompt}"']
