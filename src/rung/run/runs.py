"""The runs in a folder: how each stands, quickly, whatever state it is in."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung import config as settings
from rung.errors import RungError
from rung.report.standing import Standing, read_standing
from rung.run.folder import CONFIG, ENVIRONMENT, LINEAGE, LOCK, METRICS, WEIGHTS

RUNS = "runs"


@dataclass(frozen=True)
class RunState:
    """How one run stands.

    Attributes:
        run: its folder.
        state: ``starting``, ``training`` (a process is at it), ``done``, ``stopped`` (by a signal or a time limit),
            ``interrupted`` (its process was ended), ``diverged``, ``untrained`` (no step was done), or ``damaged``.
        steps, total_steps: done, and of the whole run; ``total_steps`` is ``None`` where the config cannot be read.
        tokens: target tokens trained on.
        seconds: of training.
        train_loss: mean of the last steps, nats per token.
        validation_loss, bits_per_byte, best_step: of the best validation; ``None`` where there was none.
        parent: the run whose weights it began with, as ``lineage.json`` has it, with the step; or ``None``.
        active: when it last wrote, in seconds since 1970.
        reason: why it ended, or what is wrong with it.
    """

    run: str
    state: str
    steps: int
    total_steps: int | None
    tokens: int
    seconds: float
    train_loss: float | None
    validation_loss: float | None
    bits_per_byte: float | None
    best_step: int | None
    parent: str | None
    active: float
    reason: str | None


def runs(folders: str | Path | Sequence[str | Path] = (RUNS,)) -> list[RunState]:
    """Return how the runs in some folders stand, the last active first. None of them is changed.

    Args:
        folders: each a run, or a folder of runs. ``runs`` may be missing.

    Raises:
        RungError: a folder that is not there, or is no folder.
    """
    named = [Path(folder) for folder in ([folders] if isinstance(folders, str | Path) else folders)]
    found: dict[Path, Path] = {}
    for folder in named:
        if not folder.is_dir() and not (str(folder) == RUNS and not folder.exists()):
            what = "is no folder" if folder.exists() else "is not there"
            raise RungError(f"{folder} {what}", "name a run, or a folder of runs, such as runs")
        for run in [folder] if _is_run(folder) else sorted(folder.glob("*/")):
            if _is_run(run):
                found.setdefault(run.resolve(), run)
    return sorted((look(run) for run in found.values()), key=lambda state: (-state.active, state.run))


def look(run: Path) -> RunState:
    """Return how one run stands, be it damaged in whatever way."""
    problems: list[str] = []
    config = _config(run, problems)
    standing = _standing(run, problems)
    state, reason = _state(run, config, standing)
    if problems:
        state, reason = "training" if state == "training" else "damaged", "; ".join(problems)
    best = standing.best
    return RunState(
        run=str(run),
        state=state,
        steps=standing.step,
        total_steps=config.train.steps if config else None,
        tokens=standing.tokens,
        seconds=standing.seconds,
        train_loss=standing.train_loss,
        validation_loss=best.loss if best else None,
        bits_per_byte=best.bits_per_byte if best else None,
        best_step=best.step if best else None,
        parent=_parent(run),
        active=_active(run),
        reason=reason,
    )


def is_held(run: Path) -> bool:
    """Return whether a process trains in the folder, without getting in the way of one that is about to."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: nothing is held
        return False
    try:
        with open(run / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run, whole or not. One with a hidden name is still being made."""
    named = not folder.name.startswith(".") or folder.name in ("", ".", "..")
    return named and any((folder / name).exists() for name in (CONFIG, ENVIRONMENT, METRICS))


def _config(run: Path, problems: list[str]) -> settings.Config | None:
    try:
        return settings.load(run / CONFIG)
    except RungError as error:
        problems.append(f"no {CONFIG}" if not (run / CONFIG).exists() else error.problem)
    except OSError as error:
        problems.append(f"{CONFIG}: {error.strerror}")
    return None


def _standing(run: Path, problems: list[str]) -> Standing:
    try:
        return read_standing(run / METRICS, _best_step(run))
    except (OSError, ValueError) as error:
        problems.append(f"{METRICS}: {getattr(error, 'strerror', None) or error}")
    return Standing()


def _best_step(run: Path) -> int | None:
    """Return the step of the best validation, which is that of the weights in ``model.safetensors``."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(run / WEIGHTS, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {}).get("rung", "{}"))
        return int(metadata["step"]) if "validation_loss" in metadata else None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None


def _state(run: Path, config: settings.Config | None, standing: Standing) -> tuple[str, str | None]:
    if is_held(run):
        return ("training" if standing.step else "starting"), None
    if standing.finished == "done" and (config is None or standing.step >= config.train.steps):
        return "done", None
    if standing.finished is not None:
        return "stopped", standing.finished
    if config is not None and standing.skipped_in_a_row >= config.train.max_skipped:
        return "diverged", f"{standing.skipped_in_a_row} updates in a row were not finite"
    return ("interrupted" if standing.step else "untrained"), None


def _parent(run: Path) -> str | None:
    try:
        lineage: Any = json.loads((run / LINEAGE).read_text(encoding="utf-8"))
        return f"{Path(lineage['run']).name}@{lineage['step']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _active(run: Path) -> float:
    for path in (run / METRICS, run / CONFIG, run):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return -math.inf
