"""Kill a training process again and again, resume it each time, and compare what comes of it bit by bit.

    python tests/stress/kill.py --kills 100

A small model is trained undisturbed, then again while it is killed at random instants of every phase, and resumed from
the command line until it ends. Both runs have to agree in everything but times: every array of every checkpoint, the
weights to use, and every step, validation, reading of norms, spike and sample in the logs. A run that ends before the
kills are spent is compared, and another begun. Exit status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
sys.path.insert(0, str(HERE))

from observed import SAVING, TRAINING  # noqa: E402 - beside this file, wherever that is run from

TEXT_BYTES = 40_000
SETTINGS = {
    "model.d-model": 16,
    "model.n-layers": 1,
    "model.n-heads": 2,
    "model.d-ff": 32,
    "model.context-length": 32,
    "model.dropout": 0.1,
    "tokenizer.kind": "byte",
    "train.batch-size": 16,
    "train.micro-batch-size": 2,  # eight in a step
    "train.schedule": "constant",
    "train.learning-rate": 0.1,  # high, and the next low, so that there are spikes
    "train.muon-learning-rate": 0.3,
    "train.spike-threshold": 0.3,
    "train.norms-every-steps": 7,
    "evaluate.every-steps": 20,
    "evaluate.batch-size": 4,
    "sample.every-steps": 30,
    "sample.max-tokens": 8,
    "checkpoint.every-steps": 5,
    "checkpoint.keep-every-steps": 50,
    "track.hardware-every-seconds": 1,
}

# Fields that tell of times, and events that tell of what happened to a process and not of what the run came to.
TIMES = ("seconds", "tokens_per_second", "flops_per_second", "data_wait")
METRICS = "metrics.jsonl"
COMPARED = ("step", "evaluation", "norms", "spiked", "skipped")

LONGEST_LIFE = 120.0  # seconds; then it is killed wherever it is
LONGEST_END = 60.0  # seconds that a process may take to end after a signal


# Over in a moment: the process lingers in them.
SHORT = ("cutting the log", "writing the best weights", "renaming", "moving pointers")
AT_END = ("finishing", "writing the report")


@dataclass(frozen=True)
class Aim:
    """When to send which signals: so long after a phase was entered so many times."""

    signals: tuple[signal.Signals, ...]
    thread: int = 0  # 0: the phase is of the training thread; 1: of the one that saves
    phase: int = 0  # 0: only the time since the start counts
    times: int = 1
    delay: float = 0.0

    @property
    def linger(self) -> tuple[int, int]:
        """The phase of each thread to linger in."""
        short = self.phase if (TRAINING, SAVING)[self.thread][self.phase] in SHORT else 0
        return (0, short) if self.thread else (short, 0)


@dataclass
class Tally:
    """What the kills fell into."""

    phases: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (phase, name of the signal)
    saving: Counter[str] = field(default_factory=Counter)  # by what the save under way was doing
    epochs: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """How many there were."""
        return self.phases.total()


def stress(
    folder: Path,
    kills: int,
    seed: int,
    steps: int = 400,
    optimizer: str = "muon",
    tell: Callable[[str], None] = lambda line: None,
) -> Tally:
    """Train undisturbed and killed, and compare; returns the tally, whose ``problems`` are empty where all agree.

    Args:
        folder: an empty one, for the runs.
        kills: how many times to kill.
        seed: of the instants.
        steps: of a run.
        optimizer: ``muon`` or ``adamw``.
        tell: told of each kill.
    """
    draw, tally = random.Random(seed), Tally()
    text = folder / "text.txt"
    text.write_bytes((SOURCE / "rung/demo/austen/emma.txt").read_bytes()[:TEXT_BYTES])
    settings = {**SETTINGS, "train.steps": steps, "train.optimizer": optimizer}
    train = ["train", str(text), *(f"--{name}={value}" for name, value in settings.items())]
    marks = folder / "marks"
    whole = folder / "undisturbed"
    first = _Life([*train, "--run", str(whole)], marks, _environment(folder / "compiled", fill=True))
    if first.end() != 0:
        raise SystemExit(f"the undisturbed run failed:\n{first.said()}")
    epoch = steps / next(e["epoch"] for e in _events(whole / METRICS) if e.get("step") == steps)
    environment = _environment(folder / "compiled", fill=False)
    while tally.kills < kills:
        run = folder / f"killed-{len(tally.runs) + 1}"
        before, ended = tally.kills, False
        while not ended:
            command = ["resume", str(run)] if run.is_dir() else [*train, "--run", str(run)]
            aim = _aim(draw) if tally.kills < kills else None
            life = _Life(command, marks, environment, aim)
            ended = life.end() == 0
            tally.problems += life.problems()
            if life.struck:
                _count(tally, life, epoch)
                tell(f"{tally.kills:4}  {life}")
        problems = differences(whole, run, steps)
        tally.problems += problems
        verdict = f"{len(problems)} differences" if problems else f"identical: {_extent(run, steps)}"
        tally.runs.append(f"run {len(tally.runs) + 1}, killed {tally.kills - before} times: {verdict}")
        tell(tally.runs[-1])
    return tally


def table(tally: Tally) -> str:
    """Return what the kills fell into as a table."""
    signals = [name for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGINT twice") if _of_signal(tally, name)]
    lines = ["".join([f"{'phase of the training thread':<34}", *(f"{name:>14}" for name in signals)])]
    for phase in TRAINING:
        numbers = [tally.phases[phase, name] for name in signals]
        if any(numbers):
            lines.append("".join([f"{phase:<34}", *(f"{number or '':>14}" for number in numbers)]))
    lines.append("".join([f"{'all':<34}", *(f"{_of_signal(tally, name):>14}" for name in signals)]))
    lines += ["", f"{'while a save was being written':<34}{tally.saving.total():>14}"]
    lines += [f"  {phase:<32}{tally.saving[phase]:>14}" for phase in SAVING if tally.saving[phase]]
    epochs = ", ".join(f"{number} in epoch {epoch}" for epoch, number in sorted(tally.epochs.items()))
    return "\n".join([*lines, "", f"kills by epoch: {epochs}", "", *tally.runs])


class _Life:
    """One process, from its start to its end."""

    def __init__(self, command: list[str], marks: Path, environment: dict[str, str], aim: Aim | None = None):
        marks.write_bytes(bytes([0, 0, *(aim.linger if aim else (0, 0)), 0, 0, 0, 0]))
        self._marks, self._command, self._aim = marks, command, aim
        self._said = marks.with_name("said")
        self.struck: tuple[signal.Signals, ...] = ()
        with open(self._said, "wb") as said:
            words = [sys.executable, str(HERE / "observed.py"), str(marks), *command]
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, cwd=marks.parent
            )

    def end(self) -> int:
        """Wait for the end, striking where that is the aim; returns the exit status."""
        if self._aim is not None:
            self._strike(self._aim)
        try:
            self.status = self._process.wait(LONGEST_END if self.struck else 10 * LONGEST_LIFE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self.status = 99
        phase, saving, self.step = struct.unpack("<BBxxI", self._marks.read_bytes())
        if not self.struck or self.struck[0] == signal.SIGKILL:
            self.phase, self.saving = TRAINING[phase], SAVING[saving]
        return self.status

    def _strike(self, aim: Aim) -> None:
        begun = time.monotonic()
        file = os.open(self._marks, os.O_RDONLY)
        seen, inside = 0, False
        ends = begun + LONGEST_LIFE
        while aim.phase and self._process.poll() is None and time.monotonic() < ends:
            was, inside = inside, os.pread(file, 2, 0)[aim.thread] == aim.phase
            seen += inside and not was
            if seen >= aim.times:
                break
            time.sleep(0.0002)
        ends = time.monotonic() + aim.delay
        while time.monotonic() < ends:
            time.sleep(min(0.0005, aim.delay))
        if aim.signals[0] != signal.SIGKILL:
            # Before that, Python itself answers a signal.
            while self._process.poll() is None and not os.pread(file, 1, 0)[0]:
                time.sleep(0.001)
        if self._process.poll() is None:
            phase, saving = os.pread(file, 2, 0)
            self.phase, self.saving, self.struck = TRAINING[phase], SAVING[saving], aim.signals
            for number in aim.signals:
                self._process.send_signal(number)
                time.sleep(0.01)
        os.close(file)

    def problems(self) -> list[str]:
        """Return what is wrong with how the process ended."""
        said, problems = self.said(), []
        allowed = {0, -signal.SIGKILL} if self.struck[:1] == (signal.SIGKILL,) else {0, 1, 3} if self.struck else {0}
        if self.status not in allowed:
            problems.append(f"{self}: exit status {self.status}\n{said}")
        elif self.status == 1 and self.phase not in TRAINING[:5]:
            problems.append(f"{self}: exit status 1, and it was training\n{said}")
        if "Traceback" in said:
            problems.append(f"{self}: a traceback\n{said}")
        return problems

    def said(self) -> str:
        """Return all that the process wrote."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    def __str__(self) -> str:
        saving = f", a save {self.saving}" if self.saving else ""
        return f"{_name(self.struck)} at step {self.step}, {self.phase}{saving} ({self._command[0]})"


def _aim(draw: random.Random) -> Aim:
    """Draw an instant: some at any time at all, the others in a phase that is drawn, so that each is hit."""
    signals: tuple[signal.Signals, ...] = draw.choices(
        [(signal.SIGKILL,), (signal.SIGTERM,), (signal.SIGINT,), (signal.SIGINT, signal.SIGINT)], [85, 6, 5, 4]
    )[0]
    begun = TRAINING.index("in a step, accumulating")
    kind = draw.choices(["any", "start", "training", "saving"], [10, 15, 40, 35])[0]
    if kind == "any":
        return Aim(signals, delay=draw.uniform(0, 3))
    if kind == "start":
        return Aim(signals, phase=draw.randrange(1, begun), delay=draw.expovariate(1 / 0.02))
    if kind == "training":
        # Few at the end, since a run has one only.
        weights = [8 if TRAINING[phase] not in AT_END else 1 for phase in range(begun, len(TRAINING))]
        phase = draw.choices(range(begun, len(TRAINING)), weights)[0]
        times = draw.randint(1, 40 if phase == begun else 2)
        return Aim(signals, phase=phase, times=times, delay=draw.expovariate(1 / 0.002))
    return Aim(
        signals,
        thread=1,
        phase=draw.randrange(1, len(SAVING)),
        times=draw.randint(1, 6),
        delay=draw.expovariate(1 / 0.001),
    )


def _count(tally: Tally, life: _Life, epoch: float) -> None:
    tally.phases[life.phase, _name(life.struck)] += 1
    if life.saving:
        tally.saving[life.saving] += 1
    if life.step:
        tally.epochs[int(life.step / epoch) + 1] += 1


def _name(signals: tuple[signal.Signals, ...]) -> str:
    if not signals:
        return "nothing"
    return signals[0].name + " twice" * (len(signals) > 1)


def _of_signal(tally: Tally, name: str) -> int:
    return sum(number for (_, one), number in tally.phases.items() if one == name)


def _environment(compiled: Path, fill: bool) -> dict[str, str]:
    """Return the environment of a run: compiled programs are kept by the undisturbed one, and read by the others.

    A process that is killed while it writes one would leave it torn, which is JAX's affair and not what is tried here.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")])),
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(compiled)),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0" if fill else "1e9",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


# Comparing, by other programs' readers alone


def differences(one: Path, two: Path, steps: int) -> list[str]:
    """Return in what two runs of so many steps differ, but for times; each in a line."""
    from safetensors.numpy import load_file

    problems = []
    checkpoints = [{path.name for path in (run / "checkpoints").iterdir()} for run in (one, two)]
    common = checkpoints[0] & checkpoints[1]
    if str(steps) not in common or any(not name.isdecimal() for name in checkpoints[1]):
        problems.append(f"{two}: checkpoints {sorted(checkpoints[1])}, not {sorted(checkpoints[0])}")
    for step in sorted(common, key=int):
        first, second = (load_file(run / "checkpoints" / step / "state.safetensors") for run in (one, two))
        names = sorted(first.keys() | second.keys())
        problems += [
            f"{two}: checkpoint {step}: {name} differs"
            for name in names
            if name not in first or name not in second or first[name].tobytes() != second[name].tobytes()
        ]
        records = [json.loads((run / "checkpoints" / step / "checkpoint.json").read_text()) for run in (one, two)]
        if _timeless(records[0]) != _timeless(records[1]):
            problems.append(f"{two}: checkpoint {step}: its record differs")
    for name in ("model.safetensors", "samples.jsonl", "best", "latest", "config.toml"):
        if (one / name).read_bytes() != (two / name).read_bytes():
            problems.append(f"{two}: {name} differs")
    for kind in COMPARED:
        first, second = ([_timeless(e) for e in _events(run / METRICS) if e["event"] == kind] for run in (one, two))
        if first != second:
            which = next((a, b) for a, b in zip([*first, None], [*second, None], strict=False) if a != b)
            problems.append(f"{two}: {kind} events differ, at first {which[0]} and {which[1]}")
    numbers = [e["step"] for e in _events(two / METRICS) if e["event"] == "step"]
    if numbers != list(range(1, steps + 1)):
        problems.append(f"{two}: steps are missing or stand twice")
    return problems


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(part) for name, part in value.items() if name not in TIMES}
    return value


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        yield json.loads(line)


def _extent(run: Path, steps: int) -> str:
    """Return how much there was to compare, in words."""
    from safetensors.numpy import load_file

    arrays = load_file(run / "checkpoints" / str(steps) / "state.safetensors")
    count = Counter(event["event"] for event in _events(run / METRICS))
    samples = len((run / "samples.jsonl").read_bytes().splitlines())
    return (
        f"{len(arrays)} arrays of {sum(a.size for a in arrays.values()):,} numbers in the last checkpoint, "
        f"{count['step']} steps, {count['evaluation']} validations, {count['norms']} readings of norms, "
        f"{count['spiked']} spikes, {samples} samples"
    )


def main() -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(description="Kill and resume a run, and compare it with an undisturbed one.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--steps", type=int, default=400, help="of a run")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--keep", action="store_true", help="leave the runs where they are")
    parsed = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rung-stress-"))
    begun = time.monotonic()
    try:
        tally = stress(
            folder,
            parsed.kills,
            parsed.seed,
            parsed.steps,
            parsed.optimizer,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    finally:
        if parsed.keep:
            print(folder, file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(tally))
    print("\n".join(tally.problems))
    verdict = "everything identical" if not tally.problems else f"{len(tally.problems)} problems"
    print(f"{tally.kills} kills in {len(tally.runs)} runs, {time.monotonic() - begun:.0f} s: {verdict}")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
