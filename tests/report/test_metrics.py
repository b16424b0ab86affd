import errno
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import typing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.report.metrics import EVENT_NAMES, MetricsLog, read_metrics, read_samples, to_line, truncate_after
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
)


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
        SaveFailed(3, "No space left on device", None),
        Skipped(2, 1, "the gradient is not finite", [3, 7], "gradient of layers.0.mlp.up: nan"),
        Spiked(3, math.inf, 4.5),
        Hardware(3, 1.5, 50.0, None, 1 << 40, None, [{"name": "H200", "power": math.nan, "throttled": ""}, {}]),
        Resumed(3, ["train.steps 100 -> 200"]),
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
    assert len(metrics.events) == len(events[3:])
    for read, written in zip(metrics.events, events[3:], strict=True):
        np.testing.assert_equal(vars(read), vars(written))  # in which NaN is NaN
    assert metrics.saved == events[4:5]
    assert metrics.skipped == events[6:7]
    assert metrics.spiked == events[7:8]
    assert len(metrics.hardware) == 1
    assert metrics.resumed == events[9:10]
    assert metrics.problems == []


def test_every_kind_of_event_has_a_name_of_its_own():
    assert set(EVENT_NAMES) == set(typing.get_args(Event))
    assert len(set(EVENT_NAMES.values())) == len(EVENT_NAMES)


def test_norms_are_read_as_columns_by_group(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log(Norms(10, {"embedding.tokens": 3.0, "layers.0.mlp": 4.0}, {"embedding.tokens": math.inf}))
        log(Norms(20, {"embedding.tokens": 3.5, "layers.0.mlp": math.nan}, {"embedding.tokens": 0.5, "head": 1.0}))
    norms = read_metrics(tmp_path / "metrics.jsonl").norms
    assert norms.step.tolist() == [10, 20]
    np.testing.assert_equal(norms.weights, {"embedding.tokens": [3.0, 3.5], "layers.0.mlp": [4.0, math.nan]})
    np.testing.assert_equal(norms.updates, {"embedding.tokens": [math.inf, 0.5], "head": [math.nan, 1.0]})


odd_floats = st.sampled_from([math.nan, math.inf, -math.inf]) | st.floats()
names = st.text(st.characters(exclude_categories=()), max_size=5) | st.sampled_from(["a", "b", "a.b", "a.b.c", "0"])


@given(st.dictionaries(names, odd_floats, max_size=6), st.lists(st.dictionaries(names, odd_floats), max_size=3))
def test_nested_numbers_are_strict_json_and_read_back(norms, gpus):
    event = Hardware(1, math.nan, None, -math.inf, 5, None, gpus)
    columns = Norms(1, norms, dict(reversed(norms.items())))
    for line in (to_line(event), to_line(columns)):
        strict(line)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(to_line(event) + to_line(columns))
        metrics = read_metrics(path)
    assert metrics.problems == []
    np.testing.assert_equal([vars(e) for e in metrics.events], [vars(event)])
    for read, written in ((metrics.norms.weights, columns.weights), (metrics.norms.updates, columns.updates)):
        np.testing.assert_equal(read, {group: [value] for group, value in written.items()})


def test_the_log_of_an_older_version_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"event": "skipped", "step": 4, "in_a_row": 1, "reason": "the gradient is not finite"}\n'
        '{"event": "saved", "step": 5, "path": "checkpoints/5"}\n'
        '{"event": "note", "step": 5, "text": "resumed at step 5 of 9"}\n'
        '{"event": "of a later version", "step": 6}\n'
    )
    metrics = read_metrics(path)
    assert metrics.skipped == [Skipped(4, 1, "the gradient is not finite", [], "")]
    assert metrics.saved == [Saved(5, "checkpoints/5")]
    assert metrics.resumed == metrics.problems == []
    assert len(metrics.norms.step) == 0


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


@pytest.mark.parametrize(
    "junk",
    [
        b"\0" * 40 + b"\n",
        b"[1, 2]\n",
        b"\xff\xfe\n",
        b'{"event": "step"}\n',
        b'{"event": ["step"], "step": 1}\n',
        b'{"event": "step", "step": 1, "loss": "low"}\n',
        b'{"event": "step", "step": 1, "not_finite": ["loss"]}\n',
        b'{"event": "norms", "step": 1, "weights": {}, "not_finite": {"weights.a": "nan"}}\n',
    ],
)
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


def test_truncate_keeps_what_happened_and_drops_what_comes_again(tmp_path, make_step):
    def events(step):
        return [
            make_step(step),
            Evaluated(step, 9, 2.5, 12.0, 1.2, 5, 0.5, True),
            Mixed(step, {"prose": 1.5, "verse": 0.5}, {"prose": 2.5}, {}),
            Saved(step, "checkpoints/5"),
            Skipped(step, 1, "not finite", [], ""),
            Spiked(step, 9.0, 4.0),
            Norms(step, {}, {}),
            Finished(step, 9, 0.5, "SIGTERM"),
            SaveFailed(step, "No space left on device", 5),
            Hardware(step, 0.5, None, None, None, None, []),
            Resumed(step, []),
            Note(step, "a tracker failed"),
        ]

    path = tmp_path / "metrics.jsonl"
    assert {type(event) for event in events(1)} == set(typing.get_args(Event)) - {Sampled}
    with MetricsLog(path) as log:
        for event in [*events(5), *events(6)]:
            log(event)
    assert truncate_after(path, 5) == 8
    metrics = read_metrics(path)
    assert metrics.steps["step"].tolist() == [5]
    assert metrics.norms.step.tolist() == [5]
    after = [type(event) for event in metrics.events if event.step > 5]
    assert after == [SaveFailed, Hardware, Resumed, Note]
    assert truncate_after(path, 5) == 0


def test_samples_after_the_step_are_dropped(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for step in (5, 10):
            log(Sampled(step, "", "text"))
    assert truncate_after(tmp_path / "samples.jsonl", 5) == 1
    assert read_samples(tmp_path / "samples.jsonl")[0] == [Sampled(5, "", "text")]


def test_truncate_killed_at_any_instant_leaves_the_old_file_or_the_new(tmp_path, make_step):
    # The process kills itself at the n-th call that changes a file, for every n until it gets through.
    program = """
        import builtins, os, signal, sys
        from rung import disk
        from rung.report.metrics import truncate_after
        left = int(sys.argv[2])
        def counted(call):
            def counting(*arguments, **options):
                global left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)
            return counting
        os.fsync, os.replace, os.unlink = counted(os.fsync), counted(os.replace), counted(os.unlink)
        disk.open = counted(builtins.open)
        truncate_after(sys.argv[1], 3)
    """
    path = tmp_path / "metrics.jsonl"
    old = b"".join(to_line(make_step(step)) for step in range(1, 6))
    new = b"".join(old.splitlines(keepends=True)[:3])
    seen = set()
    for calls in range(10):
        path.write_bytes(old)
        arguments = [sys.executable, "-c", textwrap.dedent(program), str(path), str(calls)]
        done = subprocess.run(arguments, check=False)
        seen.add(path.read_bytes())
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert calls >= 3
    assert seen == {old, new}
    assert truncate_after(path, 3) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]  # what the killed ones left is gone


def test_truncate_on_a_full_disk_leaves_the_log_as_it_was(torn, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = torn.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        truncate_after(torn, 3)
    assert torn.read_bytes() == before
    assert [path.name for path in torn.parent.iterdir()] == ["metrics.jsonl"]


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
    with pytest.raises(OSError, match="No space left"):
        log.sync()
    full.room = 1 << 20
    log(make_step(11))
    log.close()
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics.steps["step"].tolist() == list(range(1, 12))
    assert metrics.problems == []
