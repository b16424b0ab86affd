"""The update rules against their papers' algorithms in float64 NumPy, over several steps at changing rates."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rung.config import MeshConfig, TrainConfig
from rung.mesh import make_mesh
from rung.model import Weight
from rung.model.weights import flatten, unflatten
from rung.train.checkpoint import Checkpoints, Progress
from rung.train.optimizer import GROUPS, make_optimizer
from rung.train.step import abstract_state, initial_state, make_step

TABLE = (
    Weight("embedding", (150, 130), ("vocab", "embed"), std=0.02, decay=True),
    Weight("layers.0.up", (6, 4), ("mlp", "embed"), 1, std=0.02, decay=True, hidden=True),
    # A matrix of 160 x 130, of which no two axes of the array are large: it is factored all the same.
    Weight("layers.0.heads", (4, 40, 130), ("heads", "head", "embed"), 1, std=0.02, decay=True, hidden=True),
    Weight("layers.0.output", (130, 4, 40), ("embed", "heads", "head"), 2, std=0.02, decay=True, hidden=True),
    Weight("layers.0.bias", (6,), ("mlp",), decay=False),
)
FACTORED = {"embedding", "layers.0.heads", "layers.0.output"}
HIDDEN = {"layers.0.up": (6, 4), "layers.0.heads": (160, 130), "layers.0.output": (130, 160)}
CONFIG = TrainConfig(learning_rate=0.03, muon_learning_rate=0.05, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.2)
FACTORS = [0.5, 1.0, 1.0, 0.7]


def random_tree(seed, scale=1.0):
    random = np.random.default_rng(seed)
    return {w.path: (scale * random.normal(size=w.shape)).astype(np.float32) for w in TABLE}


WEIGHTS = random_tree(0, 0.1) | {"layers.0.bias": np.zeros(6, np.float32)}
GRADIENTS = [random_tree(seed, scale) for seed, scale in ((1, 0.1), (2, 5.0), (3, 0.01), (4, 1.0))]


def our_steps(name):
    optimizer = make_optimizer(TABLE, dataclasses.replace(CONFIG, optimizer=name))
    weights = jax.tree.map(jnp.asarray, unflatten(WEIGHTS))
    state, update = optimizer.init(weights), jax.jit(optimizer.update)
    for gradient, factor in zip(GRADIENTS, FACTORS, strict=True):
        weights, state = update(unflatten(gradient), state, weights, jnp.float32(factor))
    return flatten(weights)


def their_steps(rule_of):
    """Return the weights after the steps that ``rule_of(path)(gradient, weight, t) -> (rate, direction)`` makes."""
    weights = {path: w.astype(np.float64) for path, w in WEIGHTS.items()}
    rules = {path: rule_of(path) for path in weights}
    for t, (gradients, factor) in enumerate(zip(GRADIENTS, FACTORS, strict=True), start=1):
        for path, w in weights.items():
            rate, direction = rules[path](gradients[path].astype(np.float64), w, t)
            decay = 0 if path == "layers.0.bias" else CONFIG.weight_decay
            weights[path] = w - factor * rate * (direction + decay * w)
    return weights


def adamw(path):
    m = v = 0.0

    def step(g, w, t):
        nonlocal m, v
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        return 0.03, m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)

    return step


def lion(path):
    """Chen et al. 2023, algorithm 2."""
    m = 0.0

    def step(g, w, t):
        nonlocal m
        update = np.sign(0.8 * m + 0.2 * g)
        m = 0.9 * m + 0.1 * g
        return 0.03, update

    return step


def adafactor(path):
    """Shazeer and Stern 2018, algorithms 4 and 5, with epsilon 1e-30 and 1e-3, d = 1 and c = 0.8."""
    rows = columns = squares = 0.0

    def step(g, w, t):
        nonlocal rows, columns, squares
        shape, beta = g.shape, 1 - t**-0.8
        if path in FACTORED:
            g = g.reshape(HIDDEN.get(path, shape))
            rows = beta * rows + (1 - beta) * (g**2 + 1e-30).sum(1)
            columns = beta * columns + (1 - beta) * (g**2 + 1e-30).sum(0)
            mean = np.outer(rows, columns) / rows.sum()
        else:
            mean = squares = beta * squares + (1 - beta) * (g**2 + 1e-30)
        update = g / np.sqrt(mean)
        update = update / max(1, np.sqrt(np.mean(update**2)))
        return 0.03, update.reshape(shape) * max(1e-3, np.sqrt(np.mean(w**2)))

    return step


def orthogonal(matrix):
    """Jordan et al. 2024: five steps of a quintic Newton-Schulz iteration."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def muon(path, by_neuron=False):
    if path not in HIDDEN:
        return adamw(path)
    momentum = rows = 0.0

    def step(g, w, t):
        nonlocal momentum, rows
        m, n = HIDDEN[path]
        momentum = 0.95 * momentum + g.reshape(m, n)
        update = orthogonal(g.reshape(m, n) + 0.95 * momentum)
        if by_neuron:
            # Li et al. 2025, algorithm 1, lines 5 to 8; line 9 with Muon's norm as the one to keep.
            rows = 0.95 * rows + 0.05 * np.mean(update**2, axis=1)
            normalised = update / (np.sqrt(rows)[:, None] + 1e-8)
            update = normalised * np.linalg.norm(update) / np.linalg.norm(normalised)
        return 0.05, update.reshape(w.shape) * np.sqrt(max(1, m / n))

    return step


THEIRS = {"adamw": adamw, "lion": lion, "adafactor": adafactor, "muon": muon, "normuon": lambda p: muon(p, True)}


@pytest.mark.parametrize("name", GROUPS)
def test_several_steps_against_the_paper(name):
    found, expected = our_steps(name), their_steps(THEIRS[name])
    for path, w in expected.items():
        moved = np.linalg.norm(w - WEIGHTS[path])
        assert moved > 0
        assert np.linalg.norm(found[path] - w) < 2e-5 * moved, path


def test_adafactor_keeps_rows_and_columns_only():
    optimizer = make_optimizer(TABLE, dataclasses.replace(CONFIG, optimizer="adafactor"))
    state = optimizer.init(unflatten(WEIGHTS))
    sizes = sum(leaf.size for leaf in jax.tree.leaves(state))
    factored = sum(sum(HIDDEN.get(path, (150, 130))) for path in FACTORED)
    assert sizes < factored + 24 + 6 + 20  # the small ones whole, and the placeholders


class Linear:
    """A model whose gradient is the batch."""

    def weights(self):
        return TABLE

    def loss(self, weights, batch, keys_B):
        terms = jax.tree.map(lambda w, g: jnp.sum(w * g[0]), weights, unflatten(batch))
        return sum(jax.tree.leaves(terms)), jnp.int32(1), {}


@pytest.mark.parametrize("name", ["lion", "adafactor", "normuon"])  # the others' state is that of parts of these
def test_its_state_goes_through_a_checkpoint_and_stays_on_a_bad_step(name, tmp_path):
    config = dataclasses.replace(CONFIG, optimizer=name, batch_size=1)
    model, mesh = Linear(), make_mesh(MeshConfig())
    optimizer = make_optimizer(TABLE, config)
    step = make_step(model, optimizer, lambda number: jnp.float32(1), config, mesh)
    batches = [{path: g[None] for path, g in gradient.items()} for gradient in GRADIENTS]

    def bits(state):
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves([state["weights"], state["optimizer"]])]

    state, _ = step(initial_state(model, optimizer, 0, mesh), batches[0])
    state, _ = step(state, batches[1])
    before = bits(state)
    state, metrics = step(state, {**batches[2], "embedding": np.full((1, 150, 130), np.nan, np.float32)})
    assert metrics["skipped"]
    assert bits(state) == before

    checkpoints = Checkpoints(tmp_path, keep=1, identity={})
    checkpoints.save(state, Progress(step=3))
    assert checkpoints.wait().error is None
    restored = checkpoints.restore(abstract_state(model, optimizer, mesh)).state
    assert bits(restored) == before
    assert bits(step(restored, batches[3])[0]) == bits(step(state, batches[3])[0])
