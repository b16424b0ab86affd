"""The training step of the GPT-2 presets on one GPU, as ``rung bench`` times it, by attention and batch.

``benchmarks/gpu.sh`` runs it, in an environment that sees the GPU. Each point is a program of its own, so that the
device's peak of memory is that of the point.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turns import commit, machine, versions, warn

PAGE = Path(__file__).parent / "gpu.md"
SECONDS = 285  # for all, from the start of the script
PRESETS = ("gpt2-small", "gpt2-small-untied")
ATTENTIONS = ("cudnn", "blocked")
BATCHES = (16, 32, 64, 8)  # the most telling first: time may run out
TINY = (
    *("--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2", "--context-length", "32"),
    *("--vocab-size", "300"),
)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="The training step of the GPT-2 presets on one NVIDIA GPU.")
    parser.add_argument("--try", action="store_true", dest="is_try", help="a tiny model, anywhere; prints the page")
    parser.add_argument("--begun", type=float, default=time.time(), help="when the script began, in seconds of Unix")
    args = parser.parse_args()
    presets, batches = (PRESETS[:1], (2,)) if args.is_try else (PRESETS, BATCHES)
    points = [(preset, attention, batch) for batch in batches for preset in presets for attention in ATTENTIONS]
    measured = []
    for point in points:
        left = SECONDS - (time.time() - args.begun)
        result = measure(*point, left, TINY if args.is_try else ())
        warn(f"{' '.join(map(str, point))}: {told(result)}")
        measured.append((*point, result))
    text = page(measured)
    if args.is_try:
        print(text)
    else:
        PAGE.write_text(text, encoding="utf-8")
        print(f"written: {PAGE}")


def measure(preset: str, attention: str, batch: int, seconds: float, more: Sequence[str]) -> dict[str, Any]:
    """Return what ``rung bench --json`` says of a point; its one row alone with a reason where it says nothing."""
    command = [sys.executable, "-m", "rung", "bench", "--preset", preset, "--dtype", "bfloat16", "--rounds", "3"]
    command += ["--attention", attention, "--batch", str(batch), *more, "--json"]
    if seconds < 5:
        return {"rows": [{"failed": "not measured: the time was over"}]}
    try:
        # What compiling takes is measured too.
        environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"rows": [{"failed": "not measured: the time was over"}]}
    except (IndexError, ValueError):
        return {"rows": [{"failed": f"status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"}]}


def told(result: dict[str, Any]) -> str:
    """Return a result in a few words."""
    if "error" in result:
        return result["error"]
    row = result["rows"][0]
    return row["failed"] or f"{row['tokens_per_second'][0]:,.0f} tokens/s"


def page(measured: Sequence[tuple[str, str, int, dict[str, Any]]]) -> str:
    """Return the page: what was measured where, a row for each point in the order of preset, attention, batch."""
    whole = [result for *_, result in measured if "device" in result]
    packages = ", ".join(f"{name} {version}" for name, version in versions("jax", "jaxlib", "numpy").items())
    lines = ["# The training step on a GPU", "", "`benchmarks/gpu.sh` writes this page.", ""]
    if whole:
        first = whole[0]
        lines += [
            f"{first['devices']} x {first['device']}, peak {first['peak_flops'] / 1e12:,.4g} TFLOP/s "
            f"({first['peak_source']}); compute in {first['compute_dtype']}, weights and optimizer in float32; "
            f"context {first['context_length']:,}; {packages}, Python {machine()['python']}; "
            f"commit {commit()}, {time.strftime('%Y-%m-%d')}.",
            "",
            "Tokens a second are the median of three rounds, with the lowest and the highest; MFU is nominal "
            "operations (6 for each weight of a product, attention counted whole) over the peak; planned is the memory "
            "that the compiler asks for, state included, and peak what the device's runtime saw at most.",
            "",
        ]
    lines += [
        "| preset | parameters | attention | batch | tokens/s | ms a step | MFU | compiling | planned | peak memory |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    order = {name: place for place, name in enumerate((*PRESETS, *ATTENTIONS))}
    for preset, attention, batch, result in sorted(measured, key=lambda one: (order[one[0]], order[one[1]], one[2])):
        row = result.get("rows", [{"failed": told(result)}])[0]
        named = f"| {preset} | {result['parameters']:,} |" if "parameters" in result else f"| {preset} | |"
        if row["failed"]:
            lines.append(f"{named} {attention} | {batch} | {row['failed'].replace('|', '/')} | | | | | |")
            continue
        middle, lowest, highest = row["tokens_per_second"]
        taken = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB"
        lines.append(
            f"{named} {attention} | {batch} | {middle:,.0f} ({lowest:,.0f} to {highest:,.0f}) | "
            f"{1000 * row['step_seconds'][0]:,.1f} | {row['mfu']:.1%} | {row['compile_seconds']:.0f} s | "
            f"{row['planned_bytes'] / 2**30:.2f} GiB | {taken} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
