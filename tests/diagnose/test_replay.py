"""A step that is kept: it comes back as it was, whole or not at all, and runs again with the same masks."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rung.config import Config, MeshConfig, TrainConfig, override, resolve
from rung.diagnose import replay as module
from rung.diagnose.activations import Findings, describe
from rung.diagnose.replay import kept_steps, read_replay, replay, write_replay
from rung.errors import RungError
from rung.mesh import make_mesh
from rung.model import Decoder
from rung.model.weights import flatten, initialize
from rung.train.optimizer import make_optimizer
from rung.train.step import initial_state, make_step, place

SEED, STEP, ROWS, CONTEXT = 5, 7, 4, 8


@pytest.fixture(scope="module")
def model() -> Decoder:
    changes = {"vocab_size": 20, "d_model": 8, "n_layers": 1, "n_heads": 2, "context_length": CONTEXT, "dropout": 0.3}
    return Decoder(
        resolve(override(Config(), {f"model.{k}": v for k, v in changes.items()} | {"train.steps": 1})).model
    )


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(0, 20, (ROWS, CONTEXT + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.fixture
def write(model, batch, tmp_path):
    """Keep a step in the test's folder: ``write(in_a_row=4)``."""

    def keep(**changes):
        rest = {"step": STEP, "in_a_row": 3, "seed": SEED, "micro_batch_size": 2, "documents": [0, 2]}
        rest |= {"findings": None, "batch": batch, "weights": initialize(model.weights(), 1)}
        return write_replay(tmp_path / "diverged", **(rest | changes))

    return keep


FINDINGS = Findings(
    loss=math.nan,
    targets=32,
    gradient_norm=math.inf,
    first_not_finite="layers.0.mlp (dot_general)",
    largest=[("layers.0.mlp_norm (add)", 3e38)],
    largest_weight=("embedding.tokens", math.inf),
    gradients_not_finite=["embedding.tokens"],
)


def test_what_was_kept_comes_back(write, model, batch, tmp_path):
    folder = write(findings=FINDINGS)
    assert folder == tmp_path / "diverged" / "7"
    kept = read_replay(folder, model.weights())
    assert (kept.step, kept.in_a_row, kept.seed, kept.micro_batch_size, kept.documents) == (7, 3, SEED, 2, [0, 2])
    assert kept.found == describe(FINDINGS)
    assert kept.batch.keys() == batch.keys()
    assert all(np.array_equal(kept.batch[name], batch[name]) for name in batch)
    weights = flatten(initialize(model.weights(), 1))
    assert all(np.array_equal(array, weights[path]) for path, array in flatten(kept.weights).items())


def test_its_record_is_strict_json(write):
    text = (write(findings=FINDINGS) / "findings.json").read_text()
    record = json.loads(text, parse_constant=pytest.fail)
    assert record["findings"]["largest_weight"] == ["embedding.tokens", None]
    assert record["findings"]["not_finite"] == {"loss": "nan", "gradient_norm": "inf", "largest_weight.1": "inf"}
    assert record["findings"]["first_not_finite"] == "layers.0.mlp (dot_general)"


def test_a_step_kept_again_replaces_the_older_one(write, model, tmp_path):
    write(in_a_row=3)
    write(in_a_row=4)
    write(step=12)
    assert kept_steps(tmp_path / "diverged") == [7, 12]
    assert read_replay(tmp_path / "diverged/7", model.weights()).in_a_row == 4
    assert sorted(path.name for path in (tmp_path / "diverged").iterdir()) == ["12", "7"]


def test_a_disk_that_is_full_leaves_the_older_one(write, model, tmp_path, monkeypatch):
    write(in_a_row=3)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_weights", full)
    with pytest.raises(OSError, match="No space"):
        write(in_a_row=4)
    assert [path.name for path in (tmp_path / "diverged").iterdir()] == ["7"]
    assert read_replay(tmp_path / "diverged/7", model.weights()).in_a_row == 3


def test_nothing_is_kept_in_a_folder_that_is_not_there(tmp_path):
    assert kept_steps(tmp_path / "diverged") == []


@pytest.mark.parametrize("name", ["findings.json", "batch.safetensors", "weights.safetensors"])
@pytest.mark.parametrize("harm", ["missing", "torn", "other"])
def test_what_is_damaged_is_named(write, model, name, harm):
    path = write() / name
    whole = path.read_bytes()
    path.unlink()
    if harm == "torn":
        path.write_bytes(whole[: len(whole) // 2])
    elif harm == "other" and path.suffix == ".json":
        path.write_text("[]")
    elif harm == "other":
        save_file({"x": np.zeros(3), "y": np.zeros(2)}, path)
    with pytest.raises(RungError, match=name) as refused:
        read_replay(path.parent, model.weights())
    assert "resume it" in refused.value.hint
    assert "\n" not in refused.value.problem


@pytest.mark.medium
@pytest.mark.parametrize(("micro", "devices"), [(0, 1), (2, 1), pytest.param(0, 4, marks=pytest.mark.slow)])
def test_a_replay_computes_what_the_step_computed(write, model, micro, devices):
    config = TrainConfig(batch_size=ROWS, micro_batch_size=micro, seed=SEED, learning_rate=0.0, weight_decay=0.0)
    mesh = make_mesh(MeshConfig(data=devices))
    optimizer = make_optimizer(model.weights(), config)
    state = initial_state(model, optimizer, SEED, mesh)
    state["step"] = state["step"] + STEP - 1
    weights = jax.device_get(state["weights"])
    folder = write(weights=weights, micro_batch_size=micro)
    batch = {name: np.array(array) for name, array in load_file(folder / "batch.safetensors").items()}
    _, metrics = make_step(model, optimizer, lambda step: 1.0, config, mesh)(state, place(batch, mesh))

    replayed = replay(model, read_replay(folder, model.weights()), mesh)
    assert replayed.findings.finite
    assert replayed.findings.loss == pytest.approx(float(metrics["loss_sum"]) / (ROWS * CONTEXT), rel=1e-6)
    assert replayed.findings.gradient_norm == pytest.approx(float(metrics["gradient_norm"]), rel=1e-5)
    # With other masks the loss would be another one.
    assert replayed.losses_B.sum() == pytest.approx(float(metrics["loss_sum"]), rel=1e-6)
    assert replayed.row_means_B == pytest.approx(replayed.losses_B / CONTEXT)


@pytest.mark.medium
def test_a_step_that_was_not_finite_is_so_again(write, model):
    weights = jax.device_get(initialize(model.weights(), 1))
    weights["layers"][0]["mlp"]["up"] = np.full_like(weights["layers"][0]["mlp"]["up"], 3e38)
    replayed = replay(model, read_replay(write(weights=weights), model.weights()), make_mesh(MeshConfig()))
    assert replayed.findings.first_not_finite == "layers.0.mlp (dot_general), pass 1 of 2"
    assert not np.isfinite(replayed.losses_B).any()
