"""The live view of a run on a terminal, plain lines elsewhere, and progress bars for long preparation."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rung.host import memory_size
from rung.report.words import count, decimal, duration, excerpt, listed, plural, short, visible
from rung.train.events import (
    Evaluated,
    Event,
    Finished,
    Hardware,
    Mixed,
    Note,
    Resumed,
    Sampled,
    SaveFailed,
    Skipped,
    Spiked,
    StepDone,
)

REFRESHES_PER_SECOND = 4
LONG_SECONDS = 2.0  # work shorter than this has no bar
SMOOTHING = 0.98  # weight of the past in what is smoothed: some fifty steps
READING_LINES = 2  # of the live view, under the bar
BAR_COLUMNS = 24
GAP = 2  # columns between two readings
COMPILING = "compiling the first step ..."
INDENT = " " * 4  # before what belongs to the line above; of a sample two lines are shown, and the log has all of it

OnProgress = Callable[[int, "int | None"], None]


class Progress:
    """A listener that shows a run on standard error.

    Within ``with``, on a terminal: a few live lines, redrawn a few times a second from the newest events, with what
    happens scrolling by above them; of the readings those that there is room for, the most wanted first. Else plain
    lines: every tenth of the run, and whatever happens. A terminal that goes away stops no run.

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
        self._hardware: Hardware | None = None
        self._loss, self._wait, self._pace = _Mean(), _Mean(), _Mean()

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
        elif isinstance(event, Hardware):
            self._hardware = event
        else:
            if isinstance(event, Evaluated):
                self._validation = event
            if text := self._said(event):
                self._say(text)

    def _on_step(self, event: StepDone) -> None:
        before = self._step
        self._step = event
        self._first = self._first or event
        if math.isfinite(event.loss):
            self._loss.add(event.loss)
        if before and event.step > before.step:
            # The first step compiles, and its wait lies before the first reading of the clock.
            self._pace.add((event.seconds - before.seconds) / (event.step - before.step))
            self._wait.add(event.data_wait)
        if not self._live and (before is None or self._done(before, 10) != self._done(event, 10)):
            self._say(self._line(event))

    def _said(self, event: Event) -> str:
        """Return what is said of an event, in one line or more; nothing of routine matters, which the log has."""
        at = f"step {count(event.step)}"
        if isinstance(event, Evaluated):
            return f"validation at {at}: {_scores(event)}{'  (best so far)' if event.is_best else ''}"
        if isinstance(event, Mixed):
            return _lines(f"sources at {at}:", [_source(event, name) for name in event.epochs])
        if isinstance(event, Sampled):
            return _lines(f"sample at {at}:", excerpt(event.prompt + event.text) or ["(empty)"])
        if isinstance(event, Skipped):
            found = [f"documents {listed(event.documents)}"] if event.documents else []
            found = [event.largest, *found] if event.largest else found
            return _lines(f"{at} skipped, {event.in_a_row} in a row: {event.reason}", found)
        if isinstance(event, Spiked):
            return f"{at}: the loss leapt to {decimal(event.loss)}, over {decimal(event.threshold)}"
        if isinstance(event, SaveFailed):
            last = "none" if event.last_whole is None else f"step {count(event.last_whole)}"
            return f"{at} was not saved: {event.reason}; last whole checkpoint: {last}; it is tried again"
        if isinstance(event, Resumed):
            return _lines(f"resumed from {at} of {count(self._total)}", event.changes)
        if isinstance(event, Note):
            return f"{at}: {event.text}"
        if isinstance(event, Finished):
            amount = f"{plural(event.step, 'step')}, {plural(event.tokens, 'token')}, {duration(event.seconds)}"
            return f"{event.reason}: {amount}"
        return ""

    def _line(self, event: StepDone) -> str:
        place = f"step {count(event.step)}/{count(self._total)}  {self._done(event, 100)}%"
        return "  ".join([place, *self._readings(event)])

    def _readings(self, event: StepDone) -> list[str]:
        """Return what is measured now, each with its name, the most wanted first."""
        readings = [f"loss {decimal(event.loss)}"]
        if event.objective is not None:
            readings.append(f"objective {decimal(event.objective)}")
        if event is not self._first:
            readings.append(f"smoothed {decimal(self._loss.value)}")
        if self._validation:
            readings.append(f"last validation {decimal(self._validation.loss)}")
        if (left := self._seconds_left(event)) is not None:
            readings.append(f"{duration(left)} left")
        readings.append(f"{short(event.tokens_per_second)} tokens/s")
        readings.append(f"learning rate {event.learning_rate:.2e}")
        readings.append(f"gradient norm {decimal(event.gradient_norm, 2)}")
        if self._pace.value > 0:
            readings.append(f"data wait {self._wait.value / self._pace.value:.1%}")
        return readings + _machine(self._hardware)

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

        event, live = self._step, self._live
        if event is None or live is None:
            return Text(COMPILING, style="dim")
        columns = live.console.width
        place, part = f"step {count(event.step)}/{count(self._total)}", f"{self._done(event, 1000) / 10:.1f}%"
        heading = Table.grid(padding=(0, GAP))
        bar = min(BAR_COLUMNS, columns - len(place) - len(part) - 2 * GAP)
        cells: list[Any] = [Text(place, no_wrap=True), Text(part, no_wrap=True)]
        if bar >= BAR_COLUMNS // 4:
            cells.insert(1, ProgressBar(total=max(1, self._total), completed=event.step, width=bar))
        heading.add_row(*cells)
        lines = Table.grid()
        lines.add_row(heading)
        for line in packed(self._readings(event), columns, READING_LINES):
            lines.add_row(Text(line, no_wrap=True, overflow="ellipsis"))
        return lines

    def _say(self, text: str) -> None:
        text = visible(text)
        with contextlib.suppress(OSError, ValueError):  # nobody is there to read it any more
            if self._live:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=self._stream, flush=True)


def packed(readings: Sequence[str], columns: int, lines: int) -> list[str]:
    """Return readings set into at most so many lines, in order; those that there is no room for are left out.

    The first is always there, however narrow the terminal is.
    """
    set_lines: list[str] = []
    for reading in readings:
        if set_lines and len(set_lines[-1]) + GAP + len(reading) <= columns:
            set_lines[-1] += " " * GAP + reading
        elif not set_lines or (len(set_lines) < lines and len(reading) <= columns):
            set_lines.append(reading)
    return set_lines


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


class _Mean:
    """A mean in which the past weighs ever less; without a bias towards how it began."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        self._sum = SMOOTHING * self._sum + (1 - SMOOTHING) * value
        self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else math.nan


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


def _lines(heading: str, below: Sequence[str]) -> str:
    return "\n".join([heading, *(INDENT + line for line in below)])


def _machine(hardware: Hardware | None) -> list[str]:
    """Return what was last read of memory and GPUs, as far as anybody could tell."""
    if hardware is None:
        return []
    readings = [] if hardware.process_memory is None else [f"memory {memory_size(hardware.process_memory)}"]
    gpus = hardware.gpus
    parts = []
    if busy := sorted(_known(gpus, "utilization")):
        parts.append(f"{busy[0]:.0f}%" if busy[0] == busy[-1] else f"{busy[0]:.0f}-{busy[-1]:.0f}%")
    if total := sum(_known(gpus, "memory_total")):
        parts.append(f"{memory_size(sum(_known(gpus, 'memory_used')))} of {memory_size(total)}")
    if held := sorted({str(gpu["throttled"]) for gpu in gpus if gpu.get("throttled")}):
        parts.append(f"held back by {', '.join(held)}")
    if parts:
        readings.append(" ".join(["GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs", *parts]))
    return readings


def _known(gpus: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for gpu in gpus if isinstance(value := gpu.get(name), int | float)]


def _source(event: Mixed, name: str) -> str:
    parts = [f"{name}: {decimal(event.epochs[name], 2)} passes"]
    if name in event.losses:
        parts.append(f"validation loss {decimal(event.losses[name])}")
    if name in event.bits_per_byte:
        parts.append(f"bits per byte {decimal(event.bits_per_byte[name])}")
    return "  ".join(parts)


def _scores(event: Evaluated) -> str:
    parts = [f"loss {decimal(event.loss)}", f"perplexity {decimal(event.perplexity, 2)}"]
    if event.bits_per_byte is not None:
        parts.append(f"bits per byte {decimal(event.bits_per_byte)}")
    return "  ".join(parts)
