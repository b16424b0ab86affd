"""A Flax NNX module in the harness: its own initial values, its dropout, and a real training run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rung.config import MeshConfig, TrainConfig
from rung.errors import RungError
from rung.evaluate.held_out import compiled_loss, held_out_loss
from rung.mesh import make_mesh
from rung.model.weights import flatten, unflatten
from rung.train.checkpoint import Progress
from rung.train.events import StepDone
from rung.train.loop import Intervals, Loop
from rung.train.optimizer import make_optimizer
from rung.train.schedule import rate_factor
from rung.train.step import initial_state, make_step, place, row_keys

nnx = pytest.importorskip("flax.nnx", reason="the extra [flax] is not installed")
flax_module = pytest.importorskip("rung.exchange.flax_module")

VOCABULARY, CONTEXT, WIDTH = 256, 32, 32


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, 64, rngs=rngs), nnx.gelu, nnx.Linear(64, WIDTH, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        )
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x_BTD):
        mask = nnx.make_causal_mask(x_BTD[:, :, 0])
        x_BTD = x_BTD + self.attention(self.norms[0](x_BTD), mask=mask)
        return x_BTD + self.mlp(self.norms[1](x_BTD))


class Small(nnx.Module):
    """An embedding, positions, one block, and the embedding again as the output layer."""

    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Param(0.1 * jax.random.normal(rngs.params(), (CONTEXT, WIDTH)))
        self.block = Block(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens_BT):
        x_BTD = self.embedding(tokens_BT) + self.positions[: tokens_BT.shape[1]]
        return self.embedding.attend(self.norm(self.block(x_BTD)))


@pytest.fixture(scope="module")
def model():
    return flax_module.FlaxModel(Small)


def batch_of(text, starts_B):
    rows = text[np.asarray(starts_B)[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def test_initial_values_are_the_modules_own(model):
    weights = flatten(model.initialize(7))
    own = {
        ".".join(map(str, path)): value.get_value()
        for path, value in nnx.to_flat_state(nnx.state(Small(nnx.Rngs(7)), nnx.Param))
    }
    assert weights.keys() == own.keys() == {weight.path for weight in model.weights()}
    assert {"block.mlp.layers.0.kernel", "block.mlp.layers.2.kernel"} <= weights.keys()
    for weight in model.weights():
        assert np.array_equal(weights[weight.path], own[weight.path])
        assert weight.shape == own[weight.path].shape


def test_unflatten_gives_back_paths_with_gaps_in_their_numbers(model):
    flat = flatten(model.initialize(0))
    assert flatten(unflatten(flat)).keys() == flat.keys()


def test_loss_is_that_of_the_module(model):
    batch = batch_of(np.arange(500) * 37 % 251, [0, 100, 300])
    batch["targets"][0, :5] = -1
    module = Small(nnx.Rngs(3))
    module.eval()
    log_probabilities = np.asarray(jax.nn.log_softmax(module(batch["tokens"])), np.float64)
    expected = -sum(
        log_probabilities[row, t, target]
        for row in range(3)
        for t, target in enumerate(batch["targets"][row])
        if target >= 0
    )
    loss_sum, targets, _ = model.loss(model.initialize(3), batch, None)
    assert targets == 3 * CONTEXT - 5
    np.testing.assert_allclose(loss_sum, expected, rtol=1e-5)


def test_dropout_masks_belong_to_rows(model):
    weights, keys_B = model.initialize(0), row_keys(0, 5, 4)
    batch = batch_of(np.arange(500) * 37 % 251, [0, 0, 100, 300])
    logits = jax.jit(model.logits)
    whole = logits(weights, batch, keys_B)
    half = logits(weights, {name: rows[2:] for name, rows in batch.items()}, keys_B[2:])
    np.testing.assert_allclose(whole[2:], half, atol=1e-5)
    assert not np.allclose(whole[0], whole[1], atol=1e-2)  # equal rows, other keys
    assert not np.allclose(whole[0], logits(weights, batch, None)[0], atol=1e-2)
    other_step = logits(weights, batch, row_keys(0, 6, 4))
    assert not np.allclose(whole[0], other_step[0], atol=1e-2)


def test_decay_is_for_matrices_unless_told(model):
    assert {weight.path for weight in model.weights() if not weight.decay} == {
        weight.path for weight in model.weights() if len(weight.shape) == 1
    }
    chosen = flax_module.FlaxModel(Small, decay=lambda path, shape: path == "positions")
    assert [weight.path for weight in chosen.weights() if weight.decay] == ["positions"]


def test_modules_that_cannot_be_carried_are_refused():
    with pytest.raises(RungError, match="BatchStat"):
        flax_module.FlaxModel(lambda rngs: nnx.BatchNorm(4, rngs=rngs))
    with pytest.raises(RungError, match="int32"):
        flax_module.FlaxModel(lambda rngs: nnx.List([nnx.Param(jnp.arange(3))]))


def test_segments_are_not_ignored(model):
    batch = batch_of(np.arange(500) % 251, [0])
    batch["segments"] = np.zeros_like(batch["tokens"])
    with pytest.raises(RungError, match="documents"):
        model.loss(model.initialize(0), batch, None)


@pytest.mark.parametrize("setting", [{"label_smoothing": 0.1}, {"z_loss": 1e-4}])
def test_what_is_not_in_its_loss_is_refused(model, setting):
    config, mesh = TrainConfig(batch_size=2, steps=1, **setting), make_mesh(MeshConfig())
    with pytest.raises(RungError, match="FlaxModel") as error:
        make_step(model, make_optimizer(model.weights(), config), lambda step: jnp.float32(1), config, mesh)
    assert next(iter(setting)) in error.value.problem
    assert "leave both at 0" in error.value.hint


def test_it_learns_a_real_text_in_the_same_loop(model, shared_data):
    text = np.frombuffer((shared_data / "tinyshakespeare.txt").read_bytes(), np.uint8)
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    counts = np.bincount(held_out, minlength=VOCABULARY)
    frequencies = counts[counts > 0] / counts.sum()
    unigram_entropy = -np.sum(frequencies * np.log(frequencies))

    steps = 80
    config = TrainConfig(batch_size=16, micro_batch_size=8, steps=steps, learning_rate=1e-2, warmup_steps=5)
    mesh = make_mesh(MeshConfig())
    optimizer = make_optimizer(model.weights(), config)
    starts = np.random.default_rng(0).integers(len(train) - CONTEXT - 1, size=(steps, config.batch_size))
    validation = [batch_of(held_out, np.arange(64) * CONTEXT + first) for first in (0, 50_000)]
    seen = []
    loop = Loop(
        step=make_step(model, optimizer, rate_factor(config, steps, 16 * CONTEXT), config, mesh),
        batch=lambda step: place(batch_of(train, starts[step]), mesh),
        steps=steps,
        learning_rate=config.learning_rate,
        flops_per_token=1.0,
        intervals=Intervals(),
        emit=seen.append,
        evaluate=lambda weights: held_out_loss(compiled_loss(model), weights, validation),
    )
    _, progress, result = loop.run(initial_state(model, optimizer, 0, mesh), Progress())
    assert progress.step == steps
    losses = [event.loss for event in seen if isinstance(event, StepDone)]
    assert losses[0] > unigram_entropy + 1
    assert result.loss < unigram_entropy - 0.3
