"""``rung runs``: the runs in a folder, and how each stands."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from rung.cli.flags import Parser, print_result
from rung.report.columns import columns
from rung.report.words import count, decimal, duration, short
from rung.run.runs import RUNS, RunState, runs

HEAD = ("run", "state", "steps", "loss", "bits/byte", "at step", "train loss", "tokens", "time", "active", "from")


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("runs", "List runs, the last active first: state, steps, best validation, last training loss.")
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=f"a folder of runs, or a run (default: {RUNS})")
    parsed = parser.parse_args(arguments)
    found = runs(parsed.folders or (RUNS,))
    print_result(
        {"runs": [dataclasses.asdict(state) for state in found]}, parsed.json, "\n".join(_lines(found, parsed.folders))
    )
    return 0


def _lines(found: Sequence[RunState], folders: Sequence[str]) -> list[str]:
    if not found:
        return [f"no runs in {', '.join(folders) or RUNS}; train one: rung train my-novel.txt"]
    lines = columns(HEAD, [_row(state) for state in found], left=2)
    reasons = [f"{state.run}: {state.reason}" for state in found if state.reason and state.state != "stopped"]
    return [*lines, *([""] if reasons else []), *reasons]


def _row(state: RunState) -> tuple[str, ...]:
    return (
        state.run,
        f"stopped ({state.reason})" if state.state == "stopped" else state.state,
        f"{count(state.steps)}/{count(state.total_steps)}" if state.total_steps else count(state.steps),
        _decimal(state.validation_loss),
        _decimal(state.bits_per_byte),
        "" if state.best_step is None else count(state.best_step),
        _decimal(state.train_loss),
        short(state.tokens) if state.tokens else "",
        duration(state.seconds) if state.seconds else "",
        _ago(state.active),
        state.parent or "",
    )


def _decimal(number: float | None) -> str:
    return "" if number is None else decimal(number)


def _ago(moment: float) -> str:
    passed = time.time() - moment
    return f"{duration(max(0.0, passed))} ago" if math.isfinite(passed) else ""
