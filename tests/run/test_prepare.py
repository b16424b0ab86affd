"""Tokens that were made before as a source; what is chosen when only a text is named."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from rung.config import Config, DataConfig, TokenizerConfig, override
from rung.errors import RungError
from rung.run.choose import choose
from rung.run.prepare import prepare
from rung.run.store import build, train_tokenizer
from rung.run.tokens import open_tokens
from rung.tokens.tokenizer import Tokenizer


def quietly(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def byte() -> Tokenizer:
    return Tokenizer.train([], TokenizerConfig(kind="byte"))


@pytest.fixture(scope="module")
def byte_file(byte, tmp_path_factory):
    path = tmp_path_factory.mktemp("byte") / "byte.json"
    byte.save(path)
    return path


@pytest.fixture(scope="module")
def store(text, byte_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("store") / "tokens"
    build([str(text)], byte_file, out, DataConfig(validation_fraction=0.25), say=quietly)
    return out


STEPS = {"train.steps": 5, "train.batch_size": 2, "model.context_length": 16}


def bare(path, tokens, **rest):
    save_file({"tokens": np.asarray(tokens, np.uint16), **rest}, path)
    return path


# Token stores


def test_a_store_brings_its_tokenizer_and_what_it_was_made_with(store, byte, tmp_path):
    prepared = prepare([str(store)], None, STEPS, tmp_path, quietly)
    assert prepared.config.data.validation_fraction == 0.25
    assert prepared.config.model.vocab_size == prepared.config.tokenizer.vocab_size == 257
    assert Tokenizer.load(tmp_path / "tokenizer.json").hash == byte.hash
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize(
    ("path", "value"), [("tokenizer.vocab_size", 300), ("data.validation_fraction", 0.1), ("data.separator", "x")]
)
def test_a_setting_that_can_have_no_effect_on_a_store_is_refused(store, tmp_path, path, value):
    with pytest.raises(RungError, match=f"{path} is .* made already"):
        prepare([str(store)], Config(), {**STEPS, path: value}, tmp_path, quietly)


def test_another_tokenizer_than_the_stores_is_refused(store, text, byte_file, tmp_path):
    train_tokenizer([str(text)], override(Config(), {"tokenizer.kind": "char"}), tmp_path / "char.json", say=quietly)
    with pytest.raises(RungError, match="is not the tokenizer of the tokens"):
        prepare([str(store)], None, {**STEPS, "tokenizer.file": str(tmp_path / "char.json")}, tmp_path, quietly)
    prepare([str(store)], None, {**STEPS, "tokenizer.file": str(byte_file)}, tmp_path, quietly)


def test_a_store_beside_other_sources_is_refused(store, text, tmp_path):
    with pytest.raises(RungError, match=r"emma\.txt, which is named beside it, is text"):
        prepare([str(store), str(text)], None, STEPS, tmp_path, quietly)


# Bare files


def test_the_end_of_a_bare_file_is_held_out(byte, tmp_path):
    tokens = np.arange(100) % 256 + 1
    opened = open_tokens(bare(tmp_path / "t.safetensors", tokens), byte, 0.2)
    train, validation = opened.split("train"), opened.split("validation")
    np.testing.assert_array_equal(train.read(0, 80), tokens[:80])
    np.testing.assert_array_equal(validation.read(0, 20), tokens[80:])
    assert (train.text_bytes, validation.text_bytes) == (80, 20)
    assert (train.document_starts.tolist(), validation.document_starts.tolist()) == ([0], [0])


def test_a_bare_file_is_cut_between_documents_where_two_meet_near_the_cut(byte, tmp_path):
    tokens = np.ones(100, np.uint16)
    tokens[[29, 76]] = byte.end_id  # documents begin at 0, 30 and 77
    opened = open_tokens(bare(tmp_path / "t.safetensors", tokens), byte, 0.2)
    assert [len(opened.split(name)) for name in ("train", "validation")] == [77, 23]
    assert opened.split("train").document_starts.tolist() == [0, 30]
    # With the next document far from the cut, the cut is where the fraction says.
    far = open_tokens(bare(tmp_path / "u.safetensors", tokens[:70]), byte, 0.2)
    assert [len(far.split(name)) for name in ("train", "validation")] == [56, 14]
    assert far.split("validation").document_starts.tolist() == [0]


@pytest.mark.parametrize(
    ("n", "fraction", "splits"), [(5, 0.0, ("train",)), (5, 0.1, ("train",)), (4, 0.5, ("train", "validation"))]
)
def test_a_bare_file_too_short_to_hold_out_from_is_trained_on_whole(byte, tmp_path, n, fraction, splits):
    assert open_tokens(bare(tmp_path / "t.safetensors", np.ones(n)), byte, fraction).splits == splits


def test_a_bare_file_needs_its_tokenizer(byte_file, text, tmp_path):
    path = str(bare(tmp_path / "t.safetensors", np.arange(1, 257)))
    with pytest.raises(RungError, match="no tokenizer is named") as refused:
        prepare([path], None, STEPS, tmp_path, quietly)
    assert "--tokenizer FILE" in refused.value.hint
    prepared = prepare([path], None, {**STEPS, "tokenizer.file": str(byte_file)}, tmp_path, quietly)
    assert len(prepared.store.split("validation")) == 26
    over = str(bare(tmp_path / "over.safetensors", [1, 2, 3, 257, 4]))
    with pytest.raises(RungError, match="token id 257, and the tokenizer's vocabulary is 257"):
        prepare([over], None, {**STEPS, "tokenizer.file": str(byte_file)}, tmp_path, quietly)
    one = str(bare(tmp_path / "one.safetensors", [1]))
    with pytest.raises(RungError, match="holds 1 tokens"):
        prepare([one], None, {**STEPS, "tokenizer.file": str(byte_file)}, tmp_path, quietly)


def test_a_bare_file_trains_resumes_and_notices_a_change(train_tiny, byte_file, tmp_path):
    from rung.run.resuming import resume
    from rung.run.use import evaluate

    path = bare(tmp_path / "t.safetensors", np.arange(2000) % 256 + 1)
    result = train_tiny(
        tmp_path / "run", {"tokenizer.kind": "byte"} and {"tokenizer.file": str(byte_file)}, sources=[path]
    )
    assert evaluate(result["run"]).targets == 199
    assert resume(result["run"], say=quietly)["steps"] == 12
    bare(path, np.arange(2001) % 256 + 1)
    with pytest.raises(RungError, match="is not the token store"):
        resume(result["run"], say=quietly)


# What is said, and what is chosen


def test_a_small_text_is_adjusted_to_and_it_is_said(tmp_path):
    (tmp_path / "small.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 3)
    said: list[str] = []
    prepared = prepare([str(tmp_path / "small.txt")], None, {"model.context_length": 500}, tmp_path, said.append)
    assert any("fewer than the 512 asked" in line for line in said)
    train_tokens = len(prepared.store.split("train"))
    assert prepared.config.model.context_length == train_tokens - 1
    assert f"context shortened to {train_tokens - 1} tokens: the training text has only {train_tokens}" in said
    assert any("text: 1 document, 177 bytes" in line for line in said)


def test_notes_are_said_once(text, tmp_path):
    base = override(Config(), {"train.steps": 100, "train.warmup_steps": 10, "tokenizer.kind": "byte"})
    said: list[str] = []
    prepare([str(text)], base, {"train.steps": 50}, tmp_path, said.append)
    assert [line for line in said if "warmup" in line] == ["train.warmup_steps 10 -> 5, as train.steps 100 -> 50"]


def test_each_choice_is_said_with_its_reason_and_what_is_given_is_not_chosen(text, tmp_path):
    said: list[str] = []
    prepare([str(text)], None, {"tokenizer.kind": "byte"}, tmp_path, said.append)
    chosen = [line for line in said if line.startswith("chosen: ")]
    assert [line.split()[1] for line in chosen] == ["preset", "train.steps"]
    assert all(line.endswith(")") and "(" in line for line in chosen)


@pytest.mark.parametrize("length", [{"train.steps": 5}, {"train.tokens": 9999}, {"train.epochs": 2.0}])
def test_a_given_length_is_not_chosen(length):
    _, choices = choose(10_000, "cpu", length)
    assert "train.steps" not in [choice.path for choice in choices]


def test_choices_grow_with_the_text_and_stay_sensible():
    configs = [choose(n, "cpu", {})[0] for n in (20, 200, 5_000, 100_000, 1_000_000, 10**8, 10**10)]
    vocabularies = [config.tokenizer.vocab_size for config in configs]
    assert vocabularies == sorted(vocabularies)
    assert 257 <= vocabularies[0] <= 1024
    assert all(1 <= config.train.steps <= 100_000 for config in configs)
    assert all(config.name == "" for config in configs)


def test_the_passes_that_are_told_follow_the_batch_that_is_given():
    def passes(given):
        (reason,) = (choice.reason for choice in choose(1_000_000, "cpu", given)[1] if choice.path == "train.steps")
        return float(reason.split()[1])

    config = choose(1_000_000, "cpu", {})[0]
    tokens = config.train.steps * config.train.batch_size * config.model.context_length
    # 2,048 entries spell novels in English in some 3.35 bytes a token, and a tenth is held out.
    assert passes({}) == pytest.approx(3.35 * tokens / 0.9e6, rel=0.05)
    given = {"train.batch_size": 10 * config.train.batch_size}
    tokens = choose(1_000_000, "cpu", given)[0].train.steps * 10 * config.train.batch_size * config.model.context_length
    assert passes(given) == pytest.approx(3.35 * tokens / 0.9e6, rel=0.05)


def test_an_accelerator_and_a_large_text_get_gpt2():
    config, choices = choose(3 * 10**9, "gpu", {})
    assert config.model.d_model == 768
    assert choices[0].value == "gpt2-small"
    assert choose(3 * 10**9, "cpu", {})[0].model.d_model < 768
