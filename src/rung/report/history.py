"""What happened to a run, told for people: its events as a table, marks for its charts, where it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rung.report.charts import Mark
from rung.report.metrics import Metrics
from rung.report.words import count, decimal, listed, plural, safe
from rung.train.events import Event, Finished, Note, Resumed, SaveFailed, Skipped, Spiked

MOST_OF_A_KIND = 40  # events of one kind that the table shows
HASH_DIGITS = 16  # of a hash, enough to tell two apart

Row = tuple[int, str, str, list[str]]  # step, kind, what happened, what belongs to it line by line


def event_table(metrics: Metrics) -> str:
    """Return what happened beside plain steps as HTML, in the order of time, and how much was saved."""
    rows = list(_rows(metrics.events))
    note = f'<p class="note">{" ".join(_sums(metrics, rows))}</p>'
    shown = _last_of_each_kind(rows)
    if not shown:
        return note
    head = '<thead><tr><th class="number">Step</th><th>What happened</th></tr></thead>'
    return f'{note}<table class="events">{head}<tbody>{"".join(map(_row, shown))}</tbody></table>'


def marks(metrics: Metrics) -> list[Mark]:
    """Return the moments to point out on a chart of the run: resumes, skipped updates, spikes of the loss."""
    skipped = metrics.steps["step"][metrics.steps["skipped"]].tolist()
    found = [
        *((step, f"update of step {count(step)} skipped", "skip") for step in skipped),
        *((e.step, f"loss {decimal(e.loss)} at step {count(e.step)}", "spike") for e in metrics.spiked),
        *((e.step, f"resumed from step {count(e.step)}", "resume") for e in metrics.resumed),
    ]
    at = tokens_at(metrics, [step for step, _, _ in found]).tolist()
    return [Mark(tokens, text, kind) for tokens, (_, text, kind) in zip(at, found, strict=True)]  # type: ignore[arg-type]


def tokens_at(metrics: Metrics, steps: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the target tokens up to each of some steps, int64 [n]; between logged steps in proportion."""
    known = metrics.steps["step"]
    if not len(known):
        return np.zeros(len(steps), np.int64)
    return np.interp(steps, np.append(0, known), np.append(0, metrics.steps["tokens"])).round().astype(np.int64)


def not_taken_back(steps: Sequence[int]) -> np.ndarray:
    """Return the indices, ascending, of the events that stand: those before no event of an earlier step.

    Args:
        steps: of events in the order of time; after a resume they go back.
    """
    backwards = np.asarray(steps, np.int64)[::-1]
    return np.nonzero((backwards == np.minimum.accumulate(backwards))[::-1])[0]


def started_from(lineage: Mapping[str, Any]) -> str:
    """Return in one line of text where a run's first weights are from."""
    return f"Started from {lineage.get('run')} at step {_step(lineage)}, optimizer {lineage.get('optimizer')}"


def lineage_table(lineage: Mapping[str, Any]) -> str:
    """Return the runs that a run descends from as HTML, the nearest first."""
    rows = ""
    for ancestor in [lineage, *(lineage.get("parents") or [])]:
        rows += (
            f"<tr><th>{safe(ancestor.get('run'))}</th>"
            f'<td class="number" data-label="step">{safe(_step(ancestor))}</td>'
            f'<td data-label="optimizer">{safe(ancestor.get("optimizer"))}</td>'
            f'<td data-label="weights"><code>{safe(str(ancestor.get("weights", ""))[:HASH_DIGITS])}</code></td></tr>'
        )
    head = '<tr><th>Started from</th><th class="number">At step</th><th>Optimizer</th><th>Hash of its weights</th></tr>'
    return f'<table class="lineage"><thead>{head}</thead><tbody>{rows}</tbody></table>'


def _rows(events: Sequence[Event]) -> Iterator[Row]:
    reached = 0
    for event in events:
        if isinstance(event, Resumed):
            again = f"; it had been at step {count(reached)} or later" if reached > event.step else ""
            yield event.step, "resumed", f"from the checkpoint of step {count(event.step)}{again}", list(event.changes)
            reached = 0
        reached = max(reached, event.step)
        if isinstance(event, Skipped):
            found = [event.largest] if event.largest else []
            found += [f"documents {listed(event.documents)}"] if event.documents else []
            run = f"{count(event.in_a_row)} in a row: " if event.in_a_row > 1 else ""
            yield event.step, "skipped", f"{run}{event.reason}", found
        elif isinstance(event, Spiked):
            yield event.step, "spike", f"loss {decimal(event.loss)}, over {decimal(event.threshold)}", []
        elif isinstance(event, SaveFailed):
            last = "none" if event.last_whole is None else f"step {count(event.last_whole)}"
            yield event.step, "save failed", f"{event.reason}; last whole checkpoint: {last}", []
        elif isinstance(event, Note):
            yield event.step, "note", event.text, []
        elif isinstance(event, Finished):
            yield event.step, "ended", event.reason, []


def _sums(metrics: Metrics, rows: Sequence[Row]) -> Iterator[str]:
    if metrics.saved:
        yield f"Checkpoints saved: {count(len(metrics.saved))}, last at step {count(metrics.saved[-1].step)}."
    else:
        yield "No checkpoint was saved."
    skipped, logged = int(metrics.steps["skipped"].sum()), len(metrics.steps["step"])
    yield f"Updates skipped: {count(skipped)} of {count(logged)} logged." if skipped else "No update was skipped."
    for kind, words in (("spike", "loss spike"), ("resumed", "resume"), ("save failed", "failed save")):
        if number := sum(row[1] == kind for row in rows):
            yield f"{plural(number, words)}.".capitalize()
    if len(rows) > len(_last_of_each_kind(rows)):
        yield f"Shown are the last {MOST_OF_A_KIND} of each kind; metrics.jsonl has all."


def _last_of_each_kind(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are shown, so that many events of one kind do not crowd out the rest."""
    left: dict[str, int] = {}
    shown = []
    for row in reversed(rows):
        left[row[1]] = left.get(row[1], MOST_OF_A_KIND) - 1
        if left[row[1]] >= 0:
            shown.append(row)
    return shown[::-1]


def _row(row: Row) -> str:
    step, kind, text, below = row
    lines = "".join(f'<span class="detail">{safe(line)}</span>' for line in below)
    tone = {"skipped": "skip", "spike": "spike", "save failed": "skip", "resumed": "resume"}.get(kind, "")
    return (
        f'<tr><td class="number">{count(step)}</td>'
        f'<td><b class="kind {tone}">{kind}</b> <span class="what">{safe(text)}{lines}</span></td></tr>'
    )


def _step(ancestor: Mapping[str, Any]) -> str:
    step = ancestor.get("step")
    return count(step) if isinstance(step, int) else str(step)
