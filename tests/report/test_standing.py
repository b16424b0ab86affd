"""How a run stands, read from the end of its log, is what all of the log says."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.report.metrics import MetricsLog, read_metrics, to_line
from rung.report.standing import BLOCK, Standing, read_standing
from rung.train.events import Evaluated, Finished, Hardware, Note, Resumed, Saved, Skipped, StepDone


def evaluated(step, loss, best, bits=0.5):
    return Evaluated(step, step * 10, loss, math.exp(loss), bits, 100, step / 10, best)


def step_done(step, loss=1.0, skipped=False):
    return StepDone(step, step * 10, loss, 1e-3, 0.5, 1e4, 1e9, 0.0, step / 10, skipped, 0.1)


def write(path, events):
    with MetricsLog(path) as log:
        for event in events:
            log(event)
    return path


@given(
    steps=st.integers(1, 3000),
    every=st.integers(1, 400),
    best=st.integers(0, 3000),
    skips=st.sets(st.integers(1, 3000)),
)
def test_a_standing_is_what_the_whole_log_says(steps, every, best, skips, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    lowest, events = math.inf, []
    for step in range(1, steps + 1):
        events.append(step_done(step, 1 + abs(step - best) / 1000, step in skips))
        if step % every == 0:
            loss = 1 + abs(step - best) / 1000
            events.append(evaluated(step, loss, loss < lowest))
            lowest = min(loss, lowest)
    path.write_bytes(b"".join(map(to_line, events)))
    whole = read_metrics(path)
    better = min(whole.evaluations, key=lambda event: event.loss, default=None)
    standing = read_standing(path, better.step if better else None)
    losses = whole.steps["loss"][-100:][~whole.steps["skipped"][-100:]]
    assert (standing.step, standing.tokens, standing.seconds) == (steps, steps * 10, steps / 10)
    assert standing.best == better
    if len(losses):
        assert standing.train_loss == pytest.approx(losses.mean(), rel=1e-12)
    else:
        assert standing.train_loss is None
    assert standing.finished is None


def test_without_the_best_step_the_end_of_the_log_is_searched(tmp_path):
    events = [evaluated(1, 3.0, True), evaluated(2, 2.0, True), evaluated(3, 4.0, False)]
    assert read_standing(write(tmp_path / "m", events)).best.step == 2


@pytest.mark.parametrize("after", [[], [Note(9, "a tracker failed")], [Saved(9, "x"), Note(9, "y")]])
def test_an_end_is_an_end_unless_steps_follow(tmp_path, after):
    ended = [step_done(9), Finished(9, 90, 0.9, "SIGTERM"), *after]
    assert read_standing(write(tmp_path / "ended", ended)).finished == "SIGTERM"
    for more in (step_done(10), Resumed(9, []), evaluated(9, 1.0, True)):
        path = write(tmp_path / type(more).__name__, [*ended, more])
        assert read_standing(path).finished is None


def test_skipped_updates_count_while_nothing_followed_them(tmp_path):
    skips = [event for n in (5, 6, 7) for event in (step_done(n, math.nan, True), Skipped(n, n - 4, "nan", [], ""))]
    assert read_standing(write(tmp_path / "a", [step_done(4), *skips])).skipped_in_a_row == 3
    assert read_standing(write(tmp_path / "b", [step_done(4), *skips, step_done(8)])).skipped_in_a_row == 0


def test_events_that_a_resume_did_not_take_back_do_not_mislead_the_search(tmp_path):
    hardware = [Hardware(step, step / 10, 1.0, 1.0, 1, 1, []) for step in range(900, 1900)]
    events = [*map(step_done, range(1, 500)), evaluated(499, 1.0, True), *hardware, Resumed(499, [])]
    events += [*map(step_done, range(500, 2000))]
    path = write(tmp_path / "m", events)
    assert path.stat().st_size > 8 * BLOCK
    standing = read_standing(path, 499)
    assert (standing.step, standing.best.step) == (1999, 499)


def test_a_torn_last_line_counts_for_nothing(tmp_path):
    path = write(tmp_path / "m", [step_done(1), step_done(2)])
    path.write_bytes(path.read_bytes() + to_line(step_done(3))[:-10])
    assert read_standing(path).step == 2
    path.write_bytes(b'{"event": "st')
    assert read_standing(path) == Standing()


def test_losses_that_are_not_numbers_are_read_as_such(tmp_path):
    standing = read_standing(write(tmp_path / "m", [step_done(1, math.nan), evaluated(1, math.inf, True, None)]))
    assert math.isnan(standing.train_loss)
    assert standing.best.bits_per_byte is None


def test_a_missing_log_is_that_of_a_run_without_steps_and_rubbish_is_none(tmp_path):
    assert read_standing(tmp_path / "missing") == Standing()
    (tmp_path / "empty").touch()
    assert read_standing(tmp_path / "empty") == Standing()
    (tmp_path / "rubbish").write_bytes(np.random.default_rng(0).bytes(300_000) + b"\n[1]\n3\n{}\n")
    with pytest.raises(ValueError, match="no line of it is an event"):
        read_standing(tmp_path / "rubbish")


def test_a_long_log_is_read_as_fast_as_a_short_one(tmp_path):
    path = tmp_path / "m"
    block = b"".join(to_line(step_done(step)) for step in range(100, 1100))
    with open(path, "wb") as file:
        file.write(to_line(step_done(1)) + to_line(evaluated(1, 1.0, True)))
        for _ in range(400):  # steps that do not ascend: nothing of them is to be read
            file.write(block)
    assert path.stat().st_size > 80_000_000
    began = time.process_time()
    standing = read_standing(path, 1)
    assert time.process_time() - began < 0.5  # reading all of it takes several seconds
    assert (standing.step, standing.best.step) == (1099, 1)
