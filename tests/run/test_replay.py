"""``rung check --replay``: a step that ended a run, run again."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from rung.config import override
from rung.diagnose.replay import DIVERGED, write_replay
from rung.errors import RungError
from rung.model.weights import initialize
from rung.run.folder import Run
from rung.run.replay import replay
from rung.run.train import train
from rung.tokens.batches import Batches

STEP = 9
NAMES = ("one", "two", "three", "four", "five")


@pytest.fixture(scope="module")
def trained(tiny, text, tmp_path_factory):
    """A run on five documents of known text, only to be read."""
    folder = tmp_path_factory.mktemp("several")
    for name in NAMES:
        (folder / f"{name}.txt").write_text(f"This is document {name}. " * 30)
    config = override(tiny, {"train.steps": 1, "data.validation_fraction": 0.0, "model.dropout": 0.1})
    train([folder], config, run=folder / "run", say=lambda line: None)
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    return Run(shutil.copytree(trained, tmp_path / "run"))


def batches_of(run: Run) -> Batches:
    config = run.config
    return Batches(
        run.store.split("train"),
        context_length=config.model.context_length,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        windows=config.data.windows,
        segments=True,
    )


def keep(run: Run, step: int = STEP, poison: float | None = None) -> dict[str, np.ndarray]:
    """Keep a step of the run, with one weight that is ``poison``; returns its batch."""
    batches, weights = batches_of(run), initialize(run.model.weights(), 0)
    if poison is not None:
        weights["layers"][0]["mlp"]["up"] = weights["layers"][0]["mlp"]["up"].at[3, 5].set(poison)
    batch = batches(step - 1)
    write_replay(
        run.path / DIVERGED,
        step=step,
        in_a_row=3,
        seed=run.config.train.seed,
        micro_batch_size=0,
        documents=batches.documents(step - 1),
        findings=None,
        batch=batch,
        weights=weights,
    )
    return batch


def test_a_step_that_is_not_finite_again(run):
    keep(run, poison=math.inf)
    result = replay(run.path)
    assert (result["step"], result["in_a_row"], result["reproduced"]) == (STEP, 3, True)
    assert result["first_not_finite"] == "weight layers.0.mlp.up"
    assert result["found_now"].startswith("first not finite: weight layers.0.mlp.up")
    assert "layers.0.mlp.up" in result["gradients_not_finite"]
    assert result["rows_not_finite"] == [0, 1, 2, 3]
    assert result["batch_rows"] == 4
    assert result["notes"] == []


def test_a_step_that_is_finite_here_shows_the_worst_rows_with_their_documents_and_text(run):
    batch = keep(run)
    result = replay(run)
    assert (result["reproduced"], result["rows_not_finite"], result["first_not_finite"]) == (False, [], None)
    assert result["loss"] == pytest.approx(math.log(257), rel=0.02)
    losses = [row["loss"] for row in result["rows"]]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    for row in result["rows"]:
        # A byte tokenizer: id is byte + 1, and 0 the end of text.
        ids = batch["tokens"][row["row"]][batch["targets"][row["row"]] >= 0]
        text = "".join("<|endoftext|>" if id == 0 else chr(id - 1) for id in ids)
        assert row["text"] == text
        names = [Path(one["name"]).stem for one in row["documents"]]
        assert [name for name in NAMES if f" {name}. " in text and name not in names] == []
        assert [name for name in names if f" {name}. " in text or len(text) < 32]
    named = {one["id"]: one["name"] for row in result["rows"] for one in row["documents"]}
    assert named.items() <= {one["id"]: one["name"] for one in result["documents"]}.items()


def test_the_newest_is_taken_or_the_one_that_is_named(run):
    keep(run, 9)
    keep(run, 10, poison=math.nan)
    assert replay(run)["step"] == 10
    assert replay(run, 9)["step"] == 9
    with pytest.raises(RungError, match="has not kept step 11") as refused:
        replay(run, 11)
    assert "it has kept 9, 10" in refused.value.hint


def test_a_run_that_kept_nothing_says_so(trained):
    with pytest.raises(RungError, match="has kept no step"):
        replay(trained)


def test_without_its_tokens_the_step_runs_all_the_same(run):
    keep(run, poison=math.inf)
    shutil.rmtree(run.path / "tokens")
    result = replay(run.path)
    assert result["reproduced"]
    assert [row["documents"] for row in result["rows"]] == [[], [], []]
    assert result["rows"][0]["text"]
    assert "cannot be looked up" in result["notes"][0]


def test_a_batch_that_the_settings_no_longer_give_is_used_and_said(run):
    batch = keep(run)
    path = run.path / "config.toml"
    path.write_text(path.read_text().replace('windows = "contiguous"', 'windows = "random"'))
    result = replay(run.path)
    assert "another batch" in result["notes"][0]
    assert result["rows"][0]["text"].encode()[0] + 1 in batch["tokens"][result["rows"][0]["row"]]


def test_a_run_for_more_devices_than_there_are_is_replayed_on_one(run):
    keep(run, poison=math.inf)
    path = run.path / "config.toml"
    path.write_text(path.read_text().replace("data = 1", "data = 64"))
    assert replay(run.path)["reproduced"]


def test_a_real_divergence_can_be_replayed(train_tiny, tmp_path):
    from rung.train.loop import Diverged

    absurd = {"train.learning_rate": 1e30, "train.max_skipped": 3, "train.schedule": "constant"}
    with pytest.raises(Diverged) as diverged:
        train_tiny(tmp_path / "run", absurd | {"checkpoint.every_steps": 1, "evaluate.every_steps": 1})
    result = replay(tmp_path / "run")
    assert f"the last at step {result['step']}" in str(diverged.value)
    assert result["reproduced"]
    assert result["in_a_row"] == 3
    assert result["found_then"].partition(";")[0] == result["found_now"].partition(";")[0]
    assert math.isfinite(result["largest"][0][1])
    skipped = [
        json.loads(line)
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        if '"event": "skipped"' in line
    ]
    assert skipped[-1]["step"] == result["step"]
    assert skipped[-1]["documents"] == [one["id"] for one in result["documents"]]
    assert skipped[-1]["largest"] == result["found_then"]
