"""Runs on several stores: shares, passes, validation apart and together, exact resume, refusals."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest

from rung.config import Config, TokenizerConfig, override
from rung.errors import RungError
from rung.report.metrics import read_metrics
from rung.run.folder import Run
from rung.run.prepare import prepare
from rung.run.resuming import resume
from rung.run.store import build
from rung.run.use import evaluate
from rung.tokens.mixture import training_batches
from rung.tokens.tokenizer import Tokenizer
from rung.train.events import Mixed

STEPS = {"train.steps": 5, "train.batch_size": 2, "model.context_length": 16}
WEIGHTS = {"data.weights": (3.0, 1.0)}


def quietly(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "prose.txt").write_text("It was a dark night, and the rain fell in torrents. " * 120)
    (folder / "verse.txt").write_text("Roses are red,\nviolets are blue.\n" * 60)
    return [folder / "prose.txt", folder / "verse.txt"]


@pytest.fixture(scope="module")
def stores(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    Tokenizer.train([], TokenizerConfig(kind="byte")).save(folder / "byte.json")
    for text in texts:
        build([str(text)], folder / "byte.json", folder / text.stem, Config().data, say=quietly)
    return [folder / text.stem for text in texts]


@pytest.fixture(scope="module")
def mixed(train_tiny, stores, tmp_path_factory):
    """The result of a run on both stores, three to one; its folder is only to be read."""
    return train_tiny(tmp_path_factory.mktemp("runs") / "mixed", WEIGHTS, sources=stores)


def test_validation_is_told_of_each_store_and_of_all_by_their_weights(mixed, stores):
    whole = evaluate(mixed["run"])
    prose, verse = (whole.sources[name] for name in ("prose", "verse"))
    assert whole.loss == pytest.approx(0.75 * prose.loss + 0.25 * verse.loss)
    assert whole.targets == prose.targets + verse.targets
    # Bytes of a byte tokenizer are tokens: bits per byte are the loss in bits, but for ends of texts.
    assert whole.bits_per_byte == pytest.approx(whole.loss / math.log(2), rel=0.01)
    log = read_metrics(f"{mixed['run']}/metrics.jsonl")
    told = log.of(Mixed)
    assert [event.step for event in told] == [4, 8, 12]
    assert log.evaluations[-1].loss == mixed["validation_loss"]
    last = told[-1]
    assert 0.75 * last.losses["prose"] + 0.25 * last.losses["verse"] == pytest.approx(mixed["validation_loss"])
    run = Run(mixed["run"])
    batches = training_batches(
        run.store,
        context_length=32,
        batch_size=4,
        seed=run.config.train.seed,
        windows="contiguous",
        cross_documents=False,
    )
    rows = {name: batches.sources[k].windows_per_epoch for k, name in enumerate(("prose", "verse"))}
    assert last.epochs == {"prose": 36 / rows["prose"], "verse": 12 / rows["verse"]}
    assert run.config.data.weights == (3.0, 1.0)
    assert "Validation loss by source" in (run.path / "report.html").read_text(encoding="utf-8")


def test_each_store_alone_has_the_loss_that_it_has_in_the_mixture(mixed, stores):
    from rung.tokens.store import TokenStore

    run = Run(mixed["run"])
    run.store = TokenStore.open(stores[1])
    assert evaluate(run).loss == evaluate(mixed["run"]).sources["verse"].loss


def test_a_run_that_stopped_goes_on_to_the_same_end(mixed, train_tiny, stores, tmp_path):
    stopped = train_tiny(tmp_path / "run", {**WEIGHTS, "train.steps": 8, "train.schedule": "constant"}, sources=stores)
    whole = train_tiny(tmp_path / "whole", {**WEIGHTS, "train.schedule": "constant"}, sources=stores)
    again = resume(stopped["run"], steps=12, say=quietly)
    assert (again["validation_loss"], again["train_loss"]) == (whole["validation_loss"], whole["train_loss"])
    for one, two in zip(*(jax.tree.leaves(Run(path).weights) for path in (again["run"], whole["run"])), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_store_that_changed_and_other_weights_are_refused(train_tiny, texts, stores, tmp_path):
    for store in stores:
        build([str(texts[0])], store, tmp_path / store.name, Config().data, say=quietly)
    sources = [tmp_path / store.name for store in stores]
    result = train_tiny(tmp_path / "run", WEIGHTS, sources=sources)
    with pytest.raises(RungError, match=r"data\.weights decides what the run learns"):
        resume(result["run"], 20, {"data.weights": (1.0, 1.0)}, say=quietly)
    build([str(texts[1])], stores[0], sources[1], Config().data, overwrite=True, say=quietly)
    with pytest.raises(RungError, match="these are not the token stores"):
        resume(result["run"], 20, say=quietly)


def test_texts_with_weights_are_stores_of_one_tokenizer_in_the_run(texts, train_tiny, tmp_path):
    result = train_tiny(tmp_path / "run", WEIGHTS, sources=texts)
    run = Run(result["run"])
    assert json.loads((run.path / "data.json").read_text())["store"] == ["tokens/prose", "tokens/verse"]
    assert run.store.names == ["prose", "verse"]
    assert set(evaluate(run).sources) == {"prose", "verse"}
    (tmp_path / "run").rename(tmp_path / "moved")
    assert evaluate(tmp_path / "moved").loss == pytest.approx(result["validation_loss"])


def test_what_the_mixture_is_is_said(stores, tmp_path):
    said: list[str] = []
    prepared = prepare([str(store) for store in stores], Config(), {**STEPS, **WEIGHTS}, tmp_path, said.append)
    lines = [line for line in said if line.startswith("mixture: ")]
    assert [line.split(":")[1].split(",")[0] for line in lines] == [" prose", " verse"]
    assert "75.00% of the rows" in lines[0]
    tokens = len(prepared.store.stores[1].split("train"))
    assert f"{0.25 * 5 * 32 / tokens:.2f} passes over its {tokens:,} tokens" in lines[1]


def test_without_weights_the_config_records_those_that_are_taken(stores, tmp_path):
    prepared = prepare([str(store) for store in stores], Config(), STEPS, tmp_path, quietly)
    assert prepared.config.data.weights == tuple(float(len(store.split("train"))) for store in prepared.store.stores)


@pytest.mark.parametrize(
    ("sources", "changes", "problem"),
    [
        ((0, 1), {"data.weights": (1.0,)}, "1 of data.weights are given, and there are 2 sources"),
        ((0,), {"data.weights": (1.0,)}, "there is 1 source to weigh"),
        ((0, 1), {"data.weights": (1.0, -1.0)}, "data.weights has -1"),
        ((0, 1), {"data.validation_fraction": 0.2}, "made already"),
        ((0, 0), {}, "is named twice"),
    ],
)
def test_wrong_weights_are_refused_before_any_work(stores, tmp_path, sources, changes, problem):
    with pytest.raises(RungError, match=problem):
        prepare([str(stores[k]) for k in sources], Config(), {**STEPS, **changes}, tmp_path, quietly)


def test_weights_of_other_sources_are_left_out_and_it_is_said(texts, tmp_path):
    said: list[str] = []
    base = override(Config(), WEIGHTS)
    prepared = prepare([str(texts[0])], base, {**STEPS, "tokenizer.kind": "byte"}, tmp_path, said.append)
    assert prepared.config.data.weights == ()
    assert "data.weights are for 2 sources and there are 1: they are left out" in said
