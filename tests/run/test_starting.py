"""Runs that begin with the weights of another run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from run.same import same_state, state, told
from rung.errors import RungError
from rung.report.metrics import read_metrics
from rung.run.resuming import resume
from rung.run.train import train


def quietly(line: str) -> None:
    pass


@pytest.fixture
def parent(undisturbed, tmp_path) -> Path:
    return Path(shutil.copytree(undisturbed["run"], tmp_path / "parent"))


def lineage(run: Path) -> dict:
    return json.loads((run / "lineage.json").read_text())


def test_it_begins_with_the_best_weights_on_the_same_tokens(parent, tmp_path):
    run = tmp_path / "child"
    changes = {"train.steps": 3, "checkpoint.keep": 9, "train.learning_rate": 1e-4}
    result = train(changes=changes, start=parent, run=run, say=quietly)
    begun, best = state(run, 0), load_file(parent / "model.safetensors")
    assert {name for name in begun if name.startswith("weights.")} == {f"weights.{name}" for name in best}
    for name, array in best.items():
        np.testing.assert_array_equal(begun[f"weights.{name}"], array)
    assert not any(array.any() for name, array in begun.items() if name.startswith("optimizer."))
    assert lineage(run) | {"weights": ""} == {
        "run": "../parent",
        "step": 12,
        "weights": "",
        "optimizer": "fresh",
        "parents": [],
    }
    assert os.path.samefile(run / json.loads((run / "data.json").read_text())["store"], parent / "tokens")
    assert result["steps"] == 3
    # It goes on from where the parent was: not from the loss of fresh weights.
    first = read_metrics(run / "metrics.jsonl").steps["loss"][0]
    assert first < read_metrics(parent / "metrics.jsonl").steps["loss"][0] - 0.3


def test_a_checkpoint_with_its_optimizer_goes_on_as_the_run_itself(parent, train_tiny, tmp_path):
    """With a constant rate, and the batches of the same steps, the child is the parent's own continuation."""
    changes = {"train.schedule": "constant", "train.steps": 8}
    train_tiny(tmp_path / "one", changes)
    train(
        changes={"train.steps": 4},
        start=f"{tmp_path / 'one'}@4",
        keep_optimizer=True,
        run=tmp_path / "two",
        say=quietly,
    )
    kept, begun = state(tmp_path / "one", 4), state(tmp_path / "two", 4)
    assert int(begun["optimizer.adamw.0.count"]) == int(kept["optimizer.adamw.0.count"]) + 4
    first = read_metrics(tmp_path / "two/metrics.jsonl").steps["loss"][0]
    assert first != read_metrics(tmp_path / "one/metrics.jsonl").steps["loss"][4]  # another batch: step 0 of its own
    fresh = tmp_path / "fresh"
    train(changes={"train.steps": 4}, start=f"{tmp_path / 'one'}@4", run=fresh, say=quietly)
    assert read_metrics(fresh / "metrics.jsonl").steps["loss"][0] == first
    assert not same_state(fresh, tmp_path / "two", 4)


def test_other_text_is_spelt_by_the_same_tokenizer_and_generations_are_remembered(parent, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("It was the best of times, it was the worst of times. " * 60)
    child, grandchild = tmp_path / "child", tmp_path / "deep/grandchild"
    train([other], changes={"train.steps": 2}, start=parent, run=child, say=quietly)
    train([text], changes={"train.steps": 2}, start=f"{child}@latest", run=grandchild, say=quietly)
    assert (grandchild / "tokenizer.json").read_bytes() == (parent / "tokenizer.json").read_bytes()
    born = lineage(grandchild)
    assert (born["run"], born["step"], born["optimizer"]) == ("../../child", 2, "fresh")
    assert [one["run"] for one in born["parents"]] == ["../parent"]
    assert born["weights"] != born["parents"][0]["weights"]
    assert "parents" not in born["parents"][0]


def test_killed_before_its_first_own_save_it_resumes_from_the_same_weights(parent, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(changes={"train.steps": 6}, start=parent, run=whole, say=quietly)
    train(changes={"train.steps": 6}, start=parent, run=cut, time_limit=1e-9, say=quietly)
    shutil.rmtree(cut / "checkpoints/1")
    (cut / "latest").write_text("0\n")
    shutil.rmtree(parent / "checkpoints")
    (parent / "model.safetensors").unlink()
    resume(cut, say=quietly)
    assert told(cut) == told(whole)
    assert same_state(cut, whole, 6)
    shutil.rmtree(cut / "checkpoints")
    (cut / "latest").unlink()
    with pytest.raises(RungError, match="began with the weights of another run"):
        resume(cut, say=quietly)


@pytest.mark.parametrize(
    ("named", "rest", "said", "hint"),
    [
        ("{parent}@5", {}, "has no checkpoint '5'", "there are: 8, 12"),
        ("{parent}@x", {}, "has no checkpoint 'x'", "@latest"),
        ("{parent}@", {}, "names no step", "@latest"),
        ("{parent}s", {}, "no run folder", "did you mean"),
        (
            "{parent}",
            {"changes": {"model.d_ff": 64, "train.steps": 2}},
            r"mlp\.down is \(32, 128\), and the config says \(32, 64\)",
            "different models",
        ),
        ("{parent}@8", {"changes": {"model.d_ff": 64, "train.steps": 2}}, "does not fit", "have to be those"),
        (
            "{parent}",
            {"changes": {"train.optimizer": "muon", "train.steps": 2}, "keep_optimizer": True},
            "does not fit: .*muon",
            "have to be those",
        ),
    ],
)
def test_what_cannot_be_started_from_is_said_and_leaves_nothing(parent, tmp_path, named, rest, said, hint):
    with pytest.raises(RungError, match=said) as refused:
        train(start=named.format(parent=parent), run=tmp_path / "runs/child", say=quietly, **rest)
    assert hint in refused.value.hint
    assert not (tmp_path / "runs").exists()


def test_what_makes_no_sense_is_refused(parent, text, tmp_path):
    with pytest.raises(RungError, match="no run to start from"):
        train([text], keep_optimizer=True, run=tmp_path / "child", say=quietly)
    with pytest.raises(RungError, match="nothing to train on"):
        train(run=tmp_path / "child", say=quietly)
    with pytest.raises(RungError, match="would be replaced"):
        train(start=parent, run=parent, overwrite=True, say=quietly)
