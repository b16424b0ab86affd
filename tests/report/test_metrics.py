import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.report.metrics import MetricsLog, read_metrics, read_samples, to_line, truncate_after
from rung.train.events import Evaluated, Finished, Note, Sampled, Saved, Skipped


def strict(line):
    """Parse as JSON does: NaN and Infinity, which Python's parser would let pass, are refused."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line.decode("utf-8"), parse_constant=refuse)


@given(st.floats(), st.floats(), st.text(st.characters(exclude_categories=())))
def test_every_event_is_one_line_of_strict_json_and_reads_back(loss, bits, text):
    for event in (Evaluated(3, 9, loss, 1.0, bits, 5, 0.5, True), Note(3, text), Sampled(3, text, text)):
        line = to_line(event)
        assert line.count(b"\n") == 1
        assert line.endswith(b"\n")
        strict(line)


def test_what_is_logged_is_read_back(tmp_path, make_step):
    events = [
        make_step(1, 9.25),
        make_step(2, math.nan, skipped=True),
        make_step(3, math.inf, gradient_norm=-math.inf),
        Evaluated(3, 12288, 2.5, math.inf, None, 77, 1.5, True),
        Saved(3, "checkpoints/3"),
        Skipped(2, 1, "the gradient is not finite"),
        Note(3, "国境"),
        Finished(3, 12288, 2.0, "all steps done"),
    ]
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for event in events:
            log(event)
    for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines():
        strict(line)
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    np.testing.assert_array_equal(metrics.steps["step"], [1, 2, 3])
    np.testing.assert_array_equal(metrics.steps["loss"], [9.25, math.nan, math.inf])
    np.testing.assert_array_equal(metrics.steps["gradient_norm"], [0.5, math.inf, -math.inf])
    np.testing.assert_array_equal(metrics.steps["skipped"], [False, True, False])
    assert metrics.steps["tokens"].dtype == np.int64
    others = [*metrics.evaluations, *metrics.saved, *metrics.skipped, *metrics.notes, *metrics.finished]
    assert others == events[3:]
    assert metrics.problems == []


def test_samples_have_a_file_of_their_own_and_read_back_exactly(tmp_path, nasty):
    sample = Sampled(7, "Once\nupon ", nasty)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log(sample)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert read_samples(tmp_path / "samples.jsonl") == ([sample], [])


def test_steps_between_lines(tmp_path, make_step):
    with MetricsLog(tmp_path / "metrics.jsonl", every_steps=10) as log:
        for step in range(1, 36):
            log(make_step(step, skipped=step == 17))
    assert read_metrics(tmp_path / "metrics.jsonl").steps["step"].tolist() == [1, 10, 17, 20, 30]


def test_missing_and_empty_files_read_as_nothing(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    for name in ("missing.jsonl", "empty.jsonl"):
        metrics = read_metrics(tmp_path / name)
        assert len(metrics.steps["loss"]) == 0
        assert metrics.problems == []
    assert truncate_after(tmp_path / "missing.jsonl", 3) == 0
    assert not (tmp_path / "missing.jsonl").exists()


@pytest.fixture
def torn(tmp_path, make_step):
    """Return a log of five steps whose last line was half written."""
    path = tmp_path / "metrics.jsonl"
    whole = b"".join(to_line(make_step(step)) for step in range(1, 6))
    path.write_bytes(whole[:-20])
    return path


def test_a_torn_last_line_is_left_out_and_said(torn):
    metrics = read_metrics(torn)
    assert metrics.steps["step"].tolist() == [1, 2, 3, 4]
    assert metrics.problems == ["metrics.jsonl: its last line, 5, is torn and left out"]


@pytest.mark.parametrize("junk", [b"\0" * 40 + b"\n", b"[1, 2]\n", b"\xff\xfe\n", b'{"event": "step"}\n'])
def test_a_line_that_is_no_event_is_left_out_and_said(tmp_path, make_step, junk):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(to_line(make_step(1)) + junk + to_line(make_step(2)))
    metrics = read_metrics(path)
    assert metrics.steps["step"].tolist() == [1, 2]
    assert metrics.problems == ["metrics.jsonl: line 2 is no event and left out"]


def test_a_log_goes_on_after_a_torn_line_without_damage_to_the_next(torn, make_step):
    with MetricsLog(torn) as log:
        log(make_step(5))
    metrics = read_metrics(torn)
    assert metrics.steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert len(metrics.problems) == 1


def test_truncate_drops_later_steps_and_the_torn_line(torn):
    before = torn.read_bytes()
    assert truncate_after(torn, 3) == 2
    assert torn.read_bytes() == b"".join(before.splitlines(keepends=True)[:3])
    assert [path.name for path in torn.parent.iterdir()] == ["metrics.jsonl"]


def test_truncate_and_go_on_gives_the_file_of_an_undisturbed_run(tmp_path, make_step):
    straight, resumed = tmp_path / "straight.jsonl", tmp_path / "resumed.jsonl"
    with MetricsLog(straight) as log:
        for step in range(1, 31):
            log(make_step(step))
    with MetricsLog(resumed) as log:
        for step in range(1, 24):
            log(make_step(step))
    truncate_after(resumed, 20)
    with MetricsLog(resumed) as log:
        for step in range(21, 31):
            log(make_step(step))
    assert resumed.read_bytes() == straight.read_bytes()


def test_truncate_leaves_a_whole_file_alone(tmp_path, make_step):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(to_line(make_step(1)))
    inode = path.stat().st_ino
    assert truncate_after(path, 1) == 0
    assert path.stat().st_ino == inode


def test_a_killed_process_leaves_every_line_it_logged(tmp_path):
    program = """
        import os, signal, sys
        from rung.report.metrics import MetricsLog
        from rung.train.events import Note
        log = MetricsLog(sys.argv[1])
        for step in range(1, 101):
            log(Note(step, "x"))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [note.step for note in read_metrics(path).notes] == list(range(1, 101))


def test_a_full_disk_loses_no_line(tmp_path, make_step, capsys):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    lines = log._metrics
    real = lines._file

    class Full:
        room = 500

        def write(self, data):
            if self.room == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = real.write(data[: self.room])
            self.room -= taken
            return taken

        def close(self):
            real.close()

    lines._file = full = Full()
    for step in range(1, 11):
        log(make_step(step))
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert (
        len(read_metrics(tmp_path / "metrics.jsonl").problems) == 1
    )  # the line that was cut off when the disk was full
    full.room = 1 << 20
    log(make_step(11))
    log.close()
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics.steps["step"].tolist() == list(range(1, 12))
    assert metrics.problems == []
