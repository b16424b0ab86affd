"""The report's tables: parameters, config, device and versions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rung import config as settings
from rung.config import Config
from rung.errors import RungError
from rung.report.words import count, safe, shown
from rung.setting import leaves

TIMES = " × "

Parameter = tuple[str, tuple[int, ...], int, bool]  # path, shape, count, whether it decays


def parameter_table(parameters: Sequence[Parameter]) -> str:
    """Return each weight's shape, count and share as HTML."""
    if not parameters:
        return '<p class="empty">Not given.</p>'
    total = sum(row[2] for row in parameters)
    decayed = sum(row[2] for row in parameters if row[3])
    head = "".join(f'<th class="number">{name}</th>' for name in _NUMBERS)
    sums = _number_cells("", count(len(parameters)), count(total), "100.0%")
    return (
        f'<p class="note">Weight decay acts on {count(decayed)} of {count(total)} parameters. '
        "Weights of the same name and shape in several layers share a row.</p>"
        f'<table class="weights"><thead><tr><th>Weight</th>{head}<th class="share-bar"></th><th>Decays</th></tr>'
        f"</thead><tbody>{''.join(_parameter_row(*row, total) for row in grouped(parameters))}</tbody>"
        f'<tfoot><tr><th>Total</th>{sums}<td class="share-bar"></td><td></td></tr></tfoot></table>'
    )


def grouped(parameters: Iterable[Parameter]) -> list[tuple[str, tuple[int, ...], int, int, bool]]:
    """Return rows (path, shape, arrays, parameters, decays) with weights alike but for a number in the path as one.

    The number in the path becomes its range, as in ``blocks.0-11.mlp.up``.
    """
    groups: dict[tuple, list[tuple[list[int], int]]] = {}
    for path, shape, n, decays in parameters:
        numbers = [int(digits) for digits in _INDEX.findall(path)]
        groups.setdefault((_INDEX.sub("\0", path), tuple(shape), decays), []).append((numbers, n))
    rows = []
    for (path, shape, decays), members in groups.items():
        for at in range(path.count("\0")):
            low, high = (choose(numbers[at] for numbers, _ in members) for choose in (min, max))
            path = path.replace("\0", str(low) if low == high else f"{low}-{high}", 1)
        rows.append((path, shape, len(members), sum(n for _, n in members), decays))
    return rows


def config_table(config: Config) -> str:
    """Return every setting that has an effect, with its value and unit, as HTML; those that differ are marked."""
    changed = settings.differences(config, Config())
    sections: dict[str, str] = {}
    for path, declared in settings.fields(Config):
        if not settings.has_effect(config, path):
            continue
        section = path.rpartition(".")[0] or "run"
        row = _setting_row(config, path, declared.metadata["setting"], changed)
        sections[section] = sections.get(section, "") + row
    tables = (
        f"<section><h3>{section}</h3><table><tbody>{rows}</tbody></table></section>"
        for section, rows in sections.items()
    )
    return (
        '<p class="note">Marked: settings that differ from the defaults. Settings without effect are left out.</p>'
        f'<div class="settings">{"".join(tables)}</div>'
    )


def environment_table(environment: Mapping[str, Any] | None) -> str:
    """Return versions and device as HTML; nested names are joined by dots."""
    if not environment:
        return '<p class="empty">Not recorded.</p>'
    known = ((name, value) for name, value in leaves(environment) if value not in ("", None))
    rows = (f"<tr><th>{safe(name)}</th><td><code>{safe(_text(value))}</code></td></tr>" for name, value in known)
    return f'<table class="about"><tbody>{"".join(rows)}</tbody></table>'


_NUMBERS = ("Shape", "Arrays", "Parameters", "Share")  # columns of the table of parameters
_INDEX = re.compile(r"(?<![^./])\d+(?![^./])")  # a number that is a whole part of a path

# Whether a value is the one that a run fills in for a 0, as far as the config can tell.
_FILLED_IN: dict[str, Callable[[Config], bool]] = {
    "model.vocab_size": lambda config: (
        config.tokenizer.kind != "bpe"
        or bool(config.tokenizer.file)
        or config.model.vocab_size <= config.tokenizer.vocab_size
    ),
    "train.norms_every_steps": lambda config: config.train.norms_every_steps == max(1, config.train.steps // 100),
    "evaluate.every_steps": lambda config: config.evaluate.every_steps == max(1, config.train.steps // 10),
    "sample.every_steps": lambda config: config.sample.every_steps == config.evaluate.every_steps,
    "checkpoint.every_steps": lambda config: config.checkpoint.every_steps == config.evaluate.every_steps,
}


def _parameter_row(path: str, shape: Sequence[int], arrays: int, n: int, decays: bool, total: int) -> str:
    share = n / total if total else 0.0
    cells = _number_cells(TIMES.join(map(str, shape)) or "scalar", count(arrays), count(n), f"{share:.1%}")
    bar = f'<td class="share-bar"><span class="bar" style="width:{100 * share:.1f}px"></span></td>'
    return (
        f"<tr><th><code>{safe(path)}</code></th>{cells}{bar}<td data-label=decays>{'yes' if decays else 'no'}</td></tr>"
    )


def _number_cells(*numbers: str) -> str:
    """Return a row's numbers, each with the name that it has where the page is too narrow for columns."""
    named = zip(_NUMBERS, numbers, strict=True)
    return "".join(f'<td class="number" data-label="{name.lower()}">{number}</td>' for name, number in named)


def _setting_row(config: Config, path: str, declared: settings.Setting, changed: Mapping[str, tuple[Any, Any]]) -> str:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    differs, remark = path in changed, ""
    if differs and _is_derived(config, path, value):
        differs, remark = False, '<span class="default">derived</span>'
    elif differs:
        # Where the default of 0 stands for a rule, the rule is worth more than the 0.
        rule = "" if changed[path][1] else declared.help.partition("0: ")[2].partition(";")[0]
        remark = f'<span class="default">default: {safe(rule) or safe(shown(changed[path][1]))}</span>'
    unit = f' <span class="unit">{_unit(declared.unit, value)}</span>' if declared.unit else ""
    return (
        f'<tr{" class=changed" if differs else ""} title="{safe(declared.help)}"><th><code>{part}</code></th>'
        f'<td><span class="value">{safe(shown(value))}</span>{unit}{remark}</td></tr>'
    )


def _is_derived(config: Config, path: str, value: Any) -> bool:
    """Return whether ``value`` is what the other settings give where this one is left at its default of 0."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    if rule := _FILLED_IN.get(path):
        return rule(config)
    with contextlib.suppress(RungError):
        return not settings.differences(settings.resolve(settings.override(config, {path: 0})), config)
    return False


def _unit(unit: str, value: Any) -> str:
    return unit.removesuffix("s") if value == 1 else unit


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
