"""Checkpoints: which are kept, what they hold, and what a save costs a training run that goes on beside it."""

from __future__ import annotations

import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from rung.config import MeshConfig
from rung.errors import RungError
from rung.mesh import make_mesh, replicated
from rung.train import events
from rung.train.checkpoint import Checkpoints, NoCheckpoint, Outcome, Progress, read_pointer, read_record, read_state
from rung.train.loop import Intervals, _Saves


def state_of(value: float):
    placed = replicated(make_mesh(MeshConfig()))
    tree = {
        "weights": {"layers": [{"up": jnp.full((3, 2), value)}], "head": jnp.arange(4.0) + value},
        "optimizer": {"adamw": (jnp.int32(7), jnp.full(5, -0.0, jnp.bfloat16))},
        "step": jnp.int32(value),
    }
    return jax.device_put(tree, placed)


def saved(checkpoints: Checkpoints, step: int, best: int = 0) -> None:
    checkpoints.save(state_of(step), Progress(step, 10 * step, float(step), best, 1.5 if best else None, (1.0, 2.5)))
    outcome = checkpoints.wait()
    assert outcome is not None
    assert (outcome.step, outcome.error) == (step, None)


def test_what_is_saved_is_what_is_read(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, identity={"config": {"a": 1}})
    saved(checkpoints, 3, best=3)
    seen = []
    restored = checkpoints.restore(state_of(0), lambda identity, progress: seen.append((identity, progress)))
    assert restored.progress == Progress(3, 30, 3.0, 3, 1.5, (1.0, 2.5))
    assert seen == [({"config": {"a": 1}}, restored.progress)]
    assert restored.problems == []
    expected = state_of(3)
    assert jax.tree.structure(restored.state) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(restored.state), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        assert one.dtype == other.dtype
        assert one.sharding == other.sharding


def test_another_program_can_read_it(tmp_path):
    saved(Checkpoints(tmp_path, keep=2), 3)
    arrays = load_file(tmp_path / "checkpoints/3/state.safetensors")
    assert set(arrays) == {"weights.layers.0.up", "weights.head", "optimizer.adamw.0", "optimizer.adamw.1", "step"}
    np.testing.assert_array_equal(arrays["weights.head"], [3, 4, 5, 6])
    record = json.loads((tmp_path / "checkpoints/3/checkpoint.json").read_text())
    assert record["hashes"].keys() == arrays.keys()
    assert (tmp_path / "latest").read_text() == "3\n"


def test_the_newest_the_best_and_every_so_many_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, keep_every_steps=4)
    for step in range(1, 12):
        saved(checkpoints, step, best=3 if step >= 3 else 0)
    assert checkpoints.steps() == [3, 4, 8, 10, 11]
    assert (read_pointer(tmp_path / "latest"), read_pointer(tmp_path / "best")) == (11, 3)
    # A best that came between two saves has no checkpoint: the one that has stays, and so does its pointer.
    saved(checkpoints, 13, best=12)
    assert checkpoints.steps() == [3, 4, 8, 11, 13]
    assert read_pointer(tmp_path / "best") == 3
    saved(checkpoints, 14, best=14)
    assert checkpoints.steps() == [4, 8, 13, 14]
    assert read_pointer(tmp_path / "best") == 14


def test_a_save_does_not_wait_for_the_disk_and_is_of_the_state_as_it_was(tmp_path):
    """The step after a save takes the state's buffers over while they are being written."""
    may_go_on = threading.Event()
    checkpoints = Checkpoints(tmp_path, keep=2)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + jnp.ones_like(x), state), donate_argnums=0)
    state = state_of(5)
    expected = jax.tree.map(np.array, state)
    checkpoints.save(state, Progress(5), sync=lambda: may_go_on.wait(20) and None)
    for _ in range(3):
        state = step(state)
    jax.block_until_ready(state)
    assert checkpoints.saving
    assert checkpoints.outcome() is None
    assert checkpoints.steps() == []
    may_go_on.set()
    assert checkpoints.wait().error is None
    read = read_state(tmp_path / "checkpoints/5", state_of(0))
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), b), read, expected))


def test_what_unfinished_saves_left_is_removed_and_never_taken_for_whole(tmp_path):
    saved(Checkpoints(tmp_path, keep=5), 3)
    for name in ("4.tmp", "2.old"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "state.safetensors").write_bytes(b"half")
    checkpoints = Checkpoints(tmp_path, keep=5)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]
    assert checkpoints.restore(state_of(0)).progress.step == 3


def test_a_run_that_saved_nothing_has_no_checkpoint_and_one_that_lost_all_says_so(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=5)
    with pytest.raises(NoCheckpoint):
        checkpoints.restore(state_of(0))
    (tmp_path / "latest").write_text("9\n")
    with pytest.raises(RungError, match="the latest checkpoint, of step 9, is missing") as lost:
        checkpoints.restore(state_of(0))
    assert not isinstance(lost.value, NoCheckpoint)


def test_a_part_of_the_state_can_be_read_alone(tmp_path):
    saved(Checkpoints(tmp_path, keep=5), 3)
    path = tmp_path / "checkpoints/3"
    assert set(read_state(path, {"weights": state_of(0)["weights"]})) == {"weights"}
    with pytest.raises(KeyError, match="optimizer"):
        read_state(path, {"optimizer": {"muon": jnp.zeros(3)}})
    with pytest.raises(ValueError, match=r"weights\.head is float32\[4\], not float32\[5\]"):
        read_state(path, {"weights": {"head": jnp.zeros(5)}})
    assert read_record(path)[0].step == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record["progress"].update(step="3"),
        lambda record: record["progress"].pop("tokens"),
        lambda record: record["progress"].update(losses=3),
        lambda record: record.update(progress=[]),
        lambda record: record.update(identity="x"),
        lambda record: record.pop("hashes"),
    ],
)
def test_a_record_that_is_not_what_was_written_is_a_damaged_checkpoint(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (2, 3):
        saved(checkpoints, step)
    path = tmp_path / "checkpoints/3/checkpoint.json"
    record = json.loads(path.read_text())
    damage(record)
    path.write_text(json.dumps(record))
    restored = checkpoints.restore(state_of(0))
    assert restored.progress.step == 2
    assert "the checkpoint of step 3 is damaged" in restored.problems[0]


# When to save


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


class Disk:
    """Stands where the checkpoints are: each save has the next of the outcomes."""

    def __init__(self, run, outcomes):
        self.run, self.outcomes, self.running = run, list(outcomes), None

    def save(self, state, progress, sync):
        self.running = progress.step

    def wait(self):
        step, self.running = self.running, None
        return None if step is None or not self.outcomes else Outcome(step, self.run, self.outcomes.pop(0))

    outcome = wait

    def steps(self):
        return [2]


def test_saves_come_by_steps_and_by_minutes(monkeypatch, tmp_path):
    clock = Clock(monkeypatch)
    saves = _Saves(Disk(tmp_path, []), Intervals(save=10, save_seconds=60.0), lambda event: None, lambda: None)
    assert [step for step in range(1, 31) if saves.due(step)] == [10, 20, 30]
    clock.now = 60.0
    assert saves.due(13)
    saves.begin(None, Progress(13))
    assert not saves.due(14)
    clock.now = 119.9
    assert not saves.due(14)
    clock.now = 120.0
    assert saves.due(14)


def test_a_save_that_failed_is_tried_again_later_and_later(monkeypatch, tmp_path):
    clock, seen = Clock(monkeypatch), []
    disk = Disk(tmp_path, ["No space left on device"] * 8 + [None])
    saves = _Saves(disk, Intervals(save=1000), seen.append, lambda: None)
    waits = []
    for step in range(1000, 1009):
        saves.begin(None, Progress(step))
        saves.hear()
        begun = clock.now
        while not saves.due(step + 1) and clock.now - begun < 1000:
            clock.now += 1.0
        waits.append(clock.now - begun)
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300, 1000]  # the last one was whole: there is nothing to try again
    failed, whole = seen[:-1], seen[-1]
    assert failed == [events.SaveFailed(step, "No space left on device", 2) for step in range(1000, 1008)]
    assert whole == events.Saved(1008, str(tmp_path))
