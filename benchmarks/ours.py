"""Our side of a benchmark: a preset trained in rounds, on request, with the protocol of ``peer_torch.py --rounds``.

Everything that a run does for a step is in the time: the batch is read, placed and prefetched as ``rung train`` does
it, and each step's metrics are read while the next one runs.
"""

from __future__ import annotations

from rung.host import keep_freed_memory

keep_freed_memory()  # as the command line does, before anything starts a thread

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rung import config as settings
from rung.cli.flags import add_settings, given_settings
from rung.mesh import make_mesh
from rung.model import Decoder
from rung.model.weights import parameter_count
from rung.run.prepare import prepare
from rung.tokens.batches import Batches, validation_batches
from rung.train import events
from rung.train.checkpoint import Progress
from rung.train.loop import Intervals, Loop
from rung.train.optimizer import make_optimizer
from rung.train.schedule import rate_factor
from rung.train.step import initial_state, make_step, place


class Ours:
    """A training run that advances when it is told to."""

    def __init__(self, sources: list[str], preset: str, changes: dict[str, Any], folder: Path):
        prepared = prepare(sources, settings.preset(preset), changes, folder, lambda line: None)
        self.config, self.store = prepared.config, prepared.store
        self.token_bytes = prepared.tokenizer.token_bytes
        config = self.config
        self.mesh = make_mesh(config.mesh)
        self.model = Decoder(config.model)
        optimizer = make_optimizer(self.model.weights(), config.train)
        self.tokens_per_step = config.train.batch_size * config.model.context_length
        factor = rate_factor(config.train, config.train.steps, self.tokens_per_step)
        self.state = initial_state(self.model, optimizer, config.train.seed, self.mesh)
        self.step = make_step(self.model, optimizer, factor, config.train, self.mesh)
        self.batches = Batches(
            self.store.split("train"),
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
                self.store.split("validation"),
                context_length=self.config.model.context_length,
                batch_size=self.config.evaluate.batch_size,
                segments=self._segments("validation"),
            ),
            self.token_bytes,
        )
        return result.loss, result.targets, result.bits_per_byte

    def _segments(self, split: str) -> bool:
        return not self.config.data.cross_documents and len(self.store.split(split).document_starts) > 1

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.StepDone):
            self.loss = event.loss


def main() -> None:
    """Answer each line of standard input with one line of JSON: ``go STEPS``, ``validate``."""
    parser = argparse.ArgumentParser(description="Train a preset in rounds, to be timed in turns with a peer.")
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--preset", required=True)
    add_settings(parser)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(parsed.sources, parsed.preset, given_settings(parsed), Path(folder))
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
                    "gflops": tokens / seconds * ours.model.flops_per_token() / 1e9,
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
            else:
                sys.exit(f"expected 'go STEPS' or 'validate', not {line!r}")
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
