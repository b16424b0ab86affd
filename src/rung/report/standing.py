"""How a run stands, by its log: the end of the file is read, not all of it, however long it is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rung.train.events import Evaluated

BLOCK = 1 << 16  # bytes read at once
ENOUGH = 1 << 18  # bytes from the end in which the steps for a mean loss are looked for, once there is a step at all
LONGEST_LINE = 1 << 24
ENDING_STEPS = 100  # that the training loss is the mean over


@dataclass(frozen=True)
class Standing:
    """What the log says last."""

    step: int = 0  # steps done
    tokens: int = 0
    seconds: float = 0.0  # of training, over all resumes
    train_loss: float | None = None  # mean of the applied ones of the last ENDING_STEPS steps
    best: Evaluated | None = None
    finished: str | None = None  # why it ended; None: no end stands behind the last step
    skipped_in_a_row: int = 0  # at the last step


def read_standing(path: str | Path, best_step: int | None = None) -> Standing:
    """Read how a run stands; a missing log is that of a run without a step.

    Args:
        path: of ``metrics.jsonl``.
        best_step: of the best validation, where it is known; else only the end of the log is searched for it.

    Raises:
        OSError: the log cannot be read.
        ValueError: it is no log.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed by the with below
    except FileNotFoundError:
        return Standing()
    with file:
        tail = _Tail()
        for line, read in _lines_from_the_end(file):
            tail.add(_record(line))
            if tail.is_enough(read):
                break
        if not tail.found and tail.lines:
            raise ValueError("no line of it is an event")
        best = tail.best
        if best_step is not None and (best is None or best.step < best_step):
            best = _evaluation_of(file, best_step) or best
        return tail.standing(best)


class _Tail:
    """Collects, from the last record backwards, what a standing is made of."""

    def __init__(self) -> None:
        self.best: Evaluated | None = None
        self.lines = 0
        self.found = False
        self._newest: dict[str, dict[str, Any]] = {}  # by kind of event
        self._losses: list[float] = []
        self._finished: str | None = None
        self._has_ending = False

    def add(self, record: dict[str, Any] | None) -> None:
        self.lines += 1
        if record is None:
            return
        self.found = True
        kind = record["event"]
        going_on = self._newest.keys() & {"step", "resumed", "evaluation"}
        if kind == "finished" and not going_on and self._finished is None:
            self._finished = str(record.get("reason"))
        if kind == "step":
            newest = self._newest.get("step", record)["step"]
            self._has_ending = record["step"] <= newest - ENDING_STEPS
            if not self._has_ending and not record.get("skipped"):
                self._losses.append(_number(record, "loss"))
        if kind == "evaluation" and record.get("is_best") and self.best is None:
            self.best = _evaluated(record)
        self._newest.setdefault(kind, record)

    def is_enough(self, read: int) -> bool:
        return "step" in self._newest and (read >= ENOUGH or (self._has_ending and self.best is not None))

    def standing(self, best: Evaluated | None) -> Standing:
        counted = [record for kind, record in self._newest.items() if kind in ("step", "evaluation", "finished")]
        last = max((record["step"] for record in counted), default=0)
        skipped = self._newest.get("skipped", {})
        return Standing(
            step=last,
            tokens=int(max((_number(record, "tokens", 0) for record in counted), default=0)),
            seconds=max((_number(record, "seconds", 0) for record in counted), default=0.0),
            train_loss=sum(self._losses) / len(self._losses) if self._losses else None,
            best=best,
            finished=self._finished,
            skipped_in_a_row=int(_number(skipped, "in_a_row", 0)) if skipped.get("step", -1) >= last > 0 else 0,
        )


def _lines_from_the_end(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file, the last first, with the number of bytes read so far. A torn last line is none."""
    size = position = file.seek(0, 2)
    rest, torn = b"", True
    while position:
        length = min(BLOCK, position)
        position -= length
        file.seek(position)
        rest, *lines = (file.read(length) + rest).split(b"\n")
        for line in reversed(lines[:-1] if torn else lines):
            yield line, size - position
        torn = torn and not lines
        if len(rest) > LONGEST_LINE:
            raise ValueError("it has no lines")
    if not torn:
        yield rest, size


def _evaluation_of(file: BinaryIO, step: int) -> Evaluated | None:
    """Return the evaluation of a step. Bisects: the lines of steps and evaluations are in ascending order of steps."""
    low, high = 0, file.seek(0, 2)
    while high - low > BLOCK:
        middle = (low + high) // 2
        first = next((record for record in _records_after(file, middle) if _is_ordered(record)), None)
        if first is None or first["step"] >= step:
            high = middle
        else:
            low = middle
    for record in _records_after(file, low):
        if record["event"] == "evaluation" and record["step"] == step:
            return _evaluated(record)
        if _is_ordered(record) and record["step"] > step:
            break
    return None


def _records_after(file: BinaryIO, position: int) -> Iterator[dict[str, Any]]:
    """Yield the records of the lines that begin after a position in the file; from 0 on, of all."""
    file.seek(position)
    if position:
        file.readline()
    for line in file:
        if (record := _record(line)) is not None:
            yield record


def _is_ordered(record: dict[str, Any]) -> bool:
    """Return whether this kind of event comes in the order of steps; others stay when a resume takes steps back."""
    return record["event"] in ("step", "evaluation")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    known = isinstance(record, dict) and isinstance(record.get("event"), str) and isinstance(record.get("step"), int)
    return record if known else None


def _evaluated(record: dict[str, Any]) -> Evaluated:
    bits = record.get("bits_per_byte")
    return Evaluated(
        step=record["step"],
        tokens=int(_number(record, "tokens", 0)),
        loss=_number(record, "loss"),
        perplexity=_number(record, "perplexity"),
        bits_per_byte=float(bits) if isinstance(bits, int | float) else None,
        targets=int(_number(record, "targets", 0)),
        seconds=_number(record, "seconds", 0),
        is_best=bool(record.get("is_best")),
    )


def _number(record: dict[str, Any], name: str, otherwise: float = math.nan) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else otherwise
