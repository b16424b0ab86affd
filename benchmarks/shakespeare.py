"""Character-level Shakespeare, side by side: plain PyTorch and two of our presets, trained in turns to the end.

One of the presets is trained a second time, in as few steps as take it to the loss that the usual recipe ends at.

Each program trains its whole recipe on ``tinyshakespeare.txt`` in rounds, one after another, so that a slow minute of
the machine is shared by all. Wall time is everything from the first step to the last, compilation included. The loss
at the end is the mean over every target of the last tenth of the text. Run it on a quiet machine:

    .venv/bin/python benchmarks/shakespeare.py

It prints a table and writes ``benchmarks/results/shakespeare.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from turns import Program, machine, versions

HERE = Path(__file__).parent
TEXT = HERE.parent / "../shared/data/tinyshakespeare.txt"
RESULTS = HERE / "results" / "shakespeare.json"

OURS = [sys.executable, str(HERE / "ours.py"), str(TEXT)]
PROGRAMS = {
    "PyTorch, plain": ([sys.executable, str(HERE / "peer_torch.py"), "--rounds"], 2000),
    "shakespeare-char-classic": ([*OURS, "--preset", "shakespeare-char-classic"], 2000),
    "shakespeare-char": ([*OURS, "--preset", "shakespeare-char"], None),
    "shakespeare-char, 150 steps": ([*OURS, "--preset", "shakespeare-char", "--train.steps", "150"], 150),
}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Character-level Shakespeare against plain PyTorch, in turns.")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each program")
    parser.add_argument("--compile", action="store_true", help="torch.compile for the peer")
    args = parser.parse_args()
    if args.compile:
        PROGRAMS["PyTorch, plain"][0].append("--compile")
    programs = {name: Program(command) for name, (command, _) in PROGRAMS.items()}
    steps = {name: count or _steps_of(name) for name, (_, count) in PROGRAMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    tokens = dict.fromkeys(programs, 0)
    loads = []
    for number in range(args.rounds):
        for name, program in programs.items():
            share = steps[name] * (number + 1) // args.rounds - steps[name] * number // args.rounds
            answer = program.ask(f"go {share}")
            seconds[name].append(answer["seconds"])
            tokens[name] += answer["tokens"]
        loads.append(os.getloadavg()[0])
        rates = "  ".join(f"{name} {1000 * times[-1]:,.0f} ms" for name, times in seconds.items())
        print(f"round {number + 1}/{args.rounds}: {rates}  load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    rows = {}
    for name, program in programs.items():
        result = program.ask("validate")
        program.close()
        # The first round holds compilation: it is part of the wall time, not of the rate.
        later = seconds[name][1:]
        rows[name] = {
            "steps": steps[name],
            "tokens": tokens[name],
            "wall_seconds": sum(seconds[name]),
            "tokens_per_second": tokens[name] / args.rounds / statistics.median(later),
            "validation_loss": result["validation_loss"],
            "validation_targets": result["validation_targets"],
        }
    peer, classic = seconds["PyTorch, plain"], seconds["shakespeare-char-classic"]
    ratios = sorted(p / c for p, c in zip(peer[1:], classic[1:], strict=True))
    summary = {
        "rows": rows,
        "classic_over_peer_tokens_per_second": {
            "median": statistics.median(ratios),
            "lowest": ratios[0],
            "highest": ratios[-1],
        },
        "load": {"median": statistics.median(loads), "highest": max(loads)},
        "machine": machine(),
        "versions": versions("jax", "jaxlib", "torch", "numpy"),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/shakespeare.py" + (" --compile" if args.compile else ""),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(_table(summary))


def _table(summary: dict[str, Any]) -> str:
    lines = ["| program | steps | tokens | wall time | tokens/s | validation loss |", "|---|---:|---:|---:|---:|---:|"]
    for name, row in summary["rows"].items():
        lines.append(
            f"| {name} | {row['steps']:,} | {row['tokens']:,} | {row['wall_seconds']:.0f} s | "
            f"{row['tokens_per_second']:,.0f} | {row['validation_loss']:.4f} |"
        )
    ratio = summary["classic_over_peer_tokens_per_second"]
    lines.append(
        f"\nclassic against PyTorch, tokens/s, paired rounds: {ratio['median']:.2f} "
        f"({ratio['lowest']:.2f} to {ratio['highest']:.2f})"
    )
    return "\n".join(lines)


def _steps_of(preset: str) -> int:
    from rung import config

    return config.preset(preset).train.steps


if __name__ == "__main__":
    main()
