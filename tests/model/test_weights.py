"""The weight table: published parameter counts, initial values, and the tree of paths."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.config import override, preset, preset_names, resolve
from rung.model import Decoder, Weight
from rung.model.weights import abstract, flatten, initialize, map_table, parameter_count, unflatten


def table_of(name, vocab_size=0, **changes):
    config = override(preset(name), {f"model.{field}": value for field, value in changes.items()})
    model = resolve(config).model
    return Decoder(dataclasses.replace(model, vocab_size=vocab_size or config.tokenizer.vocab_size)).weights()


@pytest.mark.parametrize(
    ("name", "changes", "published"),
    [
        ("nanolm-aozora", {}, 89_456_768),
        ("nanolm-aozora", {"d_head": 8}, 78_430_592),  # the published code's heads are 8 wide
        ("gpt2-small-untied", {}, 163_009_536),
        ("gpt2-small-untied", {"attention_output_bias": False}, 163_000_320),
        ("gpt2-small", {}, 124_439_808),
        # 65 characters: 65 x 128 + 64 x 128 + 4 x (12 x 128^2 + 2 x 128) + 128
        ("shakespeare-char-classic", {"vocab_size": 65}, 804_096),
    ],
)
def test_published_parameter_counts(name, changes, published):
    assert parameter_count(table_of(name, **changes)) == published


@pytest.mark.parametrize("name", preset_names())
def test_every_path_stands_once_and_is_in_the_tree(name):
    table = table_of(name, vocab_size=100)
    paths = [weight.path for weight in table]
    assert len(set(paths)) == len(paths)
    assert list(flatten(map_table(lambda weight: weight.path, table)).values()) == list(
        flatten(map_table(lambda weight: weight.path, table))
    )
    assert {path: leaf.shape for path, leaf in flatten(abstract(table)).items()} == {w.path: w.shape for w in table}


@pytest.mark.parametrize("name", preset_names())
def test_products_sum_over_their_last_dimensions(name):
    # The head's output projection sums over heads and their width, every other product over its last dimension.
    for weight in table_of(name, vocab_size=100):
        if weight.path.endswith("attention.output"):
            assert weight.fan_in == weight.shape[1] * weight.shape[2]
        elif weight.n_inputs:
            assert weight.fan_in == weight.shape[-1]


def small(n_layers=2, vocab_size=50, seed=0, **changes):
    table = table_of(
        "gpt2-small", n_layers=n_layers, vocab_size=vocab_size, d_model=64, n_heads=4, context_length=50, **changes
    )
    return flatten(initialize(table, seed))


def test_initial_values_do_not_depend_on_layers_order_or_jit():
    few, many = small(n_layers=1, init="fan_in"), small(n_layers=3, init="fan_in")
    assert few.keys() < many.keys()
    assert all(np.array_equal(few[path], many[path]) for path in few)

    table = table_of("gpt2-small", n_layers=1, vocab_size=50, d_model=64, n_heads=4, context_length=50)
    forward, backward = flatten(initialize(table, 3)), flatten(initialize(table[::-1], 3))
    assert all(np.array_equal(forward[path], backward[path]) for path in forward)
    compiled = flatten(jax.jit(lambda: initialize(table[:2], 3))())
    for path in compiled:
        np.testing.assert_allclose(forward[path], compiled[path], rtol=1e-6)


def test_equal_weights_of_two_layers_or_two_seeds_differ():
    one, other = small(seed=0), small(seed=1)
    for path in ("embedding.tokens", "layers.0.attention.query"):
        assert abs(np.corrcoef(one[path].ravel(), other[path].ravel())[0, 1]) < 0.08
    correlation = np.corrcoef(one["layers.0.mlp.up"].ravel(), one["layers.1.mlp.up"].ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(one["layers.0.mlp.up"].size)


@pytest.mark.parametrize("seed", [2**31, 2**32 - 1])
def test_large_seeds_are_seeds_of_their_own(seed):
    assert not np.array_equal(small(seed=seed)["embedding.tokens"], small(seed=seed - 2**31)["embedding.tokens"])


def test_gpt2_initialization():
    # Radford et al. 2019, section 2.3: deviation 0.02; residual projections over the root of their number.
    weights = small(n_layers=8)
    for path, weight in weights.items():
        if path.endswith(("attention.output", "mlp.down")):
            np.testing.assert_allclose(np.std(weight), 0.02 / 4, rtol=0.05, err_msg=path)
        elif path.endswith("bias"):
            assert not np.any(weight), path
        elif path.endswith("scale"):
            assert np.all(np.asarray(weight) == 1), path
        else:
            np.testing.assert_allclose(np.std(weight), 0.02, rtol=0.08, err_msg=path)
            assert abs(np.mean(weight)) < 5 * 0.02 / np.sqrt(weight.size)


def test_fan_in_initialization_keeps_the_variance():
    for path, weight in small(init="fan_in", d_ff=256).items():
        inputs = 256 if path.endswith("mlp.down") else 64
        if weight.ndim > 1 and not path.endswith("bias"):
            np.testing.assert_allclose(np.std(weight), inputs**-0.5, rtol=0.08, err_msg=path)


def test_initial_values_are_float32():
    assert {weight.dtype for weight in small().values()} == {np.dtype(np.float32)}


names = st.text("abc_", min_size=1, max_size=4) | st.integers(0, 12).map(str)
trees = st.recursive(st.integers(), lambda below: st.dictionaries(names, below, min_size=1, max_size=4), max_leaves=12)


@given(st.dictionaries(names, trees, min_size=1, max_size=4))
def test_paths_of_any_tree_come_back(tree):
    flat = flatten(tree)
    assert flatten(unflatten(flat)) == flat


def test_numbered_levels_are_lists():
    tree = {"layers": [{"w": i} for i in range(11)], "gaps": {"0": 1, "2": 2}}
    assert unflatten(flatten(tree)) == tree
    shuffled = dict(sorted(flatten(tree).items(), key=lambda item: str(item)[::-1]))
    assert unflatten(shuffled) == tree


def test_a_dimension_without_a_name_is_a_mistake():
    with pytest.raises(AssertionError, match="logical name"):
        Weight("a.b", (2, 3), ("embed",))
