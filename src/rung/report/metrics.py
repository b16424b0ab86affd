"""The log of a run: one line of strict JSON an event, in ``metrics.jsonl`` and ``samples.jsonl``."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rung.report.files import whole_file
from rung.train.events import Evaluated, Event, Finished, Note, Sampled, Saved, Skipped, StepDone

# The word that stands for each kind of event in the files.
EVENT_NAMES: dict[type, str] = {
    StepDone: "step",
    Evaluated: "evaluation",
    Sampled: "sample",
    Saved: "saved",
    Skipped: "skipped",
    Note: "note",
    Finished: "finished",
}


class MetricsLog:
    """A listener that appends each event to ``metrics.jsonl``, and each sample to ``samples.jsonl`` beside it.

    A line is handed to the operating system as soon as it is made, so a killed process loses none. When the disk takes
    no more, the lines wait in memory, a warning says so, and each next event tries again: a full disk stops no run.

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

    def close(self) -> None:
        """Close the files.

        Raises:
            OSError: lines are left that the disk did not take.
        """
        self._metrics.close()
        self._samples.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Metrics:
    """A log that was read back.

    ``steps`` holds each field of ``StepDone`` as one array over the steps: ``step`` and ``tokens`` int64, ``skipped``
    bool, the rest float64 with NaN and infinities as they were. The other events are lists in the order of the file.
    """

    steps: dict[str, np.ndarray]
    evaluations: list[Evaluated] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # lines that could not be read, each named


def read_metrics(path: str | Path) -> Metrics:
    """Read a ``metrics.jsonl``; a missing file reads as an empty one.

    A torn last line (the process was killed while it wrote) or any other that is no event is left out and named in
    ``problems``. Kinds of event and fields that this version does not know are passed over.
    """
    columns = {f.name: array("d") for f in dataclasses.fields(StepDone)}
    problems: list[str] = []
    others: dict[type, list] = {Evaluated: [], Saved: [], Skipped: [], Note: [], Finished: []}
    kinds = {EVENT_NAMES[kind]: kind for kind in others}
    for record in _records(path, problems):
        if record["event"] == "step":
            for name, column in columns.items():
                value = record.get(name)
                column.append(math.nan if value is None else value)
        elif kind := kinds.get(record["event"]):
            others[kind].append(_from_record(kind, record))
    types: dict[str, type] = {"step": np.int64, "tokens": np.int64, "skipped": np.bool_}
    steps: dict[str, np.ndarray] = {
        name: np.asarray(column).astype(types.get(name, np.float64)) for name, column in columns.items()
    }
    return Metrics(steps, others[Evaluated], others[Saved], others[Skipped], others[Note], others[Finished], problems)


def read_samples(path: str | Path) -> tuple[list[Sampled], list[str]]:
    """Read a ``samples.jsonl``; return its samples, and what could not be read of it. A missing file has none."""
    problems: list[str] = []
    samples = [_from_record(Sampled, record) for record in _records(path, problems) if record["event"] == "sample"]
    return samples, problems


def truncate_after(path: str | Path, step: int) -> int:
    """Drop the lines of events after ``step``, and a torn last line, so that a resumed run has no step twice.

    The file is rewritten beside itself and renamed. A missing file is left missing. Works on both logs.

    Returns:
        The number of lines dropped.
    """
    path = Path(path)
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        dropped = sum(not _kept(line, step) for line in file)
        if dropped:
            file.seek(0)
            with whole_file(path) as shorter:
                shorter.writelines(line for line in file if _kept(line, step))
    return dropped


def to_line(event: Event) -> bytes:
    """Return an event as a line of strict JSON in UTF-8.

    JSON has no NaN and no infinity: such a value is ``null``, and ``not_finite`` says which it was, by field.
    """
    record: dict[str, Any] = {"event": EVENT_NAMES[type(event)], **vars(event)}
    odd = {name: value for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    if odd:
        record |= dict.fromkeys(odd)
        record["not_finite"] = {name: repr(float(value)) for name, value in odd.items()}
    text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    # Half a surrogate pair has no UTF-8; Python's escape of it is also JSON's.
    return text.encode("utf-8", errors="backslashreplace")


class _Lines:
    """A file that whole lines are appended to, unbuffered; what the disk refuses waits for the next line."""

    def __init__(self, path: Path):
        self._path = path
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
        self._waiting = b"" if _ends_whole(path) else b"\n"
        self._warned = False

    def append(self, line: bytes) -> None:
        self._waiting += line
        try:
            self._drain()
        except OSError as error:
            if not self._warned:
                sys.stderr.write(
                    f"warning: {self._path}: {error.strerror}; lines wait in memory until it is writable\n"
                )
            self._warned = True

    def close(self) -> None:
        try:
            self._drain()
        finally:
            self._file.close()

    def _drain(self) -> None:
        while self._waiting:
            # A disk that fills up may take a part of a line: only the rest is written later.
            written = self._file.write(self._waiting)
            self._waiting = self._waiting[written:]
        self._warned = False


def _ends_whole(path: Path) -> bool:
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _records(path: str | Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    path = Path(path)
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            record = _parsed(line)
            if record is not None:
                yield record
            elif not line.endswith(b"\n"):
                problems.append(f"{path.name}: its last line, {number}, is torn and left out")
            elif line.strip():
                problems.append(f"{path.name}: line {number} is no event and left out")


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, its values that are not finite restored; None where it is no whole event."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or "event" not in record or not isinstance(record.get("step"), int):
        return None
    for name, value in record.pop("not_finite", {}).items():
        record[name] = float(value)
    return record


def _kept(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    record = _parsed(line)
    return record is None or record["step"] <= step


def _from_record(kind: type, record: dict[str, Any]) -> Any:
    return kind(**{f.name: record.get(f.name) for f in dataclasses.fields(kind)})
