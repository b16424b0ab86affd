"""Looking into a step: what was planted is what is named, for our decoder and for a Flax module."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rung.config import ComputeConfig, Config, MeshConfig, override, resolve
from rung.diagnose import activations
from rung.diagnose.activations import describe, examine, row_losses
from rung.mesh import make_mesh
from rung.model import Decoder
from rung.model.weights import Weight, flatten, initialize, unflatten
from rung.train.step import place, row_keys

pytestmark = pytest.mark.medium  # several hundred reductions to compile

ROWS, CONTEXT = 4, 16


def decoder(**changes) -> Decoder:
    model = {"vocab_size": 50, "d_model": 16, "n_layers": 2, "n_heads": 2, "context_length": CONTEXT, "dropout": 0.1}
    model |= changes
    return Decoder(resolve(override(Config(), {f"model.{k}": v for k, v in model.items()} | {"train.steps": 1})).model)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder()


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(0, 50, (ROWS, CONTEXT + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.fixture(scope="module")
def keys():
    return row_keys(0, 0, ROWS)


def planted(model, values) -> dict:
    """Return initial weights with, in each weight of ``values``, its first entry set."""
    flat = {path: np.array(array) for path, array in flatten(initialize(model.weights(), 0)).items()}
    for path, value in values.items():
        flat[path].flat[0] = value
    return unflatten(flat)


@pytest.mark.slow
def test_of_a_sound_step_it_finds_what_the_step_computes(model, batch, keys):
    weights = planted(model, {})

    def mean_loss(weights):
        loss_sum, targets, _ = model.loss(weights, batch, keys)
        return loss_sum / targets

    loss, gradient = jax.value_and_grad(mean_loss)(weights)
    gradient = flatten(jax.tree.map(lambda g: g * ROWS * CONTEXT, gradient))
    largest = max(gradient, key=lambda path: float(jnp.abs(gradient[path]).max()))
    found = examine(model, weights, batch, keys)
    assert found.finite
    assert (found.first_not_finite, found.gradients_not_finite, found.targets) == (None, [], ROWS * CONTEXT)
    assert found.loss == pytest.approx(float(loss), rel=1e-6)
    norm = math.sqrt(sum(float(jnp.sum(g**2)) for g in gradient.values())) / (ROWS * CONTEXT)
    assert found.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert found.largest_gradient == (largest, pytest.approx(float(jnp.abs(gradient[largest]).max()), rel=1e-4))
    assert found.largest_weight[1] == 1  # the scale of a norm
    assert found.largest_weight[0].endswith("norm.scale")
    assert len(found.largest) == 5
    # Masked scores are -1e30; what is computed is of the order of the context length.
    assert 1 < found.largest[0][1] < 1e3
    assert describe(found).startswith("all values are finite, the loss 3.9")


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("path", ["embedding.positions", "layers.1.mlp.up", "layers.1.attention.key_bias"])
def test_a_weight_that_is_not_finite_is_named(model, batch, keys, path, bad):
    found = examine(model, planted(model, {path: bad}), batch, keys)
    assert not found.finite
    assert found.first_not_finite == f"weight {path}"
    assert found.largest_weight[0] == path
    assert len(found.gradients_not_finite) > 5


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("layers.0.attention_norm.scale", "layers.0.attention (dot_general)"),
        ("layers.1.mlp_norm.bias", "layers.1.mlp (dot_general)"),
        ("layers.1.attention.query_bias", "layers.1.attention (dot_general BGRTK,BGSK->BGRTS)"),
        ("final_norm.bias", "loss (dot_general)"),
    ],
)
def test_an_overflow_is_named_where_it_happens(model, batch, keys, path, where):
    values = {path: 5e37}
    # A product with an entry of 30 is over 3.4e38, the largest float32.
    values |= {"layers.0.attention.key": 30.0, "layers.1.mlp.up": 30.0, "embedding.tokens": 30.0}
    values |= {"layers.1.attention.key_bias": 30.0}
    found = examine(model, planted(model, values), batch, keys)
    assert found.first_not_finite == where
    assert found.largest_weight == (path, pytest.approx(5e37))
    assert 1e37 < found.largest[0][1] < math.inf
    assert describe(found).startswith(f"first not finite: {where}; largest activation before it: ")
    assert describe(found).endswith(f"largest weight: {path} 5e+37")


@pytest.mark.parametrize(("remat", "micro_batch_size"), [("block", 0), ("full", 2)])
def test_a_gradient_that_overflows_in_a_layer_computed_again_is_named_in_it(batch, keys, remat, micro_batch_size):
    model = decoder(n_layers=1)
    weights = planted(model, {})
    weights["layers"][0]["mlp"]["up"][0] = 0  # the first hidden unit is 0, and what it is multiplied by may be large
    weights["layers"][0]["mlp"]["down"][:, 0] = np.geomspace(1e38, 3e38, 16)
    found = examine(Decoder(model.config, ComputeConfig(remat=remat)), weights, batch, keys, micro_batch_size)
    assert math.isfinite(found.loss)
    assert found.first_not_finite.partition(",")[0] == "gradient of layers.0.mlp (dot_general)"
    assert found.largest_weight[0] == "layers.0.mlp.down"


@pytest.mark.slow
def test_micro_batches_and_devices_find_the_same(model, batch, keys):
    weights = planted(model, {"layers.1.mlp.down_bias": 3e4})
    whole = examine(model, weights, batch, keys)
    for other in (
        examine(model, weights, batch, keys, micro_batch_size=2),
        examine(model, weights, place(batch, make_mesh(MeshConfig(data=4))), keys),
    ):
        assert other.loss == pytest.approx(whole.loss, rel=1e-5)
        assert other.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-4)
        assert other.largest_weight == whole.largest_weight
        assert other.largest[0] == (whole.largest[0][0], pytest.approx(whole.largest[0][1], rel=1e-5))


def test_the_micro_batch_that_overflows_is_named(model, batch, keys):
    weights = planted(model, {})
    weights["embedding"]["tokens"][49] = 1e30
    tokens = np.minimum(batch["tokens"], 48)
    tokens[1, 0] = 49  # rows 1 and 3 are the second micro-batch
    found = examine(model, weights, {"tokens": tokens, "targets": batch["targets"] % 49}, keys, micro_batch_size=2)
    assert found.first_not_finite == "layers.0.attention_norm (mul), pass 2 of 2"
    assert found.largest[0][0] == "layers.0.attention_norm (reduce_sum)"


def test_the_losses_of_the_rows_are_those_of_each_by_itself(model, batch, keys):
    weights = planted(model, {})
    weights["embedding"]["tokens"][49] = math.nan
    tokens = np.minimum(batch["tokens"], 48)
    tokens[2, 3] = 49
    targets = batch["targets"] % 49
    targets[0, :5] = -1
    losses, counts = row_losses(model, weights, {"tokens": tokens, "targets": targets}, keys)
    assert counts.tolist() == [CONTEXT - 5, CONTEXT, CONTEXT, CONTEXT]
    # The output layer is tied, so a NaN in the embedding spoils all; it is the input of row 2 alone with finite logits.
    assert np.isnan(losses).all()
    weights["embedding"]["tokens"][49] = 0.1
    losses, _ = row_losses(model, weights, {"tokens": tokens, "targets": targets}, keys)
    for row in range(ROWS):
        one = {"tokens": tokens[row : row + 1], "targets": targets[row : row + 1]}
        assert losses[row] == pytest.approx(float(model.loss(weights, one, keys[row : row + 1])[0]), rel=1e-5)


@dataclass(frozen=True)
class Distance:
    """A model of one weight, the loss of which has an infinite slope where it is 0."""

    calls: list = field(default_factory=list, hash=False)

    def weights(self):
        return (Weight("w", (3,), ("embed",)),)

    def loss(self, weights, batch, keys_B):
        self.calls.append(1)
        return jnp.sum(jnp.sqrt(jnp.abs(weights["w"] * batch["x"]))), jnp.int32(batch["x"].size), {}


def test_a_gradient_alone_that_is_not_finite_is_named():
    found = examine(Distance(), {"w": jnp.zeros(3)}, {"x": jnp.ones((2, 3))}, None)
    assert found.loss == 0
    assert found.gradients_not_finite == ["w"]
    assert found.first_not_finite == "after w (div)"
    assert describe(found).startswith("the loss is 0, its gradient is not finite; first not finite: after w (div)")
    assert found.largest_gradient == ("", 0.0)


def test_a_norm_that_overflows_is_told_apart_from_values_that_do():
    found = examine(Distance(), {"w": jnp.full(3, 1e-10)}, {"x": jnp.full((2, 3), 1e35)}, None)
    assert found.gradients_not_finite == []
    assert not found.finite
    assert "the norm of the gradient" in describe(found)


def test_a_second_look_compiles_nothing():
    model = Distance()
    for value in (1.0, 2.0, 3.0):
        examine(model, {"w": jnp.full(3, value)}, {"x": jnp.ones((2, 3))}, None)
        row_losses(model, {"w": jnp.full(3, value)}, {"x": jnp.ones((2, 3))}, None)
    assert len(model.calls) == 2


def test_it_keeps_no_activations(model, batch, keys):
    arguments = (planted(model, {}), batch, keys)

    def gradient(weights, batch, keys_B):
        gradients = jax.grad(lambda weights: model.loss(weights, batch, keys_B)[0])(weights)
        return jax.tree.map(jnp.max, gradients)

    def needed(program):
        return program.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    # A step this small takes 1.8 times what its gradient does (the demo's 1.2 times); all its values would be over 6.
    assert needed(activations._compiled(model, 1)) < 3 * needed(jax.jit(gradient))


def test_a_flax_module_is_looked_into():
    nnx = pytest.importorskip("flax.nnx", reason="the extra flax is not installed")
    from rung.exchange.flax_module import FlaxModel

    class Attention(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(50, 16, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 16, decode=False, dropout_rate=0.1, rngs=rngs)
            self.out = nnx.Linear(16, 50, rngs=rngs)

        def __call__(self, tokens_BT):
            x = self.embed(tokens_BT)
            x = x + self.attention(x, mask=nnx.make_causal_mask(tokens_BT))
            return self.out(jnp.log1p(jnp.exp(x)))

    model = FlaxModel(lambda rngs: Attention(rngs))
    tokens = np.random.default_rng(0).integers(0, 50, (2, 8), dtype=np.int32)
    batch, keys_B = {"tokens": tokens, "targets": tokens}, row_keys(0, 0, 2)
    weights = model.initialize(0)
    found = examine(model, weights, batch, keys_B)
    assert found.finite
    assert found.largest[0][1] < 1e3  # Flax masks with the most negative float
    assert found.loss == pytest.approx(float(model.loss(weights, batch, keys_B)[0]) / 16, rel=1e-5)
    assert row_losses(model, weights, batch, keys_B)[0].sum() / 16 == pytest.approx(found.loss, rel=1e-5)

    weights["attention"]["out"]["bias"] = jnp.full(16, 100.0)
    found = examine(model, weights, batch, keys_B)
    assert found.first_not_finite == "after attention.out.bias (exp)"
    assert "largest activation before it: after attention.out.bias (add) 10" in describe(found)
