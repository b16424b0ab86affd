"""Time to quality: each optimizer at its best settings on Shakespeare by characters and on Austen's novels.

A run is a preset with another optimizer, and its schedule is for its own length. Its held-out loss is a fact of seed
and settings, whatever else the machine does meanwhile; what a step takes is measured apart, in turns, and a time is
steps times that. Runs are kept in ``benchmarks/results/optimizers.json`` as they end, so that a benchmark that was
broken off goes on where it was.

    .venv/bin/python benchmarks/optimizers.py              # the runs and times that are missing, the table, the plot
    .venv/bin/python benchmarks/optimizers.py --task shakespeare --only lion --steps 120 --set learning_rate=1e-3

The second is how the settings were found: one more run, kept beside the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ours import Ours, on_text
from turns import busy_seconds, commit, machine, versions, warn

HERE = Path(__file__).parent
RESULTS, PLOT = (HERE / "results" / f"optimizers.{kind}" for kind in ("json", "png"))
MARKS = 4  # validations of a run
ROUNDS, STEPS_A_TURN = 7, 10
OUTSIDE_LOAD, FEWEST_TURNS = 0.1, 3  # a turn in which others used more of the processors says nothing


@dataclass(frozen=True)
class Task:
    """A text and the preset it is trained by; what of held-out text is measured, and the goal that is to be reached."""

    title: str
    preset: str
    source: Path
    lengths: tuple[int, ...]
    measure: str
    goal: float

    @property
    def unit(self) -> str:
        """The measure in words."""
        return {"loss": "nats a character", "bits_per_byte": "bits a byte"}[self.measure]


SHAKESPEARE = HERE.parent / "../shared/data/tinyshakespeare.txt"
AUSTEN = HERE.parent / "src" / "rung" / "demo" / "austen"

# 1.92 is what the usual recipe for a CPU ends at, 1.87 bits what AdamW comes to in the 400 steps of the demo.
TASKS = {
    "shakespeare": Task("Shakespeare", "shakespeare-char", SHAKESPEARE, (120, 370), "loss", 1.92),
    "austen": Task("Austen", "demo", AUSTEN, (200, 400), "bits_per_byte", 1.87),
}

BEST: dict[str, dict[str, dict[str, float]]] = {
    "shakespeare": {
        "adamw": {"learning_rate": 2e-3, "weight_decay": 0.1},
        "lion": {"learning_rate": 1e-3, "weight_decay": 0.5},
        "adafactor": {"learning_rate": 1e-1, "weight_decay": 0.01},
        "muon": {},
        "normuon": {},
    },
    "austen": {
        "adamw": {"learning_rate": 2e-3, "weight_decay": 0.1},
        "lion": {"learning_rate": 6e-4, "weight_decay": 0.5},
        "adafactor": {"learning_rate": 6e-2, "weight_decay": 0.01},
        "muon": {},
        "normuon": {},
    },
}
"""Settings of ``train`` in which a run differs from its preset, beside the optimizer: the best of small sweeps."""


def main() -> None:
    """Do what is missing, then write table and plot."""
    parser = argparse.ArgumentParser(description="Held-out loss against time, for each optimizer.")
    parser.add_argument("--task", choices=TASKS, help="only this one")
    parser.add_argument("--only", nargs="*", help="only these optimizers")
    parser.add_argument("--steps", type=int, help="runs of this length alone")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="train settings beside the best")
    parser.add_argument("--no-times", action="store_true", help="leave out the time of a step")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"runs": {}, "step_seconds": {}}
    extra = {name: float(value) for name, value in (pair.split("=") for pair in args.set)}
    tasks = [args.task] if args.task else list(TASKS)
    for task in tasks:
        for optimizer, best in BEST[task].items():
            for steps in [args.steps] if args.steps else TASKS[task].lengths:
                if args.only is None or optimizer in args.only:
                    train_once(results, task, optimizer, {**best, **extra}, steps)
    if not args.no_times:
        for task in tasks:
            results["step_seconds"][task] = step_seconds(task)
            save(results)
    print(table(results))
    plot(results)


def train_once(results: dict[str, Any], task: str, optimizer: str, settings: dict[str, float], steps: int) -> None:
    """Train one run and put it in the results, unless it is there."""
    key = key_of(task, optimizer, settings, steps)
    if key in results["runs"]:
        return
    with tempfile.TemporaryDirectory() as folder:
        ours, curve = run_of(task, optimizer, settings, steps, Path(folder)), []
        for mark in range(1, MARKS + 1):
            ours.train(steps * mark // MARKS - ours.progress.step)
            loss, _, bits = ours.validate()
            curve.append({"step": ours.progress.step, "loss": loss, "bits_per_byte": bits})
            if not math.isfinite(loss):
                break
    results["runs"][key] = {"task": task, "optimizer": optimizer, "steps": steps, "settings": settings, "curve": curve}
    save(results)
    warn(f"{key}: {curve[-1][TASKS[task].measure]:.4f}")


def step_seconds(task: str) -> dict[str, dict[str, list[float]]]:
    """Return, of each optimizer, seconds a step in each round, and what others used of the processors meanwhile."""
    found: dict[str, dict[str, list[float]]] = {
        optimizer: {"seconds": [], "outside_load": []} for optimizer in BEST[task]
    }
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            optimizer: run_of(task, optimizer, settings, 10_000, Path(folder) / optimizer)
            for optimizer, settings in BEST[task].items()
        }
        for run in runs.values():
            run.train(3)  # compiles
        for number in range(ROUNDS):
            for optimizer, run in list(runs.items())[:: 1 if number % 2 else -1]:
                begun, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
                run.train(STEPS_A_TURN)
                seconds = time.perf_counter() - begun
                others = busy_seconds() - busy - (time.process_time() - own)
                found[optimizer]["seconds"].append(seconds / STEPS_A_TURN)
                found[optimizer]["outside_load"].append(max(0.0, others / seconds / (os.cpu_count() or 1)))
    return found


def run_of(task: str, optimizer: str, settings: dict[str, float], steps: int, folder: Path) -> Ours:
    """Return a run that has not begun."""
    changes: dict[str, Any] = {f"train.{name}": value for name, value in settings.items()}
    changes |= {"train.optimizer": optimizer, "train.steps": steps}
    return on_text([str(TASKS[task].source)], TASKS[task].preset, changes, folder)


def key_of(task: str, optimizer: str, settings: dict[str, float], steps: int) -> str:
    """Return the name of a run."""
    return " ".join([task, optimizer, str(steps), *(f"{name}={value:g}" for name, value in sorted(settings.items()))])


def save(results: dict[str, Any]) -> None:
    """Write the results, with what they are of."""
    about = {"machine": machine(), "versions": versions("jax", "jaxlib", "optax", "numpy"), "commit": commit()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({**results, **about}, indent=1) + "\n", encoding="utf-8")


# What came of it


def finals(results: dict[str, Any], task: str, optimizer: str) -> list[tuple[int, float]]:
    """Return (steps, measure at the end) of each length at the best settings, ascending."""
    runs = (
        run
        for run in results["runs"].values()
        if (run["task"], run["optimizer"], run["settings"]) == (task, optimizer, BEST[task][optimizer])
    )
    return sorted((run["steps"], run["curve"][-1][TASKS[task].measure]) for run in runs)


def steps_to(goal: float, ends: list[tuple[int, float]]) -> float | None:
    """Return the length of a run that ends at ``goal``, on straight lines over the logarithm of the length."""
    for (short, high), (long, low) in itertools.pairwise(ends):
        if high >= goal >= low and high > low:
            return short * (long / short) ** ((high - goal) / (high - low))
    return None


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown, a table for each task."""
    lines = []
    for name, task in TASKS.items():
        lines += [
            f"\n{task.title}, preset `{task.preset}`; goal {task.goal:g} {task.unit}\n",
            f"| optimizer | settings | {' | '.join(f'{n} steps' for n in task.lengths)} "
            "| ms a step | steps to the goal | seconds to the goal |",
            "|---|---|" + "---:|" * (len(task.lengths) + 3),
        ]
        for optimizer, settings in BEST[name].items():
            ends = finals(results, name, optimizer)
            at = [f"{dict(ends)[n]:.4f}" if n in dict(ends) else "" for n in task.lengths]
            seconds = median_seconds(results, name, optimizer)
            needed = steps_to(task.goal, ends)
            row = [optimizer, ", ".join(f"{k} {v:g}" for k, v in settings.items()) or "the preset's", *at]
            row.append(f"{1000 * seconds:.0f}" if seconds else "")
            row.append(f"{needed:.0f}" if needed else "not reached")
            row.append(f"{needed * seconds:.1f}" if needed and seconds else "")
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def median_seconds(results: dict[str, Any], task: str, optimizer: str) -> float | None:
    """Return the median time of a step over the turns that had the machine to themselves; ``None`` where few had."""
    measured = results["step_seconds"].get(task, {}).get(optimizer, {"seconds": [], "outside_load": []})
    turns = zip(measured["seconds"], measured["outside_load"], strict=True)
    alone = [seconds for seconds, outside in turns if outside < OUTSIDE_LOAD]
    return statistics.median(alone) if len(alone) >= FEWEST_TURNS else None


def plot(results: dict[str, Any]) -> None:
    """Draw the validations of the longest run of each optimizer, and the ends of the others.

    They stand over seconds, or over steps where not every optimizer's step was timed on a quiet machine.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panes = plt.subplots(1, len(TASKS), figsize=(11, 4.2), layout="constrained")
    for pane, (name, task) in zip(panes, TASKS.items(), strict=True):
        times = {optimizer: median_seconds(results, name, optimizer) for optimizer in BEST[name]}
        timed = all(times.values())
        for optimizer, settings in BEST[name].items():
            scale = times[optimizer] if timed else 1
            run = results["runs"].get(key_of(name, optimizer, settings, task.lengths[-1]))
            if not run:
                continue
            points = [(scale * mark["step"], mark[task.measure]) for mark in run["curve"]]
            (line,) = pane.plot(*zip(*points, strict=True), marker=".", label=optimizer)
            ends = [(scale * steps, end) for steps, end in finals(results, name, optimizer)[:-1]]
            if ends:
                pane.plot(*zip(*ends, strict=True), "o", mfc="none", color=line.get_color())
        pane.axhline(task.goal, color="0.6", lw=0.8, ls="--")
        pane.set(title=task.title, xlabel="seconds of steps" if timed else "steps", ylabel=f"held out, {task.unit}")
        if pane.lines[1:]:
            pane.legend()
    figure.savefig(PLOT, dpi=120)


if __name__ == "__main__":
    main()
