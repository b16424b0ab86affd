"""``rung generate``: continue a prompt, streaming."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rung.cli.flags import Parser, add_settings, as_text, given_settings, print_result, say, standard_input, typed
from rung.config import GenerateConfig, checked
from rung.errors import RungError

if TYPE_CHECKING:
    from rung.run.folder import Run


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("generate", "Continue a prompt with a trained model; the text streams to standard output.")
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument(
        "prompt", nargs="?", default="", metavar="PROMPT", help="what to continue; - reads standard input"
    )
    parser.add_argument(
        "--show-probabilities",
        nargs="?",
        const="5",
        metavar="N",
        help="instead of generating: for each position of the prompt the N most probable next tokens (default: 5)",
    )
    add_settings(parser, GenerateConfig, {})
    parsed = parser.parse_args(arguments)
    given = given_settings(parsed, GenerateConfig)
    settings = checked(GenerateConfig(**given))
    top = parsed.show_probabilities
    if top is not None and (top := typed("--show-probabilities", int, top)) < 1:
        raise RungError(f"--show-probabilities is {top}", "it must be at least 1")
    if top is not None and given:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in given)
        raise RungError(f"--show-probabilities generates nothing, and {flags} is about generating", "leave one out")
    prompt = standard_input() if parsed.prompt == "-" else as_text("the prompt", parsed.prompt)

    from rung.run.folder import Run

    opened = Run(parsed.run)
    if top is not None:
        return _show(opened, prompt, top, parsed.json)
    return _generate(opened, prompt, settings, parsed.json)


def _generate(run: Run, prompt: str, settings: GenerateConfig, as_json: bool) -> int:
    from rung.decode.text import generate_text

    # One sample streams; several would mix, so each is printed when it is whole.
    streams = settings.samples == 1 and not as_json
    pieces = generate_text(run.generator, run.tokenizer, prompt, settings, note=say)
    if streams:
        _write(prompt)
    completions = {}
    for piece in pieces:
        if streams:
            _write(piece.text)
        if piece.completion is not None:
            completions[piece.sample] = piece.completion
    ordered = [completions[number] for number in range(settings.samples)]
    if streams:
        _write("\n")
    samples = [{"text": one.text, "tokens": len(one.ids), "reason": one.reason} for one in ordered]
    texts = [f"--- {number} ---\n{prompt}{one.text}" for number, one in enumerate(ordered, start=1)]
    print_result({"prompt": prompt, "samples": samples}, as_json, "" if streams else "\n".join(texts))
    return 0


def _show(run: Run, prompt: str, top: int, as_json: bool) -> int:
    from rung.decode.probabilities import next_token_probabilities, rows

    positions = next_token_probabilities(run.model, run.weights, run.tokenizer, prompt, top)
    result = {
        "positions": [
            {
                "id": position.id,
                "piece": position.piece,
                "next": None if position.next is None else vars(position.next),
                "top": [vars(candidate) for candidate in position.top],
            }
            for position in positions
        ]
    }
    print_result(result, as_json, "" if as_json else _table(list(rows(positions))))
    return 0


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def _width(text: str) -> int:
    """Return the columns that a text takes on a terminal: East Asian wide characters take two."""
    import unicodedata

    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
