"""Our side of a benchmark: a model trained in rounds, on request, with the protocol of ``peer_torch.py --rounds``.

It is a preset on a text, or any config on random tokens, where only speed counts. Everything that a run does for a step
is in the time: the batch is read, placed and prefetched as ``rung train`` does it, and each step's metrics are read
while the next one runs.
"""

from __future__ import annotations

from rung.host import begin_peak, keep_freed_memory, resident_bytes

keep_freed_memory()  # as the command line does, before anything starts a thread

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rung import config as settings
from rung.cli.flags import add_settings, given_settings
from rung.mesh import make_mesh
from rung.model import Decoder
from rung.model.weights import parameter_count
from rung.run.prepare import prepare
from rung.tokens.batches import Batches, validation_batches
from rung.tokens.mapped import Tokens
from rung.train import events
from rung.train.checkpoint import Progress
from rung.train.loop import Intervals, Loop
from rung.train.optimizer import make_optimizer
from rung.train.schedule import rate_factor
from rung.train.step import initial_state, make_step, place


class Ours:
    """A training run that advances when it is told to.

    Args:
        config: resolved, with its vocabulary and its number of steps.
        splits: ``train`` and, to validate, ``validation``.
        token_bytes: bytes of text of each token, for bits per byte.
    """

    def __init__(self, config: settings.Config, splits: dict[str, Tokens], token_bytes: np.ndarray | None = None):
        self.config, self.splits, self.token_bytes = config, splits, token_bytes
        self.mesh = make_mesh(config.mesh)
        self.model = Decoder.of(config)
        optimizer = make_optimizer(self.model.weights(), config.train)
        self.tokens_per_step = config.train.batch_size * config.model.context_length
        factor = rate_factor(config.train, config.train.steps, self.tokens_per_step)
        self.state = initial_state(self.model, optimizer, config.train.seed, self.mesh)
        self.step = make_step(self.model, optimizer, factor, config.train, self.mesh)
        self.batches = Batches(
            splits["train"],
            context_length=config.model.context_length,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            windows=config.data.windows,
            segments=self._segments("train"),
        )
        self.progress = Progress()
        self.loss = float("nan")

    def train(self, steps: int) -> float:
        """Train ``steps`` more steps through the training loop; returns the seconds they took."""
        begun = time.perf_counter()
        loop = Loop(
            step=self.step,
            batch=lambda step: place(self.batches(step), self.mesh),
            steps=self.progress.step + steps,
            learning_rate=self.config.train.learning_rate,
            flops_per_token=0.0,
            intervals=Intervals(),
            emit=self._hear,
        )
        self.state, self.progress, _ = loop.run(self.state, self.progress)
        return time.perf_counter() - begun

    def validate(self) -> tuple[float, int, float | None]:
        """Return loss, targets and bits per byte over the whole validation split."""
        from rung.evaluate.held_out import compiled_loss, held_out_loss

        result = held_out_loss(
            compiled_loss(self.model),
            self.state["weights"],
            validation_batches(
                self.splits["validation"],
                context_length=self.config.model.context_length,
                batch_size=self.config.evaluate.batch_size,
                segments=self._segments("validation"),
            ),
            self.token_bytes,
        )
        return result.loss, result.targets, result.bits_per_byte

    def _segments(self, split: str) -> bool:
        return not self.config.data.cross_documents and len(self.splits[split].document_starts) > 1

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.StepDone):
            self.loss = event.loss


def on_text(sources: list[str], preset: str, changes: dict[str, Any], folder: Path) -> Ours:
    """Return a preset's run on texts, whose tokenizer and tokens are made in ``folder``."""
    prepared = prepare(sources, settings.preset(preset), changes, folder, lambda line: None)
    splits = {name: prepared.store.split(name) for name in prepared.store.splits}
    return Ours(prepared.config, splits, prepared.tokenizer.token_bytes)


def on_random_tokens(count: int, preset: str | None, changes: dict[str, Any]) -> Ours:
    """Return a run of a config on ``count`` random tokens of its vocabulary, ``model.vocab_size``."""
    base = settings.preset(preset) if preset else settings.Config()
    config = settings.resolve(settings.adapt(base, {"train.steps": 1_000_000, **changes})[0])
    tokens = np.random.default_rng(config.train.seed).integers(config.model.vocab_size, size=count, dtype=np.uint16)
    return Ours(config, {"train": Tokens([tokens], np.zeros(1, np.int64))})


def main() -> None:
    """Answer each line of standard input with one line of JSON: ``go STEPS``, ``validate``, ``memory``."""
    imported = begin_peak()
    parser = argparse.ArgumentParser(description="Train a model in rounds, to be timed in turns with a peer.")
    parser.add_argument("sources", nargs="*")
    parser.add_argument("--preset")
    parser.add_argument("--random-tokens", type=int, default=0, help="so many random tokens instead of a text")
    add_settings(parser)
    parsed = parser.parse_args()
    if bool(parsed.sources) == bool(parsed.random_tokens):
        parser.error("name texts, or give --random-tokens")
    with tempfile.TemporaryDirectory() as folder:
        if parsed.random_tokens:
            ours = on_random_tokens(parsed.random_tokens, parsed.preset, given_settings(parsed))
        else:
            ours = on_text(parsed.sources, parsed.preset, given_settings(parsed), Path(folder))
        serve_rounds(ours, imported)


def serve_rounds(ours: Ours, imported: int) -> None:
    """Answer each line of standard input; ``imported`` is the resident memory before there was a model."""
    total = 0.0
    for line in sys.stdin:
        words = line.split()
        if not words:
            break
        if words[0] == "go":
            seconds = ours.train(int(words[1]))
            total += seconds
            tokens = int(words[1]) * ours.tokens_per_step
            answer = {
                "step": ours.progress.step,
                "seconds": seconds,
                "tokens": tokens,
                "loss": ours.loss,
                "tokens_per_second": tokens / seconds,
                "total_seconds": total,
                "flops_per_token": ours.model.flops_per_token(),
                "parameters": parameter_count(ours.model.weights()),
            }
        elif words[0] == "validate":
            loss, targets, bits = ours.validate()
            answer = {
                "step": ours.progress.step,
                "validation_loss": loss,
                "validation_targets": targets,
                "bits_per_byte": bits,
            }
        elif words[0] == "memory":
            answer = {"peak_bytes": resident_bytes("VmHWM") - imported, "imported_bytes": imported}
        else:
            sys.exit(f"expected 'go STEPS', 'validate' or 'memory', not {line!r}")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
