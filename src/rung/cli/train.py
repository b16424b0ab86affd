"""``rung train``: from text to a trained model, in one command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rung.cli.flags import Parser, print_result, say
from rung.cli.training_flags import add_training_flags, base_of, changes_of
from rung.errors import RungError

STOPPED = 3
"""Exit status of a run that stopped early and can be resumed."""


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("train", "Train a model on text: files, folders, globs, - for standard input, or one token store.")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="what to train on")
    parser.add_argument("--run", metavar="DIR", help="the run folder (default: runs/<name>)")
    parser.add_argument("--overwrite", action="store_true", help="replace a run that is there")
    parser.add_argument("--profile", metavar="FIRST:LAST", help="write a profiler trace of these steps")
    add_training_flags(parser)
    parsed = parser.parse_args(arguments)
    base, changes = base_of(parsed), changes_of(parsed)

    from rung.run.training import train

    result = train(
        parsed.sources,
        base,
        changes,
        run=parsed.run,
        overwrite=parsed.overwrite,
        profile=_steps(parsed),
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
    return [*lines, f'next:     rung generate {result["run"]} "{prompt}"']


def _steps(parsed: argparse.Namespace) -> tuple[int, int] | None:
    if parsed.profile is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", parsed.profile)
    if not match or int(match[1]) > int(match[2]):
        raise RungError(f"--profile is {parsed.profile!r}, not FIRST:LAST", "write --profile 10:20 for steps 10 to 20")
    return int(match[1]), int(match[2])
