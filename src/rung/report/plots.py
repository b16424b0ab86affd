"""The loss curves of a run as a picture."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from rung.disk import whole_file
from rung.report.metrics import Metrics
from rung.report.series import log_ticks, smooth, thin, ticks, wants_log
from rung.report.words import decimal, short, visible

TRAIN, VALIDATION, INK, RULE = "#3f6fa3", "#bf5530", "#2b2d30", "#dddad2"
LONGEST_NAME = 80  # characters of a run's name that a title has room for


def loss_curves(metrics: Metrics, path: str | Path, name: str = "") -> None:
    """Draw training loss (each step, and smoothed) and validation loss over target tokens as a PNG of 1600 x 900.

    The last and the best validation are written beside the curve, with bits per byte where they are known.

    Args:
        name: of the run, for the title.
    """
    # The figure is made without pyplot, which would keep it in a global list and may want a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.625), dpi=160, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    dress(axes)
    tokens, loss = metrics.steps["tokens"], metrics.steps["loss"]
    validation = np.array([event.loss for event in metrics.evaluations])
    shown = thin(loss)
    if len(shown):
        axes.plot(tokens[shown], loss[shown], color=TRAIN, alpha=0.28, linewidth=0.8, label="train, each step")
        dot = "o" if len(shown) == 1 else None  # a line through one point is invisible
        axes.plot(tokens[shown], smooth(loss)[shown], color=TRAIN, linewidth=1.8, marker=dot, label="train, smoothed")
    if len(validation):
        at = [event.tokens for event in metrics.evaluations]
        axes.plot(at, validation, color=VALIDATION, linewidth=1.8, marker="o", markersize=5, label="validation")
    if len(shown) or len(validation):
        axes.legend(frameon=False, labelcolor=INK, loc="upper right")
        scale(axes, wants_log(loss, validation))
    axes.set_title(_title(metrics, name), loc="left", color=INK, fontsize=12, pad=12, linespacing=1.5, parse_math=False)
    with whole_file(path) as file, warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks is drawn as boxes; the report has it right.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        canvas.print_png(file)


def dress(  # type: ignore[no-untyped-def]  # matplotlib's types are not there to name
    axes, across: str = "target tokens trained on", up: str = "loss, nats per token"
) -> None:
    """Give axes the house's looks, and names."""
    axes.set_xlabel(across, color=INK)
    axes.set_ylabel(up, color=INK)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.tick_params(length=0, colors=INK, which="both")
    axes.xaxis.set_major_formatter(lambda value, _: short(value))


def scale(axes, log: bool) -> None:  # type: ignore[no-untyped-def]
    """Put round numbers on the vertical axis, which is logarithmic where that is asked for."""
    from matplotlib.ticker import NullLocator

    if log:
        axes.set_yscale("log")
        axes.set_ylabel(f"{axes.get_ylabel()}, log scale")
        axes.yaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    axes.set_yticks(log_ticks(low, high) if log else ticks(low, high))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(low, high)


def _title(metrics: Metrics, name: str) -> str:
    name = visible(" ".join(name.split()))
    if len(name) > LONGEST_NAME:
        name = name[:LONGEST_NAME] + " ..."
    return "\n".join(filter(None, [name, _scores(metrics)]))


def _scores(metrics: Metrics) -> str:
    if not metrics.evaluations:
        return "Loss, without validation"
    last = metrics.evaluations[-1]
    words = f"Validation loss {decimal(last.loss)}"
    if last.bits_per_byte is not None:
        words += f", {decimal(last.bits_per_byte)} bits per byte"
    best = min((e for e in metrics.evaluations if np.isfinite(e.loss)), key=lambda event: event.loss, default=last)
    if best.step != last.step:
        words += f"; best {decimal(best.loss)} at step {best.step:,}"
    return words
