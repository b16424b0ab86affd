"""Rung: language models from scratch in JAX, from any text to a trained model and generated text.

The verbs of the command line, as functions::

    import rung

    result = rung.train(["my-novel.txt"])                       # tokenizer, tokens, preset, training
    for completion in rung.generate(result["run"], "Once upon"):
        print(completion.text)
    print(rung.evaluate(result["run"]).bits_per_byte)

``rung.preset(name)`` is a config, ``rung.override(config, {"model.d_model": 256})`` changes it, ``rung.Run(folder)``
opens a run: its config, tokenizer, model and weights. A user's mistake raises ``rung.RungError``.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from rung.errors import RungError

if TYPE_CHECKING:
    from rung.config import Config, GenerateConfig, override, preset, preset_names
    from rung.model import Decoder
    from rung.run.compare import compare
    from rung.run.demo import demo
    from rung.run.folder import Run
    from rung.run.replay import replay
    from rung.run.resuming import resume
    from rung.run.runs import runs
    from rung.run.train import train
    from rung.run.use import evaluate, generate
    from rung.tokens.store import TokenStore
    from rung.tokens.tokenizer import Tokenizer

__version__ = "0.1.0"

# Each name is imported when it is first asked for, so that `import rung` and `rung --help` cost nothing.
_HOMES = {
    "Config": "config",
    "GenerateConfig": "config",
    "override": "config",
    "preset": "config",
    "preset_names": "config",
    "Decoder": "model",
    "Run": "run.folder",
    "TokenStore": "tokens.store",
    "Tokenizer": "tokens.tokenizer",
    "demo": "run.demo",
    "train": "run.train",
    "replay": "run.replay",
    "resume": "run.resuming",
    "compare": "run.compare",
    "runs": "run.runs",
    "evaluate": "run.use",
    "generate": "run.use",
}

__all__ = [
    "Config",
    "Decoder",
    "GenerateConfig",
    "Run",
    "RungError",
    "TokenStore",
    "Tokenizer",
    "compare",
    "demo",
    "evaluate",
    "generate",
    "override",
    "preset",
    "preset_names",
    "replay",
    "resume",
    "runs",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"rung.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'rung' has no attribute {name!r}")


class _Package(types.ModuleType):
    """Keeps ``rung.train``, ``rung.evaluate`` and ``rung.demo`` the verbs.

    Rooms have these names too, and Python would put a room in the verb's place when it is imported. The rooms are there
    for ``from rung.train import ...``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)
