"""The step and the loop: any split of a batch is the same update, bad updates are skipped, listeners change nothing."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rung.config import Config, MeshConfig, TrainConfig, override, resolve
from rung.errors import RungError
from rung.evaluate.held_out import HeldOut, compiled_loss, held_out_loss
from rung.mesh import make_mesh, replicated
from rung.model import Decoder
from rung.model.losses import Objective
from rung.model.weights import flatten
from rung.train import events
from rung.train.checkpoint import Progress
from rung.train.loop import Diverged, Intervals, Loop
from rung.train.optimizer import make_optimizer
from rung.train.step import initial_state, make_step, place, row_keys

V, T, B = 31, 12, 8
MODEL = Decoder(
    resolve(
        override(
            Config(),
            {
                "model.vocab_size": V,
                "model.context_length": T,
                "model.n_layers": 1,
                "model.n_heads": 2,
                "model.d_model": 16,
                "model.d_ff": 32,
                "model.dropout": 0.2,
                # Softmax takes a bias on keys out: its gradient is noise around 0, which Adam would make steps of.
                "model.qkv_bias": False,
                "model.init": "fan_in",
            },
        )
    ).model
)
TRAIN = TrainConfig(batch_size=B, learning_rate=0.01, weight_decay=0.1, clip_norm=1.0, seed=5)


TARGETS = np.array([T, 0, 1, 5, T, 2, 7, 3])
"""Targets of each row: very unlike numbers, so that an average of averages would show."""


class Spoiled:
    """The model, its loss times the batch's ``spoil`` [B], through which any number gets into loss and gradient."""

    def weights(self):
        return MODEL.weights()

    def loss(self, weights, batch, keys_B):
        loss_sum, targets, aux = MODEL.loss(weights, batch, keys_B)
        return loss_sum * jnp.max(batch["spoil"]), targets, aux


def batch_of(step, spoil=1.0):
    tokens, targets = np.random.default_rng(step).integers(V, size=(2, B, T)).astype(np.int32)
    targets[np.arange(T) >= TARGETS[:, None]] = -1
    return {"tokens": tokens, "targets": targets, "spoil": np.full(B, spoil, np.float32)}


@functools.cache
def compiled(data=1, **changes):
    """Return ``(step, start, put)``: the compiled step, a fresh initial state, and a batch on the devices."""
    model, config = Spoiled(), dataclasses.replace(TRAIN, **changes)
    mesh, optimizer = make_mesh(MeshConfig(data=data)), make_optimizer(model.weights(), config)
    step = make_step(model, optimizer, lambda number: jnp.float32(1), config, mesh)

    def start():  # the step takes over the memory of its state, so each run gets its own
        return jax.device_put(jax.tree.map(np.copy, first_state()), replicated(mesh))

    return step, start, lambda batch: place(batch, mesh)


@functools.cache
def first_state(data=1):
    optimizer = make_optimizer(MODEL.weights(), TRAIN)
    return jax.device_get(initial_state(MODEL, optimizer, TRAIN.seed, make_mesh(MeshConfig(data=data))))


def train(steps, **options):
    """Return the state and metrics of some steps; two steps in flight at most."""
    step, start, put = compiled(**options)
    state, seen = start(), []
    for number in range(steps):
        state, metrics = step(state, put(batch_of(number)))
        seen.append({name: value.item() for name, value in jax.device_get(metrics).items()})
    return state, seen


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# One batch, however it is cut


@functools.cache
def whole_batch():
    return train(5)


@pytest.mark.parametrize(
    ("micro", "data"),
    [pytest.param(4, 1, marks=pytest.mark.slow), (1, 1), pytest.param(8, 4, marks=pytest.mark.slow), (4, 4)],
)  # 2 x 4 and 8 x 1 micro-batches; 8, and 2 x 4, over 4 devices
def test_any_split_is_the_same_update(micro, data):
    expected_state, expected = whole_batch()
    state, seen = train(5, micro_batch_size=micro, data=data)
    for one, other in zip(seen, expected, strict=True):
        assert one["targets"] == other["targets"] == TARGETS.sum()
        np.testing.assert_allclose(one["loss_sum"], other["loss_sum"], rtol=1e-5)
        np.testing.assert_allclose(one["gradient_norm"], other["gradient_norm"], rtol=1e-4)
    for one, other in zip(*map(jax.tree.leaves, (state["weights"], expected_state["weights"])), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_gradient_is_of_the_mean_over_all_targets():
    # One row at a time, without the step: sums of losses over the sum of targets. The norm stands for the gradient.
    state, put = compiled()[1](), compiled()[2]
    batch, keys_B = batch_of(0), row_keys(TRAIN.seed, 0, B)

    @jax.jit
    def of_row(weights, row, key):
        return jax.value_and_grad(lambda w: MODEL.loss(w, row, key)[0])(weights)

    rows = [of_row(state["weights"], {n: a[r : r + 1] for n, a in batch.items()}, keys_B[r : r + 1]) for r in range(B)]
    n_targets = np.sum(batch["targets"] >= 0)
    gradient = jax.tree.map(lambda *g: sum(np.asarray(x, np.float64) for x in g) / n_targets, *(g for _, g in rows))
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
    _, metrics = compiled()[0](state, put(batch))
    np.testing.assert_allclose(metrics["loss_sum"], sum(float(loss) for loss, _ in rows), rtol=1e-5)
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)


@pytest.mark.parametrize("setting", [{"label_smoothing": 0.1}, {"z_loss": 1e-4}])
def test_an_objective_that_is_not_the_models_is_refused(setting):
    config, optimizer = dataclasses.replace(TRAIN, **setting), make_optimizer(MODEL.weights(), TRAIN)
    mesh = make_mesh(MeshConfig())
    with pytest.raises(RungError, match=next(iter(setting))):
        make_step(MODEL, optimizer, lambda number: jnp.float32(1), config, mesh)
    other = dataclasses.replace(MODEL, objective=Objective.of(config))
    with pytest.raises(RungError, match="Decoder"):  # nor the other way about
        make_step(other, optimizer, lambda number: jnp.float32(1), TRAIN, mesh)
    whole = dataclasses.replace(Config(), model=MODEL.config, train=config)
    assert callable(make_step(Decoder.of(whole), optimizer, lambda number: jnp.float32(1), config, mesh))


@functools.cache
def with_objective(micro):
    """Return the model, the batch and the event of one step with label smoothing and z-loss."""
    config = dataclasses.replace(TRAIN, micro_batch_size=micro, label_smoothing=0.2, z_loss=0.01)
    model, mesh = dataclasses.replace(MODEL, objective=Objective.of(config)), make_mesh(MeshConfig())
    optimizer, seen = make_optimizer(model.weights(), config), []
    batch = {name: rows for name, rows in batch_of(0).items() if name != "spoil"}
    Loop(
        step=make_step(model, optimizer, lambda number: jnp.float32(1), config, mesh),
        batch=lambda number: place(batch, mesh),
        steps=1,
        learning_rate=0.0,
        flops_per_token=0.0,
        emit=seen.append,
        intervals=Intervals(),
    ).run(initial_state(model, optimizer, TRAIN.seed, mesh), Progress())
    return model, batch, seen[0]


@pytest.mark.parametrize("micro", [8, 2])
def test_the_objective_is_minimised_and_the_plain_loss_is_logged(micro):
    model, batch, event = with_objective(micro)
    weights, keys_B = first_state()["weights"], row_keys(TRAIN.seed, 0, B)
    objective = jax.jit(jax.value_and_grad(lambda w: model.loss(w, batch, keys_B)[0] / 42))
    value, gradient = objective(weights)
    plain = jax.jit(MODEL.loss)(weights, batch, keys_B)[0] / 42
    np.testing.assert_allclose([event.loss, event.objective], [plain, value], rtol=1e-5)
    assert event.objective > event.loss + 0.01
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(event.gradient_norm, norm, rtol=1e-5)
    # Held-out text is scored by cross-entropy whatever was minimised.
    assert compiled_loss(model)(weights, batch)[0] == compiled_loss(MODEL)(weights, batch)[0]


def test_keys_are_of_seed_step_and_row():
    data = {
        (seed, step, row): tuple(np.asarray(key))
        for seed in (0, 1, 2**32 - 1)
        for step in (0, 1, 40_000)
        for row, key in enumerate(jax.random.key_data(row_keys(seed, step, 4)))
    }
    assert len(set(data.values())) == len(data)
    assert np.array_equal(jax.random.key_data(row_keys(1, 2, 8))[:4], jax.random.key_data(row_keys(1, 2, 4)))


def test_same_start_on_any_mesh():
    assert bits(first_state()) == bits(first_state(data=4))


# Updates that are not finite


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("micro", [8, 4])
def test_a_bad_update_changes_nothing(value, micro):
    step, start, put = compiled(micro_batch_size=micro)
    state, _ = step(start(), put(batch_of(0, 1)))
    before = bits([state["weights"], state["optimizer"]])
    for in_a_row in (1, 2):
        state, metrics = step(state, put(batch_of(in_a_row, value)))
        assert metrics["skipped"]
        assert metrics["skipped_in_a_row"] == state["skipped_in_a_row"] == in_a_row
        assert state["step"] == 1 + in_a_row
        assert bits([state["weights"], state["optimizer"]]) == before
    state, metrics = step(state, put(batch_of(3, 1)))
    assert not metrics["skipped"]
    assert state["skipped_in_a_row"] == 0
    assert bits([state["weights"], state["optimizer"]]) != before
    # The optimizer counts applied updates, not steps.
    assert state["step"] == 4
    assert state["optimizer"]["adamw"][0].count == 2


def test_a_bad_gradient_of_a_finite_loss_is_skipped():
    step, start, put = compiled()
    state = start()
    before = bits(state["weights"])
    state, metrics = step(state, put(batch_of(0, 1e30)))  # the squares of its gradient are too large for float32
    assert np.isfinite(metrics["loss_sum"])
    assert metrics["skipped"]
    assert bits(state["weights"]) == before


def test_one_infinite_weight_is_seen():
    step, start, put = compiled()
    state = start()
    state["weights"]["layers"][0]["mlp"]["up"] = state["weights"]["layers"][0]["mlp"]["up"].at[3, 3].set(jnp.inf)
    before = bits(state["weights"])
    state, metrics = step(state, put(batch_of(0)))
    assert metrics["skipped"]
    assert bits(state["weights"]) == before


# The loop


def loop_of(steps, *, spoil=None, emit, **options):
    step, _, put = compiled()
    values = spoil or {}
    return Loop(
        step=step,
        batch=lambda number: put(batch_of(number, values.get(number, 1))),
        steps=steps,
        learning_rate=TRAIN.learning_rate,
        flops_per_token=1.0,
        emit=emit,
        **{"intervals": Intervals(), **options},
    )


def test_too_many_skipped_in_a_row_end_the_run():
    seen, diverged_at = [], []
    bad = {1: np.nan, 3: np.inf, 4: np.nan, 5: np.inf}  # one alone, then three in a row
    loop = loop_of(
        20,
        spoil=bad,
        emit=seen.append,
        max_skipped=3,
        on_divergence=lambda step, weights: diverged_at.append(step),
    )
    with pytest.raises(Diverged, match="3 updates in a row were not finite, the last at step 6") as error:
        loop.run(compiled()[1](), Progress())
    assert error.value.status == 1
    assert diverged_at == [5]  # the batch that did it is that of step number 5, which ends as step 6
    skipped = [(event.step, event.in_a_row) for event in seen if isinstance(event, events.Skipped)]
    assert skipped == [(2, 1), (4, 1), (5, 2), (6, 3)]


def test_a_run_without_any_update_does_not_end_well():
    loop = loop_of(2, spoil={0: np.nan, 1: np.inf}, emit=lambda event: None, max_skipped=10)
    with pytest.raises(Diverged, match="2 updates in a row were not finite, the last at step 2"):
        loop.run(compiled()[1](), Progress())


def test_an_objective_that_is_not_finite_where_the_loss_is_has_a_hint_of_its_own():
    step, start, _ = compiled()

    def plain(state, batch):
        state, metrics = step(state, batch)
        return state, {**metrics, "cross_entropy": jnp.float32(1)}

    loop = loop_of(1, spoil={0: np.inf}, emit=lambda event: None)
    loop.step = plain
    with pytest.raises(Diverged) as diverged:
        loop.run(start(), Progress())
    assert "z_loss" in diverged.value.hint


def test_a_closer_look_is_at_the_weights_that_the_step_met_or_says_that_it_is_not():
    seen, looked = [], []

    def look(step, weights):
        looked.append(bits(weights))
        return [step], "found"

    loop = loop_of(8, spoil={2: np.nan, 3: np.inf}, emit=seen.append, look_closer=look, max_skipped=3)
    loop.run(compiled()[1](), Progress())
    state, _ = train(2)
    assert looked[0] == bits(state["weights"])  # the next step was skipped too
    assert looked[1] != looked[0]
    told = [(event.documents, event.largest) for event in seen if isinstance(event, events.Skipped)]
    assert told == [([2], "found"), ([3], "found; looked at with the weights of one update later")]


def test_after_too_many_skipped_the_weights_stay_as_they_were():
    """The loop hears of a step while the next one runs; that one must not change the weights that are kept."""
    kept = []
    loop = loop_of(
        20,
        spoil={4: np.nan, 5: np.nan},
        emit=lambda event: None,
        max_skipped=2,
        on_divergence=lambda step, weights: kept.append(bits(weights)),
    )
    step, start, _ = compiled(max_skipped=2)
    with pytest.raises(Diverged):
        dataclasses.replace(loop, step=step).run(start(), Progress())
    state, _ = train(4, max_skipped=2)
    assert kept == [bits(state["weights"])]


def test_fewer_skipped_than_that_are_named_and_passed():
    seen = []
    loop = loop_of(8, spoil={2: np.nan, 3: np.inf}, emit=seen.append, max_skipped=3)
    state, progress, _ = loop.run(compiled()[1](), Progress())
    assert progress.step == state["step"] == 8
    done = [event for event in seen if isinstance(event, events.StepDone)]
    assert [event.step for event in done] == list(range(1, 9))
    assert [event.step for event in done if event.skipped] == [3, 4]
    assert state["optimizer"]["adamw"][0].count == 6
    assert isinstance(seen[-1], events.Finished)


def test_logged_losses_are_those_of_the_step_sums():
    seen = []
    loop_of(5, emit=seen.append).run(compiled()[1](), Progress())
    logged = [event.loss for event in seen if isinstance(event, events.StepDone)]
    expected = [metrics["loss_sum"] / metrics["targets"] for metrics in whole_batch()[1]]
    np.testing.assert_allclose(logged, expected, rtol=1e-5)
    assert [e.tokens for e in seen if isinstance(e, events.StepDone)] == [42 * n for n in range(1, 6)]


def test_evaluation_and_sampling_change_no_weights():
    """User problem: the loss curve moves when evaluation is turned on, because it draws from the training key."""
    quiet, _, _ = loop_of(6, emit=lambda event: None).run(compiled()[1](), Progress())

    seen, validation = [], [batch_of(100), batch_of(101)]
    loss = compiled_loss(MODEL)

    def sample(weights):
        jax.random.normal(row_keys(TRAIN.seed, 0, 1)[0], (3,))
        logits = MODEL.unembed(weights, MODEL.hidden(weights, jnp.zeros((1, 3), jnp.int32)))
        return [("", str(int(jnp.argmax(logits[0, -1]))))]

    busy, _, result = loop_of(
        6,
        emit=seen.append,
        intervals=Intervals(evaluate=1, sample=2),
        evaluate=lambda weights: held_out_loss(loss, weights, validation),
        sample=sample,
    ).run(compiled()[1](), Progress())
    assert bits(busy) == bits(quiet)
    assert len([event for event in seen if isinstance(event, events.Evaluated)]) == 6
    assert len([event for event in seen if isinstance(event, events.Sampled)]) == 3
    # Validation is without dropout and always the same batches: the last equals one made afterwards.
    assert result == held_out_loss(loss, busy["weights"], validation)


def test_best_is_the_lowest_validation_and_never_nan():
    losses = iter([np.nan, 5.0, 4.0, 4.5, np.nan, 4.0])
    written, seen = [], []
    loop = loop_of(
        6,
        emit=seen.append,
        intervals=Intervals(evaluate=1),
        evaluate=lambda weights: HeldOut(next(losses), 1, 0),
        write_weights=lambda weights, progress: written.append(progress.step),
    )
    _, progress, _ = loop.run(compiled()[1](), Progress())
    assert (progress.best_step, progress.best_loss) == (3, 4.0)
    assert written == [2, 3]
    is_best = [event.is_best for event in seen if isinstance(event, events.Evaluated)]
    assert is_best == [False, True, True, False, False, False]


def test_stop_reason_ends_after_the_step():
    seen, asked = [], []
    loop = loop_of(10, emit=seen.append, should_stop=lambda: "signal" if asked.append(0) or len(asked) == 4 else None)
    state, progress, _ = loop.run(compiled()[1](), Progress())
    assert progress.step == state["step"] == 4
    assert seen[-1].reason == "signal"


def test_going_on_from_a_state_is_the_same_run():
    whole, _, _ = loop_of(6, emit=lambda event: None).run(compiled()[1](), Progress())
    half, progress, _ = loop_of(3, emit=lambda event: None).run(compiled()[1](), Progress())
    resumed, progress, _ = loop_of(6, emit=lambda event: None).run(half, progress)
    assert bits(resumed) == bits(whole)
    assert progress.tokens == 6 * 42


def test_a_failing_batch_ends_the_run_with_its_error():
    def batch(number):
        raise OSError("the disk is gone")

    loop = dataclasses.replace(loop_of(3, emit=lambda event: None), batch=batch)
    with pytest.raises(OSError, match="disk is gone"):
        loop.run(compiled()[1](), Progress())


def test_weights_really_train():
    """User problem: a step that updates copies trains nothing and says nothing."""
    state, seen = whole_batch()
    start = flatten(compiled()[1]()["weights"])
    for path, weight in flatten(state["weights"]).items():
        assert not np.array_equal(weight, start[path]), path
    assert all(np.isfinite(metrics["loss_sum"]) for metrics in seen)


def test_the_loop_moves_nothing_unasked():
    """No array goes to or from the device but those that are placed there or read, and no read waits for the last."""
    step, start, put = compiled()
    state, order = start(), []
    step(start(), put(batch_of(0)))  # compiled, with its constants where they belong
    loop = loop_of(5, emit=lambda event: order.append("read") if isinstance(event, events.StepDone) else None)

    def given(state, batch):
        order.append("given")
        return step(state, batch)

    loop.step = given
    with jax.transfer_guard("disallow"):
        _, progress, _ = loop.run(state, Progress())
    assert progress.step == 5
    # The device has its next step before the numbers of the one before are waited for; the last is read by itself.
    assert order == ["given", "given", "read", "given", "read", "given", "read", "read", "given", "read"]
