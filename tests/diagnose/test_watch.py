"""The size of every value inside a function, against the same values computed by hand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rung.diagnose.watch import largest_magnitude, watch


def seen(function, *arguments, names=None):
    """Return ({name: sizes}, result) of a function run under ``jit``; of a name seen twice, a list of its sizes."""
    leaves = jax.tree.leaves(list(arguments))
    names = names or [f"x{n}" for n in range(len(leaves))]
    result, sightings = jax.jit(lambda *a: watch(function, a, names))(*arguments)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, equal_nan=True), result, function(*arguments)))
    assert [s.place for s in sightings] == sorted(s.place for s in sightings)
    return {s.name: np.asarray(s.largest) for s in sightings}


@given(
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=5), elements=st.floats(width=32)),
    st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
)
def test_the_largest_magnitude_is_numpys(x, dtype):
    with np.errstate(all="ignore"):
        x = x.astype(dtype)
        expected = np.max(np.abs(x.astype(np.float32)))
    found = float(largest_magnitude(jnp.asarray(x)))
    if math.isnan(expected):
        assert math.isnan(found)
    elif expected > 2e-38:  # XLA takes smaller ones for zero
        assert found == expected
    else:
        assert found < 2e-38


def test_a_perceptron_is_seen_as_numpy_computes_it():
    rng = np.random.default_rng(0)
    x, first, second = (rng.normal(size=size).astype(np.float32) for size in ((5, 3), (3, 4), (4, 2)))

    def perceptron(first, second):
        with jax.named_scope("hidden"):
            h = jnp.exp(x @ first)
        with jax.named_scope("out"):
            return jnp.sum((h @ second) / 3)

    product = x @ first
    output = np.exp(product) @ second
    found = seen(perceptron, first, second, names=["first", "second"])
    expected = {
        "first": first,
        "second": second,
        "hidden (dot_general)": product,
        "hidden (exp)": np.exp(product),
        "out (dot_general)": output,
        "out (div)": output / 3,
        "out (reduce_sum)": (output / 3).sum(),
    }
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name] == pytest.approx(np.abs(array).max(), rel=1e-5), name


def test_a_gradient_is_seen_after_the_loss_and_says_so():
    def loss(w):
        with jax.named_scope("layer"):
            return jnp.sum(jnp.exp(w) * 3)

    found = seen(jax.value_and_grad(loss), jnp.array([1.0, 2.0]), names=["w"])
    assert list(found)[:3] == ["w", "layer (exp)", "layer (mul)"]
    assert found["gradient of layer (mul)"] == pytest.approx(3 * math.exp(2))


def test_without_scopes_the_argument_used_last_says_where():
    def function(a, b):
        return jnp.log(jnp.exp(3 * a.T) @ b)

    found = seen(function, jnp.ones((2, 2)), jnp.ones((2, 2)), names=["a", "b"])
    assert list(found) == ["a", "b", "a (mul)", "after a (exp)", "b (dot_general)", "after b (log)"]


def test_calls_of_every_kind_are_looked_into():
    @jax.custom_vjp
    def ours(x):
        return jnp.exp(x) + 1

    ours.defvjp(lambda x: (ours(x), x), lambda x, dy: (dy * jnp.exp(x) * 7,))
    of_jvp = jax.custom_jvp(lambda x: x * 10)
    of_jvp.defjvps(lambda t, y, x: 11 * t)
    inner = jax.jit(lambda x: x * 100)
    again = jax.checkpoint(lambda x: jnp.sqrt(x))

    def function(x):
        with jax.named_scope("top"):
            return again(inner(of_jvp(ours(x))))

    for whole in (function, jax.grad(lambda x: jnp.sum(function(x)))):
        found = seen(whole, jnp.array([1.0, 2.0]))
        assert found["top (exp)"] == pytest.approx(math.exp(2))
        assert found["top (add)"] == pytest.approx(math.exp(2) + 1)
        assert {name for name in found if "gradient" not in name} >= {
            "top (exp)",
            "top (add)",
            "top (mul)",
            "top (sqrt)",
        }


def test_each_pass_of_a_loop_is_seen_in_its_order():
    rows = jnp.array([1.0, 2.0, 90.0])

    def function(start, rows):
        def step(total, row):
            with jax.named_scope("sum"):
                total = total * 2 + row
            return total, total * row

        return jax.lax.scan(step, start, rows), jax.lax.scan(step, start, rows, reverse=True)

    _, sightings = jax.jit(lambda *a: watch(function, a, ["start", "rows"]))(jnp.array(1.0), rows)
    forward, backward = ([s for s in sightings if s.backwards == (way,)] for way in (False, True))
    totals = [np.asarray(s.largest).tolist() for s in (*forward, *backward) if s.name == "sum (add)"]
    assert totals == [[3.0, 8.0, 106.0], [373.0, 186.0, 92.0]]
    assert all(f.place[0] < b.place[0] for f in forward for b in backward)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_of_a_condition_the_branch_that_is_taken_is_seen(number):
    branches = [
        jax.named_scope("fine")(lambda x: x * 5 + 1),
        jax.named_scope("bad")(lambda x: x / 0),
        jax.named_scope("loop")(lambda x: jax.lax.scan(lambda x, _: (x + 1, None), x, length=2)[0]),
    ]

    def function(x, number):
        return jnp.exp(0.1 * jax.lax.switch(number, branches, x))

    found = seen(function, jnp.array([2.0, 3.0]), number, names=["x", None])
    assert list(found) == ["x", "fine (mul)", "fine (add)", "bad (div)", "loop (add)", "after x (mul)", "after x (exp)"]
    sizes = [size.tolist() for size in found.values()][1:5]
    expected = [15.0, 16.0], [math.inf], [[4.0, 5.0]]
    nothing = [0.0, 0.0], [0.0], [[0.0, 0.0]]
    assert sizes == [size for at in range(3) for size in (expected if at == number else nothing)[at]]
    result = [16.0, math.inf, 5.0][number]
    assert found["after x (mul)"] == pytest.approx(0.1 * result)


def test_of_other_operations_that_hold_code_the_results_are_seen():
    found = seen(lambda x: jax.lax.while_loop(lambda x: x[0] < 1000, lambda x: x * 2, x), jnp.array([2.0, 3.0]))
    assert found["x0 (while)"] == 1536


def test_a_row_past_the_end_of_a_table_is_no_number():
    table = jnp.ones((4, 2))
    assert math.isnan(seen(lambda x: jnp.take(x, jnp.array([1, 4]), axis=0), table)["x0 (gather)"])
    assert seen(lambda x: x[jnp.array([1, 3])], table * 7)["x0 (gather)"] == 7


def test_what_depends_on_no_argument_is_not_looked_at():
    found = seen(lambda x: x + jnp.arange(1e6)[-1:] * 3, jnp.array([1.0]))
    assert list(found) == ["x0", "x0 (add)"]


@pytest.mark.parametrize("mask", [-1e30, float(np.finfo(np.float32).min), -math.inf, -1e9])
def test_masked_scores_are_no_large_values(mask):
    keep = jnp.tril(jnp.ones((4, 4), bool))

    def attention(q, k):
        scores = q @ k.T
        where = jax.nn.softmax(jnp.where(keep, scores, mask))
        return where, jnp.exp(scores + jnp.where(keep, 0.0, mask))

    q = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    found = seen(attention, q, q)
    assert all(size < 1e7 for size in found.values()), found
    assert found["x0 (dot_general)"] == pytest.approx(np.abs(q @ q.T).max(), rel=1e-5)


def test_a_score_that_overflows_beside_masked_ones_is_seen():
    keep = jnp.array([True, False])
    found = seen(lambda x: jnp.where(keep, x * 1e38, -jnp.inf) - 1, jnp.array([10.0, 1.0]))
    assert list(found.values())[1:] == [math.inf, math.inf]
    assert math.isnan(seen(lambda x: jnp.where(keep, x * jnp.nan, -1e30) - 1, jnp.array([10.0, 1.0]))["after x0 (sub)"])


def test_a_mask_that_is_multiplied_is_a_value_again():
    keep = jnp.array([True, False])
    found = seen(lambda x: jnp.where(keep, x, -1e30) * 2, jnp.array([1.0, 1.0]))
    assert found["after x0 (mul)"] == pytest.approx(2e30)
