"""Curves as inline SVG that keeps its type size at every width, with the values under the pointer.

The drawing is stretched to the column, so everything that must not be stretched (text) is HTML placed over it by
percent. Without JavaScript a chart is complete but for the reading under the pointer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np

from rung.report.series import log_ticks, thin, ticks, wants_log
from rung.report.words import short

WIDTH, HEIGHT = 1000, 400  # units of the drawing, before it is stretched
HEADROOM = 0.05  # of the axis, left free above and below the curves
MOST_MARKS = 300
MINUS = "−"


@dataclass(frozen=True)
class Curve:
    """One quantity over the run; all arrays are [n] of the same n. Values that are not finite are not drawn."""

    name: str
    tokens: np.ndarray
    steps: np.ndarray
    values: np.ndarray
    tone: Literal["train", "validation", "plain"] = "plain"
    style: Literal["line", "faint", "points"] = "line"

    def thinned(self) -> Curve:
        """Return the curve with few enough points to draw, its extremes among them."""
        return self.at(thin(self.values))

    def at(self, indices: np.ndarray) -> Curve:
        """Return the curve with only the points at ``indices``."""
        return Curve(self.name, self.tokens[indices], self.steps[indices], self.values[indices], self.tone, self.style)


@dataclass(frozen=True)
class Mark:
    """A moment to point out, with the words for it."""

    tokens: int
    text: str


def chart(title: str, unit: str, curves: Sequence[Curve], marks: Sequence[Mark] = (), from_zero: bool = False) -> str:
    """Return a figure of curves over target tokens, as HTML.

    Args:
        title: what is drawn.
        unit: of the vertical axis; may be empty.
        curves: at most some thousand points each; see ``Curve.thinned``.
        marks: drawn as ticks on the horizontal axis.
        from_zero: the vertical axis begins at 0.
    """
    curves = [curve.at(np.nonzero(np.isfinite(curve.values))[0]) for curve in curves]
    curves = [curve for curve in curves if len(curve.values)]
    if not curves:
        nothing = '<p class="empty">Nothing was recorded.</p>'
        return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{nothing}</figure>'
    x, y = _x_axis(curves), _y_axis(curves, from_zero)
    units = ", ".join(filter(None, [unit, "log scale" if y.log else ""]))
    drawing = [_grid_line(y.place(tick)) for tick in y.ticks] + [_drawn(curve, x, y) for curve in curves]
    y_labels = "".join(
        f'<span style="top:{1 - y.place(tick):.2%}">{words}</span>'
        for tick, words in zip(y.ticks, labels(y.ticks), strict=True)
    )
    x_labels = "".join(f'<span style="left:{x.place(tick):.2%}">{short(tick)}</span>' for tick in x.ticks)
    return f"""<figure class="chart">
<figcaption>{escape(title)} <span class="unit">{escape(units)}</span>{_legend(curves, marks)}</figcaption>
<div class="frame">
<div class="y-axis" aria-hidden="true">{y_labels}</div>
<div class="plot">
<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">
{"".join(drawing)}{_drawn_marks(marks, x)}
</svg>
</div>
<div class="x-axis" aria-hidden="true">{x_labels}</div>
<div class="x-title">target tokens</div>
</div>
<script type="application/json">{_data(curves, x, y)}</script>
</figure>
"""


def labels(places: Sequence[float]) -> list[str]:
    """Return the ticks of one axis as text, all of them in one notation."""
    greatest = max((abs(place) for place in places), default=0.0)
    if greatest >= 1e4:
        return [short(place) for place in places]
    if 0 < greatest < 0.01:
        return [_powers_of_ten(place) for place in places]
    return [f"{place:,.6g}".replace("-", MINUS) for place in places]


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool
    ticks: list[float]

    def place(self, value: float) -> float:
        """Return where ``value`` lies on the axis, 0 to 1."""
        return float(self.places(np.array([value]))[0])

    def places(self, values: np.ndarray) -> np.ndarray:
        scale: Callable = np.log if self.log else np.asarray
        return (scale(values) - scale(self.low)) / (scale(self.high) - scale(self.low))


def _x_axis(curves: Sequence[Curve]) -> _Axis:
    high = max(int(curve.tokens.max()) for curve in curves)
    return _Axis(0, max(high, 1), False, ticks(0, max(high, 1), most=5))


def _y_axis(curves: Sequence[Curve], from_zero: bool) -> _Axis:
    values = [curve.values for curve in curves]
    low, high = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
    if not from_zero and wants_log(*values):
        room = (high / low) ** HEADROOM
        low, high = low / room, high * room
        return _Axis(low, high, True, log_ticks(low, high))
    if from_zero:
        low = min(low, 0.0)
    if high == low:  # one value only: give it room to lie in the middle
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
    room = (high - low) * HEADROOM
    low, high = (low if from_zero and low == 0 else low - room), high + room
    return _Axis(low, high, False, ticks(low, high))


def _drawn(curve: Curve, x: _Axis, y: _Axis) -> str:
    across = x.places(curve.tokens) * WIDTH
    down = (1 - y.places(curve.values)) * HEIGHT
    points = [f"{a:.1f} {d:.1f}" for a, d in zip(across, down, strict=True)]
    kind = f"{curve.tone} {curve.style}"
    path = f'<path class="{kind}" d="M{"L".join(points)}"/>' if len(points) > 1 else ""
    if curve.style == "points" or len(points) == 1:
        # A line of no length with round ends is a dot that stays round however the drawing is stretched.
        path += "".join(
            f'<path class="dot {curve.tone}" d="M{point}h0"><title>{_reading(curve, n)}</title></path>'
            for n, point in enumerate(points)
        )
    return path


def _reading(curve: Curve, n: int) -> str:
    return escape(f"{curve.name} {curve.values[n]:,.5g} at step {curve.steps[n]:,} ({curve.tokens[n]:,} tokens)")


def _grid_line(place: float) -> str:
    down = (1 - place) * HEIGHT
    return f'<path class="grid" d="M0 {down:.1f}H{WIDTH}"/>'


def _drawn_marks(marks: Sequence[Mark], x: _Axis) -> str:
    every = max(1, -(-len(marks) // MOST_MARKS))
    places = ((mark.text, x.place(mark.tokens) * WIDTH) for mark in marks[::every])
    return "".join(
        f'<path class="mark" d="M{across:.1f} {HEIGHT}v-14"><title>{escape(text)}</title></path>'
        for text, across in places
    )


def _legend(curves: Sequence[Curve], marks: Sequence[Mark]) -> str:
    if len(curves) < 2 and not marks:
        return ""
    entries = [f'<span class="key {curve.tone} {curve.style}"><i></i>{escape(curve.name)}</span>' for curve in curves]
    if marks:
        entries.append('<span class="key mark"><i></i>skipped update</span>')
    return f'<span class="legend">{"".join(entries)}</span>'


def _data(curves: Sequence[Curve], x: _Axis, y: _Axis) -> str:
    """Return what the pointer's reading needs, as JSON that cannot end the script element."""
    numbers = {
        "x": [x.low, x.high],
        "y": [y.low, y.high],
        "log": y.log,
        "curves": [
            {
                "name": curve.name,
                "tone": curve.tone,
                "tokens": curve.tokens.tolist(),
                "steps": curve.steps.tolist(),
                "values": [float(f"{value:.5g}") for value in curve.values],
            }
            for curve in curves
        ],
    }
    return json.dumps(numbers, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _powers_of_ten(number: float) -> str:
    leading, _, exponent = f"{number:.3e}".partition("e")
    return f"{float(leading):g}e{int(exponent)}".replace("-", MINUS) if number else "0"
