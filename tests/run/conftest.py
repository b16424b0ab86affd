"""A tiny text, and runs of a tiny model on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.config import Config, override
from rung.run.train import train

EMMA = Path(__file__).parents[2] / "src/rung/demo/austen/emma.txt"

TINY = {
    "model.d_model": 32,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "model.context_length": 32,
    "tokenizer.kind": "byte",
    "train.batch_size": 4,
    "train.steps": 12,
    "evaluate.every_steps": 4,
    "checkpoint.every_steps": 4,
    "sample.max_tokens": 0,
}


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "emma.txt"
    path.write_bytes(EMMA.read_bytes()[:6000])
    return path


@pytest.fixture(scope="session")
def tiny() -> Config:
    return override(Config(), TINY)


@pytest.fixture(scope="session")
def train_tiny(text, tiny) -> Callable[..., dict[str, Any]]:
    """Train the tiny model in a folder: ``train_tiny(folder, {path: value}, ...)``."""

    def run(folder: Path, changes: dict[str, Any] | None = None, **rest: Any) -> dict[str, Any]:
        return train(
            rest.pop("sources", [text]), tiny, changes, run=folder, say=rest.pop("say", lambda line: None), **rest
        )

    return run


@pytest.fixture(scope="session")
def undisturbed(train_tiny, tmp_path_factory) -> dict[str, Any]:
    """The result of a run that nothing happened to; its folder is only to be read."""
    return train_tiny(tmp_path_factory.mktemp("runs") / "undisturbed")
