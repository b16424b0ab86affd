"""The compiled step, held against what it was in work, memory and structure, by no clock; it is compiled once a run.

``compiled.json`` has what the compiler made of three steps, for each version of jax. Who changes the step on purpose
writes it anew: ``python tests/train/test_compiled.py --write``.
"""

from __future__ import annotations

import collections
import functools
import json
import platform
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rung import config as settings
from rung.config import Config, MeshConfig
from rung.mesh import batch_sharding, make_mesh
from rung.model import Decoder
from rung.train.optimizer import make_optimizer
from rung.train.schedule import rate_factor
from rung.train.step import abstract_state, make_step

KEPT = Path(__file__).with_name("compiled.json")
VERSION = ".".join(jax.__version__.split(".")[:2])
EMMA = Path(__file__).parents[2] / "src/rung/demo/austen/emma.txt"

MANY_OPERANDS = 20  # a fusion that reads more arrays than this reads most of them again for each element it computes

# What is compared, and by what part it may differ: an operation more or less is often the compiler's whim.
TOLERANCES = {
    "flops": 0.01,
    "bytes_accessed": 0.02,
    "temporary_bytes": 0.02,
    "fusions": 0.02,
    f"fusions_over_{MANY_OPERANDS}_operands": 0.0,
    "dots": 0.0,
    "while_loops": 0.0,
}

LLAMA = {
    "model.n_layers": 2,
    "model.n_kv_heads": 2,
    "model.d_ff": 320,
    "model.activation": "swiglu",
    "model.norm": "rmsnorm",
    "model.positions": "rope",
    "model.tied": False,
    "model.dropout": 0.1,
    "model.dropout_sites": ("residual",),
}
STEPS = {
    "classic": {},
    "llama": LLAMA,
    "bfloat16": {"model.n_layers": 2, "model.compute_dtype": "bfloat16", "model.activation": "gelu_tanh"},
}


@functools.cache
def measured(name: str) -> dict[str, int]:
    """Return what the compiler made of a step: the preset ``shakespeare-char-classic`` with the changes of STEPS."""
    changes = {"model.vocab_size": 65, **STEPS[name]}
    config = settings.resolve(settings.override(settings.preset("shakespeare-char-classic"), changes))
    mesh, model = make_mesh(MeshConfig()), Decoder(config.model, config.compute)
    optimizer = make_optimizer(model.weights(), config.train)
    shape = (config.train.batch_size, config.model.context_length)
    factor = rate_factor(config.train, config.train.steps, shape[0] * shape[1])
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    step = make_step(model, optimizer, factor, config.train, mesh)
    lowered = step.lower(abstract_state(model, optimizer, mesh), {"tokens": tokens, "targets": tokens})
    return of_program(lowered.compile())


def of_program(compiled) -> dict[str, int]:
    """Return the measures of a compiled program."""
    cost, found = compiled.cost_analysis(), operations(compiled.as_text())
    counts = collections.Counter(name for name, _ in found)
    wide = sum(name == "fusion" and operands > MANY_OPERANDS for name, operands in found)
    values = (
        cost["flops"],
        cost["bytes accessed"],
        compiled.memory_analysis().temp_size_in_bytes,
        counts["fusion"],
        wide,
        counts["dot"],
        counts["while"],
    )
    return {name: int(value) for name, value in zip(TOLERANCES, values, strict=True)}


def operations(program: str) -> list[tuple[str, int]]:
    """Return name and number of operands of every operation in the text of a program (HLO)."""
    found = re.findall(r"^ *(?:ROOT )?%?[\w.-]+ = (?:\(.*?\) |\S+ )([\w-]+)\((.*?)\)", program, re.MULTILINE)
    return [(name, operands.count("%")) for name, operands in found]


def differences(now: dict[str, int], kept: dict[str, int]) -> list[str]:
    """Return a line for each measure that is not, within its tolerance, what it was."""
    return [
        f"{name} {'grew' if now[name] > kept[name] else 'fell'} from {kept[name]:,} to {now[name]:,}"
        for name, tolerance in TOLERANCES.items()
        if abs(now[name] - kept[name]) > tolerance * kept[name]
    ]


@pytest.mark.parametrize("name", STEPS)
def test_the_compiled_step_is_no_larger_than_it_was(name):
    kept = json.loads(KEPT.read_text(encoding="utf-8")).get(VERSION)
    if kept is None or platform.machine() != "x86_64":
        pytest.skip(f"compiled.json has nothing of jax {VERSION} on {platform.machine()}")
    changed = differences(measured(name), kept[name])
    assert not changed, (
        f"the step {name!r}: {'; '.join(changed)}. "
        "Where that is meant: python tests/train/test_compiled.py --write, with each version of jax"
    )


def test_more_of_anything_is_seen_and_named():
    kept = dict.fromkeys(TOLERANCES, 100)
    assert differences({**kept, "flops": 101, "fusions": 102}, kept) == []
    assert differences({**kept, "flops": 102, "dots": 99}, kept) == [
        "flops grew from 100 to 102",
        "dots fell from 100 to 99",
    ]


def test_the_work_of_a_program_is_counted_right():
    def program(x, many):
        x = jax.lax.fori_loop(0, 3, lambda n, x: x @ x, x)
        return x, functools.reduce(lambda a, b: a * b + jnp.sin(a), many)

    matrix, vectors = jnp.ones((64, 64)), [jnp.ones(1000)] * (MANY_OPERANDS + 1)
    found = of_program(jax.jit(program).lower(matrix, vectors).compile())
    assert found["while_loops"] == 1
    assert found["dots"] == 1
    assert found[f"fusions_over_{MANY_OPERANDS}_operands"] == 1
    assert found["flops"] >= 2 * 64**3
    assert found["bytes_accessed"] >= 4 * 1000 * len(vectors)


def test_a_run_compiles_its_step_once(tmp_path):
    from rung.run.train import train

    compiled: list[str] = []

    def heard(event: str, duration_secs: float, **rest) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(rest.get("fun_name", ""))

    text = tmp_path / "emma.txt"
    text.write_bytes(EMMA.read_bytes()[:6000])
    changes = {
        "tokenizer.kind": "byte",
        "model.context_length": 16,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "model.d_model": 16,
        "train.batch_size": 4,
        "train.steps": 6,
        "evaluate.every_steps": 2,
        "checkpoint.every_steps": 3,
        "train.norms_every_steps": 2,
        "sample.max_tokens": 0,
    }
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        result = train([str(text)], Config(), changes, run=tmp_path / "run")
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    assert result["steps"] == 6
    assert compiled.count("jit(step)") == 1, compiled


def write() -> None:
    """Put the measures of this version of jax into the file."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    now = {name: measured(name) for name in STEPS}
    for name in STEPS:
        for line in differences(now[name], kept.get(VERSION, {}).get(name, now[name])):
            print(f"{name}: {line}")
    KEPT.write_text(json.dumps(dict(sorted({**kept, VERSION: now}.items())), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/train/test_compiled.py --write")
    write()
