"""The training step against PyTorch: tokens per second, part of the machine's peak, memory and compile time, by shape.

For each shape every side is a process of its own that is kept alive and trains a few steps when its turn comes: ours
through the training loop, a plain GPT in PyTorch (``peer_torch.py``, fused AdamW, in the fastest of the ways that a
short trial compares), and the GPT-2 of transformers where that is installed. The data are random tokens. Before each
round the machine's own speed is measured: a matrix product of float32, and copying memory. A round in which others
used the processors is thrown away and repeated. Run it on a quiet machine:

    .venv/bin/python benchmarks/speed.py

It adds a line to ``benchmarks/results/speed.jsonl``, draws ``speed.png`` beside it from all of them, and writes the
table in ``benchmarks/README.md`` anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from turns import Program, commit, machine, versions, warn

HERE = Path(__file__).parent
README = HERE / "README.md"
HISTORY = HERE / "results" / "speed.jsonl"
PLOT = HERE / "results" / "speed.png"
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"

TOKENS = 1_000_000  # random ones, of the shape's vocabulary
OUTSIDE_LOAD = 0.03  # of all processors; a turn with more is no measurement
TRIES = 3  # times the rounds asked for, before the least loaded ones have to do
TURN_SECONDS = 2.0  # of the slower side, but at least one step
TRIAL_SECONDS = 1.5
TRIAL_ROUNDS = 3  # or one, where a step takes longer

# What `rung` asks of the C library at its start, for a program that does not (src/rung/host.py).
KEEP_FREED = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}


@dataclass(frozen=True)
class Shape:
    """A model and its batch, for either side."""

    title: str
    n_layers: int
    d_model: int
    n_heads: int
    context_length: int
    batch_size: int
    vocab_size: int
    d_head: int = 0  # 0: d_model / n_heads
    n_positions: int = 0  # 0: context_length
    activation: str = "gelu"
    dropout: float = 0.0
    bias: bool = False
    tied: bool = True
    head_bias: bool = False
    beta2: float = 0.99
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def ours(self) -> list[str]:
        """Return the command of our side."""
        values = {
            **{f"model.{name}": getattr(self, name) for name in _SAME},
            "model.norm_bias": self.bias,
            "model.qkv_bias": self.bias,
            "model.attention_output_bias": self.bias,
            "model.mlp_bias": self.bias,
            **{f"train.{name}": getattr(self, name) for name in ("batch_size", "beta2", "weight_decay", "clip_norm")},
            "data.windows": "random",
        }
        flags = [f"--{path.replace('_', '-')}={str(value).lower()}" for path, value in values.items()]
        return [sys.executable, str(HERE / "ours.py"), "--random-tokens", str(TOKENS), *flags]

    def peer(self, *more: str) -> list[str]:
        """Return the command of the peer; ``more`` are its flags that say in which way it computes."""
        names = (*(name for name in _SAME if name not in ("tied", "head_bias")), "batch_size", "beta2", "weight_decay")
        flags = [f"--{name.replace('_', '-')}={getattr(self, name)}" for name in (*names, "clip_norm")]
        flags += ["--bias"] * self.bias + ["--untied"] * (not self.tied) + ["--head-bias"] * self.head_bias
        threads = str(os.cpu_count() or 1)
        common = ["--rounds", "--random-tokens", str(TOKENS), "--threads", threads]
        return [sys.executable, str(HERE / "peer_torch.py"), *common, *flags, *more]


_SAME = (
    "n_layers", "d_model", "n_heads", "d_head", "context_length", "n_positions", "vocab_size", "activation", "dropout",
    "tied", "head_bias",
)  # fmt: skip

NANOLM = Shape(
    "12 layers, d 512, context 128, batch 8, vocabulary 30,000, untied: NanoLM, 8 heads of 64",
    12, 512, 8, 128, 8, 30_000,
    activation="relu", bias=True, tied=False, head_bias=True, beta2=0.999, weight_decay=1e-4, clip_norm=0.0,
)  # fmt: skip

SHAPES = {
    "a": Shape("4 layers, d 128, context 64, batch 12, vocabulary 65", 4, 128, 4, 64, 12, 65),
    "b": Shape(
        "6 layers, d 384, context 256, batch 16, vocabulary 65, dropout 0.2", 6, 384, 6, 256, 16, 65,
        dropout=0.2,
    ),
    "c": Shape("12 layers, d 512, context 128, batch 8, vocabulary 30,000, tied", 12, 512, 8, 128, 8, 30_000),
    "c8": dataclasses.replace(NANOLM, title=NANOLM.title.replace("of 64", "of 8, as published"), d_head=8),
    "c64": NANOLM,
    "d": Shape(
        "GPT-2 small (124M), context 256, batch 2", 12, 768, 12, 256, 2, 50_257,
        n_positions=1024, activation="gelu_tanh", bias=True, beta2=0.95,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How PyTorch may compute."""

    compiled: bool = False
    keeps_memory: bool = False  # its allocator, of what is freed

    def __str__(self) -> str:
        return ("compiled" if self.compiled else "eager") + (", freed memory kept" if self.keeps_memory else "")

    def start(self, shape: Shape, cache: str) -> Program:
        """Start the peer, what it compiles in a folder of its own."""
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache, **(KEEP_FREED if self.keeps_memory else {})}
        return Program(shape.peer(*["--compile"] * self.compiled), environment)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="The training step against PyTorch, in turns.")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {','.join(SHAPES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds without load from outside, of each shape")
    parser.add_argument("--quick", action="store_true", help="see that it works: two short rounds, nothing is written")
    parser.add_argument("--redraw", action="store_true", help="write table and plot anew from the history; no more")
    args = parser.parse_args()
    if args.redraw:
        write(history())
        return
    names = args.shapes.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"no shape {', '.join(unknown)}: there are {', '.join(SHAPES)}")
    begun = time.perf_counter()
    rounds, seconds = (2, 0.2) if args.quick else (args.rounds, TURN_SECONDS)
    measured = {}
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            measured[name] = measure(SHAPES[name], rounds, seconds, cache, quick=args.quick)
    entry = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "command": " ".join(["python benchmarks/speed.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions("jax", "jaxlib", "torch", "transformers", "numpy"),
        "outside_load_limit": OUTSIDE_LOAD,
        "seconds": round(time.perf_counter() - begun, 1),
        "shapes": measured,
    }
    if not args.quick:
        HISTORY.parent.mkdir(exist_ok=True)
        with HISTORY.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        write(history())
    print(table([entry]))


# One shape


def measure(shape: Shape, rounds: int, seconds: float, cache: str, *, quick: bool) -> dict[str, Any]:
    """Return what was measured of a shape, in ``rounds`` rounds in turns of about so many ``seconds``."""
    warn(f"\n{shape.title}")
    missing = why_no_transformers(shape)
    way, torch, trial = choose_way(shape, cache, [] if quick else [{"keeps_memory": True}, {"compiled": True}])
    programs = {"torch": torch}
    try:
        # What compilation costs is measured: nothing kept from before, on either side.
        programs["ours"] = Program(shape.ours(), {"JAX_ENABLE_COMPILATION_CACHE": "false"})
        if missing:
            warn(f"without transformers: {missing}")
        else:
            programs["transformers"] = Program(shape.peer("--transformers"))
        begun = {name: warm_up(program) for name, program in programs.items() if name != "torch"}
        begun["torch"] = trial[way]
        steps = max(1, round(seconds / max(one["step_seconds"] for one in begun.values())))
        kept, dropped = in_turns(programs, rounds, steps, tries=1 if quick else TRIES)
        memory = {name: program.ask("memory") for name, program in programs.items()}
    finally:
        for program in programs.values():
            program.close()
    return {
        "title": shape.title,
        **summarize(kept),
        "peer": str(way),
        "trial": {str(one): found["tokens_per_second"] for one, found in trial.items() if "tokens_per_second" in found},
        "transformers": missing or "eager",
        "compile_seconds": {name: one["compile_seconds"] for name, one in begun.items()},
        "peak_bytes": {name: one["peak_bytes"] for name, one in memory.items()},
        "steps_a_turn": steps,
        "rounds": kept,
        "rounds_under_load": dropped,
    }


def choose_way(
    shape: Shape, cache: str, changes: Sequence[dict[str, bool]]
) -> tuple[Way, Program, dict[Way, dict[str, float]]]:
    """Return the fastest way, its program, and what a short trial found of all that were tried.

    Each of the ``changes`` is tried on the best so far, in turns with it; so no more than two models are in memory.
    """
    best = Way()
    program = best.start(shape, cache)
    trial = {best: warm_up(program)}
    for change in changes:
        way = dataclasses.replace(best, **change)
        other = way.start(shape, cache)
        try:
            trial[way] = warm_up(other)
        except RuntimeError as error:
            warn(f"PyTorch {way} does not run here: {error}")
            continue
        slower = max(trial[best]["step_seconds"], trial[way]["step_seconds"])
        steps = max(1, round(TRIAL_SECONDS / slower))
        for at, one in ((best, program), (way, other)) * (TRIAL_ROUNDS if slower < TRIAL_SECONDS else 1):
            answer = one.ask(f"go {steps}")
            rate = answer["tokens"] / answer["seconds"]
            trial[at]["tokens_per_second"] = max(rate, trial[at].get("tokens_per_second", 0.0))
        if trial[way]["tokens_per_second"] > trial[best]["tokens_per_second"]:
            best, program, other = way, other, program
        other.close()
    shown = "; ".join(f"{way} {found.get('tokens_per_second', math.nan):,.0f}" for way, found in trial.items())
    warn(f"PyTorch, tokens/s in a trial: {shown}")
    return best, program, trial


def warm_up(program: Program) -> dict[str, float]:
    """Train the first steps; returns seconds of compilation, which are those of the first step beyond a later one."""
    first = program.ask("go 1")["seconds"]
    later = program.ask("go 1")["seconds"]
    return {"compile_seconds": max(0.0, first - later), "step_seconds": later}


def in_turns(programs: dict[str, Program], rounds: int, steps: int, tries: int) -> tuple[list[dict], int]:
    """Return the rounds that count, and how many there were under load from outside.

    There are at most ``tries`` times those asked for. Where not enough were without load, those with the least do.
    """
    quiet: list[dict[str, Any]] = []
    loaded: list[dict[str, Any]] = []
    for number in range(tries * rounds):
        turn: dict[str, Any] = {"matrix_flops": matrix_flops(), "memory_bytes": memory_bytes_per_second()}
        names = list(programs)
        for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody is always the first
            answer = programs[name].turn(f"go {steps}")
            turn[name] = answer["tokens"] / answer["seconds"]
            turn["outside_load"] = max(turn.get("outside_load", 0.0), answer["outside_load"])
            turn["flops_per_token"] = answer.get("flops_per_token", turn.get("flops_per_token"))
        # The peak of a round is that before and after it, so that a machine that slows down is no slower program.
        turn["matrix_flops"] = (turn["matrix_flops"] + matrix_flops()) / 2
        (loaded if turn["outside_load"] > OUTSIDE_LOAD else quiet).append(turn)
        shown = "  ".join(f"{name} {turn[name]:,.0f}" for name in names)
        warn(f"round {len(quiet)}/{rounds}: tokens/s {shown}, load from outside {turn['outside_load']:.0%}")
        if len(quiet) == rounds:
            return quiet, len(loaded)
    least = sorted(loaded, key=lambda turn: turn["outside_load"])
    return quiet + least[: rounds - len(quiet)], len(loaded)


def why_no_transformers(shape: Shape) -> str:
    """Return why there is no GPT-2 of transformers to compare with; empty where there is."""
    if importlib.util.find_spec("transformers") is None:
        return "it is not installed"
    if shape.d_head or shape.head_bias:
        return "its GPT-2 has neither heads of another width nor a bias on the output layer"
    return ""


def summarize(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return of some rounds: medians of tokens a second, ratios of pairs to ours, and parts of the machine's peak."""
    sides = [name for name in ("ours", "torch", "transformers") if name in rounds[0]]
    flops = rounds[0]["flops_per_token"]
    return {
        "tokens_per_second": {name: statistics.median(turn[name] for turn in rounds) for name in sides},
        "ratio": {name: spread([turn["ours"] / turn[name] for turn in rounds]) for name in sides[1:]},
        "mfu": {name: spread([turn[name] * flops / turn["matrix_flops"] for turn in rounds]) for name in sides},
        "flops_per_token": flops,
        "matrix_flops": statistics.median(turn["matrix_flops"] for turn in rounds),
        "memory_bytes_per_second": statistics.median(turn["memory_bytes"] for turn in rounds),
        "outside_load": max(turn["outside_load"] for turn in rounds),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, lowest and highest."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


# The machine's own speed


def matrix_flops(size: int = 2048, seconds: float = 0.3) -> float:
    """Return the floating-point operations a second of the fastest of some float32 products of numpy."""
    a, b = np.ones((2, size, size), np.float32)
    product = np.empty_like(a)
    best, ends = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < ends:
        begun = time.perf_counter()
        np.matmul(a, b, out=product)
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def memory_bytes_per_second(size: int = 1 << 28) -> float:
    """Return bytes read and written a second by a copy of ``size`` bytes, cut among as many threads as processors."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    cuts = np.linspace(0, size, (os.cpu_count() or 1) + 1).astype(int)
    best = float("inf")
    for _ in range(3):
        threads = [
            threading.Thread(target=np.copyto, args=(target[low:high], source[low:high]))
            for low, high in itertools.pairwise(cuts)
        ]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = min(best, time.perf_counter() - begun)
    return 2 * size / best


# What is written


def history() -> list[dict[str, Any]]:
    """Return the entries of the history, the oldest first."""
    if not HISTORY.exists():
        return []
    return [json.loads(line) for line in HISTORY.read_text(encoding="utf-8").splitlines()]


def write(entries: Sequence[dict[str, Any]]) -> None:
    """Write the table of the README and the plot, from those entries that are of the machine of the last."""
    entries = [entry for entry in entries if same_machine(entry, entries[-1])]
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table(entries)}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    plot(entries)


def same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two entries are of machines whose numbers compare."""
    return all(one["machine"][name] == other["machine"][name] for name in ("processor", "flags", "cores"))


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Return the last measurement of each shape as Markdown, and where and with what it was made."""
    last = {name: (entry, entry["shapes"][name]) for entry in entries for name in SHAPES if name in entry["shapes"]}
    lines = [
        "| shape | ours, tokens/s | PyTorch | ratio | transformers | ratio | % of peak | PyTorch's | compile s "
        "| PyTorch's | peak MB | PyTorch's |",
        "|---|" + "---:|" * 11,
    ]
    notes = []
    for name in [name for name in SHAPES if name in last]:
        entry, row = last[name]
        rate, second = row["tokens_per_second"], "transformers" in row["tokens_per_second"]
        cells = [
            f"**{name}** {row['title']}",
            f"{rate['ours']:,.0f}",
            f"{rate['torch']:,.0f}",
            _ratio(row["ratio"]["torch"]),
            f"{rate['transformers']:,.0f}" if second else "",
            _ratio(row["ratio"]["transformers"]) if second else "",
            *(f"{100 * row['mfu'][side]['median']:.0f}" for side in ("ours", "torch")),
            *(f"{row['compile_seconds'][side]:.1f}" for side in ("ours", "torch")),
            *(f"{row['peak_bytes'][side] / 1e6:,.0f}" for side in ("ours", "torch")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        loaded = "" if row["outside_load"] <= OUTSIDE_LOAD else f" **under load: {row['outside_load']:.0%} by others**,"
        notes.append(
            f"- {name}: PyTorch {row['peer']},{loaded} {len(row['rounds'])} rounds of {row['steps_a_turn']} steps, "
            f"{row['rounds_under_load']} thrown away; {entry['date']}, commit {entry['commit']}, products "
            f"{row['matrix_flops'] / 1e9:.0f} GFLOP/s, memory {row['memory_bytes_per_second'] / 1e9:.0f} GB/s"
        )
    where = entries[-1]
    packages = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    cores = f"{where['machine']['processor']}, {where['machine']['cores']} cores"
    return "\n".join([*lines, "", *notes, "", f"{cores}; {packages}, Python {where['machine']['python']}."])


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})"


def plot(entries: Sequence[dict[str, Any]]) -> None:
    """Draw ratios to PyTorch and parts of the peak, by commit."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    panels = (
        (axes[0], "tokens/s, ours over PyTorch's (median and all rounds)", lambda row: row["ratio"]["torch"]),
        (axes[1], "part of the rate of a plain matrix product", lambda row: row["mfu"]["ours"]),
    )
    for axis, title, value in panels:
        for number, name in enumerate(SHAPES):
            found = [(at, value(e["shapes"][name])) for at, e in enumerate(entries) if name in e["shapes"]]
            if found:
                at = [place + 0.04 * number for place, _ in found]
                middle = [one["median"] for _, one in found]
                reach = [
                    [one["median"] - one["lowest"] for _, one in found],
                    [one["highest"] - one["median"] for _, one in found],
                ]
                axis.errorbar(at, middle, reach, marker="o", markersize=4, linewidth=1, capsize=2, label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(entries)), [f"{e['date'][:10]}\n{e['commit'][:7]}" for e in entries], fontsize=7)
        axis.set_xlim(-0.5, len(entries) - 0.5)
        axis.grid(alpha=0.3)
    axes[0].axhline(1, color="black", linewidth=1)
    axes[1].set_ylim(0, 1.05)
    axes[0].legend(title="shape", fontsize=8)
    figure.savefig(PLOT, dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
