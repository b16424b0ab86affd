"""A comparison of runs as a page that needs nothing but itself, and as a picture."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rung.disk import whole_file
from rung.report.charts import Across, Curve, chart
from rung.report.comparison import ACROSS, CELLS, Compared, Comparison, cell
from rung.report.html import document
from rung.report.plots import INK, dress, scale
from rung.report.series import wants_log
from rung.report.words import NOTHING, safe, short, shown, visible

# As in page.css, by daylight.
SERIES = ("#35699f", "#b84d26", "#2f7d5b", "#8a5a9e", "#a57a1e", "#3a8aa4", "#a8486f", "#6b6f76")
DASHES = ("solid", "dashed", "dotted")
TITLES = {
    "train_loss": ("Training loss, smoothed", "nats per token"),
    "validation_loss": ("Validation loss", "nats per token"),
    "bits_per_byte": ("Validation, bits per byte", ""),
}
MOST_ACROSS = 4  # runs side by side in a table of settings, where there are fewer settings than runs
_TIMES = ((86_400, "days"), (3600, "hours"), (60, "minutes"))


def page(comparison: Comparison) -> str:
    """Return the comparison as HTML."""
    names = [one.label for one in comparison.runs]
    notes = "".join(f'<p class="problem">{safe(note)}</p>' for note in comparison.notes)
    sections = [
        f'<header><h1>{len(names)} runs compared</h1><p class="lead">{safe(" · ".join(names))}</p>{notes}</header>',
        _section("What they came to", _outcome(comparison)),
        _section("Curves", _curves(comparison)),
        _section("Settings that differ", _differing(comparison.runs, comparison.differences)),
    ]
    if comparison.surroundings:
        sections.append(
            _section("Device and versions that differ", _differing(comparison.runs, comparison.surroundings))
        )
    return document(f"{', '.join(names)} · Rung comparison", "\n".join(sections), "compare.css")


def picture(comparison: Comparison, path: str | Path) -> None:
    """Draw the curves as a PNG: a row for each quantity, a column for each horizontal axis."""
    # The figure is made without pyplot, which would keep it in a global list and may want a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = _drawn(comparison) or ["train_loss"]
    figure = Figure(figsize=(15, 1 + 4 * len(names)), dpi=110, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    grid = figure.subplots(len(names), len(ACROSS), sharey="row", squeeze=False)
    for row, name in zip(grid, names, strict=True):
        for axes, across in zip(row, ACROSS, strict=True):
            _draw(axes, comparison, name, across)
    _legend(figure, comparison)
    with whole_file(path) as file, warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks is drawn as boxes; the page has it right.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        canvas.print_png(file)


# The page


def _outcome(comparison: Comparison) -> str:
    heads = "".join(f'<th class="number">{head}</th>' for head, _, _ in CELLS)
    rows = "".join(_row(comparison, n, one) for n, one in enumerate(comparison.runs))
    note = "Losses in nats per token. Train loss: mean of the last 100 steps. Bits per byte: of the best validation."
    return f'<p class="note">{note}</p>{_table(f"<th>Run</th><th>State</th>{heads}", rows, "outcome came-to")}'


def _row(comparison: Comparison, n: int, one: Compared) -> str:
    nothing = np.empty(0)
    look = Curve("", nothing, nothing, nothing).one_of_many(n)
    dash = f" dash-{look.dash}" if look.dash else ""
    cells = ""
    for head, field, written in CELLS:
        text = safe(cell(one, field, written))
        is_best = field in ("best_validation_loss", "bits_per_byte") and comparison.winner(field) == n
        kind = " best" if is_best else "" if text else " nothing"
        cells += f'<td class="number{kind}" data-label="{head}">{text or NOTHING}</td>'
    return (
        f'<tr><th><span class="key {look.tone}{dash}"><i></i></span>{safe(one.label)}'
        f'<code class="path">{safe(one.path)}</code></th><td>{safe(one.state)}</td>{cells}</tr>'
    )


def _curves(comparison: Comparison) -> str:
    buttons, groups = "", ""
    for n, (across, words) in enumerate(ACROSS.items()):
        checked = " checked" if n == 0 else ""
        buttons += f'<input type="radio" name="across" id="across-{across}"{checked}>'
        buttons += f'<label for="across-{across}">by {words}</label>'
        figures = "".join(
            f"<div{' class=wide' if place == 0 else ''}>{_chart(comparison, name, across)}</div>"
            for place, name in enumerate(_drawn(comparison) or ["train_loss"])
        )
        groups += f'<div class="charts across-{across}">{figures}</div>'
    return f'<div class="picker">{buttons}{groups}</div>'


def _chart(comparison: Comparison, name: str, across: Across) -> str:
    title, unit = TITLES[name]
    return chart(title, _unit(comparison, unit), comparison.curves(name), across=across)


def _differing(runs: Sequence[Compared], values: Mapping[str, Sequence[Any]]) -> str:
    if not values:
        return '<p class="empty">None.</p>'
    names = [safe(one.label) for one in runs]
    paths = [f"<code>{safe(path)}</code>" for path in values]
    cells = [[f"<td>{safe(shown(one)) or NOTHING}</td>" for one in each] for each in values.values()]
    if len(runs) > max(len(values), MOST_ACROSS):
        names, paths, cells = paths, names, [list(row) for row in zip(*cells, strict=True)]
    heads = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(f"<tr><th>{path}</th>{''.join(row)}</tr>" for path, row in zip(paths, cells, strict=True))
    return _table(f"<th></th>{heads}", rows, "outcome differ")


def _table(heads: str, rows: str, kind: str) -> str:
    return f'<div class="{kind}"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


# The picture


def _draw(axes: Any, comparison: Comparison, name: str, across: Across) -> None:
    title, unit = TITLES[name]
    curves = comparison.curves(name)
    divisor, words = _horizontal(across, [curve.across(across) for curve in curves])
    dress(axes, words, "")
    if across == next(iter(ACROSS)):
        said = ", ".join(filter(None, [title, _unit(comparison, unit)]))
        axes.set_title(said, loc="left", color=INK, fontsize=11)
    for curve in curves:
        n = [one.label for one in comparison.runs].index(curve.name)
        finite = np.isfinite(curve.values)
        places, values = curve.across(across)[finite] / divisor, curve.values[finite]
        marker = "o" if curve.style == "points" or len(values) == 1 else None  # a line through one point is invisible
        axes.plot(places, values, linewidth=1.6, marker=marker, markersize=4, **_look(n))
    if curves:
        axes.set_xlim(left=0)
        log = wants_log(*(curve.values for curve in curves))
        scale(axes, log)
        axes.set_ylabel("log scale" if log else "", color=INK)
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.label_outer()


def _look(n: int) -> dict[str, Any]:
    return {"color": SERIES[n % len(SERIES)], "linestyle": DASHES[n // len(SERIES) % len(DASHES)]}


def _horizontal(across: Across, places: Sequence[np.ndarray]) -> tuple[int, str]:
    """Return what the numbers of a horizontal axis are divided by, and its name then."""
    if across != "seconds":
        return 1, "target tokens" if across == "tokens" else "steps"
    high = max((float(one.max()) for one in places if len(one)), default=0.0)
    size, unit = next(((size, unit) for size, unit in _TIMES if high >= 2 * size), (1, "seconds"))
    return size, f"{unit} of training"


def _legend(figure: Any, comparison: Comparison) -> None:
    from matplotlib.lines import Line2D

    names = [" ".join(visible(one.label).split()).replace("$", r"\$") for one in comparison.runs]
    lines = [Line2D([], [], linewidth=2, **_look(n)) for n in range(len(comparison.runs))]
    figure.legend(lines, names, loc="outside upper left", ncols=4, frameon=False, labelcolor=INK)


def _drawn(comparison: Comparison) -> list[str]:
    """Return the quantities of which there is a curve; that which compares first."""
    names = list(TITLES) if comparison.losses_compare else list(reversed(TITLES))
    return [name for name in names if comparison.curves(name)]


def _unit(comparison: Comparison, unit: str) -> str:
    return f"{unit}, each of its own tokenizer" if unit and not comparison.losses_compare else unit
