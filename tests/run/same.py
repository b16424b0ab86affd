"""What two runs have to agree in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from rung.report.metrics import read_metrics


def state(run: Path, step: int) -> dict[str, Any]:
    """Return a checkpoint's arrays by path, read by the library alone."""
    return load_file(run / "checkpoints" / str(step) / "state.safetensors")


def same_state(one: Path, two: Path, step: int) -> bool:
    """Return whether two runs' checkpoints hold the same bits."""
    first, second = state(one, step), state(two, step)
    return first.keys() == second.keys() and all(first[k].tobytes() == second[k].tobytes() for k in first)


def same_weights(one: Path, two: Path) -> bool:
    """Return whether two runs' ``model.safetensors`` hold the same bits."""
    first, second = (load_file(run / "model.safetensors") for run in (one, two))
    return first.keys() == second.keys() and all(first[k].tobytes() == second[k].tobytes() for k in first)


def told(run: Path) -> tuple[Any, Any]:
    """Return what a run's log tells but for times: the steps, and the validations."""
    log = read_metrics(run / "metrics.jsonl")
    assert log.problems == []
    names = ("step", "tokens", "loss", "learning_rate", "gradient_norm", "epoch")
    steps = list(zip(*(log.steps[name].tolist() for name in names), strict=True))
    return steps, [(one.step, one.tokens, one.loss, one.is_best) for one in log.evaluations]
