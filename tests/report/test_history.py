import html
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.report.history import MOST_OF_A_KIND, event_table, lineage_table, marks, not_taken_back, tokens_at
from rung.report.metrics import MetricsLog, read_metrics
from rung.train.events import Finished, Hardware, Note, Resumed, Saved, SaveFailed, Skipped, Spiked


@pytest.fixture
def logged(tmp_path):
    """Return the metrics of a log of these events."""

    def log_and_read(*events):
        path = tmp_path / "metrics.jsonl"
        path.unlink(missing_ok=True)
        with MetricsLog(path) as log:
            for event in events:
                log(event)
        return read_metrics(path)

    return log_and_read


def rows_of(table):
    """Return each row of the table as its step and its text."""
    rows = re.findall(r'<tr><td class="number">([\d,]+)</td><td>(.*?)</td></tr>', table)
    return [(step, html.unescape(re.sub("<[^>]*>", " ", cell)).split()) for step, cell in rows]


def test_the_table_tells_what_happened_in_the_order_of_time(logged, make_step):
    metrics = logged(
        make_step(1),
        Skipped(4, 1, "not finite", [], ""),
        Skipped(5, 2, "not finite", list(range(3, 14)), "gradient of head.weight: inf"),
        Spiked(40, 9.0, 4.5),
        SaveFailed(40, "No <space> left", None),
        Hardware(57, 1.0, None, None, None, None, []),
        Saved(40, "checkpoints/40"),
        Resumed(40, ["train.steps 100 -> 200", "checkpoint.keep 2 -> 5"]),
        SaveFailed(50, "Read-only file system", 40),
        Resumed(50, []),
        Note(50, "profile written"),
        Finished(60, 9, 1.0, "done"),
    )
    table = event_table(metrics)
    assert rows_of(table) == [
        (step, text.split())
        for step, text in [
            ("4", "skipped not finite"),
            ("5", "skipped 2 in a row: not finite gradient of head.weight: inf "
                  "documents 3, 4, 5, 6, 7, 8, 9, 10 and 3 more"),
            ("40", "spike loss 9.000, over 4.500"),
            ("40", "save failed No <space> left; last whole checkpoint: none"),
            ("40", "resumed from the checkpoint of step 40; it had been at step 57 or later "
                   "train.steps 100 -> 200 checkpoint.keep 2 -> 5"),
            ("50", "save failed Read-only file system; last whole checkpoint: step 40"),
            ("50", "resumed from the checkpoint of step 50"),
            ("50", "note profile written"),
            ("60", "ended done"),
        ]
    ]  # fmt: skip
    said = re.search(r'<p class="note">(.*?)</p>', table)[1]
    assert said == (
        "Checkpoints saved: 1, last at step 40. No update was skipped. 1 loss spike. 2 resumes. 2 failed saves."
    )


def test_many_events_of_one_kind_do_not_crowd_out_the_rest(logged):
    metrics = logged(Resumed(1, []), *(Spiked(step, 9.0, 4.5) for step in range(2, 1002)))
    table = event_table(metrics)
    shown = rows_of(table)
    assert (shown[0][0], shown[0][1][0]) == ("1", "resumed")
    assert [step for step, _ in shown[1:]] == [f"{step:,}" for step in range(1002 - MOST_OF_A_KIND, 1002)]
    assert "1,000 loss spikes" in table
    assert f"the last {MOST_OF_A_KIND} of each kind" in table


def test_a_run_without_events_says_so(logged):
    assert event_table(logged()) == '<p class="note">No checkpoint was saved. No update was skipped.</p>'


def test_marks_lie_at_the_tokens_of_their_steps(logged, make_step):
    metrics = logged(
        *(make_step(step, skipped=step == 3) for step in (1, 2, 3, 4, 8)),
        Spiked(2, 9.0, 4.0),
        Resumed(6, []),
        Resumed(0, []),
    )
    assert [(mark.kind, mark.tokens / 4096) for mark in marks(metrics)] == [
        ("skip", 3), ("spike", 2), ("resume", 6), ("resume", 0),
    ]  # fmt: skip
    assert marks(logged(Resumed(0, []))) != []  # before the first step
    assert tokens_at(logged(), [1, 2]).tolist() == [0, 0]


@given(st.lists(st.integers(0, 30), max_size=30))
def test_what_stands_is_what_a_file_without_the_steps_taken_back_would_hold(steps):
    # By brute force: an event of an earlier step takes back all that are later than it.
    standing: list[tuple[int, int]] = []
    for n, step in enumerate(steps):
        standing = [(m, earlier) for m, earlier in standing if earlier <= step] + [(n, step)]
    np.testing.assert_array_equal(not_taken_back(steps), [n for n, _ in standing])


def test_lineage_names_every_generation():
    parent = {"run": "../<first>", "step": 500, "weights": "f" * 64, "optimizer": "fresh"}
    lineage = {
        "run": "../base",
        "step": 12_000,
        "weights": "0123456789abcdef" * 4,
        "optimizer": "kept",
        "parents": [parent],
    }
    table = lineage_table(lineage)
    rows = [re.sub("<[^>]*>", " ", row).split() for row in re.findall("<tr>(.*?)</tr>", table)[1:]]
    assert rows == [
        ["../base", "12,000", "kept", "0123456789abcdef"],
        ["../&lt;first&gt;", "500", "fresh", "f" * 16],
    ]
    assert "None" in lineage_table({"parents": None})  # a file that someone edited does not end a report
