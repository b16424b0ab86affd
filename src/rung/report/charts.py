"""Curves as inline SVG that keeps its type size at every width, with the values under the pointer.

The drawing is stretched to the column, so everything that must not be stretched (text) is HTML placed over it by
percent. Without JavaScript a chart is complete but for the reading under the pointer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rung.report.series import log_ticks, thin, ticks, wants_log
from rung.report.words import safe, short, visible

WIDTH, HEIGHT = 1000, 400  # units of the drawing, before it is stretched
HEADROOM = 0.05  # of the axis, left free above and below the curves
MOST_MARKS = 300  # of a kind
MANY = 8  # curves, from which on they share colours, and differ in dashes
DASHES = 3
FEW = 4  # entries of a legend that find room beside the title
MINUS = "−"

Across = Literal["tokens", "steps", "seconds"]
Kind = Literal["skip", "spike", "resume"]
MARKED: dict[Kind, str] = {"skip": "skipped update", "spike": "loss spike", "resume": "resumed"}


@dataclass(frozen=True)
class Curve:
    """One quantity over the run; all arrays are [n] of the same n. Values that are not finite are not drawn."""

    name: str
    tokens: np.ndarray
    steps: np.ndarray
    values: np.ndarray
    tone: str = "plain"  # train, validation, plain, or as `one_of_many` says
    style: Literal["line", "faint", "points"] = "line"
    dash: int = 0  # 0 is a whole line
    seconds: np.ndarray | None = None  # of training; needed only for a chart across seconds

    def thinned(self) -> Curve:
        """Return the curve with few enough points to draw, its extremes among them."""
        return self.at(thin(self.values))

    def at(self, indices: np.ndarray) -> Curve:
        """Return the curve with only the points at ``indices``."""
        seconds = None if self.seconds is None else self.seconds[indices]
        at = {"tokens": self.tokens[indices], "steps": self.steps[indices], "values": self.values[indices]}
        return replace(self, **at, seconds=seconds)

    def one_of_many(self, n: int) -> Curve:
        """Return the curve with a look that tells it from the other numbers ``n`` of a chart of many lines."""
        return replace(self, tone=f"series-{n % MANY}", dash=n // MANY % DASHES)

    def across(self, what: Across) -> np.ndarray:
        """Return the places of the points on the horizontal axis."""
        places = getattr(self, what)
        assert places is not None, f"{self.name} has no {what}"
        return places


@dataclass(frozen=True)
class Mark:
    """A moment to point out, with the words for it."""

    tokens: int
    text: str
    kind: Kind = "skip"


def chart(
    title: str,
    unit: str,
    curves: Sequence[Curve],
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    across: Across = "tokens",
    log: bool | None = None,
    until: float = 0,
) -> str:
    """Return a figure of curves over target tokens, or over steps or seconds of training, as HTML.

    Args:
        title: what is drawn.
        unit: of the vertical axis; may be empty.
        curves: at most some thousand points each; see ``Curve.thinned``.
        marks: drawn along the edges of a chart over tokens; elsewhere there are none.
        from_zero: the vertical axis begins at 0.
        across: what the horizontal axis counts.
        log: a logarithmic vertical axis, on which only values over 0 have a place; ``None``: where the curves span
            much and all of them are over 0.
        until: the horizontal axis goes at least so far, so that charts of one run can be held against each other.
    """
    assert not marks or across == "tokens"
    drawable = [np.isfinite(curve.values) & ((curve.values > 0) | (not log)) for curve in curves]
    curves = [curve.at(np.nonzero(shown)[0]) for curve, shown in zip(curves, drawable, strict=True)]
    curves = [curve for curve in curves if len(curve.values)]
    if not curves:
        nothing = '<p class="empty">Nothing was recorded.</p>'
        return f'<figure class="chart"><figcaption>{safe(title)}</figcaption>{nothing}</figure>'
    x, y = _x_axis(curves, across, until), _y_axis(curves, from_zero, log)
    units = ", ".join(filter(None, [unit, "log scale" if y.log else ""]))
    drawing = [_grid_line(y.place(tick)) for tick in y.ticks] + [_drawn(curve, across, x, y) for curve in curves]
    y_labels = "".join(
        f'<span style="top:{1 - y.place(tick):.2%}">{words}</span>'
        for tick, words in zip(y.ticks, labels(y.ticks), strict=True)
    )
    divisor, x_title = _horizontal_unit(across, x.high)
    x_labels = "".join(f'<span style="left:{x.place(tick):.2%}">{short(tick / divisor)}</span>' for tick in x.ticks)
    return f"""<figure class="chart">
<figcaption>{safe(title)} <span class="unit">{safe(units)}</span>{_legend(curves, marks)}</figcaption>
<div class="frame">
<div class="y-axis" aria-hidden="true">{y_labels}</div>
<div class="plot">
<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{_spoken(title, curves)}">
{"".join(drawing)}{_drawn_marks(marks, x)}
</svg>
</div>
<div class="x-axis" aria-hidden="true">{x_labels}</div>
<div class="x-title">{x_title}</div>
</div>
<script type="application/json">{_data(curves, across, x, y)}</script>
</figure>
"""


def labels(places: Sequence[float]) -> list[str]:
    """Return the ticks of one axis as text, all of them in one notation."""
    sizes = [abs(place) for place in places if place] or [1.0]
    if max(sizes) >= 1e4:
        return [short(place) for place in places]
    if max(sizes) < 0.01 or min(sizes) < 0.001:
        return [_powers_of_ten(place) for place in places]
    return [f"{place:,.6g}".replace("-", MINUS) for place in places]


_TIMES = ((86_400, "days"), (3600, "hours"), (60, "minutes"))
_MARK_LINES: dict[Kind, str] = {"resume": f"M{{x}} 0V{HEIGHT}", "spike": "M{x} 0v14", "skip": f"M{{x}} {HEIGHT}v-14"}


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


def _x_axis(curves: Sequence[Curve], across: Across, until: float) -> _Axis:
    high = max(1, until, *(float(curve.across(across).max()) for curve in curves))
    divisor, _ = _horizontal_unit(across, high)
    return _Axis(0, high, False, [tick * divisor for tick in ticks(0, high / divisor, most=5)])


def _horizontal_unit(across: Across, high: float) -> tuple[int, str]:
    """Return what the numbers along the horizontal axis are divided by, and what they are then."""
    if across != "seconds":
        return 1, "target tokens" if across == "tokens" else across
    size, name = next(((size, name) for size, name in _TIMES if high >= 2 * size), (1, "seconds"))
    return size, f"{name} of training"


def _y_axis(curves: Sequence[Curve], from_zero: bool, log: bool | None) -> _Axis:
    values = [curve.values for curve in curves]
    low, high = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
    if log or (log is None and not from_zero and wants_log(*values)):
        # One value only, or values close together, still need room for a tick beside them.
        room = max((high / low) ** HEADROOM, 1.05)
        low, high = low / room, high * room
        return _Axis(low, high, True, log_ticks(low, high) or [high / room])
    if from_zero:
        low = min(low, 0.0)
    if high == low:  # one value only: give it room to lie in the middle
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
    room = (high - low) * HEADROOM
    low, high = (low if from_zero and low == 0 else low - room), high + room
    return _Axis(low, high, False, ticks(low, high))


def _drawn(curve: Curve, across: Across, x: _Axis, y: _Axis) -> str:
    right = x.places(curve.across(across)) * WIDTH
    down = (1 - y.places(curve.values)) * HEIGHT
    points = [f"{a:.1f} {d:.1f}" for a, d in zip(right, down, strict=True)]
    path = f'<path class="{_look(curve)}" d="M{"L".join(points)}"/>' if len(points) > 1 else ""
    if curve.style == "points" or len(points) == 1:
        # A line of no length with round ends is a dot that stays round however the drawing is stretched.
        path += "".join(
            f'<path class="dot {curve.tone}" d="M{point}h0"><title>{_reading(curve, n)}</title></path>'
            for n, point in enumerate(points)
        )
    return path


def _look(curve: Curve) -> str:
    """Return the classes that say how a curve is drawn."""
    return f"{curve.tone} {curve.style}" + (f" dash-{curve.dash}" if curve.dash else "")


def _reading(curve: Curve, n: int) -> str:
    return safe(f"{curve.name} {curve.values[n]:,.5g} at step {curve.steps[n]:,} ({curve.tokens[n]:,} tokens)")


def _grid_line(place: float) -> str:
    down = (1 - place) * HEIGHT
    return f'<path class="grid" d="M0 {down:.1f}H{WIDTH}"/>'


def _drawn_marks(marks: Sequence[Mark], x: _Axis) -> str:
    drawn = ""
    for kind, line in _MARK_LINES.items():
        of_kind = [mark for mark in marks if mark.kind == kind]
        for mark in of_kind[:: max(1, -(-len(of_kind) // MOST_MARKS))]:
            path = line.format(x=f"{x.place(mark.tokens) * WIDTH:.1f}")
            drawn += f'<path class="mark {kind}" d="{path}"><title>{safe(mark.text)}</title></path>'
    return drawn


def _legend(curves: Sequence[Curve], marks: Sequence[Mark]) -> str:
    if len(curves) < 2 and not marks:
        return ""
    entries = [f'<span class="key {_look(curve)}"><i></i>{safe(curve.name)}</span>' for curve in curves]
    marked = {mark.kind for mark in marks}
    entries += [f'<span class="key mark {kind}"><i></i>{MARKED[kind]}</span>' for kind in MARKED if kind in marked]
    return f'<span class="legend{" many" if len(curves) > FEW else ""}">{"".join(entries)}</span>'


def _spoken(title: str, curves: Sequence[Curve]) -> str:
    """Return what a screen reader says of a chart: where each curve ends."""
    ends = [f"{curve.name} ends at {curve.values[-1]:,.4g}" for curve in curves if curve.style != "faint"]
    return safe("; ".join([title, *ends]))


def _data(curves: Sequence[Curve], across: Across, x: _Axis, y: _Axis) -> str:
    """Return what the pointer's reading needs, as JSON that cannot end the script element."""
    numbers = {
        "x": [x.low, x.high],
        "y": [y.low, y.high],
        "log": y.log,
        "across": across,
        "curves": [
            {
                "name": visible(curve.name),
                "tone": curve.tone,
                "tokens": curve.tokens.tolist(),
                "steps": curve.steps.tolist(),
                **({"seconds": [round(s, 1) for s in curve.across(across).tolist()]} if across == "seconds" else {}),
                "values": [float(f"{value:.5g}") for value in curve.values],
            }
            for curve in curves
        ],
    }
    return json.dumps(numbers, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _powers_of_ten(number: float) -> str:
    leading, _, exponent = f"{number:.3e}".partition("e")
    return f"{float(leading):g}e{int(exponent)}".replace("-", MINUS) if number else "0"
