"""A run that was stopped, interrupted or killed ends as if nothing had happened to it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from run.same import same_state, same_weights, told
from rung.errors import RungError
from rung.report.metrics import MetricsLog, read_metrics
from rung.run.resuming import resume
from rung.run.train import train
from rung.run.training import Interrupted
from rung.train.events import StepDone


def quietly(line: str) -> None:
    pass


def signalled(monkeypatch, *signals: int, after: int) -> None:
    """Send this process signals when the log hears of a step."""

    class Signalling(MetricsLog):
        def __call__(self, event):
            super().__call__(event)
            if isinstance(event, StepDone) and event.step == after:
                for number in signals:
                    os.kill(os.getpid(), number)

    monkeypatch.setattr("rung.run.training.MetricsLog", Signalling)


# At step 8 a validation and a save are due: the loop hears of step 7 while step 8 runs.
@pytest.mark.parametrize(("number", "after"), [(signal.SIGINT, 4), (signal.SIGTERM, 7)])
def test_a_signal_stops_after_a_step_and_the_resumed_run_is_the_undisturbed_one(
    undisturbed, train_tiny, tmp_path, monkeypatch, number, after
):
    """SIGTERM and Ctrl-C: finish the step, save, say how to go on, exit."""
    said: list[str] = []
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        signalled(patch, number, after=after)
        result = train_tiny(tmp_path / "run", say=said.append)
    assert (result["stopped"], result["steps"]) == (signal.Signals(number).name, after + 1)
    assert f"go on with: rung resume {tmp_path / 'run'}" in said[-1]
    assert signal.getsignal(number) is handler

    resumed = resume(tmp_path / "run", say=quietly)
    whole = Path(undisturbed["run"])
    assert told(tmp_path / "run") == told(whole)
    assert same_state(tmp_path / "run", whole, 12)
    assert same_weights(tmp_path / "run", whole)
    names = ("steps", "tokens", "validation_loss", "bits_per_byte", "stopped")
    assert [resumed[name] for name in names] == [undisturbed[name] for name in names]


def test_a_second_signal_stops_at_once_and_a_run_without_a_checkpoint_resumes_from_the_start(
    undisturbed, train_tiny, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGINT, signal.SIGINT, after=2)
        with pytest.raises(Interrupted) as interrupted:
            train_tiny(tmp_path / "run")
    assert interrupted.value.status == 3
    assert f"rung resume {tmp_path / 'run'}" in interrupted.value.hint
    said: list[str] = []
    resume(tmp_path / "run", say=said.append)
    assert "no checkpoint yet: from the start" in said[0]
    assert told(tmp_path / "run") == told(Path(undisturbed["run"]))
    assert same_state(tmp_path / "run", Path(undisturbed["run"]), 12)


@pytest.mark.medium
def test_a_killed_run_resumes_to_the_undisturbed_one(text, tiny, tmp_path):
    changes = {"train.steps": 600, "checkpoint.every_steps": 50, "evaluate.every_steps": 200}
    program = (
        "import sys, rung; from rung.run.train import train;"
        f"train([{str(text)!r}], rung.Config(), {_differences(tiny) | changes!r}, run=sys.argv[1])"
    )
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen([sys.executable, "-c", program, killed], stderr=subprocess.DEVNULL, env=_environment())
    log = killed / "metrics.jsonl"
    while not (log.exists() and b'"step": 170,' in log.read_bytes()):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    process.wait()
    resume(killed, say=quietly)
    train([text], tiny, changes, run=whole, say=quietly)
    assert told(killed) == told(whole)
    assert same_state(killed, whole, 600)
    assert same_weights(killed, whole)


def _differences(tiny):
    from rung.config import Config, differences

    return {path: value for path, (_, value) in differences(Config(), tiny).items()}


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


# Runs that are done


@pytest.fixture
def done(undisturbed, tmp_path) -> Path:
    """A copy of a run that is done."""
    return Path(shutil.copytree(undisturbed["run"], tmp_path / "done"))


def test_a_run_that_is_done_says_so_and_gives_its_result(done, undisturbed):
    before = (done / "metrics.jsonl").read_bytes(), (done / "checkpoints/12").stat().st_mtime_ns
    said: list[str] = []
    result = resume(done, say=said.append)
    assert "is done: 12 steps" in said[0]
    assert {**result, "run": "", "report": ""} == pytest.approx({**undisturbed, "run": "", "report": ""})
    assert ((done / "metrics.jsonl").read_bytes(), (done / "checkpoints/12").stat().st_mtime_ns) == before


def test_damaged_weights_are_written_again(done, undisturbed):
    (done / "model.safetensors").write_bytes(b"\1\2\3")
    resume(done, say=quietly)
    assert load_file(done / "model.safetensors").keys() == load_file(f"{undisturbed['run']}/model.safetensors").keys()


def test_a_run_can_be_made_longer_and_not_shorter(done):
    config = (done / "config.toml").read_text(encoding="utf-8")
    for steps in (5, 0, -3):
        with pytest.raises(RungError, match=r"has done 12 steps|train\.steps is -3|no length"):
            resume(done, steps, reschedule=True, say=quietly)
        assert (done / "config.toml").read_text(encoding="utf-8") == config
    # The end of a cosine is not the middle of a longer one.
    with pytest.raises(
        RungError, match=r"cosine schedule of 12 steps is not the beginning of one of 15: .* 0\.0001, and"
    ) as no:
        resume(done, 15, say=quietly)
    assert "--reschedule" in no.value.hint
    assert (done / "config.toml").read_text(encoding="utf-8") == config
    result = resume(done, 15, reschedule=True, say=quietly)
    assert result["steps"] == 15
    assert [step for step, *_ in told(done)[0]] == list(range(1, 16))
    assert "steps = 15" in (done / "config.toml").read_text(encoding="utf-8")
    (resumed,) = read_metrics(done / "metrics.jsonl").resumed
    assert resumed.step == 12
    assert resumed.changes[0] == "train.steps 12 -> 15"
    assert "learning rate rescheduled: at step 12 it was 0.0001, and would go on at" in resumed.changes[1]


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param({"train.schedule": "constant"}, id="constant", marks=pytest.mark.slow),
        pytest.param({"train.schedule": "wsd", "train.decay_steps": 3}, id="wsd"),
    ],
)
def test_a_schedule_whose_beginning_is_the_same_is_extended_to_the_longer_run(train_tiny, tmp_path, schedule):
    changes = {**schedule, "train.warmup_steps": 2}
    with_limit = train_tiny(tmp_path / "run", {**changes, "train.steps": 12})
    assert with_limit["steps"] == 12
    longer = train_tiny(tmp_path / "longer", {**changes, "train.steps": 16})
    if schedule["train.schedule"] == "wsd":
        # Its decay has begun: only from a checkpoint before that it is the beginning of the longer run.
        with pytest.raises(RungError, match="wsd schedule of 12 steps is not the beginning"):
            resume(tmp_path / "run", 16, say=quietly)
        shutil.rmtree(tmp_path / "run/checkpoints/12")
        (tmp_path / "run/latest").write_text("8\n")
    result = resume(tmp_path / "run", 16, say=quietly)
    assert result["validation_loss"] == longer["validation_loss"]
    assert told(tmp_path / "run") == told(tmp_path / "longer")
    assert same_state(tmp_path / "run", tmp_path / "longer", 16)


def test_settings_that_decide_no_update_may_change_and_are_told_of(undisturbed, train_tiny, tmp_path):
    shutil.copytree(undisturbed["run"], tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/12")
    (tmp_path / "run/latest").write_text("8\n")
    changes = {"checkpoint.every_steps": 2, "evaluate.batch_size": 3, "train.micro_batch_size": 2, "checkpoint.keep": 9}
    resume(tmp_path / "run", changes=changes, say=quietly)
    (resumed,) = read_metrics(tmp_path / "run/metrics.jsonl").resumed
    assert set(resumed.changes) == {
        "checkpoint.every_steps 4 -> 2",
        "checkpoint.keep 2 -> 9",
        "evaluate.batch_size 4 -> 3",
        "train.micro_batch_size 4 -> 2",
    }
    assert (tmp_path / "run/checkpoints/10").is_dir()
    assert [loss for _, _, loss, *_ in told(tmp_path / "run")[0]] == pytest.approx(
        [loss for _, _, loss, *_ in told(Path(undisturbed["run"]))[0]], rel=1e-5
    )


def test_a_time_limit_stops_and_the_resumed_run_is_the_undisturbed_one(undisturbed, train_tiny, tmp_path):
    result = train_tiny(tmp_path / "run", time_limit=1e-9)
    assert result["stopped"].startswith("time limit of")
    assert result["steps"] == 1
    resume(tmp_path / "run", say=quietly)
    assert told(tmp_path / "run") == told(Path(undisturbed["run"]))
    assert same_state(tmp_path / "run", Path(undisturbed["run"]), 12)


# Checkpoints that are not what they were


def spoil_truncate(state: Path) -> None:
    with open(state, "r+b") as file:
        file.truncate(state.stat().st_size // 2)


def spoil_flip(state: Path) -> None:
    data = bytearray(state.read_bytes())
    data[-1000] ^= 4
    state.write_bytes(data)


def spoil_empty(state: Path) -> None:
    (state.parent / "checkpoint.json").write_text("")


def spoil_missing(state: Path) -> None:
    shutil.rmtree(state.parent)


@pytest.mark.parametrize("spoil", [spoil_truncate, spoil_flip, spoil_empty, spoil_missing])
def test_a_newest_checkpoint_that_is_damaged_is_named_and_the_one_before_it_serves(
    undisturbed, train_tiny, tmp_path, spoil
):
    """The run ends as the undisturbed one; what was damaged is put aside."""
    run = tmp_path / "run"
    train_tiny(run, time_limit=1e-9)
    resume(run, time_limit=1e-9, say=quietly)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["1", "2"]
    spoil(run / "checkpoints/2/state.safetensors")
    said: list[str] = []
    resume(run, say=said.append)
    assert "checkpoint of step 2" in said[0] or "of step 2, is missing" in said[0]
    assert said[0].endswith("going on from step 1")
    assert (run / "damaged/2").is_dir() == (spoil is not spoil_missing)
    assert told(run) == told(Path(undisturbed["run"]))
    assert same_state(run, Path(undisturbed["run"]), 12)


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew(done):
    before = (done / "metrics.jsonl").read_bytes()
    for step in (8, 12):
        spoil_flip(done / f"checkpoints/{step}/state.safetensors")
    with pytest.raises(
        RungError, match=r"no whole checkpoint: .*step 12 is damaged .* its hash is .*step 8 is damaged"
    ):
        resume(done, 15, reschedule=True, say=quietly)
    assert (done / "metrics.jsonl").read_bytes() == before


# What is refused


def test_another_text_tokenizer_or_store_is_refused(done, train_tiny, tmp_path):
    from rung.config import DataConfig
    from rung.run.store import build
    from rung.tokens.tokenizer import Tokenizer

    other = tmp_path / "other.txt"
    other.write_text("another text " * 100)
    tokens, aside = done / "tokens", tmp_path / "aside"
    tokens.rename(aside)
    build([str(other)], done / "tokenizer.json", tokens, DataConfig(), say=quietly)
    with pytest.raises(RungError, match="is not the token store that"):
        resume(done, 15, say=quietly)
    shutil.rmtree(tokens)
    with pytest.raises(RungError, match="no token store"):
        resume(done, 15, say=quietly)
    aside.rename(tokens)

    from rung.config import TokenizerConfig
    from rung.corpus.documents import Document

    Tokenizer.train([Document("x", iter(["abc"]))], TokenizerConfig(kind="char")).save(done / "tokenizer.json")
    with pytest.raises(RungError, match=r"tokenizer.json is not the tokenizer that"):
        resume(done, 15, say=quietly)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("d_ff = 128", "d_ff = 64", "model.d_ff was 128 and is 64"),
        ("seed = 42", "seed = 7", "train.seed was 42 and is 7"),
        ("learning_rate = 0.001", "learning_rate = 0.01", "train.learning_rate was 0.001 and is 0.01"),
        ('optimizer = "adamw"', 'optimizer = "muon"', "train.optimizer was 'adamw' and is 'muon'"),
        ("batch_size = 4", "batch_size = 8", "train.batch_size was 4 and is 8"),
    ],
)
def test_each_setting_that_was_edited_is_named(done, old, new, said):
    """Resume with another config: refused, naming each difference."""
    config = (done / "config.toml").read_text(encoding="utf-8")
    assert old in config
    edited = config.replace(old, new, 1).replace("beta1 = 0.9", "beta1 = 0.8")
    (done / "config.toml").write_text(edited, encoding="utf-8")
    with pytest.raises(RungError, match="is not as it was saved") as refused:
        resume(done, 15, say=quietly)
    assert said in refused.value.problem
    assert "train.beta1 was 0.9 and is 0.8" in refused.value.problem
    assert "put config.toml" in refused.value.hint
    with pytest.raises(RungError, match="decides what the run learns"):
        resume(done, 15, {"train.seed": 3}, say=quietly)
    assert (done / "config.toml").read_text(encoding="utf-8") == edited


def test_a_folder_that_was_tampered_with_is_refused_in_a_line(done):
    config = (done / "config.toml").read_text(encoding="utf-8")
    (done / "config.toml").write_text("d_ff = [", encoding="utf-8")
    with pytest.raises(RungError, match="is not TOML"):
        resume(done, say=quietly)
    (done / "config.toml").write_text(config, encoding="utf-8")

    data = (done / "data.json").read_text(encoding="utf-8")
    for text in ("{", "[]", "{}"):
        (done / "data.json").write_text(text, encoding="utf-8")
        with pytest.raises(RungError, match=r"data\.json"):
            resume(done, say=quietly)
    (done / "data.json").unlink()
    with pytest.raises(RungError, match=r"data\.json is missing"):
        resume(done, say=quietly)
    (done / "data.json").write_text(data, encoding="utf-8")

    shutil.rmtree(done / "checkpoints")
    with pytest.raises(RungError, match="no whole checkpoint"):
        resume(done, say=quietly)


def test_tokens_that_were_overwritten_are_noticed(done):
    (shard,) = (done / "tokens").glob("train-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-3000:-2900] = bytes(100)
    shard.write_bytes(data)
    with pytest.raises(RungError, match=r"train-00000-of-00001\.safetensors does not hold the tokens that") as refused:
        resume(done, 15, reschedule=True, say=quietly)
    assert "put the old file back" in refused.value.hint


def test_a_config_that_lost_its_sizes_is_refused(done):
    (done / "config.toml").write_text("")
    with pytest.raises(RungError, match=r"config\.toml is not what the run began with"):
        resume(done, say=quietly)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "has lost steps before 12"),
        (lambda path: path.write_bytes(path.read_bytes()[:900]), "has lost steps before 12"),
        (lambda path: path.write_bytes(b"garbage\n" + path.read_bytes()), "line 1 is no event"),
    ],
    ids=["gone", "cut", "garbage"],
)
def test_a_log_that_lost_something_is_told_of_and_stops_no_resume(done, damage, said):
    damage(done / "metrics.jsonl")
    told_to: list[str] = []
    assert resume(done, 14, reschedule=True, say=told_to.append)["steps"] == 14
    assert any(said in line for line in told_to)


def test_what_is_no_run_is_refused(tmp_path, done):
    with pytest.raises(RungError, match="no run folder") as refused:
        resume(done.parent / "dome", say=quietly)
    assert "did you mean" in refused.value.hint
    with pytest.raises(RungError, match=r"is not a run: it has no config\.toml"):
        resume(tmp_path, say=quietly)
