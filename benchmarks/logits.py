"""Memory and time of loss and gradient at GPT-2's vocabulary: in chunks against logits made whole, in turns.

Each side is a program of its own, whose highest resident size is above what it had with its inputs made. The naive side
is what one writes first: a product, ``log_softmax``, the target's entry, and JAX's gradient of that.

    .venv/bin/python benchmarks/logits.py

It prints a table and writes ``benchmarks/results/logits.json``. The naive side needs 8 GB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from turns import Program, commit, machine, versions, warn

from rung.host import begin_peak, resident_bytes

RESULTS = Path(__file__).parent / "results" / "logits.json"
SIDES = ("chunked", "naive")


def main() -> None:
    """Run the benchmark, or one side of it."""
    parser = argparse.ArgumentParser(description="Loss and gradient at a large vocabulary, in chunks and whole.")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    for name, default in (("batch", 8), ("context", 1024), ("width", 768), ("vocabulary", 50257)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.side:
        serve(args)
        return
    flags = [f"--{name}={getattr(args, name)}" for name in ("batch", "context", "width", "vocabulary")]
    programs = {side: Program([sys.executable, __file__, "--side", side, *flags]) for side in SIDES}
    facts = {side: program.ask("compile") for side, program in programs.items()}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    load = []
    for number in range(args.rounds):
        order = SIDES if number % 2 else SIDES[::-1]
        for side in order:
            answer = programs[side].turn("go")
            seconds[side].append(answer["seconds"])
            load.append(answer["outside_load"])
        warn(f"round {number + 1}/{args.rounds}: " + "  ".join(f"{s} {t[-1]:.2f} s" for s, t in seconds.items()))
    for side, program in programs.items():
        facts[side] |= program.ask("peak")
        program.close()
    result = summary(facts, seconds)
    result |= {"outside_load": {"median": statistics.median(load), "highest": max(load)}, "shape": vars(args)}
    result |= {"machine": machine(), "versions": versions("jax", "jaxlib", "numpy"), "commit": commit()}
    result["shape"].pop("side")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(table(result))


def serve(args: argparse.Namespace) -> None:
    """Answer ``compile``, ``go`` and ``peak`` for one side."""
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np

    from rung.model.losses import cross_entropy

    def naive(x_BTD: Any, head_VD: Any, targets_BT: Any) -> Any:
        log_p = jax.nn.log_softmax(x_BTD @ head_VD.T)
        return -jnp.sum(jnp.take_along_axis(log_p, targets_BT[..., None], -1))

    def chunked(x_BTD: Any, head_VD: Any, targets_BT: Any) -> Any:
        return cross_entropy(x_BTD, head_VD, None, targets_BT)[0]

    random = np.random.default_rng(0)
    shape = (args.batch, args.context)
    x = jnp.asarray(random.standard_normal((*shape, args.width), np.float32))
    head = jnp.asarray(0.02 * random.standard_normal((args.vocabulary, args.width), np.float32))
    targets = jnp.asarray(random.integers(args.vocabulary, size=shape), jnp.int32)
    gradient = jax.jit(jax.value_and_grad(chunked if args.side == "chunked" else naive, (0, 1)))
    for line in sys.stdin:
        if line.strip() == "compile":
            compiled = gradient.lower(x, head, targets).compile()
            analysis = compiled.memory_analysis()
            planned = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
            before = begin_peak()
            loss = float(jax.block_until_ready(compiled(x, head, targets))[0])
            answer = {"planned_bytes": planned, "loss": loss / targets.size}
        elif line.strip() == "go":
            begun = time.perf_counter()
            jax.block_until_ready(compiled(x, head, targets))
            answer = {"seconds": time.perf_counter() - begun}
        else:
            answer = {"resident_bytes": resident_bytes("VmHWM") - before}
        print(json.dumps(answer), flush=True)


def summary(facts: dict[str, dict[str, Any]], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return what was measured, and the ratios of the chunked side to the naive one."""
    paired = sorted(ours / naive for ours, naive in zip(seconds["chunked"], seconds["naive"], strict=True))
    return {
        "sides": {side: {**facts[side], "seconds": seconds[side]} for side in SIDES},
        "chunked_over_naive": {
            "planned_bytes": facts["chunked"]["planned_bytes"] / facts["naive"]["planned_bytes"],
            "resident_bytes": facts["chunked"]["resident_bytes"] / facts["naive"]["resident_bytes"],
            "seconds": {"median": statistics.median(paired), "lowest": paired[0], "highest": paired[-1]},
        },
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = ["| loss and gradient | planned | resident, highest | seconds |", "|---|---:|---:|---:|"]
    for side, row in result["sides"].items():
        sizes = [f"{row[name] / 2**30:.2f} GiB" for name in ("planned_bytes", "resident_bytes")]
        lines.append(f"| {side} | {sizes[0]} | {sizes[1]} | {statistics.median(row['seconds']):.2f} |")
    ratio = result["chunked_over_naive"]
    time = ratio["seconds"]
    lines.append(
        f"\nchunked over naive: planned {ratio['planned_bytes']:.3f}, resident {ratio['resident_bytes']:.3f}, "
        f"time {time['median']:.3f} ({time['lowest']:.3f} to {time['highest']:.3f})"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
