"""The command line, called in this process; a run that was trained by it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rung.cli import main

EMMA = Path(__file__).parents[2] / "src/rung/demo/austen/emma.txt"

# A model that trains in a moment, in the flags that scripts use.
TINY = (
    *("--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2", "--model.d-ff", "64"),
    *("--model.context-length", "32", "--train.batch-size", "4", "--train.steps", "6", "--train.learning-rate", "1e-3"),
    *("--checkpoint.every-steps", "3", "--train.optimizer", "adamw", "--sample.max-tokens", "5"),
)


@dataclass(frozen=True)
class Done:
    """What a command came to."""

    status: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode("utf-8")

    @property
    def json(self) -> Any:
        """The last line of standard output."""
        return json.loads(self.out.splitlines()[-1])


def call(*words: object, stdin: bytes = b"") -> Done:
    """Run a command in this process, with standard streams of its own that know ASCII only until it says otherwise."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "ascii", newline="\n") for _ in range(2))
    old = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), "ascii")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main([str(word) for word in words])
            except SystemExit as leaving:
                status = leaving.code
    finally:
        sys.stdin = old
    for stream in (out, err):
        stream.flush()
    return Done(status, out.buffer.getvalue(), err.buffer.getvalue().decode("utf-8"))


@pytest.fixture(scope="session")
def rung() -> Callable[..., Done]:
    return call


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "emma.txt"
    path.write_bytes(EMMA.read_bytes()[:6000])
    return path


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    return TINY


@pytest.fixture(scope="session")
def trained(text, tmp_path_factory) -> tuple[str, Done]:
    """A run folder, only to be read, and what the command that made it said."""
    folder = str(tmp_path_factory.mktemp("runs") / "emma")
    done = call("train", text, *TINY, "--vocab-size", "300", "--run", folder, "--json")
    assert done.status == 0, done.err
    return folder, done


@pytest.fixture(scope="session")
def bpe(text, tmp_path_factory) -> str:
    """A tokenizer file."""
    path = tmp_path_factory.mktemp("tokenizer") / "bpe.json"
    done = call("tokenizer", "train", text, "--vocab-size", 300, "--out", path)
    assert done.status == 0, done.err
    return str(path)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
