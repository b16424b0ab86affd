"""A run in use: its loss on text, and text from it; the Python API."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rung
from rung.config import GenerateConfig
from rung.errors import RungError

ROOT = Path(__file__).parents[2]


def test_the_loss_on_a_text_is_that_of_its_tokens(undisturbed, tmp_path):
    """Against logits of whole windows, softmax by hand: targets are every byte but the first, and the end of text."""
    run = rung.Run(undisturbed["run"])
    text = "It was a dark and stormy night."  # 31 bytes and the end: one window of 32
    (tmp_path / "night.txt").write_text(text)
    ids = np.append(run.tokenizer.encode(text), run.tokenizer.end_id)
    hidden = run.model.hidden(run.weights, jnp.asarray(ids[None, :-1]))
    logits = np.asarray(run.model.unembed(run.weights, hidden))[0].astype(np.float64)
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -log_softmax[np.arange(31), ids[1:]]
    held_out = rung.evaluate(run, tmp_path / "night.txt")
    assert held_out.targets == 31
    assert held_out.loss == pytest.approx(losses.mean(), rel=1e-5)
    # The end of text stands for no byte.
    assert held_out.bits_per_byte == pytest.approx(losses.sum() / np.log(2) / 30, rel=1e-5)


def test_a_run_evaluates_its_own_split_to_what_training_told(undisturbed):
    best = min(evaluation for _, _, evaluation, _ in _evaluations(undisturbed["run"]))
    assert rung.evaluate(undisturbed["run"]).loss == pytest.approx(best, rel=1e-6)


def _evaluations(run):
    from run.same import told

    return told(Path(run))[1]


def test_what_cannot_be_evaluated_is_said(undisturbed, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    for sources, said in [("empty.txt", "empty"), ("bad.txt", "0xff at offset 3"), ("none.txt", "no file")]:
        with pytest.raises(RungError, match=said):
            rung.evaluate(undisturbed["run"], tmp_path / sources)
    with pytest.raises(RungError, match="no test split"):
        rung.evaluate(undisturbed["run"], split="test")
    with pytest.raises(RungError, match="no run named"):
        rung.evaluate("")


def test_python_generates_as_asked(undisturbed):
    run = rung.Run(undisturbed["run"])
    one, two = rung.generate(run, "Emma", GenerateConfig(max_tokens=7, temperature=0, samples=2, ignore_end=True))
    assert one == two
    assert len(one.ids) == 7
    assert rung.generate(undisturbed["run"], "", GenerateConfig(max_tokens=3, ignore_end=True))[0].reason == "length"


def test_damaged_and_missing_weights_are_said(undisturbed, tmp_path):
    import shutil

    copy = Path(shutil.copytree(undisturbed["run"], tmp_path / "copy"))
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(RungError, match="is damaged"):
        rung.generate(copy, "x")
    (copy / "model.safetensors").unlink()
    with pytest.raises(RungError, match="no weights at"):
        rung.generate(copy, "x")
    # What is needed for use is the config, the tokenizer and the weights.
    (copy / "model.safetensors").write_bytes(weights)
    (copy / "data.json").unlink()
    shutil.rmtree(copy / "tokens")
    assert rung.generate(copy, "x", GenerateConfig(max_tokens=1))


# The package


def test_all_documented_names_are_there():
    assert all(getattr(rung, name) is not None for name in rung.__all__)
    assert set(rung.__all__) == set(dir(rung)) & set(rung.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        rung.no_such  # noqa: B018


def test_importing_rung_imports_nothing_heavy():
    program = (
        "import sys, rung; print([m for m in ('jax', 'numpy', 'tokenizers', 'rich', 'matplotlib') if m in sys.modules])"
    )
    environment = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []


def test_the_verbs_are_not_hidden_by_the_rooms_of_their_names():
    program = (
        "import rung, rung.train.loop, rung.evaluate.held_out, rung.demo; from rung.train import step;"
        "print(rung.train.__module__, rung.evaluate.__module__, rung.demo.__module__, step.__name__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rung.run.train", "rung.run.use", "rung.run.demo", "rung.train.step"]


def test_a_run_knows_its_devices(undisturbed):
    import json

    told = json.loads((Path(undisturbed["run"]) / "environment.json").read_text())
    assert told["jax"] == jax.__version__
    assert told["device"] == "1 x cpu (cpu)"
