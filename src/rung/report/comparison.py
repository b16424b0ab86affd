"""Several runs side by side: what each came to, how their settings differ, and whether their losses may be compared."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rung import config as settings
from rung.config import Config
from rung.report.charts import Across, Curve
from rung.report.columns import columns
from rung.report.html import Run
from rung.report.series import smooth, typical
from rung.report.words import count, decimal, duration, short, shown
from rung.train.events import Evaluated, Finished

ENDING_STEPS = 100  # that the training loss is the mean over
ACROSS: dict[Across, str] = {"tokens": "tokens", "steps": "steps", "seconds": "training time"}
LINE = 100  # characters
MOST_COLUMNS = 4  # runs whose settings are shown side by side on a terminal


@dataclass(frozen=True)
class Compared:
    """One run of a comparison.

    Attributes:
        label: what it is called; no two are called the same.
        path: its folder.
        run: what was read of it.
        state: how it stands, in a word.
        parameters: their number.
        tokenizer: hash of its tokenizer; ``None``: unknown.
        held_out: what identifies the text that it is validated on; ``None``: unknown.
    """

    label: str
    path: str
    run: Run
    state: str
    parameters: int
    tokenizer: str | None
    held_out: str | None

    @cached_property
    def best(self) -> Evaluated | None:
        """The best validation."""
        finite = [event for event in self.run.metrics.evaluations if math.isfinite(event.loss)]
        return min(finite, key=lambda event: event.loss, default=None)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the run came to, as plain values; ``None`` where there is nothing to tell."""
        steps, evaluations = self.run.metrics.steps, self.run.metrics.evaluations
        ends: list[Evaluated | Finished] = [*evaluations, *self.run.metrics.finished]
        best, last = self.best, evaluations[-1] if evaluations else None
        return {
            "label": self.label,
            "run": self.path,
            "state": self.state,
            "steps": max([_last(steps["step"]), *(event.step for event in ends)]),
            "tokens": max([_last(steps["tokens"]), *(event.tokens for event in ends)]),
            "parameters": self.parameters,
            "train_loss": _ending(steps),
            "best_validation_loss": best.loss if best else None,
            "best_step": best.step if best else None,
            "bits_per_byte": best.bits_per_byte if best else None,
            "last_validation_loss": last.loss if last else None,
            "tokens_per_second": typical(steps["tokens_per_second"]),
            "lineage": self.run.lineage,
            "seconds": max([float(_last(steps["seconds"])), *(event.seconds for event in ends)]),
        }

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """By name: ``train_loss`` (smoothed), ``validation_loss``, ``bits_per_byte``; only those that have points."""
        steps, events = self.run.metrics.steps, self.run.metrics.evaluations
        places = (steps["tokens"], steps["step"])
        found = {"train_loss": Curve(self.label, *places, smooth(steps["loss"]), seconds=steps["seconds"])}
        for name, field in (("validation_loss", "loss"), ("bits_per_byte", "bits_per_byte")):
            values = np.array([_float(getattr(event, field)) for event in events])
            tokens, at = (np.array([getattr(e, name) for e in events], np.int64) for name in ("tokens", "step"))
            seconds = np.array([event.seconds for event in events], np.float64)
            found[name] = Curve(self.label, tokens, at, values, style="points", seconds=seconds)
        return {name: curve.thinned() for name, curve in found.items() if np.isfinite(curve.values).any()}


@dataclass(frozen=True)
class Comparison:
    """Two runs or more, in the order in which they were named."""

    runs: Sequence[Compared]

    @property
    def losses_compare(self) -> bool:
        """Whether a loss per token means the same in all runs: a token has to be the same."""
        return len({one.tokenizer for one in self.runs}) == 1

    @cached_property
    def notes(self) -> list[str]:
        """What has to be known before numbers are compared, and what could not be read."""
        said = []
        held_out = {one.held_out for one in self.runs if one.run.metrics.evaluations}
        if not self.losses_compare:
            said.append(
                "Tokenizers differ, and so do the tokens that a loss is the mean over: losses do not compare; "
                "bits per byte does, on the same text."
            )
        if len(held_out) > 1:
            known = None not in held_out
            said.append(
                "The texts held out differ: scores of different texts do not compare."
                if known
                else "Whether the texts held out are the same is not known of all runs."
            )
        for one in self.runs:
            if one.run.lineage:
                start = one.run.lineage
                said.append(
                    f"{one.label} began with the weights of {start.get('run')} at step {start.get('step')}, "
                    f"its optimizer {start.get('optimizer')}."
                )
        return said + [f"{one.label}: {problem}" for one in self.runs for problem in one.run.problems]

    @cached_property
    def differences(self) -> dict[str, list[Any]]:
        """The settings that are not the same in all runs: by path, the value in each."""
        values = {
            path: [settings.value_at(one.run.config, path) for one in self.runs] for path, _ in settings.fields(Config)
        }
        return {path: each for path, each in values.items() if path != "name" and any(one != each[0] for one in each)}

    @cached_property
    def surroundings(self) -> dict[str, list[Any]]:
        """The versions and devices that are not the same in all runs: by name, the value in each."""
        known: list[Mapping[str, Any]] = [one.run.environment or {} for one in self.runs]
        names = dict.fromkeys(name for one in known for name in one)
        values = {name: [one.get(name) for one in known] for name in names}
        return {name: each for name, each in values.items() if any(one != each[0] for one in each)}

    def curves(self, name: str) -> list[Curve]:
        """Return the curves of one name, each with the look that its run has everywhere."""
        return [one.curves[name].one_of_many(n) for n, one in enumerate(self.runs) if name in one.curves]

    def winner(self, field: str) -> int | None:
        """Return which run has the lowest value of a fact; ``None`` where that says nothing."""
        values = [_float(one.facts[field]) for one in self.runs]
        finite = [value for value in values if math.isfinite(value)]
        compares = field == "bits_per_byte" or self.losses_compare
        return values.index(min(finite)) if compares and len(finite) > 1 and len(set(finite)) > 1 else None


CELLS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("steps", "steps", count),
    ("tokens", "tokens", short),
    ("parameters", "parameters", short),
    ("train loss", "train_loss", decimal),
    ("best loss", "best_validation_loss", decimal),
    ("at step", "best_step", count),
    ("last loss", "last_validation_loss", decimal),
    ("bits/byte", "bits_per_byte", decimal),
    ("tokens/s", "tokens_per_second", count),
    ("time", "seconds", duration),
)
"""The columns of the table of what runs came to: head, fact, and how it is written."""


def cell(one: Compared, field: str, written: Callable[[Any], str]) -> str:
    """Return one fact as text; empty where there is none."""
    value = one.facts[field]
    return "" if value is None else written(value)


def lines(comparison: Comparison) -> list[str]:
    """Return the comparison for a terminal."""
    rows = [[one.label, one.state, *(cell(one, field, how) for _, field, how in CELLS)] for one in comparison.runs]
    table = columns(["run", "state", *(head for head, _, _ in CELLS)], rows, left=2)
    return [
        *table,
        *_settings(comparison),
        *(line for note in comparison.notes for line in ["", *textwrap.wrap(note, LINE)]),
    ]


def _settings(comparison: Comparison) -> list[str]:
    differ = comparison.differences
    if not differ:
        return ["", "no setting differs"]
    if len(comparison.runs) > MOST_COLUMNS:
        return ["", *textwrap.wrap(f"settings that differ: {', '.join(differ)}", LINE)]
    rows = [[path, *map(shown, each)] for path, each in differ.items()]
    return ["", *columns(["setting", *(one.label for one in comparison.runs)], rows)]


def _ending(steps: Mapping[str, np.ndarray]) -> float | None:
    """Return the mean loss of the last steps whose update was applied."""
    if not len(steps["step"]):
        return None
    ending = (steps["step"] > steps["step"][-1] - ENDING_STEPS) & ~steps["skipped"]
    return float(steps["loss"][ending].mean()) if ending.any() else None


def _last(values: np.ndarray) -> Any:
    return values[-1].item() if len(values) else 0


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)
