"""``rung bench``: how fast the training step of a config is on this machine, and what memory it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rung import config as settings
from rung.cli.flags import Parser, print_result, say, typed
from rung.cli.training_flags import add_training_flags, base_of, changes_of
from rung.errors import RungError

HEAD = ("attention", "batch", "tokens/s", "lowest to highest", "ms a step", "of peak", "compile", "planned", "taken")


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser(
        "bench", "Time the training step of a preset or a config on this machine, on random tokens: no text is needed."
    )
    parser.add_argument(
        "--batch", metavar="N,N", help="sequences whose gradient is computed at once (default: train.micro_batch_size)"
    )
    parser.add_argument("--attention", metavar="A,A", help="values of compute.attention, each with each batch")
    parser.add_argument("--rounds", default="5", metavar="N", help="measurements of each, of a second (default: 5)")
    add_training_flags(parser)
    parsed = parser.parse_args(arguments)
    rounds = _at_least_one("--rounds", parsed.rounds)
    batches = [_at_least_one("--batch", one) for one in parsed.batch.split(",")] if parsed.batch else []
    kind = settings.field_type(settings.Config, "compute.attention")
    attentions = [typed("--attention", kind, one) for one in parsed.attention.split(",")] if parsed.attention else []
    config, notes = settings.adapt(base_of(parsed) or settings.preset("demo"), changes_of(parsed), "flag")
    for note in notes:
        say(note)

    from rung.run.bench import bench

    result = bench(config, say, batches=batches, attentions=attentions, rounds=rounds)
    print_result(result, parsed.json, "\n".join(_lines(result)))
    return 1 if all(row["failed"] for row in result["rows"]) else 0


def _at_least_one(flag: str, text: str) -> int:
    number = typed(flag, int, text)
    if number < 1:
        raise RungError(f"{flag} is {text}", f"write 1 or more, as in {flag} 8")
    return number


def _lines(result: Mapping[str, Any]) -> list[str]:
    from rung.report.columns import columns
    from rung.report.words import count

    precision = result["matmul_precision"]
    computed = "bfloat16" if result["compute_dtype"] == "bfloat16" else f"float32, products in {precision}"
    opening = [
        f"{count(result['parameters'])} parameters, context {count(result['context_length'])}, {computed}",
        f"{result['devices']} x {result['device']}; peak of one {result['peak_flops'] / 1e12:,.3g} TFLOP/s "
        f"({result['peak_source']})",
        "",
    ]
    done = [row for row in result["rows"] if not row["failed"]]
    failed = [
        f"{row['attention']}, batch {count(row['batch'])}: {row['failed']}" for row in result["rows"] if row["failed"]
    ]
    return [*opening, *(columns(HEAD, [_cells(row) for row in done], left=1) if done else []), *failed]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    from rung.report.words import count, size

    middle, lowest, highest = row["tokens_per_second"]
    asked, backend = row["attention"], row["backend"]
    return (
        asked if asked == backend else f"{asked}: {backend}",
        count(row["batch"]),
        count(middle),
        f"{count(lowest)} to {count(highest)}",
        f"{1000 * row['step_seconds'][0]:,.1f}",
        f"{100 * row['part_of_peak']:.1f}%",
        f"{row['compile_seconds']:.1f} s{' (cache)' if row['compiled_before'] else ''}",
        size(row["planned_bytes"]),
        "" if row["peak_bytes"] is None else size(row["peak_bytes"]),
    )
