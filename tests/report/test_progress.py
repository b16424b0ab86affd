import io
import os
import pty
import re
import subprocess
import sys
import textwrap
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.report.progress import Progress, packed, track
from rung.train.events import (
    Evaluated,
    Finished,
    Hardware,
    Note,
    Resumed,
    Sampled,
    Saved,
    SaveFailed,
    Skipped,
    Spiked,
)

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def lines_of(total, events):
    stream = io.StringIO()
    with Progress(total, stream) as progress:
        for event in events:
            progress(event)
    first, *lines = stream.getvalue().splitlines()
    assert first == "compiling the first step ..."
    return lines


def test_plain_lines_at_each_tenth(make_step):
    lines = lines_of(200, [make_step(step) for step in range(1, 201)])
    assert [line.split("  ")[0] for line in lines] == [
        f"step {n}/200" for n in (1, 20, 40, 60, 80, 100, 120, 140, 160, 180, 200)
    ]
    assert lines[5].startswith("step 100/200  50%  loss 3.000  smoothed 3.000  10 s left  40K tokens/s  ")
    assert lines[5].endswith("tokens/s  learning rate 1.00e-05  gradient norm 0.50  data wait 0.5%")


def test_the_seconds_before_the_first_step_are_explained_at_once():
    stream = io.StringIO()
    with Progress(10, stream):
        assert stream.getvalue() == "compiling the first step ...\n"


def test_percentages_are_not_ahead_of_the_run(make_step):
    assert lines_of(60, [make_step(1)])[0].startswith("step 1/60  1%  ")  # 1.67
    assert lines_of(2000, [make_step(1999)])[0].startswith("step 1,999/2,000  99%  ")
    assert lines_of(100, [make_step(29)])[0].startswith("step 29/100  29%  ")  # and 100 * 0.29 is below 29


def test_a_validation_in_a_line_of_a_step_is_said_to_be_the_last(make_step):
    lines = lines_of(2, [make_step(1), Evaluated(1, 10, 5.3264, 1205.7, None, 99, 1.0, False), make_step(2)])
    assert lines[1] == "validation at step 1: loss 5.326  perplexity 1,205.70"
    assert "last validation 5.326" in lines[2]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("A short one.", ["A short one."]),
        ("", ["(empty)"]),
        ("one\n\ntwo\tthree", ["one⏎⏎two⇥three"]),
        ("x" * 5000, ["x" * 76, "x" * 72 + " ..."]),
        ("x" * 152, ["x" * 76, "x" * 76]),
        ("国" * 500, ["国" * 38, "国" * 36 + " ..."]),
        ("word " * 30, [("word " * 15).strip(), "word " * 15]),
    ],
)
def test_a_sample_has_at_most_two_indented_lines(text, shown):
    heading, *lines = lines_of(10, [Sampled(10, "", text)])
    assert heading == "sample at step 10:"
    assert lines == ["    " + line for line in shown]


def test_a_resumed_run_begins_in_the_middle_and_reckons_from_there(make_step):
    lines = lines_of(1000, [make_step(step, seconds=5000 + 2.0 * step) for step in range(901, 1001)])
    assert lines[0].startswith("step 901/1,000  90%")
    assert "left" not in lines[0]
    assert len(lines) == 2
    assert lines[-1].startswith("step 1,000/1,000  100%")
    assert "left" not in lines[-1]


def test_the_loss_shown_is_smoothed_without_bias_and_without_bad_steps(make_step):
    losses = [4.0, 2.0, float("nan"), 5.0]
    lines = lines_of(4, [make_step(step, loss) for step, loss in enumerate(losses, 1)])
    assert "smoothed" not in lines[0]
    # Each value weighs 0.98 of the one after it; the bad step does not count.
    weights = [0.98**2, 0.98, 1.0]
    mean = sum(w * loss for w, loss in zip(weights, [4.0, 2.0, 5.0], strict=True)) / sum(weights)
    assert f"loss 5.000  smoothed {mean:.3f}" in lines[3]
    assert f"loss not a number  smoothed {(0.98 * 4 + 2) / 1.98:.3f}" in lines[2]


def test_the_wait_for_data_is_its_share_of_the_time_without_the_first_step(make_step):
    # The first step compiles for 100 s and waits 50; then half of each second is waited.
    steps = [make_step(1, data_wait=50.0, seconds=100.0)]
    steps += [make_step(step, data_wait=0.5, seconds=99.0 + step) for step in range(2, 11)]
    lines = lines_of(10, steps)
    assert "data wait" not in lines[0]
    assert all("data wait 50.0%" in line for line in lines[1:])


GPU = {"utilization": 97, "memory_used": 12 << 30, "memory_total": 80 << 30, "throttled": ""}


@pytest.mark.parametrize(
    ("memory", "gpus", "shown"),
    [
        (None, [], ""),
        (1 << 31, [], "  memory 2.0 GiB"),
        (300 << 20, [GPU], "  memory 300 MiB  GPU 97% 12.0 GiB of 80.0 GiB"),
        (None, [GPU, {**GPU, "utilization": 3, "throttled": "power limit"}],
         "  2 GPUs 3-97% 24.0 GiB of 160.0 GiB held back by power limit"),
        (None, [dict.fromkeys(GPU)], ""),
        (None, [{**dict.fromkeys(GPU), "utilization": 50}], "  GPU 50%"),
    ],
)  # fmt: skip
def test_what_the_machine_does_is_shown_as_far_as_it_is_known(make_step, memory, gpus, shown):
    lines = lines_of(2, [make_step(1), Hardware(1, 0.5, None, None, memory, None, gpus), make_step(2)])
    assert lines[-1].endswith("data wait 0.5%" + shown)


def test_where_there_is_little_room_the_most_wanted_readings_stay():
    readings = ["loss 3.000", "smoothed 3.1", "40K tokens/s", "gradient norm 0.50", "memory 1 GiB"]
    assert packed(readings, 200, 2) == ["  ".join(readings)]
    assert packed(readings, 40, 2) == ["loss 3.000  smoothed 3.1  40K tokens/s", "gradient norm 0.50  memory 1 GiB"]
    assert packed(readings, 24, 2) == ["loss 3.000  smoothed 3.1", "40K tokens/s"]
    assert packed(readings, 12, 2) == ["loss 3.000", "smoothed 3.1"]
    assert packed(readings, 4, 2) == ["loss 3.000"]


@given(st.lists(st.text("abc", min_size=1, max_size=30), max_size=12), st.integers(1, 100), st.integers(1, 4))
def test_packed_lines_fit_and_keep_whole_readings_in_order(readings, columns, most):
    lines = packed(readings, columns, most)
    assert len(lines) <= most
    assert all(len(line) <= columns for line in lines[1:])
    shown = iter(readings)
    assert all(one in shown for line in lines for one in line.split("  "))
    assert [lines[0].split("  ")[0]] == readings[:1] if readings else not lines


def test_what_happens_is_said_on_plain_lines(make_step):
    happened = [
        Evaluated(10, 40960, 2.5, 12.182, 1.25, 99, 1.0, True),
        Sampled(10, "Once ", "upon\x1b[2J a time\x07"),
        Sampled(10, "", "x" * 5000),
        Skipped(11, 2, "the gradient is not finite", list(range(1, 12)), "gradient of head.weight: nan"),
        Skipped(12, 1, "the gradient is not finite", [], ""),
        Spiked(12, 9.25, 4.5),
        SaveFailed(12, "No space left on device", 8),
        SaveFailed(12, "No space left on device", None),
        Resumed(12, ["train.steps 100 -> 200", "checkpoint.keep 2 -> 5\x1b[2J"]),
        Note(12, "profile written"),
        Saved(12, "checkpoints/12"),
        Finished(12, 49152, 192.0, "all steps done"),
        Finished(1, 1, 1.0, "done"),
    ]
    lines = lines_of(100, happened)
    assert lines[0] == "validation at step 10: loss 2.500  perplexity 12.18  bits per byte 1.250  (best so far)"
    assert lines[1:3] == ["sample at step 10:", "    Once upon\\x1b[2J a time\\x07"]
    assert lines[3] == "sample at step 10:"
    assert lines[5].endswith("x ...")
    assert lines[6:] == [
        "step 11 skipped, 2 in a row: the gradient is not finite",
        "    gradient of head.weight: nan",
        "    documents 1, 2, 3, 4, 5, 6, 7, 8 and 3 more",
        "step 12 skipped, 1 in a row: the gradient is not finite",
        "step 12: the loss leapt to 9.250, over 4.500",
        "step 12 was not saved: No space left on device; last whole checkpoint: step 8; it is tried again",
        "step 12 was not saved: No space left on device; last whole checkpoint: none; it is tried again",
        "resumed from step 12 of 100",
        "    train.steps 100 -> 200",
        "    checkpoint.keep 2 -> 5\\x1b[2J",
        "step 12: profile written",
        "all steps done: 12 steps, 49,152 tokens, 3 min 12 s",
        "done: 1 step, 1 token, 1.0 s",
    ]
    assert not any(CONTROL.search(line) for line in lines)


def test_a_closed_stream_stops_no_run(make_step):
    stream = io.StringIO()
    with Progress(3, stream) as progress:
        stream.close()
        for step in (1, 2, 3):
            progress(make_step(step))


PROGRAM = """
    import sys, time
    from rung.report import progress
    from rung.report.progress import Progress, track
    from rung.train.events import *
    progress.LONG_SECONDS = 0.05
    print("result")
    with track(1000, "[reading] words") as on_progress:
        on_progress(10)
        time.sleep(0.1)
        on_progress(500)
        time.sleep(0.3)
    with track(1000, "quick work") as on_progress:
        on_progress(10)
        on_progress(1000)
    with Progress(20) as show:
        for step in range(1, 21):
            show(StepDone(step, step * 10, 3.0, 1e-3, 0.5, 4e4, 1e9, 0.0, step * 1.0, False, 0.1))
            time.sleep(0.03)
        show(Evaluated(20, 200, 2.5, 12.182, 1.25, 99, 1.0, True))
        show(Sampled(20, "[red]", "text\\x1b[2J"))
        show(Note(20, "a long line " * 20))
    print("rich" in sys.modules)
"""


def test_without_a_terminal_there_is_no_bar_no_control_character_and_no_rich():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, check=True)
    assert done.stdout == "result\nFalse\n"
    assert not any(CONTROL.search(line) for line in done.stderr.splitlines())
    assert "reading" not in done.stderr
    assert "step 20/20  100%" in done.stderr


def on_terminal(program, **environment):
    """Run a program whose standard error is a terminal; return its standard output and what the terminal got."""
    main, side = pty.openpty()
    received = []

    def read():
        while True:
            try:
                data = os.read(main, 65536)
            except OSError:  # Linux: the other side is closed
                return
            if not data:
                return
            received.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=side,
        env=environment,
        text=True,
        check=False,
    )
    os.close(side)
    thread.join(timeout=20)
    os.close(main)
    terminal = b"".join(received).decode()
    assert done.returncode == 0, terminal
    return done.stdout, terminal


def test_on_a_terminal_lines_are_live_and_the_result_stays_on_standard_output():
    out, terminal = on_terminal(PROGRAM)
    assert out == "result\nTrue\n"
    assert "\x1b[" in terminal  # redrawn
    assert "━" in terminal
    assert "[reading] words" in terminal  # not taken for markup
    assert "quick work" not in terminal
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal)
    assert "compiling the first step" in plain
    assert re.search(r"step \d+/20 .*loss 3\.000  .*40K tokens/s  .* left", plain, re.DOTALL)
    assert "validation at step 20: loss 2.500" in plain
    assert "sample at step 20:\r\n    [red]text\\x1b[2J" in plain
    assert ("a long line " * 20).strip() in plain.replace("\r\n", "")
    assert terminal.count("\x1b[?25l") == terminal.count("\x1b[?25h")  # the cursor is shown again


def test_a_dumb_terminal_has_plain_lines():
    out, terminal = on_terminal(PROGRAM, TERM="dumb")
    assert out == "result\nFalse\n"
    assert "\x1b[" not in terminal
    assert "step 20/20  100%" in terminal


def test_an_error_within_gives_the_terminal_back():
    program = """
        from rung.report.progress import Progress
        try:
            with Progress(20):
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
    """
    _, terminal = on_terminal(program)
    assert terminal.count("\x1b[?25l") == terminal.count("\x1b[?25h") == 1


@pytest.mark.parametrize("total", [100, None])
def test_track_without_a_terminal_is_silent(total):
    stream = io.StringIO()
    with track(total, "reading", stream) as on_progress:
        on_progress(50)
        on_progress(100, 100)
    assert stream.getvalue() == ""
