"""``rung evaluate``: held-out loss of a run, or its loss on other text."""

from __future__ import annotations

from collections.abc import Sequence

from rung.cli.flags import Parser, add_settings, given_settings, print_result
from rung.errors import RungError

# What of the config says how a text is read, by short name.
_SETTINGS = {
    "encoding": "data.encoding",
    "format": "data.format",
    "text-column": "data.text_column",
    "separator": "data.separator",
}


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("evaluate", "Loss, perplexity and bits per byte of a run's weights, over all of a split or a text.")
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument(
        "--text", action="append", default=[], metavar="FILE", help="a text instead of the run's own split"
    )
    parser.add_argument("--split", metavar="NAME", help="a split of the run's tokens (default: validation)")
    add_settings(parser, short_names=_SETTINGS, only=_SETTINGS.values())
    parsed = parser.parse_args(arguments)
    reading = given_settings(parsed)
    if parsed.text and parsed.split:
        raise RungError("both --text and --split are given", "a text is evaluated whole; keep one of them")

    if reading and not parsed.text:
        flag = f"--{next(iter(reading)).replace('_', '-')}"
        raise RungError(f"{flag} is given, and no --text", "it says how a text is read: name the text")

    from rung.run.use import evaluate

    held_out = evaluate(parsed.run, parsed.text, parsed.split or "validation", reading)
    result = {
        "loss": held_out.loss,
        "perplexity": held_out.perplexity,
        "bits_per_byte": held_out.bits_per_byte,
        "targets": held_out.targets,
    }
    text = f"loss {held_out.loss:.4f} nats per token, perplexity {held_out.perplexity:.2f}"
    if held_out.bits_per_byte is not None:
        text += f", {held_out.bits_per_byte:.4f} bits per byte"
    print_result(result, parsed.json, f"{text}, over {held_out.targets:,} tokens")
    return 0
