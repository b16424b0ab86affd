"""Trackers, read back with the libraries' own readers; and trackers that fail, which must cost a run nothing."""

from __future__ import annotations

import json
import math
import os
import pty
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rung.config import Config, override
from rung.errors import RungError
from rung.report import trackers as module
from rung.report.trackers import Guarded, TensorBoard, check_trackers, scalars, trackers
from rung.train.events import Evaluated, Finished, Hardware, Norms, Note, Resumed, Sampled, Skipped, Spiked

pytest.importorskip("tensorboard", reason="tensorboard is not installed: the extra tensorboard has it")
pytest.importorskip("wandb", reason="wandb is not installed: the extra wandb has it")

ROOT = Path(__file__).parents[2]
CONFIG = override(Config(), {"name": "a run", "sample.prompts": ("", "Once")})
GPU = {"name": "H", "utilization": 90, "memory_used": 2**30, "memory_total": 2**31, "temperature": 60, "power": 300.0}


# TensorBoard


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def curve(accumulator, tag):
    return [(point.step, point.value) for point in accumulator.Scalars(tag)]


def text(accumulator, tag):
    return [(point.step, point.tensor_proto.string_val[0].decode()) for point in accumulator.Tensors(tag)]


def test_tensorboard_reads_back_every_number_at_its_step(tmp_path, make_step):
    board = TensorBoard(tmp_path, CONFIG)
    for step in range(1, 6):
        board(make_step(step, loss=5.0 - step))
    board(Evaluated(5, 500, 2.5, math.exp(2.5), 1.25, 40, 3.0, True))
    board(Norms(5, {"embedding": 8.0, "empty": 0.0}, {"embedding": 0.5, "empty": 0.0}))
    board(Hardware(5, 3.0, 50.0, None, 3 * 2**20, None, [{**GPU, "throttled": ""}, {**GPU, "throttled": "heat"}]))
    board(make_step(6, loss=math.nan, skipped=True))
    board.close()
    found = read(tmp_path)
    assert curve(found, "train/loss")[:5] == [(step, 5.0 - step) for step in range(1, 6)]
    assert math.isnan(curve(found, "train/loss")[5][1])
    assert curve(found, "train/tokens") == [(step, step * 4096) for step in range(1, 7)]
    assert curve(found, "train/learning_rate")[1] == (2, pytest.approx(0.0005))
    assert curve(found, "train/gradient_norm")[0] == (1, 0.5)
    assert curve(found, "speed/tokens_per_second")[0] == (1, 40_000)
    assert curve(found, "validation/loss") == [(5, 2.5)]
    assert curve(found, "validation/bits_per_byte") == [(5, 1.25)]
    assert curve(found, "norms/embedding") == [(5, 8.0)]
    assert curve(found, "update_to_weight/embedding") == [(5, 0.0625)]
    assert curve(found, "hardware/cpu_percent") == [(5, 50.0)]
    assert curve(found, "hardware/process_memory_mib") == [(5, 3.0)]
    assert curve(found, "hardware/gpu1_memory_mib") == [(5, 1024.0)]
    assert [curve(found, f"hardware/gpu{n}_throttled") for n in (0, 1)] == [[(5, 0.0)], [(5, 1.0)]]
    scalar_tags = set(found.Tags()["scalars"])
    assert not scalar_tags & {"hardware/process_cpu_percent", "hardware/free_memory_mib", "update_to_weight/empty"}


def test_tensorboard_has_samples_events_and_the_config_as_text(tmp_path, nasty):
    board = TensorBoard(tmp_path, CONFIG)
    board(Sampled(3, "Once", " upon\n# a time"))
    board(Sampled(3, "", nasty))
    board(Skipped(4, 2, "the loss is not finite", [7], ""))
    board(Spiked(5, 9.0, 4.0))
    board(Resumed(5, ["train.steps 10 -> 20"]))
    board(Finished(6, 600, 6.0, "done"))
    board.close()
    found = read(tmp_path)
    # Four spaces make it code, in which Markdown has no say.
    assert text(found, "samples/2") == [(3, "    Once upon\n    # a time")]
    assert "\x1b" not in text(found, "samples/1")[0][1]
    events = text(found, "events")
    assert [step for step, _ in events] == [4, 5, 5, 6]
    assert "2 in a row" in events[0][1]
    assert "train.steps 10 -> 20" in events[2][1]
    assert 'name = "a run"' in text(found, "config")[0][1]


def test_tensorboards_plugin_reads_the_hyperparameters(tmp_path):
    from tensorboard.plugins.hparams import metadata

    TensorBoard(tmp_path, CONFIG).close()
    content = read(tmp_path).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = metadata.parse_session_start_info_plugin_data(content).hparams
    assert values["train.batch_size"].number_value == Config().train.batch_size
    assert values["model.tied"].bool_value is True
    assert values["sample.prompts"].string_value == ", Once"


def test_what_a_killed_process_wrote_after_the_checkpoint_is_superseded(tmp_path, make_step):
    killed = TensorBoard(tmp_path, CONFIG)
    for step in range(1, 11):
        killed(make_step(step, loss=1.0))
    killed(Sampled(10, "", "lost"))
    killed.close()
    (file,) = tmp_path.iterdir()
    os.truncate(file, file.stat().st_size - 7)  # its last record is torn
    resumed = TensorBoard(tmp_path, CONFIG, done=4)
    for step in range(5, 8):
        resumed(make_step(step, loss=2.0))
    resumed.close()
    found = read(tmp_path)
    assert curve(found, "train/loss") == [(step, 1.0 if step <= 4 else 2.0) for step in range(1, 8)]
    assert "samples/1" not in found.Tags()["tensors"]
    assert [step for step, _ in text(found, "config")] == [0, 4]


def test_many_resumes_within_a_second_are_read_in_their_order(tmp_path, make_step):
    for done in (0, 3, 2, 1):
        board = TensorBoard(tmp_path, CONFIG, done=done)
        for step in range(done + 1, done + 4):
            board(make_step(step, loss=float(done)))
        board.close()
    assert curve(read(tmp_path), "train/loss") == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)]


def test_neither_the_module_nor_tensorboards_files_need_tensorflow_or_torch(tmp_path):
    for name in ("tensorflow", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    program = """
import sys
from pathlib import Path
from rung.config import Config
from rung.report.trackers import TensorBoard, check_trackers, trackers
check_trackers(Config())
assert trackers(Config(), ".") == []
assert not {"tensorboard", "wandb", "google", "jax"} & set(sys.modules), "imported before it is asked for"
TensorBoard(Path("files"), Config()).close()
print("written")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "written\n", done.stderr


# Weights & Biases


def records(folder):
    """Yield the records of the one .wandb file in a folder: LevelDB's log format, of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    data, at, parts = path.read_bytes(), 7, b""  # after the file's own header
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # no header fits in the rest of the block
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def history(folder):
    rows = []
    for record in records(folder):
        if record.HasField("history"):
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            rows.append({key: json.loads(value) for key, value in items.items()})
    return rows


PROGRAM = """
import socket, sys
connect = socket.socket.connect
def guarded(self, address):
    if self.family != getattr(socket, "AF_UNIX", None) and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise SystemExit(f"connects to {address}")
    return connect(self, address)
socket.socket.connect = guarded

from rung.config import Config, override
from rung.report.trackers import check_trackers, trackers
from rung.train.events import Evaluated, Finished, Norms, Sampled, StepDone
folder, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = override(Config(), {"name": "a run", "track.wandb": True, "sample.prompts": ("Once",)})
check_trackers(config)
notes = []
(tracker,) = trackers(config, folder, first - 1, notes.append)
for step in range(first, last + 1):
    tracker(StepDone(step, step * 10, 5 / step, 1e-3, 0.5, 1e4, 1e9, 0.0, 0.1 * step, False, 0.1))
tracker(Evaluated(last, last * 10, 1.5, 4.5, 0.75, 100, 1.0, True))
tracker(Norms(last, {"embedding": 4.0}, {"embedding": 1.0}))
tracker(Sampled(last, "Once", " <upon>"))
tracker(Finished(last, last * 10, 1.0, "done"))
tracker.close()
if notes:
    raise SystemExit(str(notes))
"""


@pytest.fixture
def listener() -> Iterator[tuple[int, list]]:
    """A port that stands for all of the network, and who came to it."""
    came: list = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                came.append(connection.recv(200))
                connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1], came


@pytest.fixture
def environment(tmp_path, listener):
    """Of a process with a login whose whole network is the listener."""
    address = f"http://127.0.0.1:{listener[0]}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), address)
    own = {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT / "src"), "NO_PROXY": "", "no_proxy": ""}
    (tmp_path / "home").mkdir()
    return {**kept, **proxies, **own, "WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40}


def test_offline_wandb_keeps_everything_in_the_run_and_touches_no_network(tmp_path, listener, environment):
    folder = tmp_path / "run"
    folder.mkdir()
    for first, last in ((1, 6), (5, 8)):  # killed after step 6, resumed from a checkpoint of step 4
        words = [sys.executable, "-c", PROGRAM, folder, str(first), str(last)]
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        time.sleep(1.1)  # wandb names its folders by the second
    assert listener[1] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "run"]
    assert [p.name for p in folder.iterdir()] == ["wandb"]
    one, two = sorted((folder / "wandb").glob("offline-run-*"))
    runs = [next(record.run for record in records(part) if record.HasField("run")) for part in (one, two)]
    assert runs[0].run_id == runs[1].run_id == (folder / "wandb/run-id").read_text().strip()
    assert (runs[0].project, runs[0].display_name) == ("rung", "a run")
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["train"]["batch_size"] == Config().train.batch_size
    rows = history(one)
    assert [row["_step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["train/loss"] for row in rows] == [5 / step for step in range(1, 7)]
    assert [row["_step"] for row in history(two)] == [5, 6, 7, 8]
    assert rows[-1]["validation/loss"] == 1.5
    assert rows[-1]["update_to_weight/embedding"] == 0.25
    (sample,) = one.glob("files/media/html/samples/*.html")
    assert "<b>Once</b> &lt;upon&gt;" in sample.read_text()
    # Of the machine and the code nothing is written.
    assert not any(
        (one / "files" / name).exists() for name in ("wandb-metadata.json", "requirements.txt", "output.log")
    )


CHECK = """
from rung.config import Config, override
from rung.errors import RungError
from rung.report.trackers import check_trackers
try:
    check_trackers(override(Config(), {"track.wandb": True, "track.wandb_mode": "online"}))
    print("fine")
except RungError as error:
    print(error)
"""


@pytest.mark.parametrize(("change", "expected"), [
    ({}, "fine\n"),
    ({"WANDB_MODE": "offline"}, "fine\n"),
    ({"WANDB_API_KEY": "short"}, "nobody is logged in"),
    ({"WANDB_API_KEY": ""}, "nobody is logged in"),
])  # fmt: skip
def test_online_wandb_wants_a_login_before_training_and_never_asks_for_one(change, expected, environment, listener):
    terminal, other = pty.openpty()  # where it could ask
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHECK],
            env={**environment, "TERM": "xterm", **change},
            stdin=other,
            stdout=subprocess.PIPE,
            stderr=other,
            text=True,
            timeout=60,
            check=False,
        )
        os.set_blocking(terminal, False)
        with pytest.raises(BlockingIOError):
            os.read(terminal, 1000)
    finally:
        os.close(terminal)
        os.close(other)
    assert expected in done.stdout
    if expected != "fine\n":
        problem, hint = done.stdout.splitlines()
        assert "online" in problem
        assert "wandb login" in hint
    assert listener[1] == []


# What is asked for and not there


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_before_any_work(name, monkeypatch, tmp_path):
    config = override(Config(), {f"track.{name}": True})
    check_trackers(config)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(RungError, match=f"{name} is not installed") as caught:
        check_trackers(config)
    assert f"pip install 'rung[{name}]'" in caught.value.hint
    assert trackers(Config(), tmp_path) == []


def test_a_folder_of_the_packages_name_is_not_the_package(monkeypatch, tmp_path):
    (tmp_path / "wandb_of_this_test").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not module._is_installed("wandb_of_this_test")
    assert module._is_installed("pytest")


# Trackers that fail


class Tracker:
    """Collects events; fails or hangs where it is told to."""

    def __init__(self, fails="", hangs=""):
        self.fails, self.hangs, self.events, self.released = fails, hangs, [], threading.Event()
        self._at("make")

    def __call__(self, event):
        self._at("event")
        self.events.append(event)

    def close(self):
        self._at("close")
        self.events.append("closed")

    def _at(self, place):
        if self.hangs == place:
            self.released.wait(30)
        if self.fails == place:
            raise OSError(28, "No space left on device")


def wait_for(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_tracker_hears_everything_in_order_and_is_closed(make_step):
    tracker, notes = Tracker(), []
    sent = [make_step(step) for step in range(1, 500)]
    with Guarded("it", lambda: tracker, notes.append) as guarded:
        for event in sent:
            guarded(event)
    guarded.close()
    assert tracker.events == [*sent, "closed"]
    assert notes == []


def test_a_tracker_hears_of_the_steps_that_the_log_has(make_step):
    tracker = Tracker()
    guarded = Guarded("it", lambda: tracker, lambda note: None)
    guarded.every_steps = 10
    for step in range(1, 26):
        guarded(make_step(step, skipped=step == 13))
    guarded(Note(25, "kept"))
    guarded.close()
    assert [event.step for event in tracker.events[:-1]] == [1, 10, 13, 20, 25]


@pytest.mark.parametrize("place", ["make", "event", "close"])
def test_a_tracker_that_fails_is_told_of_once_and_left_alone(place, make_step):
    notes = []
    made = Tracker() if place == "make" else Tracker(fails=place)

    def make():
        return Tracker(fails="make") if place == "make" else made

    guarded = Guarded("Tracker X", make, notes.append)
    guarded(make_step(1))
    if place != "close":
        wait_for(lambda: guarded._failure)
    for step in range(2, 20):
        guarded(make_step(step))
    guarded.close()
    guarded.close()
    (note,) = notes
    assert "Tracker X" in note.text
    assert "No space left on device" in note.text
    assert note.step in ((19,) if place == "close" else (1, 2))
    assert "closed" not in made.events


@pytest.mark.parametrize("place", ["make", "event", "close"])
def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end_for_long(place, make_step):
    notes, made = [], []
    released = threading.Event()

    class Hanging(Tracker):
        def _at(self, at):
            if at == place:
                released.wait(30)

    guarded = Guarded("it", lambda: made.append(Hanging()) or made[0], notes.append, close_seconds=0.2)
    began = time.monotonic()
    for step in range(1, 100):
        guarded(make_step(step))
    assert time.monotonic() - began < 1
    guarded.close()
    assert time.monotonic() - began < 5
    released.set()
    (note,) = notes
    assert "did not finish" in note.text


def test_a_tracker_that_falls_far_behind_is_given_up(make_step, monkeypatch):
    monkeypatch.setattr(module, "MOST_WAITING", 50)
    tracker, notes = Tracker(hangs="event"), []
    guarded = Guarded("it", lambda: tracker, notes.append, close_seconds=0.2)
    for step in range(1, 100):
        guarded(make_step(step))
    tracker.released.set()
    guarded.close()
    (note,) = notes
    assert "does not keep up" in note.text
    assert 50 <= note.step <= 53


def test_telling_of_a_failure_to_all_listeners_does_not_come_back_to_the_tracker(make_step):
    heard = []

    def emit(event):
        heard.append(event)
        guarded(event)

    guarded = Guarded("it", lambda: Tracker(fails="make"), emit)
    wait_for(lambda: guarded._failure)
    emit(make_step(1))
    emit(make_step(2))
    guarded.close()
    assert [type(event).__name__ for event in heard] == ["StepDone", "Note", "StepDone"]


def test_files_that_cannot_be_made_are_a_note(tmp_path, make_step):
    (tmp_path / "tensorboard").write_text("in the way")
    notes = []
    config = override(CONFIG, {"track.tensorboard": True})
    (tracker,) = trackers(config, tmp_path, 0, notes.append)
    tracker(make_step(1))
    tracker.close()
    assert "TensorBoard is given up, training goes on" in notes[0].text
    assert len(notes) == 1


def test_what_the_config_asks_for_is_what_there_is(tmp_path, make_step):
    config = override(CONFIG, {"track.tensorboard": True, "train.log_every_steps": 5})
    (tracker,) = trackers(config, tmp_path, done=10)
    for step in range(11, 21):
        tracker(make_step(step))
    tracker.close()
    assert [step for step, _ in curve(read(tmp_path / "tensorboard"), "train/loss")] == [15, 20]


def test_an_event_without_numbers_has_no_curve():
    assert scalars(Note(1, "x")) == {}
    assert scalars(Finished(1, 1, 1.0, "done")) == {}
