"""Each command does what scripts rely on: its flags, its last line, its streams, its status."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rung.cli import COMMANDS
from rung.config import preset_names

RESULT = {"run", "steps", "tokens", "parameters", "train_loss", "seconds", "stopped"}
RESULT |= {"validation_loss", "perplexity", "bits_per_byte", "train_loss_steps", "report"}


# train, resume, evaluate


def test_train_ends_with_one_json_object_and_tells_the_rest_on_standard_error(trained):
    folder, done = trained
    assert len(done.out.splitlines()) == 1
    assert done.json.keys() == RESULT
    assert (done.json["run"], done.json["steps"], done.json["stopped"]) == (folder, 6, None)
    assert 0 < done.json["bits_per_byte"] < 8
    for said in ("chosen: preset", "model: ", "text: 1 document, 6,000 bytes", "step 6/6", "validation at step 6"):
        assert said in done.err
    assert "\x1b" not in done.err
    config = Path(folder, "config.toml").read_text(encoding="utf-8")
    for line in ("d_model = 32", "n_layers = 1", "n_heads = 2", "d_ff = 64", "context_length = 32", "batch_size = 4"):
        assert f"\n{line}\n" in config
    assert sorted(path.name for path in Path(folder, "checkpoints").iterdir()) == ["3", "6"]


def test_train_without_json_prints_for_people(rung, text, tiny, here):
    done = rung("train", text, *tiny, "--preset", "demo", "--steps", 2, "--seed", 5, "--mesh", "data=2")
    assert done.status == 0
    assert done.text.startswith("held-out: ")
    assert (here / "runs/demo/report.html").is_file()
    assert 'rung generate runs/demo "..."' in done.text
    config = (here / "runs/demo/config.toml").read_text(encoding="utf-8")
    assert "\nsteps = 2\n" in config
    assert "\nseed = 5\n" in config
    assert "\ndata = 2\n" in config


def test_resume_goes_on_and_gives_the_same_kind_of_result(rung, trained, tmp_path):
    run = shutil.copytree(trained[0], tmp_path / "run")
    assert rung("resume", run, "--json").json == {
        **trained[1].json,
        "run": str(run),
        "report": str(run / "report.html"),
    }
    assert rung("resume", run, "--steps", "8").status == 2
    longer = rung("resume", run, "--steps", "8", "--reschedule", "--json")
    assert (longer.status, longer.json["steps"]) == (0, 8)
    assert longer.json.keys() == trained[1].json.keys()


def test_evaluate(rung, trained, text):
    own = rung("evaluate", trained[0], "--json")
    assert own.json.keys() == {"loss", "perplexity", "bits_per_byte", "targets"}
    assert own.json["perplexity"] == pytest.approx(math.exp(own.json["loss"]))
    other = rung("evaluate", trained[0], "--text", text, "--json")
    assert other.json["targets"] > own.json["targets"]
    assert "bits per byte, over" in rung("evaluate", trained[0]).text


def test_a_token_store_and_a_bare_file_train(rung, text, tiny, bpe, here):
    built = rung("tokens", "build", text, "--tokenizer", bpe, "--out", "store", "--json")
    assert built.json["store"] == "store"
    assert built.json["train"]["tokens"] > built.json["validation"]["tokens"] > 0
    done = rung("train", "store", *tiny, "--run", "one", "--steps", 1, "--json")
    assert done.json["validation_loss"] > 0
    save_file({"tokens": np.arange(1, 300, dtype=np.uint16)}, here / "bare.safetensors")
    done = rung("train", "bare.safetensors", "--tokenizer", bpe, *tiny, "--run", "two", "--steps", 1, "--json")
    assert done.json["validation_loss"] > 0


# generate


def test_generate_prints_the_prompt_and_what_follows(rung, trained):
    flags = (trained[0], "--max-tokens", 6, "--ignore-end", "--temperature", 0)
    done = rung("generate", *flags, "Emma Woodhouse, ")
    assert done.text.startswith("Emma Woodhouse, ")
    assert done.text.endswith("\n")
    told = rung("generate", *flags, "Emma Woodhouse, ", "--json").json
    assert told["prompt"] + told["samples"][0]["text"] + "\n" == done.text
    assert (told["samples"][0]["tokens"], told["samples"][0]["reason"]) == (6, "length")
    assert rung("generate", *flags, "-", stdin=b"Emma Woodhouse, ").text == done.text


def test_generate_draws_by_seed_and_gives_several_samples(rung, trained):
    flags = ("generate", trained[0], "Emma", "--max-tokens", 12, "--ignore-end", "--top-k", 50, "--top-p", 0.9)
    one, again, other = (rung(*flags, "--samples", 2, "--seed", seed).text for seed in (1, 1, 2))
    assert one == again != other
    assert "--- 1 ---\nEmma" in one
    assert "--- 2 ---\nEmma" in one
    assert len(rung(*flags, "--samples", 2, "--json").json["samples"]) == 2


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        (["-hello"], "-hello"),
        (["- he said"], "- he said"),
        (["-5"], "-5"),
        (["-h5"], "-h5"),
        (["--", "--seed"], "--seed"),
        (["--", "-h"], "-h"),
        (["国境の長い"], "国境の長い"),
        ([], ""),
        ([""], ""),
        (["--ignore-end", "It"], "It"),
        (["--ignore-end", "true", "It"], "It"),
    ],
)
def test_a_prompt_may_be_any_text(rung, trained, words, prompt):
    done = rung("generate", trained[0], "--max-tokens", "0", "--json", *words)
    assert (done.status, done.json["prompt"]) == (0, prompt)


def test_a_value_may_begin_with_a_dash(rung, trained):
    done = rung("generate", trained[0], "--max-tokens", 9, "--stop", "-end", "--stop=--", "--json", "x")
    assert done.status == 0
    from rung.cli.flags import Parser

    parser = Parser("x", "x")
    parser.add_argument("--stop", action="append")
    assert parser.parse_args(["--stop", "-end", "--stop=--", "--stop=-"]).stop == ["-end", "--", "-"]


def test_show_probabilities(rung, trained):
    done = rung("generate", trained[0], "Emma", "--show-probabilities", 3, "--json")
    for position in done.json["positions"]:
        assert len(position["top"]) == 3
        probabilities = [one["probability"] for one in position["top"]]
        assert probabilities == sorted(probabilities, reverse=True)
    lines = rung("generate", trained[0], "--show-probabilities", "Emma").text.splitlines()
    assert lines[0].split() == ["token", "next", "probability", "rank", "most", "probable", "next", "tokens"]
    assert len(lines) == len(done.json["positions"]) + 1


# tokenizer


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_a_tokenizer_is_trained(rung, text, here, kind):
    flags = ("--kind", kind, "--out", "deep/t.json")
    done = rung("tokenizer", "train", text, "--vocab-size", 280, *flags, "--json")
    assert done.status == 0
    assert done.json["kind"] == kind
    ids = rung("tokenizer", "encode", "--tokenizer", "deep/t.json", stdin="Emma é\n".encode())
    assert max(map(int, ids.out.split())) < done.json["vocab_size"]
    assert rung("tokenizer", "train", text, "--tokenizer.vocab-size", 280, "--out", "long.json").status == 0


AWKWARD = ("a\n", "a", "\n\n", "", "a\r\nb\0c\u2028d\u0085", "国境\n<|endoftext|>", "\ufeffx", " x ")


@pytest.mark.parametrize("data", AWKWARD)
def test_decode_gives_back_the_bytes_that_were_encoded(rung, bpe, data):
    ids = rung("tokenizer", "encode", "--tokenizer", bpe, stdin=data.encode())
    assert rung("tokenizer", "decode", "--tokenizer", bpe, stdin=ids.out).out == data.encode()


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_decode_says_what_is_not_in_the_text(rung, bpe, flags):
    ids = rung("tokenizer", "encode", "--tokenizer", bpe, stdin="é\ufffd".encode()).out.split()
    words = ("tokenizer", "decode", "--tokenizer", bpe, *flags)
    assert rung(*words, stdin=b" ".join(ids)).err == ""
    lines = rung(*words, stdin=b" ".join([b"0", *ids[1:], b"0"])).err.splitlines()  # half of é is cut off
    assert lines[0] == "left out: 2 ids without text (<|endoftext|>)"
    assert lines[1].startswith("bytes that are no whole character, in 1 place: ")
    assert lines[1].endswith("shown as U+FFFD" if flags else "written as they are")


def test_tokenizer_show(rung, bpe, trained):
    done = rung("tokenizer", "show", "--tokenizer", bpe, "-the the", "--json")
    assert "".join(done.json["pieces"]) == "-the the"
    assert len(done.json["ids"]) == len(done.json["pieces"])
    assert "\x1b" not in rung("tokenizer", "show", "--tokenizer", trained[0], "the").text


# config and help


@pytest.mark.parametrize("name", preset_names())
def test_config_shows_every_preset_resolved(rung, name):
    done = rung("config", "--preset", name, "--json", "--tokenizer.vocab-size", 5000, "--model.vocab-size", 5000)
    assert done.json.keys() == {"parameters", "config"}
    assert done.json["config"]["model"]["d_head"] > 0
    assert done.json["parameters"] > 5000 * done.json["config"]["model"]["d_model"]


def test_config_counts_published_models(rung):
    assert rung("config", "--preset", "gpt2-small", "--json").json["parameters"] == 124_439_808
    assert rung("config", "--preset", "gpt2-small-untied", "--json").json["parameters"] == 163_009_536
    assert rung("config", "--preset", "nanolm-aozora", "--json").json["parameters"] == 89_456_768


def test_config_counts_for_the_vocabulary_there_will_be(rung, bpe):
    """An untied model without biases or learned positions: the vocabulary stands in two matrices."""
    flags = ("config", "--preset", "demo", "--model.d-model", 64, "--json")
    base = rung(*flags, "--vocab-size", 1000).json["parameters"]
    assert rung(*flags, "--tokenizer", bpe).json["parameters"] == base - 2 * 64 * (1000 - 300)
    assert rung(*flags, "--tokenizer.kind", "byte").json["parameters"] == base - 2 * 64 * (1000 - 257)
    character = rung(*flags, "--tokenizer.kind", "char", "--vocab-size", 1000)
    assert "128 parameters each" in character.err


def test_what_config_prints_is_a_config(rung, tmp_path):
    printed = rung("config", "--preset", "demo", "--model.d-model", "64").text
    (tmp_path / "mine.toml").write_text(printed, encoding="utf-8")
    again = rung("config", "--config", tmp_path / "mine.toml")
    assert again.text == printed


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"], *([name, "--help"] for name in COMMANDS)])
def test_help(rung, words):
    done = rung(*words)
    assert done.status == 0
    assert done.text.startswith("usage: rung")
    assert done.err == ""


def test_every_command_is_in_the_help_with_its_version(rung):
    assert [name for name in COMMANDS if f"\n  {name} " not in rung("--help").text] == []
    assert rung("--version").text.split()[0] == "rung"


def test_json_is_strict_and_in_one_line_whatever_is_in_it(capsys):
    from rung.cli.flags import print_result

    result = {"text": "a\u2028b\u0085\n国", "loss": math.nan, "list": [math.inf, {"x": -math.inf}], "n": 1}
    print_result(result, True, "")
    (line,) = capsys.readouterr().out.splitlines()

    def refuse(name):
        raise AssertionError(name)

    told = json.loads(line, parse_constant=refuse)
    assert told["text"] == "a\u2028b\u0085\n国"
    assert (told["loss"], told["not_finite"], told["list"]) == (None, {"loss": "nan"}, [None, {"x": None}])
