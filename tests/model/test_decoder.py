"""The decoder, in the shapes of its presets scaled down: causality, documents, tying, dtypes, initial loss, cache."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.config import ComputeConfig, TrainConfig, override, preset, preset_names, resolve
from rung.errors import RungError
from rung.model import Decoder, losses
from rung.model.decoder import predicted_logit_variance
from rung.model.weights import flatten, initialize, map_table
from rung.train.optimizer import make_optimizer
from rung.train.step import row_keys

FAMILIES = ["nanolm-aozora", "gpt2-small", "llama-small"]
LENGTH = 140  # attention in three blocks, the last of them short
SMALL = {
    "vocab_size": 61,
    "context_length": LENGTH,
    "n_layers": 2,
    "n_heads": 4,
    "d_model": 32,
    "d_ff": 64,
    "init": "fan_in",  # weights so large that every part matters
}


def scaled(name, **changes):
    if name == "windowed":  # not a preset: what else a query may be kept from
        name, changes = (
            "llama-small",
            {"attention_window": 20, "attention_soft_cap": 2.0, "logit_soft_cap": 3.0} | changes,
        )
    changes = SMALL | ({"n_kv_heads": 2, "qk_norm": True} if name == "llama-small" else {}) | changes
    config = override(preset(name), {f"model.{field}": value for field, value in changes.items()})
    return Decoder(resolve(config).model)


def drawn(model):
    """Return weights of which every one matters: biases are not 0 nor norms 1, as they are at initialisation."""
    random = np.random.default_rng(0)

    def draw(weight):
        return jnp.float32(random.normal(weight.constant, weight.std or 0.2, weight.shape))

    return map_table(draw, model.weights())


@functools.cache
def model_and_logits(name):
    model = scaled(name)
    weights = drawn(model)

    @jax.jit
    def logits(tokens_BT, segments_BT):
        return model.unembed(weights, model.hidden(weights, tokens_BT, segments_BT))

    return model, weights, lambda *arrays: np.asarray(logits(*map(jnp.int32, arrays)))


def tokens(seed=0, rows=1):
    return np.random.default_rng(seed).integers(61, size=(rows, LENGTH))


@pytest.mark.parametrize("name", FAMILIES)
def test_later_tokens_never_change_earlier_logits(name):
    _, _, logits = model_and_logits(name)
    before = tokens()
    one_document = np.zeros_like(before)
    expected = logits(before, one_document)

    @settings(max_examples=15)
    @given(position=st.integers(0, LENGTH - 1), new=st.integers(0, 60))
    def check(position, new):
        after = before.copy()
        after[0, position] = new if new != before[0, position] else (new + 1) % 61
        found = logits(after, one_document)
        assert np.array_equal(found[0, :position], expected[0, :position])
        # and the others do see it, each of them
        assert np.all(np.any(found[0, position:] != expected[0, position:], -1))

    check()


@pytest.mark.parametrize("name", FAMILIES)
def test_other_documents_never_matter(name):
    _, _, logits = model_and_logits(name)
    before = tokens()
    segments = np.zeros_like(before)
    segments[0, 50:] = 1
    segments[0, 97:] = 2
    expected = logits(before, segments)
    for start, stop in ((0, 50), (50, 97), (97, LENGTH)):
        after = tokens(seed=1)
        after[0, start:stop] = before[0, start:stop]
        found = logits(after, segments)
        assert np.array_equal(found[0, start:stop], expected[0, start:stop])
    assert np.any(logits(before, np.zeros_like(before))[0, 50:] != expected[0, 50:])


def test_a_document_is_as_if_alone_under_rope():
    # RoPE knows distances only, so a document reads the same wherever it stands.
    _, _, logits = model_and_logits("llama-small")
    both = tokens()
    segments = np.zeros_like(both)
    segments[0, 45:] = 1
    alone = np.roll(both, -45, axis=1)
    found, expected = logits(both, segments)[0, 45:], logits(alone, np.zeros_like(both))[0, : LENGTH - 45]
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_layer_sees_as_far_as_its_window():
    _, _, logits = model_and_logits("windowed")
    before = tokens()
    after, one_document = before.copy(), np.zeros_like(before)
    after[0, 30] = (before[0, 30] + 1) % 61
    changed = np.any(logits(before, one_document)[0] != logits(after, one_document)[0], -1)
    reach = 2 * (20 - 1)  # of two layers
    assert np.all(changed[30 : 30 + reach + 1])
    assert not np.any(changed[:30])
    assert not np.any(changed[30 + reach + 1 :])


def test_logits_stay_within_their_cap():
    model, weights, logits = model_and_logits("windowed")
    free = dataclasses.replace(model.config, logit_soft_cap=0.0)
    found = logits(tokens(), np.zeros((1, LENGTH)))
    uncapped = Decoder(free).unembed(weights, jax.jit(model.hidden)(weights, jnp.int32(tokens())))
    assert np.max(np.abs(uncapped)) > 3
    np.testing.assert_allclose(found, 3 * np.tanh(uncapped / 3), atol=1e-5)


@pytest.mark.parametrize("name", [*FAMILIES, "windowed"])
def test_cached_decoding_is_the_forward_pass(name):
    model, weights, logits = model_and_logits(name)
    text = tokens(seed=2, rows=2)
    expected = logits(text, np.zeros_like(text))
    starts = np.array([70, 130])  # rows of unlike length, padded with other tokens
    prompt = np.where(np.arange(LENGTH) < starts[:, None], text, 0)
    hidden_BTD, cache = jax.jit(model.prefill)(weights, jnp.int32(prompt), model.empty_cache(2))
    found = np.asarray(model.unembed(weights, hidden_BTD))
    for row, start in enumerate(starts):
        np.testing.assert_allclose(found[row, :start], expected[row, :start], atol=1e-5)
    decode = jax.jit(model.decode)
    for step in range(6):
        positions = starts + step
        hidden_BD, cache = decode(weights, jnp.int32(text[[0, 1], positions]), jnp.int32(positions), cache)
        found = model.unembed(weights, hidden_BD)
        np.testing.assert_allclose(found, expected[[0, 1], positions], atol=1e-5)


def batch_of(length):
    return {"tokens": jnp.int32(tokens(rows=2)[:, :length]), "targets": jnp.int32(tokens(1, rows=2)[:, :length])}


@functools.cache
def loss_and_gradient(model):
    """Return what a short batch gives, with the weights of ``drawn``."""
    weights, batch = drawn(model), batch_of(16)
    return jax.jit(jax.value_and_grad(lambda w: model.loss(w, batch, None)[0] / 32))(weights)


@pytest.mark.parametrize("name", FAMILIES)
def test_tied_weights_are_one_array(name):
    model = scaled(name, n_layers=1)
    weights, (_, gradients) = drawn(model), loss_and_gradient(model)
    paths = {weight.path for weight in model.weights()}
    assert ("head.weight" in paths) != model.config.tied

    optimizer = make_optimizer(model.weights(), TrainConfig())
    new, _ = jax.jit(optimizer.update)(gradients, optimizer.init(weights), weights, 1.0)
    assert flatten(weights).keys() == flatten(new).keys() == paths
    head = new["embedding"]["tokens"] if model.config.tied else new["head"]["weight"]
    x_BTD = jnp.float32(np.random.default_rng(0).normal(size=(1, 2, 32)))
    bias = new["head"]["bias"] if model.config.head_bias else 0
    np.testing.assert_allclose(model.unembed(new, x_BTD), x_BTD @ head.T + bias, rtol=1e-4, atol=1e-5)
    # Only as an output layer does the embedding of a token that never comes in get a gradient.
    absent = np.setdiff1d(np.arange(61), batch_of(16)["tokens"])
    assert absent.size
    assert np.all(np.any(gradients["embedding"]["tokens"][absent] != 0, -1)) == model.config.tied


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_gets_a_gradient(name):
    for path, gradient in flatten(loss_and_gradient(scaled(name, n_layers=1))[1]).items():
        if not path.endswith("key_bias"):  # adds the same to all scores of a query, so softmax takes it out
            assert np.linalg.norm(gradient) > 1e-4, path


def test_bfloat16_computes_near_float32():
    wide, narrow = (scaled("llama-small", n_layers=1, compute_dtype=dtype) for dtype in ("float32", "bfloat16"))
    states = jax.eval_shape(lambda: narrow.hidden(drawn(narrow), batch_of(16)["tokens"]))
    assert states.dtype == jnp.bfloat16
    (loss, gradient), (exact, exact_gradient) = loss_and_gradient(narrow), loss_and_gradient(wide)
    assert loss.dtype == jnp.float32
    assert loss != exact  # it is really computed in less
    np.testing.assert_allclose(loss, exact, rtol=0.01)
    exact_gradient = flatten(exact_gradient)
    for path, leaf in flatten(gradient).items():
        assert leaf.dtype == jnp.float32, path
        if not path.endswith("key_bias"):
            error = np.linalg.norm(leaf - exact_gradient[path]) / np.linalg.norm(exact_gradient[path])
            assert error < 0.1, path


@pytest.mark.parametrize("name", preset_names())
def test_initial_loss_is_what_the_table_predicts(name):
    # The parts and the initialisation of each preset, all at the width of GPT-2 small; fewer layers, words and tokens,
    # on which the prediction does not depend.
    V = 2000
    changes = {"vocab_size": V, "n_layers": 1, "context_length": 32, "n_positions": 0}
    changes |= {"d_model": 768, "n_heads": 12, "d_head": 0, "n_kv_heads": 0, "d_ff": 768}
    config = override(preset(name), {f"model.{field}": value for field, value in changes.items()})
    model = Decoder(resolve(config).model)
    random = np.random.default_rng(0)
    batch = {key: random.integers(V, size=(32, 32)).astype(np.int32) for key in ("tokens", "targets")}
    loss_sum, targets, _ = jax.jit(model.loss)(initialize(model.weights(), 0), batch, None)
    variance = predicted_logit_variance(model)
    predicted = math.log(V) + variance / 2
    # Three deviations of a mean over the batch; it is well under the 2% that is promised.
    tolerance = 3 * math.sqrt(variance / 1024) + 0.01
    assert tolerance < 0.02 * predicted
    assert abs(loss_sum / targets - predicted) < tolerance


# Dropout in the model


def test_dropout_is_by_row_and_off_in_evaluation():
    model = scaled("gpt2-small", dropout=0.3, n_layers=1, context_length=70)
    weights = drawn(model)
    hidden = jax.jit(model.hidden)
    text = jnp.int32(tokens(rows=4)[:, :70])
    whole = hidden(weights, text, None, row_keys(0, 3, 4))
    half = hidden(weights, text[2:], None, row_keys(0, 3, 4)[2:])
    np.testing.assert_allclose(whole[2:], half, atol=1e-5)
    assert not np.allclose(whole, hidden(weights, text, None, row_keys(0, 4, 4)), atol=1e-2)
    none = Decoder(dataclasses.replace(model.config, dropout=0.0))
    assert np.array_equal(hidden(weights, text, None, None), jax.jit(none.hidden)(weights, text, None, None))


def test_each_dropout_site_acts():
    sites = ["embedding", "attention", "mlp", "residual"]
    models = [scaled("gpt2-small", dropout=0.3, dropout_sites=[site], n_layers=1, context_length=8) for site in sites]
    weights, text = drawn(models[0]), jnp.int32(tokens()[:, :8])

    @jax.jit
    def states():
        keys_B = row_keys(0, 0, 1)
        return models[0].hidden(weights, text), [model.hidden(weights, text, None, keys_B) for model in models]

    without, with_dropout = states()
    for site, found in zip(sites, with_dropout, strict=True):
        assert not np.allclose(found, without, atol=1e-2), site


def test_no_two_places_share_a_mask(monkeypatch):
    from rung.model import decoder as module

    uses = []
    monkeypatch.setattr(module, "dropout", lambda x, rate, keys_B, use: uses.append(use) or x)
    monkeypatch.setattr(module, "keep_mask", lambda shape, rate, keys_B, use: uses.append(use) or jnp.ones(shape, bool))
    model = scaled("gpt2-small", dropout=0.3, dropout_sites=("embedding", "attention", "mlp", "residual"), n_layers=3)
    jax.eval_shape(lambda: model.hidden(drawn(model), jnp.int32(tokens()), None, row_keys(0, 0, 1)))
    n_blocks = 3  # of 140 positions
    assert len(uses) == len(set(uses)) == 1 + 3 * (3 + n_blocks)


def test_a_kernel_that_is_not_for_this_device_is_refused():
    model = Decoder(scaled("gpt2-small", context_length=8).config, ComputeConfig(attention="cudnn"))
    weights, text = drawn(model), jnp.zeros((1, 8), jnp.int32)
    for use in (lambda: model.attention_backend(segments=False), lambda: model.hidden(weights, text)):
        with pytest.raises(RungError, match="NVIDIA"):
            use()
    # Text is generated all the same: with what there is here.
    states, _ = jax.eval_shape(lambda: model.prefill(weights, text, model.empty_cache(1)))
    assert states.shape == (1, 8, 32)


def test_the_kernel_for_one_device_is_taken_where_the_batch_is_on_one(monkeypatch):
    tpu = types.SimpleNamespace(platform="tpu", client=types.SimpleNamespace(platform_version=""))
    monkeypatch.setattr(jax, "devices", lambda: [tpu] * 4)
    config = scaled("gpt2-small", context_length=8, dropout=0.0).config
    assert Decoder(config).attention_backend(segments=True).backend == "splash"
    split = Decoder(config, devices=4).attention_backend(segments=True)
    assert str(split) == "blocked (not splash: it runs on one device, and the batch is split over 4)"


def test_each_device_has_its_part_of_a_chunk_of_logits(monkeypatch):
    model = scaled("gpt2-small", context_length=16)
    rows = {name: jax.ShapeDtypeStruct((4, 16), jnp.int32) for name in ("tokens", "targets")}
    weights = jax.eval_shape(lambda: initialize(model.weights(), 0))
    monkeypatch.setattr(losses, "chunk_bytes", lambda device: 4 * model.config.vocab_size * 4 * 4)

    def widths(devices):
        split = dataclasses.replace(model, devices=devices)
        text = str(jax.make_jaxpr(lambda w, b: split.loss(w, b, None)[0])(weights, rows))
        return {int(n) for n in re.findall(rf"f32\[4,(\d+),{model.config.vocab_size}\] = dot_general", text)}

    assert (widths(1), widths(2), widths(4)) == ({4}, {8}, {16})


def test_attention_says_what_it_is_computed_with():
    model = scaled("gpt2-small", dropout=0.1)
    assert str(model.attention_backend(segments=True)) == "blocked (the one for a CPU)"


def test_more_tokens_than_positions_is_a_mistake():
    model = scaled("gpt2-small", context_length=8)
    with pytest.raises(AssertionError, match="positions"):
        jax.eval_shape(lambda: model.hidden(drawn(model), jnp.zeros((1, 9), jnp.int32)))


def test_flops_of_gpt2_small():
    # Per token: 6 x (12 layers x 12 x 768^2 + 50257 x 768) for the products, and 12 x 12 x 768 x 1024 for attention.
    model = Decoder(resolve(override(preset("gpt2-small"), {"model.vocab_size": 50257})).model)
    assert model.flops_per_token() == 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024
    windowed = Decoder(dataclasses.replace(model.config, attention_window=256))
    assert model.flops_per_token() - windowed.flops_per_token() == 12 * 12 * 768 * (1024 - 256)
