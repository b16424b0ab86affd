"""A trained run in use: text that it writes, its loss on text, its probabilities."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rung.config import Config, DataConfig, GenerateConfig, override
from rung.corpus import sources as corpus_sources
from rung.decode.text import Completion, complete
from rung.errors import RungError
from rung.evaluate.held_out import HeldOut, compiled_loss, held_out_loss
from rung.report.progress import OnProgress, track
from rung.run.folder import Run
from rung.run.validation import over_split
from rung.tokens.batches import IGNORED
from rung.tokens.mapped import Tokens
from rung.tokens.mixture import Store
from rung.tokens.store import build_store


def generate(run: Run | str | Path, prompt: str, settings: GenerateConfig | None = None) -> list[Completion]:
    """Return the continuations of ``prompt``, one a sample.

    Args:
        run: a run or its folder.
        prompt: the text to continue; empty begins a document.
        settings: how to draw.
    """
    run = _opened(run)
    return complete(run.generator, run.tokenizer, prompt, settings or GenerateConfig())


def evaluate(
    run: Run | str | Path,
    sources: str | Path | Sequence[str | Path] = (),
    split: str = "validation",
    reading: Mapping[str, Any] | None = None,
) -> HeldOut:
    """Return the loss of a run's weights over a split of its store, or over other text.

    Every target counts once, and the average is over tokens.

    Args:
        run: a run or its folder.
        sources: text to evaluate on instead of the run's own.
        split: of the run's store.
        reading: how the text is read, as ``{"data.format": "jsonl"}``, where it is not as the run's own; its format
            is told by its name, whatever the run's own was.

    Raises:
        RungError: no such split; text that is too short, or that the run's tokenizer cannot spell.
    """
    run = _opened(run)
    if not sources:
        return _evaluated(run, run.store, split)
    if isinstance(sources, str | Path):
        sources = [sources]
    files = corpus_sources.resolve(sources)
    with tempfile.TemporaryDirectory(prefix="rung-evaluate-") as folder:
        with track(sum(file.size for file in files), "tokenizing") as on_progress:
            tokens = Path(folder) / "tokens"
            data = _whole(run.config, reading or {})
            store = build_store(files, run.tokenizer, tokens, data, on_progress=on_progress)
        return _evaluated(run, store, "train")


def _evaluated(run: Run, store: Store, split: str) -> HeldOut:
    config, loss = run.config, compiled_loss(run.model)

    def score(batches: Iterator[Any], tokens: Tokens) -> HeldOut:
        with track(tokens.text_bytes, "evaluating") as on_progress:
            seen = _watched(batches, tokens, on_progress)
            return held_out_loss(loss, run.weights, seen, run.tokenizer.token_bytes)

    return over_split(
        store,
        split,
        score,
        context_length=config.model.context_length,
        batch_size=config.evaluate.batch_size,
        cross_documents=config.data.cross_documents,
    )


def _watched(batches: Iterable[Any], tokens: Any, on_progress: OnProgress) -> Iterator[Any]:
    """Yield the batches, telling of the bytes of text that they come to, as far as one can say."""
    targets = 0
    for batch in batches:
        yield batch
        targets += int((batch["targets"] != IGNORED).sum())
        on_progress(tokens.text_bytes * targets // max(1, len(tokens) - 1), tokens.text_bytes)


def _whole(config: Config, reading: Mapping[str, Any]) -> DataConfig:
    """Return the data settings of a text that is evaluated whole: nothing of it held out."""
    whole = {"data.validation": (), "data.validation_fraction": 0.0, "data.format": "auto"}
    return override(config, {**whole, **reading}).data


def _opened(run: Run | str | Path) -> Run:
    if isinstance(run, Run):
        return run
    if not str(run):
        raise RungError("no run named", "name a run folder, such as runs/demo")
    return Run(run)
