"""The log of a run: one line of strict JSON an event, in ``metrics.jsonl`` and ``samples.jsonl``."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from rung.disk import remove_partials, whole_file
from rung.train.events import (
    Evaluated,
    Event,
    Finished,
    Hardware,
    Mixed,
    Norms,
    Note,
    Resumed,
    Sampled,
    Saved,
    SaveFailed,
    Skipped,
    Spiked,
    StepDone,
)

# The word that stands for each kind of event in the files.
EVENT_NAMES: dict[type, str] = {
    StepDone: "step",
    Evaluated: "evaluation",
    Mixed: "mixture",
    Sampled: "sample",
    Saved: "saved",
    SaveFailed: "save_failed",
    Skipped: "skipped",
    Spiked: "spiked",
    Norms: "norms",
    Hardware: "hardware",
    Resumed: "resumed",
    Note: "note",
    Finished: "finished",
}

# What a resume does not take back: these happened, whatever the steps after the checkpoint came to. All other events
# follow from the steps, and come again with them.
HISTORY = (Resumed, SaveFailed, Hardware, Note)

_Kind = TypeVar("_Kind")


class MetricsLog:
    """A listener that appends each event to ``metrics.jsonl``, and each sample to ``samples.jsonl`` beside it.

    A line is handed to the operating system as soon as it is made, so a killed process loses none. When the disk takes
    no more, the lines wait in memory, a warning says so, and each next event tries again: a full disk stops no run.
    ``sync`` may be called in another thread than the rest.

    Args:
        path: of ``metrics.jsonl``; its folder exists.
        every_steps: steps between lines of steps; the first step and skipped steps have a line whatever it is.
    """

    def __init__(self, path: str | Path, every_steps: int = 1):
        path = Path(path)
        self._every_steps = every_steps
        self._metrics = _Lines(path)
        self._samples = _Lines(path.with_name("samples.jsonl"))

    def __call__(self, event: Event) -> None:
        if isinstance(event, Sampled):
            self._samples.append(to_line(event))
        elif not isinstance(event, StepDone) or event.skipped or event.step == 1 or event.step % self._every_steps == 0:
            self._metrics.append(to_line(event))

    def sync(self) -> None:
        """Wait until all lines are on the disk, so that no checkpoint is ever ahead of its log.

        Raises:
            OSError: lines are left that the disk did not take.
        """
        self._metrics.sync()
        self._samples.sync()

    def close(self) -> None:
        """Close the files.

        Raises:
            OSError: lines are left that the disk did not take.
        """
        try:
            self._metrics.close()
        finally:
            self._samples.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class NormColumns:
    """The norms of a run as columns: ``step`` [n] int64, and for each group of weights a float64 [n].

    A group that a reading did not have is NaN there.
    """

    step: np.ndarray
    weights: dict[str, np.ndarray]
    updates: dict[str, np.ndarray]


@dataclass(frozen=True)
class Metrics:
    """A log that was read back.

    ``steps`` holds each field of ``StepDone`` as one array over the steps: ``step`` and ``tokens`` int64, ``skipped``
    bool, the rest float64 with NaN and infinities as they were. ``events`` are all others but the norms in the order of
    the file, which is that of time: after a resume the steps go back.
    """

    steps: dict[str, np.ndarray]
    norms: NormColumns
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # lines that could not be read, each named

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @cached_property
    def evaluations(self) -> list[Evaluated]:
        """The validations."""
        return self.of(Evaluated)

    @cached_property
    def saved(self) -> list[Saved]:
        """The checkpoints that became whole."""
        return self.of(Saved)

    @cached_property
    def skipped(self) -> list[Skipped]:
        """The updates that were not applied."""
        return self.of(Skipped)

    @cached_property
    def spiked(self) -> list[Spiked]:
        """The losses far above those before them."""
        return self.of(Spiked)

    @cached_property
    def hardware(self) -> list[Hardware]:
        """The readings of processor, memory and GPUs, those of steps that a resume took back included."""
        return self.of(Hardware)

    @cached_property
    def resumed(self) -> list[Resumed]:
        """The resumes."""
        return self.of(Resumed)

    @cached_property
    def notes(self) -> list[Note]:
        """What else was said."""
        return self.of(Note)

    @cached_property
    def finished(self) -> list[Finished]:
        """The ends."""
        return self.of(Finished)


def read_metrics(path: str | Path) -> Metrics:
    """Read a ``metrics.jsonl``; a missing file reads as an empty one.

    A torn last line (the process was killed while it wrote) or any other that is no event is left out and named in
    ``problems``. Kinds of event and fields that this version does not know are passed over; fields that an older
    version did not write are empty or ``None``.
    """
    columns = {f.name: array("d") for f in dataclasses.fields(StepDone)}
    problems: list[str] = []
    norms: list[Norms] = []
    events: list[Event] = []
    for number, record in _records(path, problems):
        kind = _KINDS.get(record["event"])
        try:
            if kind is StepDone:
                values = [_number(record.get(name)) for name in columns]
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
            elif kind is Norms:
                norms.append(_from_record(Norms, record))
            elif kind:
                events.append(_from_record(kind, record))
        except (TypeError, ValueError):
            problems.append(_no_event(path, number))
    types: dict[str, type] = {"step": np.int64, "tokens": np.int64, "skipped": np.bool_}
    steps: dict[str, np.ndarray] = {
        name: np.asarray(column).astype(types.get(name, np.float64)) for name, column in columns.items()
    }
    return Metrics(steps, _norm_columns(norms), events, problems)


def read_samples(path: str | Path) -> tuple[list[Sampled], list[str]]:
    """Read a ``samples.jsonl``; return its samples, and what could not be read of it. A missing file has none."""
    problems: list[str] = []
    samples = [_from_record(Sampled, record) for _, record in _records(path, problems) if record["event"] == "sample"]
    return samples, problems


def truncate_after(path: str | Path, step: int) -> int:
    """Drop the lines of events after ``step``, and a torn last line, so that a resumed run has no step twice.

    Events of ``HISTORY`` stay, so that one can see afterwards what happened after ``step`` before the resume. The file
    is rewritten beside itself and renamed: killed at any instant, it is the old one or the new one. A missing file is
    left missing. Works on both logs. No other process may be writing to the log.

    Returns:
        The number of lines dropped.

    Raises:
        OSError: the disk did not take the new file; the old one stands.
    """
    path = Path(path)
    if not path.exists():
        return 0
    remove_partials(path)
    with open(path, "rb") as file:
        dropped = sum(not _kept(line, step) for line in file)
        if dropped:
            file.seek(0)
            with whole_file(path) as shorter:
                shorter.writelines(line for line in file if _kept(line, step))
    return dropped


def to_line(event: Event) -> bytes:
    """Return an event as a line of strict JSON in UTF-8.

    JSON has no NaN and no infinity: such a value is ``null``, and ``not_finite`` says which it was, by the path to it:
    names and positions in lists, joined by dots.
    """
    odd: dict[str, str] = {}
    record: dict[str, Any] = {"event": EVENT_NAMES[type(event)]}
    record |= {name: _finite(value, name, odd) for name, value in vars(event).items()}
    if odd:
        record["not_finite"] = odd
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    # Half a surrogate pair has no UTF-8; Python's escape of it is also JSON's.
    return text.encode("utf-8", errors="backslashreplace")


_KINDS: dict[str, type] = {name: kind for kind, name in EVENT_NAMES.items()}
_HISTORY_NAMES = frozenset(EVENT_NAMES[kind] for kind in HISTORY)

# What a field is where a line does not have it, as in logs of older versions; any other is None.
_MISSING: dict[tuple[type, str], type] = {
    (Skipped, "documents"): list,
    (Skipped, "largest"): str,
    (Mixed, "epochs"): dict,
    (Mixed, "losses"): dict,
    (Mixed, "bits_per_byte"): dict,
    (Norms, "weights"): dict,
    (Norms, "updates"): dict,
    (Hardware, "gpus"): list,
    (Resumed, "changes"): list,
}


class _Lines:
    """A file that whole lines are appended to, unbuffered; what the disk refuses waits for the next line."""

    def __init__(self, path: Path):
        self._path = path
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
        self._waiting = bytearray() if _ends_whole(path) else bytearray(b"\n")
        self._warned = False
        self._lock = threading.Lock()

    def append(self, line: bytes) -> None:
        try:
            with self._lock:
                self._waiting += line
                self._drain()
        except OSError as error:
            if not self._warned:
                sys.stderr.write(
                    f"warning: {self._path}: {error.strerror}; lines wait in memory until it is writable\n"
                )
            self._warned = True

    def sync(self) -> None:
        with self._lock:
            self._drain()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        try:
            self._drain()
        finally:
            self._file.close()

    def _drain(self) -> None:
        while self._waiting:
            # A disk that fills up may take a part of a line: only the rest is written later.
            written = self._file.write(self._waiting)
            del self._waiting[:written]
        self._warned = False


def _ends_whole(path: Path) -> bool:
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _finite(value: Any, path: str, odd: dict[str, str]) -> Any:
    """Return ``value`` with each number in it that is not finite as ``None``, and note in ``odd`` what it was."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        odd[path] = repr(float(value))
        return None
    if isinstance(value, dict):
        return {name: _finite(part, f"{path}.{name}", odd) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part, f"{path}.{n}", odd) for n, part in enumerate(value)]
    return value


def _records(path: str | Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each event of a log with the number of its line."""
    path = Path(path)
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            record = _parsed(line)
            if record is not None:
                yield number, record
            elif not line.endswith(b"\n"):
                problems.append(f"{path.name}: its last line, {number}, is torn and left out")
            elif line.strip():
                problems.append(_no_event(path, number))


def _no_event(path: str | Path, number: int) -> str:
    return f"{Path(path).name}: line {number} is no event and left out"


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, its values that are not finite restored; None where it is no whole event."""
    try:
        record = json.loads(line)
        if not isinstance(record["step"], int) or not isinstance(record["event"], str):
            return None
        for path, value in record.pop("not_finite", {}).items():
            _put(record, path, float(value))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None
    return record


def _put(within: Any, path: str, value: float) -> None:
    """Put a value at a path of names and positions joined by dots, where a name may have dots of its own."""
    if isinstance(within, list):
        position, dot, rest = path.partition(".")
        if dot:
            _put(within[int(position)], rest, value)
        else:
            within[int(position)] = value
    elif path in within:
        within[path] = value
    else:
        (name,) = [n for n, part in within.items() if isinstance(part, dict | list) and path.startswith(f"{n}.")]
        _put(within[name], path[len(name) + 1 :], value)


def _kept(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    record = _parsed(line)
    return record is None or record["step"] <= step or record["event"] in _HISTORY_NAMES


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _from_record(kind: type[_Kind], record: dict[str, Any]) -> _Kind:
    values = {f.name: record.get(f.name) for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if value is None and (kind, name) in _MISSING:
            values[name] = _MISSING[kind, name]()
    return kind(**values)


def _norm_columns(norms: Sequence[Norms]) -> NormColumns:
    def columns(readings: Sequence[dict[str, float]]) -> dict[str, np.ndarray]:
        groups = dict.fromkeys(group for reading in readings for group in reading)
        return {group: np.array([_number(reading.get(group)) for reading in readings]) for group in groups}

    steps = np.array([event.step for event in norms], np.int64)
    return NormColumns(steps, columns([e.weights for e in norms]), columns([e.updates for e in norms]))
