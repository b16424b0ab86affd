"""A training run: what it leaves, what does not change it, and what it refuses."""

from __future__ import annotations

import json
import math
import tomllib

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from run.same import same_state, state, told
from rung.errors import RungError
from rung.report.metrics import read_metrics
from rung.run.folder import Run
from rung.run.replay import replay
from rung.run.train import train
from rung.train.loop import Diverged


def nothing_in(folder) -> bool:
    return not folder.exists() or not list(folder.iterdir())


def test_a_run_folder_has_what_the_formats_say(undisturbed):
    run = Run(undisturbed["run"])
    names = {path.name for path in run.path.iterdir()}
    assert names == {
        *("config.toml", "environment.json", "data.json", "tokenizer.json", "tokens", "metrics.jsonl", "samples.jsonl"),
        *("checkpoints", "latest", "best", "model.safetensors", "report.html", "loss.png", "lock"),
    }
    assert (run.path / "latest").read_text() == "12\n"
    config = tomllib.loads((run.path / "config.toml").read_text(encoding="utf-8"))
    assert (config["model"]["vocab_size"], config["model"]["d_head"], config["train"]["steps"]) == (257, 16, 12)
    assert json.loads((run.path / "environment.json").read_text())["jax"]
    assert list((run.path / "samples.jsonl").read_bytes()) == []


def test_the_log_has_every_step_once_and_every_validation(undisturbed, text):
    steps, evaluations = told(Run(undisturbed["run"]).path)
    assert [step for step, *_ in steps] == list(range(1, 13))
    assert [step for step, *_ in evaluations] == [4, 8, 12]
    # 4 rows of 32 targets a step, less those that an epoch's ragged windows lack.
    assert steps[-1][1] == undisturbed["tokens"] <= 12 * 4 * 32
    # Nothing is known at first: the loss is about ln(vocabulary).
    assert steps[0][2] == pytest.approx(math.log(257), rel=0.02)


def test_the_result_is_what_the_log_says(undisturbed):
    steps, evaluations = told(Run(undisturbed["run"]).path)
    assert undisturbed["steps"] == 12
    assert undisturbed["stopped"] is None
    assert undisturbed["validation_loss"] == evaluations[-1][2]
    assert undisturbed["train_loss"] == pytest.approx(np.mean([loss for _, _, loss, *_ in steps]))
    assert undisturbed["perplexity"] == pytest.approx(math.exp(evaluations[-1][2]))
    # A byte a token: bits per byte are the loss in bits.
    assert undisturbed["bits_per_byte"] == pytest.approx(evaluations[-1][2] / math.log(2))
    assert undisturbed["parameters"] == sum(
        a.size for a in load_file(Run(undisturbed["run"]).path / "model.safetensors").values()
    )


def test_the_weights_to_use_are_those_of_the_best_validation(undisturbed, train_tiny, tmp_path):
    with safe_open(Run(undisturbed["run"]).path / "model.safetensors", "numpy") as file:
        metadata = json.loads(file.metadata()["rung"])
    best = min(told(Run(undisturbed["run"]).path)[1], key=lambda evaluation: evaluation[2])
    assert int(metadata["step"]) == best[0]
    assert float(metadata["validation_loss"]) == pytest.approx(best[2], abs=1e-6)


def test_validation_and_samples_do_not_change_the_weights(undisturbed, train_tiny, tmp_path):
    often = {"evaluate.every_steps": 5, "sample.every_steps": 3, "sample.max_tokens": 8, "model.dropout": 0.0}
    train_tiny(tmp_path / "often", often)
    assert same_state(tmp_path / "often", Run(undisturbed["run"]).path, 12)
    assert told(tmp_path / "often")[0] == told(Run(undisturbed["run"]).path)[0]
    samples = [json.loads(line) for line in (tmp_path / "often/samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [sample["step"] for sample in samples] == [3, 6, 9, 12]


def test_the_seed_decides_the_run(undisturbed, train_tiny, tmp_path):
    train_tiny(tmp_path / "again")
    assert same_state(tmp_path / "again", Run(undisturbed["run"]).path, 12)
    train_tiny(tmp_path / "other", {"train.seed": 7})
    assert not same_state(tmp_path / "other", Run(undisturbed["run"]).path, 12)


def test_four_devices_reach_the_losses_of_one(undisturbed, train_tiny, tmp_path):
    result = train_tiny(tmp_path / "mesh", {"mesh.data": 4})
    one, four = (
        np.array([step[:3] for step in told(path)[0]]) for path in (Run(undisturbed["run"]).path, tmp_path / "mesh")
    )
    np.testing.assert_array_equal(one[:, :2], four[:, :2])
    np.testing.assert_allclose(one[:, 2], four[:, 2], rtol=1e-5)
    assert result["validation_loss"] == pytest.approx(undisturbed["validation_loss"], rel=1e-5)


def test_without_validation_the_last_weights_are_the_ones_to_use(train_tiny, tmp_path):
    result = train_tiny(tmp_path / "run", {"data.validation_fraction": 0.0, "train.steps": 3})
    assert (result["validation_loss"], result["perplexity"], result["bits_per_byte"]) == (None, None, None)
    last = {name: array for name, array in state(tmp_path / "run", 3).items() if name.startswith("weights.")}
    kept = load_file(tmp_path / "run/model.safetensors")
    assert sorted(a.tobytes() for a in last.values()) == sorted(a.tobytes() for a in kept.values())


@pytest.mark.slow
def test_a_profile_of_some_steps_is_written(train_tiny, tmp_path):
    train_tiny(tmp_path / "run", {"train.steps": 4}, profile=(1, 2))
    assert list((tmp_path / "run/profile").rglob("*.xplane.pb"))
    assert "profile of steps 1 to 2" in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8")


def test_updates_that_are_not_finite_end_the_run_with_its_checkpoint_and_batch(train_tiny, tmp_path):
    absurd = {"train.learning_rate": 1e30, "train.max_skipped": 3, "train.schedule": "constant"}
    with pytest.raises(Diverged, match="3 updates in a row") as diverged:
        train_tiny(tmp_path / "run", absurd | {"checkpoint.every_steps": 1, "evaluate.every_steps": 1})
    assert diverged.value.status == 1
    log = read_metrics(tmp_path / "run/metrics.jsonl")
    last = log.skipped[-1]
    assert [one.in_a_row for one in log.skipped] == [1, 2, 3]
    assert last.documents == [0]
    assert "first not finite: layers.0." in last.largest
    kept = tmp_path / f"run/diverged/{last.step}"
    assert load_file(kept / "batch.safetensors")["tokens"].shape == (4, 32)
    step = int((tmp_path / "run/latest").read_text())
    saved = {name: array for name, array in state(tmp_path / "run", step).items() if name.startswith("weights.")}
    assert all(np.isfinite(array).all() for array in saved.values())
    # No update was applied since, so these are the weights that it was for.
    for name, array in load_file(kept / "weights.safetensors").items():
        np.testing.assert_array_equal(array, saved[f"weights.{name}"])
    again = replay(tmp_path / "run")
    assert again["reproduced"]
    assert again["found_now"] == again["found_then"] == last.largest
    assert (tmp_path / "run/report.html").exists()


# Where it may be written


def test_an_existing_run_stays_unless_it_is_to_be_replaced(train_tiny, tmp_path):
    folder = tmp_path / "runs" / "one"
    train_tiny(folder, {"train.steps": 1})
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(RungError, match="exists already") as refused:
        train_tiny(folder)
    assert "rung resume" in refused.value.hint
    assert (folder / "metrics.jsonl").read_bytes() == before
    train_tiny(folder, {"train.steps": 2}, overwrite=True)
    assert (folder / "latest").read_text() == "2\n"
    assert [path.name for path in folder.parent.iterdir()] == ["one"]


def test_only_runs_are_overwritten(train_tiny, tmp_path):
    (tmp_path / "precious.txt").write_text("years of work")
    with pytest.raises(RungError, match="is not a run"):
        train_tiny(tmp_path, overwrite=True)
    assert (tmp_path / "precious.txt").read_text() == "years of work"
    train_tiny(tmp_path / "run", {"train.steps": 1})
    (tmp_path / "run/notes").mkdir()
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(RungError, match="run/notes is not Rung's, and would be removed with"):
        train_tiny(tmp_path / "run", overwrite=True)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_run_is_not_replaced_by_one_on_its_own_tokens(train_tiny, tmp_path):
    train_tiny(tmp_path / "run", {"train.steps": 1})
    with pytest.raises(RungError, match="would be replaced"):
        train_tiny(tmp_path / "run", sources=[tmp_path / "run/tokens"], overwrite=True)
    assert (tmp_path / "run/tokens/dataset.json").exists()


@pytest.mark.parametrize(
    ("changes", "rest", "said"),
    [
        ({"mesh.data": 3}, {}, "do not split over mesh data=3"),
        ({"mesh.data": 8, "train.batch_size": 8}, {}, "needs 8 devices"),
        ({"model.n_heads": 3}, {}, "not divisible by model.n_heads 3"),
        ({"model.d_modle": 3}, {}, "unknown setting 'model.d_modle'"),
        ({"train.steps": 0}, {}, "no length"),
        ({}, {"profile": (10, 20)}, "steps 10 to 20 are to be profiled"),
        ({}, {"sources": ["no-such.txt"]}, "no-such.txt"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(train_tiny, tmp_path, changes, rest, said):
    with pytest.raises(RungError, match=said):
        train_tiny(tmp_path / "runs/deep/run", changes, **rest)
    assert nothing_in(tmp_path)


def test_a_place_that_cannot_be_written_is_named(train_tiny, text):
    for place in (text / "run", "/proc/run", "x" * 300):
        with pytest.raises(RungError, match="cannot make"):
            train_tiny(place)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("texts/emma.txt", "emma"),
        ("my novels", "my-novels"),
        ("texts/*.txt", "texts"),
        ("雪国.txt", "雪国"),
        ("-", "standard-input"),
    ],
)
def test_a_run_is_named_for_its_text(train_tiny, tiny, text, tmp_path, monkeypatch, source, name):
    folders = []
    monkeypatch.setattr("rung.run.train.new_folder", lambda folder, overwrite: folders.append(folder) or 1 / 0)
    for changes in ({}, {"name": "mine"}):
        with pytest.raises(ZeroDivisionError):
            train(source, None, changes)
    assert [str(folder) for folder in folders] == [f"runs/{name}", "runs/mine"]


@pytest.mark.parametrize("backend", ["cudnn", "splash"])
def test_a_way_of_attention_that_is_not_here_is_refused_before_any_work(train_tiny, tmp_path, backend, monkeypatch):
    monkeypatch.setattr("rung.run.train.prepare", lambda *args: pytest.fail("worked before"))
    changes = {"compute.attention": backend, "model.compute_dtype": "bfloat16"}
    with pytest.raises(RungError, match=f"compute.attention {backend} cannot be used"):
        train_tiny(tmp_path / "run", changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "products in float32; remat none"),
        (
            {"compute.matmul_precision": "bfloat16"},
            "products in float32 (a CPU has no other: compute.matmul_precision bfloat16 does nothing); remat none",
        ),
        ({"model.compute_dtype": "bfloat16"}, "products in bfloat16; remat none"),
    ],
)
def test_the_precision_that_is_said_is_that_of_the_device(train_tiny, tmp_path, changes, said):
    lines = []
    train_tiny(tmp_path / "run", {"train.steps": 1, **changes}, say=lines.append)
    (line,) = [line for line in lines if line.startswith("computed: ")]
    assert line.endswith(f"; {said}")
