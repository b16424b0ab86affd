"""Train many tiny steps as `rung train` does on a terminal, and write how much memory the process has in between.

    python memory.py STEPS EVERY FOLDER > readings

Each line of standard output is a step and the resident bytes after it. Standard error has to be a terminal, so that
the live view is drawn.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

from rung.host import keep_freed_memory


def main() -> None:
    """Train, and read."""
    keep_freed_memory()  # as the command line does, before anything starts a thread
    import psutil

    import rung
    import rung.run.training as training
    from rung.report.metrics import MetricsLog
    from rung.train.events import StepDone

    steps, every, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    process = psutil.Process()

    class Reading(MetricsLog):
        def __call__(self, event: Any) -> None:
            super().__call__(event)
            if isinstance(event, StepDone) and event.step % every == 0:
                gc.collect()
                print(event.step, process.memory_info().rss, flush=True)

    training.MetricsLog = Reading  # type: ignore[misc]
    text = folder / "text.txt"
    text.write_bytes((Path(rung.__file__).parent / "demo/austen/emma.txt").read_bytes()[:20_000])
    changes = {
        "model.d_model": 16,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "model.d_ff": 16,
        "model.context_length": 8,
        "tokenizer.kind": "byte",
        "train.batch_size": 1,
        "train.steps": steps,
        "train.norms_every_steps": 100,
        "train.spike_threshold": 3.0,
        "evaluate.every_steps": 2000,
        "evaluate.batch_size": 256,
        "sample.every_steps": 2000,
        "sample.max_tokens": 4,
        "checkpoint.every_steps": 300,
        "track.hardware_every_seconds": 0.2,
    }
    rung.train([text], rung.Config(), changes, run=folder / "run")


if __name__ == "__main__":
    main()
