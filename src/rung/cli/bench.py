"""``rung bench``: how fast the training step of a config is on this machine, and what memory it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rung import config as settings
from rung.cli.flags import Parser, print_result, say, typed
from rung.cli.training_flags import add_training_flags, base_of, changes_of
from rung.errors import RungError

HEAD = ("attention", "batch", "tokens/s", "lowest to highest", "ms a step", "MFU", "compile", "planned", "peak memory")


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
    rounds = _number("--rounds", parsed.rounds)
    batches = [_number("--batch", one) for one in parsed.batch.split(",")] if parsed.batch is not None else []
    kind = settings.field_type(settings.Config, "compute.attention")
    asked = parsed.attention.split(",") if parsed.attention is not None else []
    attentions = [typed("--attention", kind, one) for one in asked]
    config, notes = settings.adapt(base_of(parsed) or settings.preset("demo"), changes_of(parsed), "flag")
    for note in notes:
        say(note)

    from rung.run.bench import bench

    result = bench(config, say, batches=batches, attentions=attentions, rounds=rounds)
    print_result(result, parsed.json, "\n".join(_lines(result)))
    if result["interrupted"]:
        raise Interrupted("interrupted; the points above are whole", "name fewer with --batch and --attention")
    return 1 if all(row["failed"] for row in result["rows"]) else 0


class Interrupted(RungError):
    """Ctrl-C in the middle of a sweep."""

    status = 1


def _number(flag: str, text: str) -> int:
    """Return a number from 1 to what a batch may be."""
    number = typed(flag, int, text)
    settings.check_bounds(
        flag, dict(settings.fields(settings.Config))["train.batch_size"].metadata["setting"], number, ""
    )
    return number


def _lines(result: Mapping[str, Any]) -> list[str]:
    from rung.report.columns import columns
    from rung.report.words import count

    precision = result["matmul_precision"]
    computed = "bfloat16" if result["compute_dtype"] == "bfloat16" else f"float32, products in {precision}"
    opening = [
        f"{count(result['parameters'])} parameters, context {count(result['context_length'])}, {computed}",
        f"{result['devices']} x {result['device']}; peak {result['peak_flops'] / 1e12:,.3g} TFLOP/s "
        f"({result['peak_source']})",
        "",
    ]
    done = [row for row in result["rows"] if not row["failed"]]
    failed = [
        f"{row['attention']}, batch {count(row['batch'])}: {row['failed']}" for row in result["rows"] if row["failed"]
    ]
    return [*opening, *(columns(HEAD, [_cells(row) for row in done], left=1) if done else []), *failed]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    from rung.host import memory_size
    from rung.report.words import count

    middle, lowest, highest = row["tokens_per_second"]
    asked, backend = row["attention"], row["backend"]
    return (
        asked if asked == backend else f"{asked}: {backend}",
        count(row["batch"]),
        count(middle),
        f"{count(lowest)} to {count(highest)}",
        f"{1000 * row['step_seconds'][0]:,.1f}",
        f"{100 * row['mfu']:.1f}%",
        f"{row['compile_seconds']:.1f} s{' (cache)' if row['compiled_before'] else ''}",
        memory_size(row["planned_bytes"]),
        "" if row["peak_bytes"] is None else memory_size(row["peak_bytes"]),
    )
