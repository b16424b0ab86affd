"""``compare``: several runs side by side, as a page, a picture and JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rung import config as settings
from rung.disk import whole_file
from rung.errors import RungError
from rung.model import Decoder
from rung.model.weights import parameter_count
from rung.report.comparison import Compared, Comparison, lines
from rung.report.comparison_page import page, picture
from rung.report.html import is_page, read_run
from rung.run.folder import CONFIG, DATA, Run
from rung.run.prepare import Say
from rung.run.runs import RUNS, look

HTML, PICTURE, NUMBERS = "comparison.html", "comparison.png", "comparison.json"


def compare(runs: Sequence[str | Path], out: str | Path = "comparison", *, say: Say | None = None) -> dict[str, Any]:
    """Compare two runs or more, finished or not: curves, settings that differ, and what each came to.

    Args:
        runs: run folders, or their names under ``runs/``. Of a folder that is no run it is said that it is left out,
            and so of a run that is named twice.
        out: a folder for the page, the picture and the numbers; a comparison that is there is replaced.
        say: told what is left out; ``None``: standard error.

    Returns:
        ``html``, ``png``, ``json`` (paths), ``runs`` (what each came to), ``differences`` (by setting, the value in
        each), ``notes`` (what has to be known before numbers are compared), ``table`` (lines for a terminal).

    Raises:
        RungError: a run that is not there or whose config cannot be read, fewer than two runs, or ``out`` is taken.
    """
    found = _found([str(run) for run in runs], say or _to_standard_error)
    if len(found) < 2:
        raise RungError(
            f"{'one run' if found else 'no run'} to compare", "name two runs or more: rung compare runs/one runs/two"
        )
    folder = Path(out)
    _check_free(folder)
    comparison = Comparison([_read(path, label) for path, label in zip(found, _labels(found), strict=True)])
    folder.mkdir(parents=True, exist_ok=True)
    result = _numbers(comparison)
    with whole_file(folder / HTML) as file:
        file.write(page(comparison).encode("utf-8", errors="backslashreplace"))
    picture(comparison, folder / PICTURE)
    with whole_file(folder / NUMBERS) as file:  # last: it marks the folder as a comparison
        whole = {**result, "curves": {one.label: _curves(one) for one in comparison.runs}}
        file.write(json.dumps(_finite(whole), allow_nan=False).encode("ascii") + b"\n")
    places = {"html": str(folder / HTML), "png": str(folder / PICTURE), "json": str(folder / NUMBERS)}
    return {**places, **result, "table": lines(comparison)}


def _found(names: Sequence[str], say: Say) -> list[Path]:
    """Return the folders of the runs named, each once."""
    found: dict[Path, Path] = {}
    for name in names:
        path = Path(name) if Path(name).exists() or len(Path(name).parts) > 1 else Path(RUNS) / name
        if path.exists() and not (path / CONFIG).is_file():
            say(f"{path} is left out: it is no run")
            continue
        if path.resolve() in found:
            say(f"{path} is left out: it is named already")
            continue
        found[path.resolve()] = Run(path).path
    return list(found.values())


def _labels(paths: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its last part, or as many parts as it takes to tell it from the others."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise AssertionError("two paths are the same")


def _read(path: Path, label: str) -> Compared:
    run = read_run(path)
    model = settings.resolve(run.config).model
    data = _json(path / DATA)
    return Compared(
        label=label,
        path=str(path),
        run=run,
        state=look(path).state,
        parameters=parameter_count(Decoder(model).weights()),
        tokenizer=data.get("tokenizer"),
        held_out=_held_out(path, data),
    )


def _held_out(path: Path, data: dict[str, Any]) -> str | None:
    """Return what identifies the text that a run is validated on, whatever its tokenizer; ``None``: unknown."""
    try:
        info = _json(Path(os.path.normpath(path / data["store"])) / "dataset.json")
        sources = [[entry["sha256"] for entry in info[key]] for key in ("sources", "validation_sources")]
        kept = {name: value for name, value in info["data"].items() if name != "validation"}
        validation = info["splits"].get("validation", {}).get("text_bytes")
        return json.dumps([*sources, kept, validation], sort_keys=True)
    except (KeyError, TypeError, AttributeError):
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _check_free(folder: Path) -> None:
    made = {"runs", "losses_compare", "curves"} <= _json(folder / NUMBERS).keys()
    if (html := folder / HTML).exists() and not is_page(html):
        raise RungError(f"{html} is not a page of Rung's, so it is not overwritten", "choose another place with --out")
    if folder.is_dir() and any(folder.iterdir()) and not made:
        raise RungError(f"{folder} has files in it and is no comparison", "choose another place with --out")
    if folder.exists() and not folder.is_dir():
        raise RungError(f"{folder} is no folder", "choose another place with --out")


def _numbers(comparison: Comparison) -> dict[str, Any]:
    return {
        "runs": [one.facts for one in comparison.runs],
        "differences": comparison.differences,
        "surroundings": comparison.surroundings,
        "losses_compare": comparison.losses_compare,
        "notes": comparison.notes,
    }


def _curves(one: Compared) -> dict[str, Any]:
    """Return the curves of a run, thinned as they are drawn."""
    return {
        name: {
            "steps": curve.steps.tolist(),
            "tokens": curve.tokens.tolist(),
            "seconds": curve.across("seconds").tolist(),
            "values": curve.values.tolist(),
        }
        for name, curve in one.curves.items()
    }


def _to_standard_error(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _finite(value: Any) -> Any:
    """Return a value as JSON has it, which knows no number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
