"""The config: files and back, overrides with types and bounds, near misses, contradictions, differences."""

from __future__ import annotations

import dataclasses
import math
import tomllib
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung import config as c
from rung.config import Config
from rung.errors import RungError

FIELDS = dict(c.fields(Config))


@pytest.mark.parametrize("name", [*c.preset_names(), None])
def test_every_preset_comes_back_from_toml(name, tmp_path):
    config = c.preset(name) if name else Config()
    for version in (config, c.resolve(config)):
        (tmp_path / "config.toml").write_text(c.to_toml(version), encoding="utf-8")
        assert c.load(tmp_path / "config.toml") == version
        assert c.from_dict(tomllib.loads(c.to_toml(version))) == version


def test_resolving_twice_is_resolving_once():
    for name in c.preset_names():
        assert c.resolve(c.resolve(c.preset(name))) == c.resolve(c.preset(name))


def test_every_field_is_declared_and_its_default_is_in_bounds():
    for path, field in FIELDS.items():
        declared = field.metadata["setting"]
        assert declared.help, path
        assert c.override(Config(), {path: field.default}) == Config()


def value_of(path):
    """A strategy for values that the field at ``path`` takes."""
    kind, bounds = c.field_type(Config, path), FIELDS[path].metadata["setting"]
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        of = typing.get_args(kind)[0]
        if of is float:
            return st.lists(st.floats(0.01, 100)).map(tuple)
        return st.lists(st.sampled_from(typing.get_args(of)) if typing.get_args(of) else st.text(max_size=5)).map(tuple)
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.text(max_size=8)
    low, high = max(bounds.low, -(2**40)), min(bounds.high, 2**40)
    if kind is int:
        return st.integers(math.ceil(low) + bounds.open_low, math.floor(high) - bounds.open_high)
    return st.floats(low, high, exclude_min=bounds.open_low, exclude_max=bounds.open_high)


@given(st.data())
def test_any_values_in_bounds_come_back_from_toml(data):
    paths = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=8))
    changes = {path: data.draw(value_of(path)) for path in paths}
    config = c.override(Config(), changes)
    assert c.from_dict(tomllib.loads(c.to_toml(config))) == config
    assert {path: new for path, (_, new) in c.differences(Config(), config).items()} == {
        path: list(value) if isinstance(value, tuple) else value
        for path, value in changes.items()
        if value != FIELDS[path].default
    }


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("model.d_modle", 8, "model.d_model"),
        ("trian.steps", 8, "train.steps"),
        ("model.n_head", 8, "model.n_heads"),
        ("train.lerning_rate", 1.0, "train.learning_rate"),
        ("nmae", "x", "name"),
    ],
)
def test_unknown_names_get_the_nearest(path, value, hint):
    with pytest.raises(RungError, match=f"unknown setting '{path}'") as error:
        c.override(Config(), {path: value})
    assert error.value.hint == f"did you mean {hint}?"


def test_unknown_presets_get_the_nearest():
    with pytest.raises(RungError, match="unknown preset 'gpt2-smal'") as error:
        c.preset("gpt2-smal")
    assert "gpt2-small" in error.value.hint


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("model.d_model", "256", "not a whole number"),
        ("model.d_model", 256.0, "not a whole number"),
        ("model.d_model", True, "not a whole number"),
        ("model.d_model", 0, "at least 1"),
        ("model.dropout", 1, "below 1"),
        ("model.dropout", -0.1, "at least 0"),
        ("model.dropout", math.nan, "at least 0"),
        ("train.learning_rate", math.inf, "at least 0"),
        ("train.learning_rate", "fast", "not a number"),
        ("model.norm_epsilon", 0.0, "over 0"),
        ("model.tied", 1, "not true or false"),
        ("model.tied", "yes", "not true or false"),
        ("name", 3, "not a text"),
        ("model.norm", "layer_norm", "layernorm"),
        ("model.norm", 3, "one of"),
        ("model.dropout_sites", ["attn"], "attention"),
        ("model.dropout_sites", 3, "not a list"),
        ("train.seed", 2**32, "at most"),
        ("train.seed", -1, "at least 0"),
        ("mesh.data", 0, "at least 1"),
    ],
)
def test_bad_values_are_named_with_what_is_wanted(path, value, said):
    with pytest.raises(RungError) as error:
        c.override(Config(), {path: value}, where="there")
    assert error.value.problem.startswith(f"there: {path} is ")
    assert said in str(error.value)


def test_whole_numbers_are_numbers_and_one_text_is_a_list():
    config = c.override(Config(), {"train.learning_rate": 1, "sample.prompts": "Once", "model.dropout_sites": []})
    assert config.train.learning_rate == 1.0
    assert type(config.train.learning_rate) is float
    assert config.sample.prompts == ("Once",)
    assert config.model.dropout_sites == ()


def test_another_optimizer_has_its_own_rate_and_as_much_decay():
    base = c.override(Config(), {"train.learning_rate": 6e-4, "train.weight_decay": 0.1})
    config, notes = c.adapt(base, {"train.optimizer": "lion"})
    # Chen et al. 2023, section 5: a rate 3 to 10 times smaller, and a decay as many times larger.
    ratio = 6e-4 / config.train.learning_rate
    assert 3 <= ratio <= 10
    assert config.train.weight_decay == pytest.approx(0.1 * ratio, rel=0.1)
    assert [note.split(",")[1].strip() for note in notes] == ["as train.optimizer adamw -> lion"] * 2
    back, _ = c.adapt(config, {"train.optimizer": "adamw"})
    assert (back.train.learning_rate, back.train.weight_decay) == pytest.approx((6e-4, 0.1), rel=0.1)

    given = {"train.optimizer": "lion", "train.learning_rate": 1.0, "train.weight_decay": 2.0}
    config, notes = c.adapt(base, given)
    assert (config.train.learning_rate, config.train.weight_decay, notes) == (1.0, 2.0, [])
    assert c.adapt(base, {"train.optimizer": "adamw"}) == (base, [])
    with pytest.raises(RungError, match=r"train\.optimizer"):
        c.adapt(base, {"train.optimizer": "adam"})


@pytest.mark.parametrize(
    "changes",
    [
        {"train.optimizer": "lion"},
        {"train.optimizer": "adafactor"},
        {"train.optimizer": "muon"},
        {"train.optimizer": "lion", "train.learning_rate": 1e-3},
        {"train.optimizer": "muon", "train.learning_rate": 1e-3},
        {"train.optimizer": "normuon", "train.muon_learning_rate": 0.01},
    ],
)
@pytest.mark.parametrize("name", ["gpt2-small", "demo"])  # of AdamW, and of Muon
def test_the_matrices_of_the_layers_lose_as_much_in_a_step_under_another_optimizer(name, changes):
    from rung.model import Weight
    from rung.train.optimizer import make_optimizer

    table = (Weight("layers.0.up", (6, 4), ("mlp", "embed"), 1, std=0.02, decay=True, hidden=True),)

    def lost(train):
        for group in make_optimizer(table, train).groups.values():
            if group.weights:
                return group.learning_rate * group.weight_decay

    base = c.preset(name)
    config, _ = c.adapt(base, changes)
    assert lost(config.train) == pytest.approx(lost(base.train), rel=0.06)  # rounded to two digits
    assert all(getattr(config.train, path.split(".")[1]) == value for path, value in changes.items())


def test_a_rate_of_zero_leaves_the_decay_as_it_is():
    config, _ = c.adapt(Config(), {"train.optimizer": "lion", "train.learning_rate": 0})
    assert config.train.weight_decay == Config().train.weight_decay


@pytest.mark.parametrize("named", ["optimizer", "optimizer, learning_rate"])
def test_a_file_is_left_as_it_is_and_flags_follow_it(named, tmp_path):
    lines = ['optimizer = "muon"', "learning_rate = 2e-3"][: 1 + named.count(",")]
    (tmp_path / "muon.toml").write_text("\n".join(["[train]", *lines]), encoding="utf-8")
    config = c.load(tmp_path / "muon.toml")
    assert set(c.differences(Config(), config)) == {f"train.{name}" for name in named.split(", ")}
    changed, notes = c.adapt(config, {"train.optimizer": "adamw"})
    assert changed.train.learning_rate == config.train.learning_rate / 4
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train.optimizer": "adafactor", "train.beta1": 0.8}, "train.beta1 does nothing here, as train.optimizer is"),
        ({"train.optimizer": "adafactor", "train.beta2": 0.8}, "train.beta2 does nothing here, as train.optimizer is"),
        ({"train.optimizer": "lion", "train.epsilon": 1e-6}, "train.epsilon does nothing here, as train.optimizer is"),
        ({"train.muon_learning_rate": 0.1}, "train.muon_learning_rate does nothing here, as train.optimizer is adamw"),
        ({"model.dropout_sites": ["mlp"]}, "model.dropout_sites does nothing here, as model.dropout is not set"),
        ({"train.optimizer": "lion", "train.beta1": 0.8}, ""),
        ({"train.optimizer": "muon", "train.muon_learning_rate": 0.1, "train.epsilon": 1e-6}, ""),
        ({"train.schedule": "wsd", "train.decay_steps": 5}, ""),
    ],
)
def test_a_given_setting_that_does_nothing_is_said(changes, said):
    _, notes = c.adapt(Config(), changes)
    found = [note for note in notes if "nothing" in note]
    assert [note[: len(said)] for note in found] == ([said] if said else [])


def test_override_leaves_the_rest():
    base = c.preset("gpt2-small")
    changed = c.override(base, {"model.d_model": 100})
    assert c.differences(base, changed) == {"model.d_model": (768, 100)}
    assert base == c.preset("gpt2-small")


@pytest.mark.parametrize(
    ("changes", "both"),
    [
        ({"model.d_model": 100, "model.n_heads": 3}, ("model.d_model 100", "model.n_heads 3")),
        ({"model.n_heads": 4, "model.n_kv_heads": 3}, ("model.n_heads 4", "model.n_kv_heads 3")),
        ({"model.d_head": 5, "model.positions": "rope"}, ("model.d_head 5", "RoPE")),
        ({"model.context_length": 64, "model.n_positions": 32}, ("model.context_length 64", "model.n_positions 32")),
        ({"train.steps": 10, "train.tokens": 100}, ("train.steps 10", "train.tokens 100")),
        ({"train.steps": 10, "train.epochs": 1.5}, ("train.steps 10", "train.epochs 1.5")),
        ({"train.warmup_steps": 1, "train.warmup_tokens": 1}, ("train.warmup_steps", "train.warmup_tokens")),
        ({"train.decay_steps": 1, "train.decay_tokens": 1}, ("train.decay_steps", "train.decay_tokens")),
        ({"train.steps": 10, "train.warmup_steps": 11}, ("train.warmup_steps 11", "train.steps 10")),
        (
            {"train.steps": 10, "train.schedule": "wsd", "train.warmup_steps": 5, "train.decay_steps": 6},
            ("train.warmup_steps 5", "train.decay_steps 6", "train.steps 10"),
        ),
        ({"train.optimizer": "normuon", "model.n_layers": 0}, ("train.optimizer normuon", "model.n_layers is 0")),
        ({"train.batch_size": 8, "train.micro_batch_size": 3}, ("train.batch_size 8", "train.micro_batch_size 3")),
        ({"train.batch_size": 6, "mesh.data": 4}, ("6", "data=4")),
        ({"compute.attention": "cudnn"}, ("compute.attention cudnn", "model.compute_dtype float32")),
        (
            {"compute.attention": "cudnn", "model.compute_dtype": "bfloat16", "model.attention_soft_cap": 50.0},
            ("compute.attention cudnn", "model.attention_soft_cap 50"),
        ),
        ({"compute.attention": "splash", "model.dropout": 0.1}, ("compute.attention splash", "model.dropout is 0.1")),
        ({"compute.attention": "splash", "mesh.data": 2}, ("compute.attention splash", "mesh.data is 2")),
        (
            {"compute.matmul_precision": "tensorfloat32", "model.compute_dtype": "bfloat16"},
            ("compute.matmul_precision tensorfloat32", "model.compute_dtype is bfloat16"),
        ),
    ],
)
def test_contradictions_name_both_sides(changes, both):
    with pytest.raises(RungError) as error:
        c.resolve(c.override(Config(), changes))
    assert all(side in error.value.problem for side in both)
    assert error.value.hint


def test_what_only_looks_like_a_contradiction_passes():
    for changes in (
        {"model.d_model": 100, "model.n_heads": 3, "model.d_head": 32},
        {"train.steps": 10, "train.warmup_steps": 10},
        {"model.positions": "rope", "model.n_positions": 8},  # not a table: RoPE has none
        {"train.batch_size": 8, "mesh.data": 4},
        {"compute.attention": "splash", "model.dropout": 0.1, "model.dropout_sites": ["residual"]},
    ):
        c.resolve(c.override(Config(), changes))


def test_resolving_fills_what_the_config_determines():
    model = c.resolve(c.override(Config(), {"model.d_model": 96, "model.n_heads": 6, "model.context_length": 33})).model
    assert (model.d_head, model.n_kv_heads, model.d_ff, model.n_positions) == (16, 6, 384, 33)


def test_files_that_are_none(tmp_path):
    with pytest.raises(RungError, match="no config file"):
        c.load(tmp_path / "none.toml")
    for name, content in (("bad.toml", b"[model\n"), ("bytes.toml", b"name = '\xff'")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RungError, match=f"{name} is not TOML"):
            c.load(tmp_path / name)
    (tmp_path / "unknown.toml").write_text("[model]\nd_modle = 3\n")
    with pytest.raises(RungError, match=r"unknown\.toml: unknown setting 'model\.d_modle'"):
        c.load(tmp_path / "unknown.toml")
    (tmp_path / "scalar.toml").write_text("model = 3\n")
    with pytest.raises(RungError, match="unknown setting 'model'"):
        c.load(tmp_path / "scalar.toml")


def test_the_tree_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.steps = 3
