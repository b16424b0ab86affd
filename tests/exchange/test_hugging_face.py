"""Import of GPT-2 and Llama weights, against transformers' own logits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from parity import make_models
from rung.errors import RungError
from rung.exchange import hugging_face
from rung.model import Decoder
from rung.model.weights import flatten, parameter_count

pytestmark = pytest.mark.parity

GPT2 = (hugging_face.config_from_gpt2, hugging_face.from_gpt2)
LLAMA = (hugging_face.config_from_llama, hugging_face.from_llama)


@pytest.fixture(scope="module")
def gpt2():
    return make_models.gpt2(n_layers=2)


@pytest.fixture(scope="module")
def llama():
    return make_models.llama(n_layers=2)


@pytest.mark.parametrize(
    ("make", "read", "options"),
    [
        (make_models.gpt2, GPT2, {"tied": True}),
        (make_models.gpt2, GPT2, {"tied": False, "seed": 1}),
        (make_models.llama, LLAMA, {"tied": False, "n_kv_heads": 2}),
        (make_models.llama, LLAMA, {"tied": True, "n_kv_heads": 4, "rope_base": 500.0, "seed": 1}),
        (make_models.llama, LLAMA, {"tied": False, "n_kv_heads": 1, "seed": 2}),
    ],
)
def test_logits_are_those_of_transformers(make, read, options):
    reference = make(n_layers=2, **options)
    read_config, read_weights = read
    model = Decoder(read_config(reference.config))
    weights = read_weights(reference.weights, model.config)
    tokens_BT = np.asarray(reference.tokens_BT, np.int32)
    logits_BTV = model.unembed(weights, model.hidden(weights, tokens_BT))
    np.testing.assert_allclose(logits_BTV, reference.logits_BTV, atol=1e-4, rtol=0)
    assert parameter_count(model.weights()) == reference.parameters


def test_safetensors_file_without_the_prefix(gpt2, tmp_path):
    # The file of "gpt2" on the Hub has the names of GPT2Model, no output layer, and the masks of older versions.
    from safetensors.numpy import save_file

    state = {name.removeprefix("transformer."): array for name, array in gpt2.weights.items()}
    del state["lm_head.weight"]
    state["h.0.attn.bias"] = np.tri(32, dtype=np.float32)[None, None]
    save_file(state, tmp_path / "model.safetensors")
    config = hugging_face.config_from_gpt2(gpt2.config)
    ours = flatten(hugging_face.from_gpt2(hugging_face.read_state(tmp_path / "model.safetensors"), config))
    direct = flatten(hugging_face.from_gpt2(gpt2.weights, config))
    assert ours.keys() == direct.keys()
    assert all(np.array_equal(ours[name], direct[name]) for name in ours)


def test_every_missing_array_is_named(gpt2, llama):
    for reference, (read_config, read) in ((gpt2, GPT2), (llama, LLAMA)):
        config = read_config(reference.config)
        for name in reference.weights.keys() - ({"lm_head.weight"} if config.tied else set()):
            rest = {other: array for other, array in reference.weights.items() if other != name}
            with pytest.raises(RungError, match=name.removeprefix("transformer.").removeprefix("model.")):
                read(rest, config)


def test_every_array_of_another_shape_is_named(gpt2, llama):
    for reference, (read_config, read) in ((gpt2, GPT2), (llama, LLAMA)):
        config = read_config(reference.config)
        for name, array in reference.weights.items():
            wrong = reference.weights | {name: np.concatenate([array, array])}
            with pytest.raises(RungError, match=name.removeprefix("transformer.").removeprefix("model.")):
                read(wrong, config)


def test_arrays_without_a_place_are_named(gpt2, llama):
    for reference, (read_config, read) in ((gpt2, GPT2), (llama, LLAMA)):
        config = read_config(reference.config)
        with pytest.raises(RungError, match="extra_adapter"):
            read(reference.weights | {"extra_adapter": np.zeros(3, np.float32)}, config)
        with pytest.raises(RungError, match=r"\.1\."):
            read(reference.weights, dataclasses.replace(config, n_layers=1))


def test_config_that_asks_for_other_parts(gpt2):
    config = hugging_face.config_from_gpt2(gpt2.config)
    with pytest.raises(RungError, match=r"head\.bias"):
        hugging_face.from_gpt2(gpt2.weights, dataclasses.replace(config, head_bias=True))
    with pytest.raises(RungError, match="bias"):
        hugging_face.from_gpt2(gpt2.weights, dataclasses.replace(config, qkv_bias=False))


def test_tied_config_with_another_output_layer(gpt2):
    config = hugging_face.config_from_gpt2(gpt2.config)
    other = gpt2.weights | {"lm_head.weight": gpt2.weights["lm_head.weight"] + 1}
    with pytest.raises(RungError, match=r"lm_head\.weight differs"):
        hugging_face.from_gpt2(other, config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"activation_function": "mish"}, "mish"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"resid_pdrop": 0.1, "embd_pdrop": 0.2}, "dropout rates"),
    ],
)
def test_variants_of_gpt2_are_refused(gpt2, change, named):
    with pytest.raises(RungError, match=named):
        hugging_face.config_from_gpt2(gpt2.config | change)


def test_variants_of_llama_are_refused(llama):
    scaled = llama.config | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}
    with pytest.raises(RungError, match="llama3"):
        hugging_face.config_from_llama(scaled)
    with pytest.raises(RungError, match="gelu"):
        hugging_face.config_from_llama(llama.config | {"hidden_act": "gelu"})


def test_dropout_rates_become_sites(gpt2):
    config = hugging_face.config_from_gpt2(gpt2.config | {"resid_pdrop": 0.1, "attn_pdrop": 0.1})
    assert config.dropout == 0.1
    assert set(config.dropout_sites) == {"residual", "attention"}


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(RungError, match=r"nothing\.safetensors"):
        hugging_face.read_state(tmp_path / "nothing.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(RungError, match=r"bad\.safetensors is damaged"):
        hugging_face.read_state(tmp_path / "bad.safetensors")
