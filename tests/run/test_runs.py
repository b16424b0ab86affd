"""The list of runs: each in its state, and damaged ones named, not fatal."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rung.config import Config, override, resolve, to_toml
from rung.errors import RungError
from rung.report.metrics import MetricsLog
from rung.run.folder import held
from rung.run.runs import is_held, look, runs
from rung.train.events import Evaluated, Finished, Note, Skipped, StepDone

ROOT = Path(__file__).parents[2]


@pytest.fixture
def make_run(tmp_path):
    """Write a run folder with a log of so many of 20 steps, and what came last."""

    def make(name, steps=20, *last, validate=True, folder=tmp_path / "runs"):
        run = folder / name
        run.mkdir(parents=True)
        config = resolve(override(Config(), {"train.steps": 20, "train.max_skipped": 3}))
        (run / "config.toml").write_text(to_toml(config), encoding="utf-8")
        with MetricsLog(run / "metrics.jsonl") as log:
            for step in range(1, steps + 1):
                log(StepDone(step, step * 10, 4.0, 1e-3, 0.5, 1e4, 1e9, 0.0, step / 2, False, 0.1))
                if validate and step % 5 == 0:
                    loss = 3 + abs(step - 10) / 10
                    log(Evaluated(step, step * 10, loss, math.exp(loss), loss / 2, 100, step / 2, step <= 10))
            for event in last:
                log(event)
        return run

    return make


def done(step=20):
    return Finished(step, step * 10, step / 2, "done")


def test_a_finished_run_has_its_best_validation_and_its_last_losses(make_run):
    state = look(make_run("a", 20, done()))
    assert (state.state, state.reason) == ("done", None)
    assert (state.steps, state.total_steps, state.tokens, state.seconds) == (20, 20, 200, 10.0)
    assert (state.validation_loss, state.bits_per_byte, state.best_step, state.train_loss) == (3.0, 1.5, 10, 4.0)


@pytest.mark.parametrize(("steps", "last", "state", "reason"), [
    (0, [], "untrained", None),
    (7, [], "interrupted", None),
    (7, [Finished(7, 70, 3.5, "SIGTERM")], "stopped", "SIGTERM"),
    (7, [Finished(7, 70, 3.5, "time limit of 5 s"), Note(7, "x")], "stopped", "time limit of 5 s"),
    (7, [done(7)], "stopped", "done"),  # and then made longer
    (7, [Skipped(7, 3, "nan", [], "")], "diverged", "3 updates in a row were not finite"),
    (7, [Skipped(7, 2, "nan", [], "")], "interrupted", None),
])  # fmt: skip
def test_a_run_that_is_not_done_says_how_it_ended(steps, last, state, reason, make_run):
    found = look(make_run("a", steps, *last))
    assert (found.state, found.reason, found.steps) == (state, reason, steps)


def test_a_run_that_a_process_trains_in_is_training_and_looking_does_not_disturb_it(make_run):
    run = make_run("a", 7)
    program = (
        "import sys; from pathlib import Path; from rung.run.folder import held\n"
        "with held(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", program, run]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"held\n"
        assert look(run).state == "training"
        (run / "metrics.jsonl").unlink()
        assert look(run).state == "starting"
        assert is_held(run)
        process.kill()
    assert look(run).state == "untrained"
    with held(run):  # nothing of the looking is left
        pass


def test_a_run_without_validation_has_a_training_loss(make_run):
    state = look(make_run("a", 20, done(), validate=False))
    assert (state.validation_loss, state.bits_per_byte, state.best_step, state.train_loss) == (None, None, None, 4.0)


def test_the_best_step_is_that_of_the_weights_wherever_in_the_log_it_is(make_run):
    from safetensors.numpy import save_file

    run = make_run("a", 20)
    metadata = {"format": "rung", "step": "5", "tokens": "50", "validation_loss": "3.5"}
    save_file({}, run / "model.safetensors", {"rung": json.dumps(metadata)})
    assert look(run).best_step == 10  # a later best, whose weights a killed process had no time to write
    with MetricsLog(run / "metrics.jsonl") as log:
        for step in range(21, 6000):
            log(StepDone(step, step * 10, 4.0, 1e-3, 0.5, 1e4, 1e9, 0.0, step / 2, False, 0.1))
    metadata["step"] = "10"
    save_file({}, run / "model.safetensors", {"rung": json.dumps(metadata)})
    assert look(run).bits_per_byte == 1.5


def test_runs_are_sorted_by_when_they_were_active_last(make_run, tmp_path):
    for n, name in enumerate("bac"):
        run = make_run(name)
        os.utime(run / "metrics.jsonl", (1000 + n, 1000 + n))
    other = make_run("d", folder=tmp_path / "elsewhere")
    os.utime(other / "metrics.jsonl", (2000, 2000))
    found = runs([tmp_path / "runs", other, tmp_path / "runs"])
    assert [Path(state.run).name for state in found] == ["d", "c", "a", "b"]


def test_what_is_no_run_is_passed_over(make_run, tmp_path):
    make_run("a")
    make_run(".a-being-made")
    (tmp_path / "runs/notes").mkdir()
    (tmp_path / "runs/file").touch()
    assert [Path(state.run).name for state in runs(tmp_path / "runs")] == ["a"]


def test_the_default_folder_may_be_missing_and_a_named_one_may_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert runs() == []
    with pytest.raises(RungError, match="elsewhere is not there"):
        runs("elsewhere")
    (tmp_path / "file").touch()
    with pytest.raises(RungError, match="file is no folder"):
        runs(["file"])


def _directory(run):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


@pytest.mark.parametrize(("damage", "said"), [
    (lambda run: (run / "config.toml").unlink(), "no config.toml"),
    (lambda run: (run / "config.toml").write_text("x = ["), "is not TOML"),
    (lambda run: (run / "config.toml").write_text("[train]\nstepz = 3"), "stepz"),
    (lambda run: (run / "config.toml").write_bytes(b"\xff\xfe"), "config.toml"),
    (lambda run: (run / "metrics.jsonl").write_bytes(b"\x00\n\xff\n"), "no line of it is an event"),
    (_directory, "Is a directory"),
])  # fmt: skip
def test_a_damaged_run_is_listed_with_what_is_wrong(damage, said, make_run, tmp_path):
    make_run("fine", 20, done())
    run = make_run("damaged", 20, done())
    damage(run)
    states = {Path(state.run).name: state for state in runs(tmp_path / "runs")}
    assert states["fine"].state == "done"
    assert states["damaged"].state == "damaged"
    assert said in states["damaged"].reason


def test_damage_to_what_is_only_told_does_not_make_a_run_damaged(make_run):
    run = make_run("a", 20, done())
    for name in ("lineage.json", "model.safetensors", "environment.json"):
        (run / name).write_bytes(b"\xff{")
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"event": "ste')
    assert look(run).state == "done"


def test_a_run_of_anothers_weights_names_it(make_run):
    run = make_run("child")
    (run / "lineage.json").write_text(json.dumps({"run": "../parent", "step": 300, "optimizer": "kept", "parents": []}))
    assert look(run).parent == "parent@300"


def test_a_hundred_runs_are_listed_at_once(make_run, tmp_path):
    run = make_run("a", 20, done())
    log = (run / "metrics.jsonl").read_bytes()
    lines = (log * 2000)[: 8 << 20]
    (run / "metrics.jsonl").write_bytes(lines[: lines.rfind(b"\n") + 1] + log)
    for n in range(99):
        (tmp_path / "runs" / f"r{n}").mkdir()
        for name in ("config.toml", "metrics.jsonl"):
            os.link(run / name, tmp_path / "runs" / f"r{n}" / name)
    began = time.process_time()
    found = runs(tmp_path / "runs")
    assert time.process_time() - began < 10  # 800 MB of logs
    assert [state.state for state in found] == ["done"] * 100


def test_the_verb_is_in_the_python_api(tmp_path, make_run):
    import rung

    make_run("a", 20, done())
    assert [state.state for state in rung.runs(tmp_path / "runs")] == ["done"]
