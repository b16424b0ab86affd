"""A user's mistake: one line that names it, one line with the way out, status 2, and nothing left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rung.cli.flags import parse_mesh, typed
from rung.errors import RungError

JAPANESE = "国境の長いトンネルを抜けると雪国であった。夜の底が白くなった。信号所に汽車が止まった。\n" * 60


@pytest.fixture
def files(here) -> Path:
    """A folder of files that are not what they should be."""
    (here / "novel.txt").write_text("It was a dark and stormy night; the rain fell in torrents.\n" * 30)
    (here / "empty.txt").write_bytes(b"")
    (here / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 4)
    (here / "zeros.dat").write_bytes(b"\0" * 2000)
    (here / "shift-jis.txt").write_bytes(JAPANESE.encode("cp932"))
    (here / "a-folder").mkdir()
    (here / "config.toml").write_text("[model]\nd_modle = 3\n")
    (here / "nonsense.toml").write_text("[[[")
    (here / "tokens.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (here / "tokenizer.json").write_text("{}")
    return here


TRAIN = [
    ("no-such.txt", "no file or folder no-such.txt", ""),
    ("nowel.txt", "no file or folder nowel.txt", "did you mean novel.txt?"),
    ("empty.txt", "empty.txt is empty", "text"),
    ("a-folder", "no files in folder a-folder", "text files"),
    ("*.md", "no file matches *.md", "pattern"),
    ("picture.png", "picture.png: byte 0x89 at offset 0 is not utf-8", "PNG"),
    ("zeros.dat", "zeros.dat looks binary", "--encoding"),
    ("shift-jis.txt", "shift-jis.txt: byte 0x8d at offset 0 is not utf-8", "--encoding cp932"),
    ("novel.txt --encoding klingon", "unknown encoding 'klingon'", ""),
    ("novel.txt --preset demoo", "unknown preset 'demoo'", "did you mean demo?"),
    ("novel.txt --stepz 5", "unknown flag --stepz", "did you mean --steps?"),
    ("novel.txt --model.d-modle 5", "unknown flag --model.d-modle", "did you mean --model.d-model?"),
    ("novel.txt --config config.toml", "config.toml: unknown setting 'model.d_modle'", "did you mean model.d_model?"),
    ("novel.txt --config nonsense.toml", "nonsense.toml is not TOML", "formats.md"),
    ("novel.txt --config none.toml", "no config file none.toml", "preset"),
    ("novel.txt --config config.toml --preset demo", "both --preset and --config", "keep one"),
    ("novel.txt --steps 10 --tokens 100", "given more than once: train.steps 10 and train.tokens 100", "keep one"),
    ("novel.txt --steps ten", "--steps is 'ten', not a whole number", "--steps 100"),
    ("novel.txt --steps 1.5", "--steps is '1.5', not a whole number", ""),
    ("novel.txt --steps 1e400", "--steps is '1e400', not a whole number", ""),
    ("novel.txt --steps -1", "--steps is -1", "at least 0"),
    ("novel.txt --steps 0", "the run has no length", "--steps"),
    ("novel.txt --steps", "expected one argument", "--help"),
    ("novel.txt --learning-rate fast", "--learning-rate is 'fast', not a number", ""),
    ("novel.txt --learning-rate nan", "--learning-rate is nan", ""),
    ("novel.txt --model.tied perhaps", "no file or folder perhaps", ""),
    ("novel.txt --model.tied=perhaps", "--model.tied is 'perhaps', not true or false", "true"),
    ("novel.txt --train.schedule cosin", "train.schedule is 'cosin'", "did you mean cosine?"),
    ("novel.txt --train.warmup-steps 30 --steps 20", "train.warmup_steps 30 is over train.steps 20", "shorten"),
    ("novel.txt --model.d-model 30 --model.n-heads 4", "model.d_model 30 is not divisible by model.n_heads 4", "32"),
    ("novel.txt --batch-size 6 --train.micro-batch-size 4", "train.batch_size 6 is not divisible", "micro-batch"),
    ("novel.txt --mesh data=3 --batch-size 4", "do not split over mesh data=3", "multiple"),
    ("novel.txt --mesh data=8 --batch-size 8", "mesh data=8 needs 8 devices", "XLA_FLAGS"),
    ("novel.txt --mesh date=2", "unknown axis 'date'", "did you mean data?"),
    ("novel.txt --mesh data", "--mesh data is '', not a whole number", ""),
    ("novel.txt --vocab-size 100", "tokenizer.vocab_size 100 is too small", "257"),
    ("novel.txt --tokenizer none.json", "no tokenizer file none.json", ""),
    ("novel.txt --tokenizer tokenizer.json", "tokenizer.json is not a tokenizer.json", ""),
    ("novel.txt --profile often", "--profile is 'often', not FIRST:LAST", "--profile 10:20"),
    ("novel.txt --profile 20:10", "--profile is '20:10'", ""),
    ("novel.txt --profile 10:20 --steps 5 --tokenizer.kind byte", "steps 10 to 20 are to be profiled", ""),
    ("novel.txt --run novel.txt", "novel.txt exists already", "--run"),
    ("novel.txt --run novel.txt/run", "cannot make novel.txt/run", "--run"),
    ("novel.txt --run a-folder/.. --overwrite", "is not a run, so it is not overwritten", "--run"),
    ("novel.txt novel.txt", "novel.txt is named twice", "once"),
    ("tokens.safetensors --tokenizer tokenizer.json", "tokenizer.json is not a tokenizer.json", ""),
    ("tokens.safetensors", "no tokenizer is named", "--tokenizer FILE"),
    ("", "nothing to train on", "run to start from"),
]


@pytest.mark.parametrize(("words", "problem", "hint"), TRAIN, ids=[words for words, _, _ in TRAIN])
def test_train(rung, files, words, problem, hint):
    before = sorted(files.rglob("*"))
    done = rung("train", *words.split())
    refused(done, problem, hint)
    assert sorted(files.rglob("*")) == before


def refused(done, problem: str, hint: str) -> None:
    *_, told, way_out = done.err.splitlines()
    assert done.status == 2
    assert done.out == b""
    assert told.startswith("rung: ")
    assert problem in told
    assert way_out.startswith("hint: ")
    assert hint in way_out
    assert "Traceback" not in done.err


OTHERS = [
    ("tran novel.txt", "unknown command 'tran'", "did you mean train?"),
    ("generate RUN x --temperature -1", "temperature is -1", "at least 0"),
    ("generate RUN x --temperature hot", "--temperature is 'hot', not a number", ""),
    ("generate RUN x --top-p 0", "--top-p is 0", "over 0 and at most 1"),
    ("generate RUN x --top-p 1.5", "--top-p is 1.5", ""),
    ("generate RUN x --top-k -1", "--top-k is -1", ""),
    ("generate RUN x --samples 0", "samples is 0", ""),
    ("generate RUN x --stop=", "stop has an empty string", ""),
    ("generate RUN x --show-probabilities 0", "--show-probabilities is 0", "at least 1"),
    ("generate RUN x y", "too many arguments: y", "--help"),
    ("generate RUN -- x --seed 1", "too many arguments: --seed 1", "before it"),
    ("generate nowhere x", "no run folder nowhere", ""),
    ("generate a-folder x", "a-folder is not a run", "rung train"),
    ("generate", "missing RUN", "--help"),
    ("evaluate RUN --text empty.txt", "empty.txt is empty", ""),
    ("evaluate RUN --text shift-jis.txt", "shift-jis.txt: byte 0x8d", ""),
    ("evaluate RUN --split test", "no test split", "train, validation"),
    ("evaluate nowhere", "no run folder nowhere", ""),
    ("resume nowhere", "no run folder nowhere", ""),
    ("resume RUN --steps many", "--steps is 'many', not a whole number", ""),
    ("resume RUN --steps 2", "has done 6 steps of 6, and 2 are asked", "more"),
    ("demo --steps many", "--steps is 'many'", ""),
    ("demo --steps 0", "the run has no length", ""),
    ("tokenizer trian", "unknown action 'trian' of rung tokenizer", "did you mean train?"),
    ("tokenizer train novel.txt", "missing --out", ""),
    ("tokenizer train novel.txt --out config.toml", "config.toml exists", "--overwrite"),
    ("tokenizer train novel.txt --out a-folder --overwrite", "a-folder exists", "another"),
    ("tokenizer train novel.txt --out /proc/t.json --kind byte", "cannot write /proc/t.json", "--out"),
    ("tokenizer train novel.txt --out t.json --vocab-size 10", "tokenizer.vocab_size 10 is too small", "byte"),
    ("tokenizer train picture.png --out t.json", "picture.png: byte 0x89", "PNG"),
    ("tokenizer encode", "missing --tokenizer", ""),
    ("tokenizer decode --tokenizer RUN", "'x' is no token id", "separated by spaces"),
    ("tokenizer show x --tokenizer none", "no tokenizer file none", ""),
    ("tokens buidl", "unknown action 'buidl' of rung tokens", "did you mean build?"),
    ("tokens build novel.txt --tokenizer RUN --out a-folder", "a-folder exists", "--overwrite"),
    ("tokens build novel.txt --tokenizer RUN --out a-folder --overwrite", "is not a token store", "--out"),
    ("tokens build novel.txt --tokenizer RUN --out t --validation-fraction 0.9", "is 0.9", "at most 0.5"),
    ("config --preset demo --model.n-heads 5", "not divisible by model.n_heads 5", ""),
    ("config extra", "too many arguments: extra", ""),
]


@pytest.mark.parametrize(("words", "problem", "hint"), OTHERS, ids=[words for words, _, _ in OTHERS])
def test_other_commands(rung, files, trained, words, problem, hint):
    before = sorted(files.rglob("*"))
    refused(rung(*(word.replace("RUN", trained[0]) for word in words.split()), stdin=b"x"), problem, hint)
    assert sorted(files.rglob("*")) == before


@pytest.mark.parametrize("words", ["tokenizer encode --tokenizer RUN", "generate RUN -"])
def test_standard_input_that_is_not_text(rung, trained, words):
    done = rung(*(word.replace("RUN", trained[0]) for word in words.split()), stdin=b"ab\xffc")
    refused(done, "standard input: byte 0xff at offset 2 is not UTF-8", "iconv")


def test_a_damaged_run(rung, trained, tmp_path):
    run = Path(shutil.copytree(trained[0], tmp_path / "run"))
    config = (run / "config.toml").read_text(encoding="utf-8")
    (run / "model.safetensors").write_bytes(b"damaged")
    refused(rung("generate", run, "x"), "model.safetensors is damaged", "rung resume")
    (run / "config.toml").write_text(config.replace("n_heads = 2", 'n_heads = "two"'), encoding="utf-8")
    refused(rung("generate", run, "x"), "model.n_heads is 'two', not a whole number", "")
    (run / "config.toml").write_text("nonsense", encoding="utf-8")
    refused(rung("evaluate", run), "is not TOML", "")
    (run / "config.toml").write_text(config, encoding="utf-8")
    shutil.rmtree(run / "checkpoints")
    refused(rung("resume", run), "has no whole checkpoint", "--overwrite")


@pytest.mark.slow
def test_text_that_is_odd_but_text_trains(rung, tiny, here):
    flags = (*tiny, "--steps", 1, "--sample.max-tokens", 0, "--json")
    (here / "small.txt").write_bytes(b"It is a truth universally acknowledged, " * 5)  # 200 bytes
    small = rung("train", "small.txt", *flags)
    assert small.status == 0
    assert "fewer than the 512 asked" in small.err
    (here / "tiny.txt").write_bytes(b"It is a truth univer")  # 20 bytes
    twenty = rung("train", "tiny.txt", *flags)
    assert twenty.status == 0
    assert "context shortened to" in twenty.err
    (here / "sj.txt").write_bytes(JAPANESE.encode("cp932"))
    (here / "utf16.txt").write_bytes(JAPANESE.encode("utf-16"))
    one, two = rung("train", "sj.txt", *flags, "--encoding", "shift_jis"), rung("train", "utf16.txt", *flags)
    assert one.json["validation_loss"] == two.json["validation_loss"]


# Values


@pytest.mark.parametrize(("text", "value"), [("100", 100), ("1e3", 1000), ("3_000", 3000), ("1.5e3", 1500), ("+5", 5)])
def test_whole_numbers_as_people_write_them(text, value):
    assert typed("--steps", int, text) == value


@pytest.mark.parametrize("text", ["", "1__0", "0x10", "1.5", "1e-3", "inf", "١e", "1 000", "1,000"])
def test_what_is_no_whole_number(text):
    with pytest.raises(RungError, match="not a whole number"):
        typed("--steps", int, text)


def test_a_mesh_is_axes_and_sizes():
    assert parse_mesh("data=4") == {"mesh.data": 4}
    with pytest.raises(RungError, match="not a whole number"):
        parse_mesh("data=four")


def test_with_json_a_failure_is_an_object_too(rung, here):
    done = rung("train", "no-such.txt", "--json")
    assert done.status == 2
    assert done.json == {
        "error": done.err.splitlines()[0].removeprefix("rung: "),
        "hint": done.json["hint"],
        "status": 2,
    }
    assert f"hint: {done.json['hint']}" in done.err
