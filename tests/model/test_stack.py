"""Layers unrolled and as a loop, with less and less kept for the backward pass: the same numbers in less memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rung.config import ComputeConfig, Config, MeshConfig, override, resolve
from rung.mesh import make_mesh, replicated
from rung.model import Decoder
from rung.model.stack import run_layers
from rung.model.weights import flatten, initialize
from rung.train.step import place, row_keys

POLICIES = ["none", "dots", "block", "full"]  # from the most memory to the least
LAYERS, ROWS, LENGTH = 9, 8, 32  # three groups of three layers under "full"


def deep(n_layers=LAYERS, **settings):
    model = {
        "vocab_size": 31,
        "context_length": LENGTH,
        "n_layers": n_layers,
        "n_heads": 2,
        "n_kv_heads": 1,
        "d_model": 16,
        "d_ff": 64,
        "dropout": 0.2,
        "dropout_sites": ["embedding", "attention", "mlp", "residual"],
        "attention_window": 20,
        "init": "fan_in",
    }
    changes = {f"model.{name}": value for name, value in model.items()}
    config = resolve(override(Config(), changes | {path.replace("__", "."): value for path, value in settings.items()}))
    return Decoder(config.model, config.compute)


def batch():
    random = np.random.default_rng(0)
    tokens, targets = random.integers(31, size=(2, ROWS, LENGTH))
    segments = np.sort(random.integers(0, 3, (ROWS, LENGTH)), -1)
    return {"tokens": jnp.int32(tokens), "targets": jnp.int32(targets), "segments": jnp.int32(segments)}


def lowered(model):
    def loss(weights, batch):
        return model.loss(weights, batch, row_keys(0, 0, ROWS))[0]

    return jax.jit(jax.value_and_grad(loss)).lower(initialize(model.weights(), 0), batch())


@functools.cache
def compiled(remat, scan):
    return lowered(deep(compute__remat=remat, compute__scan_layers=scan)).compile()


@functools.cache
def loss_and_gradients(remat, scan):
    loss, gradients = compiled(remat, scan)(initialize(deep().weights(), 0), batch())
    return loss, flatten(gradients)


@pytest.mark.parametrize(("remat", "scan"), list(itertools.product(POLICIES, [False, True]))[1:])
def test_same_loss_and_gradients(remat, scan):
    # With dropout, so each layer has to find its own masks again.
    loss, gradients = loss_and_gradients(remat, scan)
    expected, expected_gradients = loss_and_gradients("none", False)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for path, gradient in gradients.items():
        scale = max(np.max(np.abs(expected_gradients[path])), 1)  # that of key biases is 0
        np.testing.assert_allclose(gradient, expected_gradients[path], rtol=0, atol=2e-6 * scale, err_msg=path)


@pytest.mark.parametrize("scan", [False, True])
def test_each_policy_takes_less_memory(scan):
    sizes = [compiled(remat, scan).memory_analysis().temp_size_in_bytes for remat in POLICIES]
    for more, less in itertools.pairwise(sizes):
        assert less < 0.95 * more


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("n_layers", [1, 2, 5, 7])
def test_groups_of_any_number_of_layers(n_layers, scan):
    def layer(number, w, x):
        return jnp.tanh(x @ w["w"] + w["b"] + 0.1 * jnp.float32(number))

    def tower(remat, scan_layers):
        def summed(weights, x):
            return jnp.sum(run_layers(layer, weights, x, ComputeConfig(remat=remat, scan_layers=scan_layers)) ** 2)

        return jax.jit(jax.value_and_grad(summed, (0, 1)))

    random = np.random.default_rng(n_layers)
    weights = [
        {"w": jnp.float32(random.normal(size=(3, 3))), "b": jnp.float32(random.normal(size=3))} for _ in range(n_layers)
    ]
    x = jnp.float32(random.normal(size=(2, 2, 3)))
    expected = tower("none", False)(weights, x)
    for one, other in zip(*map(jax.tree.leaves, (tower("full", scan)(weights, x), expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("remat", "scan"), [("block", False), pytest.param("full", False, marks=pytest.mark.slow), ("block", True)]
)
def test_over_several_devices(remat, scan):
    mesh = make_mesh(MeshConfig(data=4))

    def run(model):
        weights = jax.device_put(initialize(model.weights(), 0), replicated(mesh))

        def loss(weights, batch):
            return model.loss(weights, batch, row_keys(0, 0, ROWS))[0]

        arguments = weights, place(batch(), mesh)
        program = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()
        return program(*arguments), program.memory_analysis().temp_size_in_bytes

    split = {"compute__remat": remat, "compute__scan_layers": scan}
    (loss, gradients), memory = run(dataclasses.replace(deep(4, **split), devices=4))
    kept = dataclasses.replace(deep(4, compute__scan_layers=scan), devices=4)
    (kept_loss, kept_gradients), more = run(kept)
    assert memory < 0.8 * more
    np.testing.assert_allclose(loss, kept_loss, rtol=1e-5)
    gradients, kept_gradients = flatten(gradients), flatten(kept_gradients)
    for path, gradient in gradients.items():
        assert gradient.sharding.is_fully_replicated
        scale = max(np.max(np.abs(kept_gradients[path])), 1)
        np.testing.assert_allclose(gradient, kept_gradients[path], rtol=0, atol=1e-5 * scale, err_msg=path)


def weights_of(model):
    return jax.eval_shape(lambda: initialize(model.weights(), 0))


def products(model):
    return lowered(model).as_text().count("stablehlo.dot_general")


def test_a_loop_is_one_layer_however_many_there_are():
    few, many = (products(deep(n, compute__scan_layers=True)) for n in (2, 9))
    assert few == many
    assert products(deep(9)) > 3 * many


# Precision


def precisions(jaxpr):
    """Yield the precision of every matrix product of a jaxpr, and of those inside it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from precisions(inner)


HIGH, HIGHEST, DEFAULT = jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, HIGHEST),
        ({"model__attention_soft_cap": 5.0}, HIGHEST),
        ({"compute__remat": "dots"}, HIGHEST),
        ({"compute__remat": "full", "compute__scan_layers": True}, HIGHEST),
        ({"compute__matmul_precision": "tensorfloat32"}, HIGH),
        ({"compute__matmul_precision": "bfloat16"}, DEFAULT),
        ({"model__compute_dtype": "bfloat16"}, DEFAULT),
    ],
    ids=str,
)
def test_every_product_has_the_precision_that_is_set(settings, expected):
    model = deep(2, **settings)

    def loss(weights):
        return model.loss(weights, batch(), row_keys(0, 0, ROWS))[0]

    found = list(precisions(jax.make_jaxpr(jax.value_and_grad(loss))(weights_of(model)).jaxpr))
    # Forward and twice backward: query-key-value, output, up, down, and the two of attention; and the head.
    assert len(found) >= 3 * (6 if model.compute.scan_layers else 12) + 3
    assert set(found) == {(expected, expected)}


def test_generation_has_the_precision_that_is_set():
    model = deep(2, model__dropout=0.0)
    token_B, cache = jnp.zeros(1, jnp.int32), model.empty_cache(1)

    def generate(weights):
        hidden, filled = model.prefill(weights, token_B[:, None], cache)
        state, _ = model.decode(weights, token_B, token_B + 1, filled)
        return model.unembed(weights, hidden), model.unembed(weights, state)

    found = list(precisions(jax.make_jaxpr(generate)(weights_of(model)).jaxpr))
    assert len(found) >= 2 * (2 * 6 + 1)
    assert set(found) == {(HIGHEST, HIGHEST)}
