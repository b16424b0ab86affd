"""The live view of a run on a terminal, plain lines elsewhere, and progress bars for long preparation."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rung.report.words import count, decimal, duration, excerpt, plural, short
from rung.train.events import Evaluated, Event, Finished, Note, Sampled, Saved, Skipped, StepDone

REFRESHES_PER_SECOND = 4
LONG_SECONDS = 2.0  # work shorter than this has no bar
SMOOTHING = 0.98  # weight of the past in the loss shown: some fifty steps
COMPILING = "compiling the first step ..."
INDENT = " " * 4  # before the text of a sample, whose first two lines are shown; the log has all of it

OnProgress = Callable[[int, "int | None"], None]


class Progress:
    """A listener that shows a run on standard error.

    Within ``with``, on a terminal: two live lines, redrawn a few times a second from the newest event, with what
    happens scrolling by above them. Else plain lines: every tenth of the run, and whatever happens.
    A terminal that goes away stops no run.

    Args:
        total_steps: of the whole run, so that a resumed one begins in the middle.
        stream: where to write; by default standard error.
    """

    def __init__(self, total_steps: int, stream: TextIO | None = None):
        self._total = total_steps
        self._stream = stream or sys.stderr
        self._live: Any = None
        self._step: StepDone | None = None
        self._first: StepDone | None = None
        self._validation: Evaluated | None = None
        self._loss_sum = self._loss_weight = 0.0

    def __enter__(self) -> Progress:
        if is_live(self._stream):
            from rich.console import Console
            from rich.live import Live

            # Standard output is left alone: the command's result goes there.
            self._live = Live(
                get_renderable=self._view,
                console=Console(file=self._stream),
                refresh_per_second=REFRESHES_PER_SECOND,
                redirect_stdout=False,
                transient=True,
            )
            self._live.start(refresh=True)
        else:
            self._say(COMPILING)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            live, self._live = self._live, None
            with contextlib.suppress(OSError, ValueError):
                live.stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._on_step(event)
        elif isinstance(event, Evaluated):
            self._validation = event
            best = "  (best so far)" if event.is_best else ""
            self._say(f"validation at step {count(event.step)}: {_scores(event)}{best}")
        elif isinstance(event, Sampled):
            lines = excerpt(event.prompt + event.text) or ["(empty)"]
            self._say("\n".join([f"sample at step {count(event.step)}:", *(INDENT + line for line in lines)]))
        elif isinstance(event, Skipped):
            self._say(f"step {count(event.step)} skipped, {event.in_a_row} in a row: {event.reason}")
        elif isinstance(event, Note):
            self._say(f"step {count(event.step)}: {event.text}")
        elif isinstance(event, Finished):
            amount = f"{plural(event.step, 'step')}, {plural(event.tokens, 'token')}, {duration(event.seconds)}"
            self._say(f"{event.reason}: {amount}")
        else:
            assert isinstance(event, Saved)  # a routine matter: the log has it

    def _on_step(self, event: StepDone) -> None:
        before = self._step
        self._step = event
        self._first = self._first or event
        if math.isfinite(event.loss):
            self._loss_sum = SMOOTHING * self._loss_sum + (1 - SMOOTHING) * event.loss
            self._loss_weight = SMOOTHING * self._loss_weight + (1 - SMOOTHING)
        if not self._live and (before is None or self._done(before, 10) != self._done(event, 10)):
            self._say(self._line(event))

    def _line(self, event: StepDone) -> str:
        place = f"step {count(event.step)}/{count(self._total)}  {self._done(event, 100)}%"
        return "  ".join([place, *self._readings(event)])

    def _readings(self, event: StepDone) -> list[str]:
        """Return what is measured now, each with its name, the most wanted first."""
        loss = self._loss_sum / self._loss_weight if self._loss_weight else math.nan
        readings = [f"loss {decimal(loss)}"]
        if self._validation:
            readings.append(f"last validation {decimal(self._validation.loss)}")
        readings.append(f"{short(event.tokens_per_second)} tokens/s")
        if (left := self._seconds_left(event)) is not None:
            readings.append(f"{duration(left)} left")
        readings.append(f"learning rate {event.learning_rate:.2e}")
        readings.append(f"gradient norm {decimal(event.gradient_norm, 2)}")
        return readings

    def _done(self, event: StepDone, parts: int) -> int:
        """Return how many whole ``parts`` of the run are done: never more than there are, and none before its time."""
        return min(parts, parts * event.step // max(1, self._total))

    def _seconds_left(self, event: StepDone) -> float | None:
        # Counted from the first step on, which compiles and says nothing about the pace.
        assert self._first
        steps = event.step - self._first.step
        if not steps or event.step >= self._total:
            return None
        return (event.seconds - self._first.seconds) / steps * (self._total - event.step)

    def _view(self) -> Any:
        """Return the two live lines as a rich renderable; runs in rich's own thread."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        event = self._step
        if event is None:
            return Text(COMPILING, style="dim")
        heading = Table.grid(padding=(0, 2))
        heading.add_row(
            Text(f"step {count(event.step)}/{count(self._total)}", no_wrap=True),
            ProgressBar(total=max(1, self._total), completed=event.step, width=24),
            Text(f"{self._done(event, 1000) / 10:.1f}%", no_wrap=True),
        )
        lines = Table.grid()
        lines.add_row(heading)
        lines.add_row(Text("  ".join(self._readings(event)), no_wrap=True, overflow="ellipsis"))
        return lines

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody is there to read it any more
            if self._live:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=self._stream, flush=True)


@contextlib.contextmanager
def track(total: int | None, description: str, stream: TextIO | None = None) -> Iterator[OnProgress]:
    """Give a callback ``on_progress(done, total)`` that draws a bar of bytes once the work has taken two seconds.

    Nothing is drawn where ``stream`` (default: standard error) is no terminal.

    Args:
        total: bytes to do; None where that is not known.
        description: what is being done.
    """
    stream = stream or sys.stderr
    bar = _Bar(total, description, stream)
    try:
        yield bar.update if is_live(stream) else _nothing
    finally:
        bar.close()


def is_live(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal that lines can be redrawn on."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class _Bar:
    def __init__(self, total: int | None, description: str, stream: TextIO):
        self._total, self._description, self._stream = total, description, stream
        self._began = time.monotonic()
        self._progress: Any = None

    def update(self, done: int, total: int | None = None) -> None:
        if self._progress is None:
            if time.monotonic() - self._began < LONG_SECONDS:
                return
            self._start()
        self._progress.update(self._task, completed=done, total=self._total if total is None else total)

    def close(self) -> None:
        if self._progress:
            with contextlib.suppress(OSError, ValueError):
                self._progress.stop()

    def _start(self) -> None:
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        self._progress = progress.Progress(*columns, console=Console(file=self._stream), transient=True)
        self._task = self._progress.add_task(self._description, total=self._total)
        self._progress.start()


def _nothing(done: int, total: int | None = None) -> None:
    pass


def _scores(event: Evaluated) -> str:
    parts = [f"loss {decimal(event.loss)}", f"perplexity {decimal(event.perplexity, 2)}"]
    if event.bits_per_byte is not None:
        parts.append(f"bits per byte {decimal(event.bits_per_byte)}")
    return "  ".join(parts)
