"""Which weight is in which parameter group; AdamW with clipping, and Muon, against numpy, torch and the definition."""

from __future__ import annotations

import dataclasses
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rung.config import MeshConfig, TrainConfig, preset, preset_names, resolve
from rung.errors import RungError
from rung.mesh import make_mesh
from rung.model import Decoder, Weight
from rung.model.weights import flatten, unflatten
from rung.train.optimizer import GROUPS, global_norm, group_rows, make_optimizer
from rung.train.step import make_step

TABLE = (
    Weight("embedding", (7, 4), ("vocab", "embed"), std=0.02, decay=True),
    Weight("layers.0.up", (6, 4), ("mlp", "embed"), 1, std=0.02, decay=True, hidden=True),
    Weight("layers.0.heads", (3, 2, 4), ("heads", "head", "embed"), 1, std=0.02, decay=True, hidden=True),
    Weight("layers.0.output", (4, 3, 2), ("embed", "heads", "head"), 2, std=0.02, decay=True, hidden=True),
    Weight("layers.0.bias", (6,), ("mlp",)),
    Weight("norm.scale", (4,), ("embed",), constant=1.0),
)
MATRICES = {"embedding", "layers.0.up", "layers.0.heads", "layers.0.output"}


def random_tree(seed, scale=1.0):
    random = np.random.default_rng(seed)
    return {weight.path: (scale * random.normal(size=weight.shape)).astype(np.float32) for weight in TABLE}


@pytest.mark.parametrize("optimizer", GROUPS)
@pytest.mark.parametrize("name", preset_names())
def test_every_weight_is_in_exactly_one_group(name, optimizer):
    config = resolve(preset(name))
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 50)
    table = Decoder(model).weights()
    groups = make_optimizer(table, dataclasses.replace(config.train, optimizer=optimizer)).groups
    owned = [path for group in groups.values() for path in group.paths]
    assert sorted(owned) == sorted(weight.path for weight in table)
    assert set(groups) == ({optimizer, "adamw"} if "muon" in optimizer else {optimizer})
    in_muon = set(groups[optimizer].paths) if "muon" in optimizer else set()
    # Muon is for matrices between hidden layers: not for embeddings, output layer, norms or biases.
    for weight in table:
        is_hidden = weight.path.startswith("layers.") and weight.n_inputs > 0
        assert (weight.path in in_muon) == (is_hidden and "muon" in optimizer)


def test_the_choices_of_the_config_are_the_optimizers_there_are():
    assert set(get_args(get_type_hints(TrainConfig)["optimizer"])) == set(GROUPS)


@pytest.mark.parametrize("optimizer", GROUPS)
def test_every_weight_of_a_flax_module_is_in_exactly_one_group(optimizer):
    nnx = pytest.importorskip("flax.nnx")
    from rung.exchange.flax_module import FlaxModel

    class Bigram(nnx.Module):
        def __init__(self, *, rngs):
            self.table, self.out = nnx.Embed(7, 4, rngs=rngs), nnx.Linear(4, 7, rngs=rngs)

        def __call__(self, tokens_BT):
            return self.out(self.table(tokens_BT))

    table, config = FlaxModel(lambda rngs: Bigram(rngs=rngs)).weights(), TrainConfig(optimizer=optimizer)
    if "muon" in optimizer:  # a module does not say which of its matrices are between hidden layers
        with pytest.raises(RungError, match=f"{optimizer}, and the model has no hidden matrices"):
            make_optimizer(table, config)
    else:
        groups = make_optimizer(table, config).groups
        assert sorted(path for group in groups.values() for path in group.paths) == sorted(w.path for w in table)


def test_the_table_of_groups_for_people():
    config = TrainConfig(optimizer="muon", learning_rate=0.01, muon_learning_rate=0.02, weight_decay=0.5)
    rows = [tuple(row.values()) for row in group_rows(make_optimizer(TABLE, config))]
    # rule, peak rate, decay, weights, parameters
    assert rows == [("muon", 0.02, 0.5, 3, 72), ("adamw", 0.01, 0.5, 1, 28), ("adamw", 0.01, 0.0, 2, 10)]
    none = group_rows(make_optimizer(TABLE, TrainConfig(learning_rate=0.01, weight_decay=0.0)))
    assert [tuple(row.values()) for row in none] == [("adamw", 0.01, 0.0, 4, 100), ("adamw", 0.01, 0.0, 2, 10)]


@pytest.mark.parametrize("name", preset_names())
def test_decay_is_for_matrices_only(name):
    config = resolve(preset(name)).model
    for weight in Decoder(dataclasses.replace(config, vocab_size=config.vocab_size or 50)).weights():
        is_vector = weight.path.endswith(("bias", "scale", "query_norm", "key_norm"))
        assert weight.decay != is_vector


@pytest.mark.parametrize("optimizer", GROUPS)
def test_with_no_gradient_only_matrices_shrink(optimizer):
    config = TrainConfig(optimizer=optimizer, learning_rate=0.01, muon_learning_rate=0.02, weight_decay=0.5)
    update = make_optimizer(TABLE, config)
    old = random_tree(0)
    weights = unflatten(old)
    none = jax.tree.map(jnp.zeros_like, weights)
    new, _ = jax.jit(update.update)(none, update.init(weights), weights, jnp.float32(0.5))
    for path, value in flatten(new).items():
        rate = 0.02 if "muon" in optimizer and path.startswith("layers.") else 0.01
        factor = 1 - 0.5 * rate * 0.5 if path in MATRICES else 1.0
        np.testing.assert_allclose(value, old[path] * factor, rtol=1e-6, err_msg=path)


CONFIG = TrainConfig(
    batch_size=1, learning_rate=0.03, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.2, clip_norm=3.0
)


class Linear:
    """A model whose gradient is whatever the batch holds: its loss is the product of weights and batch."""

    def weights(self):
        return TABLE

    def loss(self, weights, batch, keys_B):
        terms = jax.tree.map(lambda w, g: jnp.sum(w * g[0]), weights, unflatten(batch))
        return sum(jax.tree.leaves(terms)), jnp.int32(1), {}


def our_steps(gradients, factors):
    optimizer, mesh = make_optimizer(TABLE, CONFIG), make_mesh(MeshConfig())
    weights = jax.tree.map(jnp.asarray, unflatten(random_tree(0)))
    state = {
        "weights": weights,
        "optimizer": optimizer.init(weights),
        "step": jnp.int32(0),
        "skipped_in_a_row": jnp.int32(0),
    }
    step = make_step(Linear(), optimizer, lambda number: jnp.asarray(factors, jnp.float32)[number], CONFIG, mesh)
    norms = []
    for gradient in gradients:
        state, metrics = step(state, {path: g[None] for path, g in gradient.items()})
        norms.append(float(metrics["gradient_norm"]))
    return flatten(state["weights"]), norms


GRADIENTS = [random_tree(seed, scale) for seed, scale in ((1, 0.1), (2, 5.0), (3, 0.01), (4, 1.0), (5, 0.3))]
FACTORS = [0.5, 1.0, 1.0, 0.7, 0.1]


def test_adamw_and_clipping_against_numpy():
    # Loshchilov and Hutter 2019, algorithm 2, and Pascanu et al. 2013, algorithm 1, in float64.
    weights = {path: w.astype(np.float64) for path, w in random_tree(0).items()}
    m = {path: np.zeros_like(w) for path, w in weights.items()}
    v = {path: np.zeros_like(w) for path, w in weights.items()}
    norms = []
    for t, (gradient, factor) in enumerate(zip(GRADIENTS, FACTORS, strict=True), start=1):
        norms.append(np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in gradient.values())))
        clip = min(1, CONFIG.clip_norm / norms[-1])
        for path, w in weights.items():
            g = gradient[path] * clip
            m[path] = 0.8 * m[path] + 0.2 * g
            v[path] = 0.9 * v[path] + 0.1 * g**2
            direction = m[path] / (1 - 0.8**t) / (np.sqrt(v[path] / (1 - 0.9**t)) + 1e-3)
            decay = 0.2 if path in MATRICES else 0
            weights[path] = w - factor * 0.03 * (direction + decay * w)
    found, found_norms = our_steps(GRADIENTS, FACTORS)
    assert max(norms) > CONFIG.clip_norm > min(norms)
    np.testing.assert_allclose(found_norms, norms, rtol=1e-5)
    for path, w in weights.items():
        np.testing.assert_allclose(found[path], w, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parity
def test_adamw_and_clipping_against_torch():
    import torch

    weights = {path: torch.nn.Parameter(torch.from_numpy(w)) for path, w in random_tree(0).items()}
    groups = [
        {"params": [w for path, w in weights.items() if path in MATRICES], "weight_decay": CONFIG.weight_decay},
        {"params": [w for path, w in weights.items() if path not in MATRICES], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, betas=(CONFIG.beta1, CONFIG.beta2), eps=CONFIG.epsilon)
    for gradient, factor in zip(GRADIENTS, FACTORS, strict=True):
        for path, weight in weights.items():
            weight.grad = torch.from_numpy(gradient[path].copy())
        torch.nn.utils.clip_grad_norm_(weights.values(), CONFIG.clip_norm)
        for group in theirs.param_groups:
            group["lr"] = factor * CONFIG.learning_rate
        theirs.step()
    found, _ = our_steps(GRADIENTS, FACTORS)
    for path, weight in weights.items():
        np.testing.assert_allclose(found[path], weight.detach().numpy(), rtol=1e-5, atol=1e-6, err_msg=path)


def test_muon_orthogonalises_each_matrix():
    # Five steps of Jordan's polynomial bring every singular value of a well-conditioned matrix near 1 (his figure: 0.7
    # to 1.2), times sqrt(outputs / inputs) where there are more outputs.
    config = TrainConfig(optimizer="muon", muon_learning_rate=1.0, weight_decay=0.0)
    optimizer = make_optimizer(TABLE, config)
    weights, gradients = unflatten(random_tree(0)), unflatten(random_tree(1, 1e-3))
    new, _ = jax.jit(optimizer.update)(gradients, optimizer.init(weights), weights, jnp.float32(1))
    change = {path: np.asarray(w) - random_tree(0)[path] for path, w in flatten(new).items()}
    for path, (outputs, inputs) in {"layers.0.up": (6, 4), "layers.0.heads": (6, 4), "layers.0.output": (4, 6)}.items():
        matrix = -change[path].reshape(outputs, inputs)
        singular = np.linalg.svd(matrix, compute_uv=False) / max(1, outputs / inputs) ** 0.5
        assert np.all((singular > 0.6) & (singular < 1.3)), (path, singular)
        # It turns the gradient as little as an orthogonal matrix can: the polar factor, of which it is an estimate.
        u, _, vt = np.linalg.svd(random_tree(1)[path].reshape(outputs, inputs), full_matrices=False)
        cosine = np.sum(matrix * (u @ vt)) / np.linalg.norm(matrix) / np.linalg.norm(u @ vt)
        assert cosine > 0.95, path


def test_global_norm_is_of_all_leaves_together():
    tree = random_tree(3)
    expected = np.linalg.norm(np.concatenate([leaf.ravel() for leaf in tree.values()]))
    np.testing.assert_allclose(global_norm(unflatten(tree)), expected, rtol=1e-6)
