"""The charts of a run's report: loss, optimisation, norms by group of weights, the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rung.report.charts import Curve, chart
from rung.report.history import marks, not_taken_back, tokens_at
from rung.report.metrics import Metrics
from rung.report.series import smooth, thin
from rung.report.words import NOTHING, count, decimal, plural, safe
from rung.train.events import Hardware, Mixed

GIB = 2.0**30


def loss_charts(metrics: Metrics) -> str:
    """Return the charts of loss in training and validation."""
    curves = [*_raw_and_smooth(metrics, "loss", "train"), *_validation(metrics, "loss")]
    figures = f'<div class="wide">{chart("Loss", "nats per token", curves, marks(metrics))}</div>'
    if any(event.bits_per_byte is not None for event in metrics.evaluations):
        figures += chart("Validation, bits per byte", "", _validation(metrics, "bits_per_byte"), until=_end(metrics))
    if metrics.evaluations:
        perplexity = _validation(metrics, "perplexity")
        figures += chart("Validation perplexity", "per token", perplexity, until=_end(metrics))
    return f'<div class="charts">{figures}</div>'


def source_charts(metrics: Metrics) -> str:
    """Return how the stores of a mixture stand, as a table and a chart; nothing where there is no mixture."""
    told = metrics.of(Mixed)
    standing = [told[n] for n in not_taken_back([event.step for event in told])]
    if not standing:
        return ""
    last = standing[-1]
    rows = "".join(
        f"<tr><th>{safe(name)}</th>"
        + "".join(
            f'<td class="number">{decimal(values[name], places) if name in values else NOTHING}</td>'
            for values, places in ((last.epochs, 2), (last.losses, 3), (last.bits_per_byte, 3))
        )
        + "</tr>"
        for name in last.epochs
    )
    names = ("Passes", "Validation loss", "Bits per byte")
    head = "<th>Source</th>" + "".join(f'<th class="number">{name}</th>' for name in names)
    table = f'<table class="sources"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    curves = []
    for number, name in enumerate(last.epochs):
        scored = [event for event in standing if name in event.losses]
        steps = np.array([event.step for event in scored], np.int64)
        losses = np.array([event.losses[name] for event in scored])
        curves.append(Curve(name, tokens_at(metrics, steps), steps, losses).one_of_many(number))
    drawn = chart("Validation loss by source", "nats per token", curves, until=_end(metrics)) if last.losses else ""
    note = f'<p class="note">At step {count(last.step)}.</p>'
    return f'{note}{table}<div class="charts"><div class="wide">{drawn}</div></div>'


def training_charts(metrics: Metrics) -> str:
    """Return the charts of learning rate, gradient, norms by group of weights, and speed."""
    steps = metrics.steps
    rate = Curve("learning rate", steps["tokens"], steps["step"], steps["learning_rate"]).thinned()
    gradient = _raw_and_smooth(metrics, "gradient_norm", "plain")
    speed = _raw_and_smooth(metrics, "tokens_per_second", "plain")
    wait = _raw_and_smooth(metrics, "data_wait", "plain", scale=1000)
    figures = [
        chart("Learning rate", "", [rate], from_zero=True),
        chart("Gradient norm", "before clipping", gradient, marks(metrics)),
        *_norm_charts(metrics),
        chart("Speed", "tokens per second", speed, from_zero=True),
        chart("Waiting for data", "milliseconds per step", wait, from_zero=True),
    ]
    return f'<div class="charts">{"".join(figures)}</div>'


def machine_charts(metrics: Metrics) -> str:
    """Return the charts of processor, memory and GPUs; nothing where nothing of them was read."""
    readings = metrics.hardware
    standing = [readings[n] for n in not_taken_back([reading.step for reading in readings])]
    figures = list(_machine_figures(metrics, standing))
    if not figures:
        return ""
    notes = [f"{plural(len(readings), 'reading')}."]
    if again := len(readings) - len(standing):
        notes.append(f"Not drawn, as a resume took their steps back: {count(again)}.")
    notes += _held_back(standing)
    note = f'<p class="note">{safe(" ".join(notes))}</p>'
    return f'{note}<div class="charts">{"".join(figures)}</div>'


def _norm_charts(metrics: Metrics) -> Iterator[str]:
    norms = metrics.norms
    if not len(norms.step):
        return
    tokens = tokens_at(metrics, norms.step)

    def curves(columns: Mapping[str, np.ndarray]) -> list[Curve]:
        groups = list(norms.weights)
        return [
            Curve(group, tokens, norms.step, values).one_of_many(groups.index(group)).thinned()
            for group, values in columns.items()
        ]

    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = {g: norms.updates[g] / norms.weights[g] for g in norms.weights if g in norms.updates}
    yield chart("Update-to-weight ratio", "of one step", curves(ratios), log=True, until=_end(metrics))
    yield chart("Weight norm", "per group", curves(norms.weights), until=_end(metrics))


def _machine_figures(metrics: Metrics, readings: Sequence[Hardware]) -> Iterator[str]:
    steps = np.array([reading.step for reading in readings], np.int64)
    tokens = tokens_at(metrics, steps)

    def curve(name: str, value: Callable[[Hardware], Any], scale: float = 1.0) -> Curve:
        values = [np.nan if value(reading) is None else value(reading) for reading in readings]
        return Curve(name, tokens, steps, np.array(values, np.float64) * scale).thinned()

    def drawn(title: str, unit: str, *curves: Curve) -> Iterator[str]:
        known = [one for one in curves if len(one.values)]
        if len(curves) > 1:
            known = [one.one_of_many(n) for n, one in enumerate(known)]
        if known:
            yield chart(title, unit, known, from_zero=unit != "°C", until=_end(metrics))

    yield from drawn("Processor", "percent of the machine", curve("all", lambda r: r.cpu_percent))
    yield from drawn("Processor, this process", "cores", curve("this", lambda r: r.process_cpu_percent, 1 / 100))
    yield from drawn(
        "Memory",
        "GiB",
        curve("this process", lambda r: r.process_memory, 1 / GIB),
        curve("free on the machine", lambda r: r.free_memory, 1 / GIB),
    )
    gpus = range(max((len(reading.gpus) for reading in readings), default=0))
    for title, unit, field, scale in (
        ("GPU use", "percent", "utilization", 1.0),
        ("GPU memory", "GiB", "memory_used", 1 / GIB),
        ("GPU temperature", "°C", "temperature", 1.0),
        ("GPU power", "watts", "power", 1.0),
    ):
        yield from drawn(title, unit, *(curve(f"GPU {n}", _of_gpu(n, field), scale) for n in gpus))


def _of_gpu(n: int, field: str) -> Callable[[Hardware], Any]:
    return lambda reading: reading.gpus[n].get(field) if n < len(reading.gpus) else None


def _held_back(readings: Sequence[Hardware]) -> Iterator[str]:
    """Yield a sentence for each GPU whose clock was held down at times, with the reasons and how often."""
    for n in range(max((len(reading.gpus) for reading in readings), default=0)):
        seen = [_of_gpu(n, "throttled")(reading) for reading in readings]
        reasons = Counter(reason for reason in seen if reason)
        if reasons:
            name = next((gpu for gpu in map(_of_gpu(n, "name"), readings) if gpu), "no name")
            times = ", ".join(f"{reason} ({count(number)})" for reason, number in reasons.most_common())
            known = sum(one is not None for one in seen)
            yield f"GPU {n} ({name}) was held back in {count(reasons.total())} of {count(known)}: {times}."


def _end(metrics: Metrics) -> int:
    """Return the target tokens that the run has come to."""
    tokens = metrics.steps["tokens"]
    return int(tokens[-1]) if len(tokens) else 0


def _raw_and_smooth(metrics: Metrics, field: str, tone: Literal["train", "plain"], scale: float = 1.0) -> list[Curve]:
    steps = metrics.steps
    prefix = "train, " if tone == "train" else ""
    raw = Curve(f"{prefix}each step", steps["tokens"], steps["step"], steps[field] * scale, tone, "faint")
    smoothed = Curve(f"{prefix}smoothed", raw.tokens, raw.steps, smooth(raw.values), tone)
    shown = thin(raw.values)
    return [raw.at(shown), smoothed.at(shown)] if len(shown) > 1 else [raw.at(shown)]


def _validation(metrics: Metrics, field: str) -> list[Curve]:
    events = metrics.evaluations
    values = np.array([np.nan if getattr(e, field) is None else getattr(e, field) for e in events], np.float64)
    tokens, steps = (np.array([getattr(e, name) for e in events], np.int64) for name in ("tokens", "step"))
    return [Curve("validation", tokens, steps, values, "validation", "points").thinned()]
