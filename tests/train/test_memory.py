"""Memory before the first step: what does not fit is refused, and the micro-batch named is the largest that does."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from rung.config import Config, MeshConfig, override, resolve
from rung.errors import RungError
from rung.mesh import batch_sharding, make_mesh
from rung.model import Decoder
from rung.train import memory
from rung.train.optimizer import make_optimizer
from rung.train.step import abstract_state, make_step

CONFIG = resolve(
    override(
        Config(),
        {
            "model.vocab_size": 50,
            "model.context_length": 64,
            "model.n_layers": 1,
            "model.n_heads": 2,
            "model.d_model": 32,
            "train.batch_size": 16,
        },
    )
)
MESH, MODEL = make_mesh(MeshConfig()), Decoder(CONFIG.model)
OPTIMIZER = make_optimizer(MODEL.weights(), CONFIG.train)
TOKENS = jax.ShapeDtypeStruct((16, 64), jnp.int32, sharding=batch_sharding(MESH))
SHAPES = (abstract_state(MODEL, OPTIMIZER, MESH), {"tokens": TOKENS, "targets": TOKENS})


def make(train):
    return make_step(MODEL, OPTIMIZER, lambda step: jnp.float32(1), train, MESH)


def needed(micro):
    train = dataclasses.replace(CONFIG.train, micro_batch_size=micro)
    return memory.new_bytes(make(train).lower(*SHAPES).compile())


def compiling(monkeypatch, free):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    return memory.Compiling(make, CONFIG.train, SHAPES, data=1)


@pytest.mark.parametrize("fits", [4, 2])
def test_the_micro_batch_that_is_named_is_the_largest_that_fits(monkeypatch, fits):
    free = needed(fits)
    assert free < needed(2 * fits)
    with pytest.raises(RungError, match=r"micro-batches of 16, and the device has .* free") as refused:
        compiling(monkeypatch, free).step()
    assert re.search(r"micro-batch-size (\d+) is the largest", refused.value.hint)[1] == str(fits)


def test_a_step_that_fits_or_that_nobody_can_judge_runs(monkeypatch):
    assert callable(compiling(monkeypatch, needed(16)).step())
    assert callable(compiling(monkeypatch, None).step())


def test_a_shortage_is_told_as_everywhere():
    error = memory.out_of_memory(1 << 31, 64 << 20, 4, 16)
    assert error.problem.endswith("needs 2.0 GiB more with micro-batches of 16, and the device has 64 MiB free")


def test_where_no_micro_batch_fits_it_is_said(monkeypatch):
    with pytest.raises(RungError) as refused:
        compiling(monkeypatch, 1000).step()
    assert "no micro-batch fits" in refused.value.hint
