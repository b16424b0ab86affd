"""The demo: the preset ``demo`` on the six novels that ship with Rung, one of them held out."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from rung import config as settings
from rung.config import GenerateConfig
from rung.run.folder import Run
from rung.run.prepare import Say
from rung.run.train import train
from rung.run.use import generate

PROMPT = "It is a truth universally acknowledged, that"


def demo(run: str | Path | None = None, steps: int | None = None, *, say: Say | None = None) -> dict[str, Any]:
    """Train the demo; returns what ``rung.train`` returns, with a ``sample``.

    A demo that was stopped early has no sample (``None``); ``rung.resume`` continues it.

    Args:
        run: the run folder; ``None``: ``runs/demo``, or the first of ``runs/demo-2``, ... that is free.
        steps: a length other than the preset's.
        say: as in ``rung.train``.
    """
    with resources.as_file(resources.files("rung.demo") / "austen") as novels:
        result = train(
            sorted(str(path) for path in novels.glob("*.txt")),
            settings.preset("demo"),
            {} if steps is None else {"train.steps": steps},
            run=run or _free(Path("runs")),
            say=say,
        )
    folder = Path(result["run"])
    sample = None
    if not result["stopped"]:
        sample = PROMPT + generate(Run(folder), PROMPT, GenerateConfig(max_tokens=160, temperature=0.8, seed=1))[0].text
    return {**result, "sample": sample}


def _free(runs: Path) -> Path:
    number, folder = 1, runs / "demo"
    while folder.exists():
        number += 1
        folder = runs / f"demo-{number}"
    return folder
