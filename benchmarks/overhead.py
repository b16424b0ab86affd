"""What it costs to lose nothing and to see everything: the demo with all that listens, in turns with the bare loop.

Two processes train the demo's model: one is the training loop and nothing besides, the other a run as ``rung train``
makes it: log, live view on a terminal, telemetry, norms, the watch for spikes, and checkpoints, at the demo's own
intervals. Only saves come more often, with every second turn, so that there are enough of them to measure; they are
counted as often as the demo has them. Validation and samples, work of another kind, are left out. Run it on a quiet
machine:

    .venv/bin/python benchmarks/overhead.py

It prints a table and writes ``benchmarks/results/overhead.json``.
"""

from __future__ import annotations

from rung.host import keep_freed_memory

keep_freed_memory()  # as the command line does, before anything starts a thread

import argparse
import contextlib
import json
import os
import platform
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "overhead.json"
STEPS = 10  # of a turn
WARM_UP = 5  # steps: with it, a save comes in the middle of a turn
SAVE_EVERY = 2 * STEPS
NEVER = 10**9


class Program:
    """A process that trains a number of steps when it is told to."""

    def __init__(self, what: str, folder: Path, terminal: int):
        command = [sys.executable, __file__, "--part", what, "--folder", str(folder)]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=terminal, text=True, env=environment
        )

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line, return the JSON of the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        """End the process, in the middle of its run."""
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Run the benchmark, or a part of it."""
    parser = argparse.ArgumentParser(description="The demo with all that listens, in turns with the bare loop.")
    parser.add_argument("--turns", type=int, default=40, help=f"of {STEPS} steps of each; every second has a save")
    parser.add_argument("--part", choices=("bare", "whole", "pieces"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        {"bare": bare, "whole": whole, "pieces": pieces}[args.part](args.folder)
        return
    with tempfile.TemporaryDirectory() as folder, terminal() as screen:
        programs = {name: Program(name, Path(folder), screen) for name in ("bare", "whole")}
        for program in programs.values():
            program.ask(f"go {WARM_UP}")  # compiles
        print("measuring", file=sys.stderr, flush=True)
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        loads = []
        for turn in range(args.turns):
            for name in sorted(programs, reverse=bool(turn % 2)):  # neither is always the first
                seconds[name].append(programs[name].ask(f"go {STEPS}")["seconds"])
            loads.append(os.getloadavg()[0])
            shown = "  ".join(f"{name} {1000 * times[-1] / STEPS:,.1f} ms" for name, times in seconds.items())
            print(f"turn {turn + 1}/{args.turns}: {shown}  load {loads[-1]:.1f}", file=sys.stderr, flush=True)
        for program in programs.values():
            program.end()
        alone = Program("pieces", Path(folder), screen)
        measured = alone.ask("go")
        alone.end()
    summary = {
        **summarize(seconds),
        "pieces": measured,
        "turns": {name: [time / STEPS for time in times] for name, times in seconds.items()},
        "load": {"median": statistics.median(loads), "highest": max(loads)},
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/overhead.py",
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(table(summary))


def summarize(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return seconds a step of both, and their ratio less one, of paired turns by kind and as often as each comes.

    Medians, so that a slow second of the machine is in none.
    """
    pairs = [whole / bare - 1 for bare, whole in zip(seconds["bare"], seconds["whole"], strict=True)]
    # After the warm-up the first turn has steps 6 to 15, the second 16 to 25 with the save of step 20.
    without, saving = pairs[::2], pairs[1::2]
    own = saves_per_step() * STEPS
    return {
        "step_seconds": {name: statistics.median(times) / STEPS for name, times in seconds.items()},
        "overhead": {
            "at_own_intervals": (1 - own) * statistics.median(without) + own * statistics.median(saving),
            "turns_without_save": _spread(without),
            "turns_with_save": _spread(saving),
        },
    }


def saves_per_step() -> float:
    """Return how many the demo has."""
    from rung import config as settings

    demo = settings.preset("demo")
    return 1 / (demo.checkpoint.every_steps or demo.evaluate.every_steps)


def _spread(values: list[float]) -> dict[str, float]:
    lower, middle, upper = statistics.quantiles(values, n=4)
    return {"median": middle, "lower_quartile": lower, "upper_quartile": upper}


def table(summary: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    overhead, step, pieces = summary["overhead"], summary["step_seconds"], summary["pieces"]
    lines = ["| paired turns | overhead: median (and quartiles) |", "|---|---:|"]
    for name, kind in (("without a save", "turns_without_save"), ("with a save", "turns_with_save")):
        s = overhead[kind]
        lines.append(f"| {name} | {s['median']:+.2%} ({s['lower_quartile']:+.2%} to {s['upper_quartile']:+.2%}) |")
    lines += [
        f"| at the demo's intervals, one turn of {1 / saves_per_step() / STEPS:g} with a save | "
        f"{overhead['at_own_intervals']:+.2%} |",
        "",
        f"A turn is {STEPS} steps of {1000 * step['bare']:.0f} ms.",
        "",
        "| piece | time | part of a step |",
        "|---|---:|---:|",
    ]
    for name, piece in pieces.items():
        part = piece["seconds"] * (piece.get("per_second") or piece["per_step"] / step["bare"])
        shown = f"{1e6 * piece['seconds']:,.0f} us" if piece["seconds"] < 0.001 else f"{1e3 * piece['seconds']:,.1f} ms"
        lines.append(f"| {name} | {shown} | {part:.3%} |")
    return "\n".join(lines)


# What is measured


def bare(folder: Path) -> None:
    """Train by the loop alone."""
    from ours import on_text

    from rung.train.checkpoint import Progress
    from rung.train.loop import Intervals, Loop
    from rung.train.step import place

    place_in = folder / "bare"
    place_in.mkdir()
    ours = on_text(novels(), "demo", {"train.steps": NEVER // 1000}, place_in)
    loop = Loop(
        step=ours.step,
        batch=lambda step: place(ours.batches(step), ours.mesh),
        steps=ours.config.train.steps,
        learning_rate=ours.config.train.learning_rate,
        flops_per_token=0.0,
        intervals=Intervals(),
        emit=lambda event: None,
        should_stop=in_turns(),
    )
    loop.run(ours.state, Progress())


def whole(folder: Path) -> None:
    """Train as ``rung train`` does, with standard error on a terminal."""
    import rung.run.train as train
    import rung.run.training as training
    from rung import config as settings

    @contextlib.contextmanager
    def asked(time_limit: float | None) -> Iterator[Callable[[], str | None]]:
        yield in_turns()

    training.asked_to_stop = asked  # type: ignore[assignment]
    train.train(novels(), settings.preset("demo"), intervals(), run=folder / "whole")


def intervals() -> dict[str, int]:
    """Return those of the demo, but for saves, in a run that does not end here; no validation, no samples."""
    from rung import config as settings

    demo = settings.preset("demo")
    return {
        "train.steps": NEVER // 1000,
        "train.norms_every_steps": demo.train.steps // 100,
        "checkpoint.every_steps": SAVE_EVERY,
        "evaluate.every_steps": NEVER,
        "sample.every_steps": NEVER,
    }


def in_turns() -> Callable[[], None]:
    """Return what the loop asks after each step: it waits there for a turn, and at its end says how long it took."""
    import jax

    left, begun = 0, 0.0

    def ask() -> None:
        nonlocal left, begun
        if left > 1:
            left -= 1
            return
        jax.block_until_ready(jax.live_arrays())
        if begun:
            print(json.dumps({"seconds": time.perf_counter() - begun}), flush=True)
        words = sys.stdin.readline().split()
        if not words:
            sys.exit()
        left, begun = int(words[1]), time.perf_counter()

    return ask


def pieces(folder: Path) -> None:
    """Time each listener alone, and a save."""
    import jax
    from ours import on_text

    from rung import config as settings
    from rung.model.hashes import tree_hashes
    from rung.report.metrics import MetricsLog
    from rung.report.progress import Progress as View
    from rung.report.telemetry import Telemetry
    from rung.train import events
    from rung.train.checkpoint import Checkpoints, Progress, _on_host
    from rung.train.norms import copy_of, make_norms
    from rung.train.spikes import Spikes

    sys.stdin.readline()
    place_in = folder / "pieces"
    place_in.mkdir()
    ours = on_text(novels(), "demo", {}, place_in)
    state = ours.state
    save, norms = saves_per_step(), 1 / intervals()["train.norms_every_steps"]

    def step_done(step: int) -> events.StepDone:
        return events.StepDone(step, 2048 * step, 4.5 + step % 7 / 10, 6e-3, 0.3, 8e3, 1e11, 1e-3, step / 4, False, 0.1)

    steps = [step_done(step) for step in range(1, 2001)]
    found: dict[str, dict[str, float]] = {}

    def piece(name: str, per_step: float, times: int, call: Callable[[int], Any]) -> None:
        call(0)
        begun = time.perf_counter()
        for n in range(times):
            call(n)
        found[name] = {"seconds": (time.perf_counter() - begun) / times, "per_step": per_step}

    with MetricsLog(place_in / "metrics.jsonl") as log:
        piece("log, a step", 1, len(steps), lambda n: log(steps[n]))
    with View(NEVER) as view:
        piece("live view, a step", 1, len(steps), lambda n: view(steps[n]))
        begun = time.process_time()
        time.sleep(2)  # its thread draws
        drawn = (time.process_time() - begun) / 2
    spikes = Spikes(8.0)
    piece("spikes, a step", 1, len(steps), lambda n: spikes.push(steps[n].loss))
    with Telemetry(1e-9, lambda event: None) as telemetry:
        piece("telemetry, a reading", 0.0, 200, lambda n: telemetry(steps[n]))
    found["telemetry, a reading"]["per_second"] = 1 / settings.preset("demo").track.hardware_every_seconds
    take = make_norms(ours.model.weights())

    def read_norms(n: int) -> None:
        before = copy_of(state["weights"])
        jax.block_until_ready(take(before, state["weights"]))

    piece("norms: copy, norms, change", norms, 20, read_norms)
    piece("save: hashes", save, 10, lambda n: tree_hashes(state))
    piece("save: copy", save, 10, lambda n: _on_host(state))
    checkpoints = Checkpoints(place_in, keep=2)
    written: list[float] = []

    def save_one(n: int) -> None:
        checkpoints.save(state, Progress(step=n + 1))
        begun = time.perf_counter()
        checkpoints.wait()
        written.append(time.perf_counter() - begun)

    for n in range(6):
        save_one(n)
    found["save: written by its thread"] = {"seconds": statistics.median(written), "per_step": save}
    # In a thread of its own, on one of the processors that the step is computed on.
    found["live view, drawing for a second"] = {"seconds": drawn, "per_second": 1.0}
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


def novels() -> list[str]:
    """Return the files of the demo."""
    with resources.as_file(resources.files("rung.demo") / "austen") as folder:
        return sorted(str(path) for path in folder.glob("*.txt"))


@contextlib.contextmanager
def terminal() -> Iterator[int]:
    """Give one side of a terminal that nobody looks at."""
    ours, theirs = pty.openpty()

    def drain() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while os.read(ours, 65536):
                pass

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    yield theirs
    os.close(theirs)


def versions() -> dict[str, str]:
    """Return those of the libraries that count."""
    from importlib.metadata import version

    return {name: version(name) for name in ("jax", "jaxlib", "numpy")}


if __name__ == "__main__":
    main()
