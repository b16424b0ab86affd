"""``rung tokens import``, ``rung tokens show``, ``rung corpus show`` and mixtures, as they are typed."""

from __future__ import annotations

import json

import numpy as np
import pytest


@pytest.fixture
def store(rung, text, bpe, here):
    rung("tokens", "build", text, "--tokenizer", bpe, "--out", "store")
    return here / "store"


def test_ids_are_imported_and_trained_on(rung, tiny, bpe, here):
    ids = np.random.default_rng(0).integers(0, 300, 4000).astype(np.uint16)
    ids.tofile(here / "train.bin")
    done = rung("tokens", "import", "train.bin", "--tokenizer", bpe, "--json")
    assert done.json["store"] == "tokens/train"
    assert done.json["train"]["tokens"] + done.json["validation"]["tokens"] == 4000
    assert rung("train", "tokens/train", *tiny, "--run", "one", "--steps", 1, "--json").json["validation_loss"] > 0
    bare = rung("train", "train.bin", "--tokenizer", bpe, *tiny, "--run", "two", "--steps", 1, "--json")
    assert bare.json["validation_loss"] > 0
    shown = rung(
        "tokens", "import", "train.bin", "--tokenizer", bpe, "--out", "v", "--verify", "--validation-fraction", 0
    )
    assert "4,000 tokens" in shown.text
    assert "validation" not in shown.text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("tokens import missing.bin --tokenizer BPE", "missing.bin is not there"),
        ("tokens import odd.bin --tokenizer BPE", "no whole number of uint16"),
        ("tokens import a.bin --tokenizer BPE --dtype uint8", "invalid choice"),
        ("tokens import wide.bin --tokenizer BPE", "every second uint16 is 0"),
        ("tokens import high.bin --tokenizer BPE", "token 7 has the token id 65535"),
        ("tokens import a.bin --tokenizer BPE --validation a.bin", "named twice"),
        ("tokens import a.bin --tokenizer BPE --validation b --validation-fraction 0.1", "both --validation and"),
        ("tokens import a.bin --tokenizer BPE --validation-fraction 0.9", "is 0.9"),
        ("tokens show a.bin", "no tokenizer is named"),
        ("tokens show nowhere", "no token store at nowhere"),
        ("tokens show a.bin --tokenizer BPE --rows 0", "--rows is 0"),
        ("tokens show a.bin --tokenizer BPE --html no/where.html", "cannot write no/where.html"),
        ("corpus show nowhere.txt", "no file or folder nowhere.txt"),
        ("corpus show a.txt --samples -1", "--samples is -1"),
        ("train a.bin b.bin --tokenizer BPE", "is a file of ids, and a mixture is of token stores"),
    ],
)
def test_mistakes_are_two_lines(rung, bpe, here, words, problem):
    for name in ("a.bin", "b.bin"):
        np.arange(1, 200, dtype=np.uint16).tofile(here / name)
    np.arange(1, 200, dtype=np.uint32).tofile(here / "wide.bin")
    (here / "odd.bin").write_bytes(b"\1\0\2")
    np.array([1, 2, 3, 4, 5, 6, 7, 65535], np.uint16).tofile(here / "high.bin")
    (here / "a.txt").write_text("text")
    done = rung(*(bpe if word == "BPE" else word for word in words.split()))
    assert done.status == 2
    lines = done.err.strip().splitlines()
    assert len(lines) == 2, done.err
    assert problem in lines[0]
    assert lines[1].startswith("hint: ")


def test_a_mixture_as_it_is_typed(rung, text, tiny, bpe, store, here):
    (here / "other.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely. " * 40)
    rung("tokens", "build", "other.txt", "--tokenizer", bpe, "--out", "other")
    flags = ("--data.weights", 3, "--data.weights", 1, "--run", "mixed", "--steps", 4, "--json")
    done = rung("train", "store", "other", *tiny, *flags)
    assert "mixture: store, 75.00% of the rows" in done.err
    assert "sources at step 4:" in done.err
    told = [json.loads(line) for line in (here / "mixed/metrics.jsonl").read_text().splitlines()]
    assert [line["losses"].keys() for line in told if line["event"] == "mixture"][-1] == {"store", "other"}
    shown = rung("tokens", "show", "mixed", "--json").json
    assert {window["source"] for window in shown["windows"]} == {"store", "other"}
    assert shown["context_length"] == 32


def test_a_look_at_text(rung, text, here):
    done = rung("corpus", "show", text, "--samples", 1, "--html", "look.html")
    assert "Latin" in done.text
    assert "page: look.html" in done.text
    assert (here / "look.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    told = rung("corpus", "show", text, "--json").json
    assert told["documents"] == 1
    assert told["bytes"] == len(text.read_bytes())
    assert told["characters"] == len(text.read_text(encoding="utf-8"))


def test_a_look_at_tokens(rung, store, here):
    done = rung("tokens", "show", "store", "--html", "look.html", "--rows", 2, "--context-length", 20)
    assert "most frequent" in done.text
    assert "step 1, row 1" in done.text
    assert (here / "look.html").exists()
    told = rung("tokens", "show", "store", "--json", "--rows", 1, "--context-length", 20).json
    (window,) = told["windows"]
    assert window["tokens"][1:] == window["targets"][:-1] or -1 in window["targets"]
    assert told["splits"]["train"]["looked_at"] == told["splits"]["train"]["tokens"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("corpus clean corpus --out corpus/clean", "corpus/clean is in corpus, which it is made of"),
        ("corpus clean corpus --validation held --out held --overwrite", "held would be made of itself"),
        ("corpus files corpus --out corpus/files", "corpus/files is in corpus, which it is made of"),
        ("corpus files corpus/documents-00000.jsonl --out corpus --overwrite", "corpus, which would be replaced"),
        ("tokens build corpus --tokenizer BPE --out corpus/store", "corpus/store is in corpus, which it is made of"),
        ("tokens import SHARD --tokenizer BPE --out store --overwrite", "is in store, which would be replaced"),
        ("train store --run store/run", "store/run is in store, which it trains on"),
    ],
)
def test_nothing_is_made_within_its_own_source_nor_in_place_of_it(rung, text, bpe, store, here, words, problem):
    for name in ("corpus", "held"):
        assert rung("corpus", "files", text, "--out", name).status == 0
    (shard,) = (path.relative_to(here) for path in store.glob("train-*"))
    before = {path: path.is_file() and path.read_bytes() for path in here.rglob("*")}
    done = rung(*({"BPE": bpe, "SHARD": shard}.get(word, word) for word in words.split()))
    assert (done.status, len(done.err.splitlines())) == (2, 2), done.err
    assert problem in done.err
    assert {path: path.is_file() and path.read_bytes() for path in here.rglob("*")} == before


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("corpus show a.txt --html a.txt", "a.txt is what is looked at"),
        ("corpus show a.txt --html mine.html", "mine.html is not a page of Rung's, so it is not overwritten"),
        ("corpus show corpus --html corpus/corpus.json", "corpus/corpus.json is in corpus, what is looked at"),
        ("tokens show store --html a.txt", "a.txt is not a page of Rung's, so it is not overwritten"),
        ("tokens show store --html store/new.html", "store/new.html is in store, what is looked at"),
        ("tokenizer train a.txt --out a.txt --overwrite", "a.txt is no tokenizer, so it is not overwritten"),
    ],
)
def test_a_file_is_replaced_by_its_own_kind_alone(rung, text, store, here, words, problem):
    (here / "a.txt").write_bytes(text.read_bytes())
    (here / "mine.html").write_text("<!DOCTYPE html><title>mine</title>")
    assert rung("corpus", "files", text, "--out", "corpus").status == 0
    before = {path: path.is_file() and path.read_bytes() for path in here.rglob("*")}
    done = rung(*words.split())
    assert (done.status, len(done.err.splitlines())) == (2, 2), done.err
    assert done.err.startswith(f"rung: {problem}\n")
    assert {path: path.is_file() and path.read_bytes() for path in here.rglob("*")} == before


def test_a_page_and_a_tokenizer_are_replaced(rung, text, here):
    for _ in range(2):
        assert rung("corpus", "show", text, "--html", "page.html").status == 0
        words = ("tokenizer", "train", text, "--vocab-size", 260, "--out", "t.json", "--overwrite")
        assert rung(*words).status == 0


def test_a_store_is_shown_with_the_tokenizer_that_made_it_and_no_other(rung, bpe, store, here, text):
    rung("tokenizer", "train", text, "--vocab-size", 260, "--out", "other.json")
    done = rung("tokens", "show", "store", "--tokenizer", "other.json")
    assert (done.status, done.err.splitlines()[1]) == (2, "hint: leave --tokenizer out: it is for a bare file of ids")
    (here / "store/tokenizer.json").write_bytes((here / "other.json").read_bytes())
    done = rung("tokens", "show", "store")
    assert (done.status, len(done.err.splitlines())) == (2, 2)
    assert done.err.startswith("rung: store/tokenizer.json is not the tokenizer of the tokens in store\n")


def test_an_id_that_a_damaged_store_has_is_named(rung, store, here):
    (shard,) = (here / "store").glob("train-*")
    data = shard.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")  # of the tensors
    said = json.loads(data[8:begin])["tokens"]["data_offsets"][0]
    shard.write_bytes(data[: begin + said] + b"\xff\xff" + data[begin + said + 2 :])
    done = rung("tokens", "show", "store")
    assert (done.status, len(done.err.splitlines())) == (2, 2), done.err
    assert f"{shard.relative_to(here)}: token 0 has the token id 65535" in done.err
    assert done.err.endswith("hint: the store was tampered with; build it again\n")


def test_one_of_a_thing_is_said_as_one(rung, bpe, here):
    (here / "one.jsonl").write_text('{"text": "A text of some words, which stand in a row."}\n{"text": ""}\n')
    made = rung("corpus", "files", "one.jsonl", "--out", "corpus")
    assert "corpus: 1 document, 43 bytes, 43 characters" in made.text
    assert "left out: 1 empty document\n" in made.err
    built = rung("tokens", "build", "one.jsonl", "--tokenizer", bpe, "--out", "tx", "--validation-fraction", 0)
    assert " 1 document " in built.text
    assert built.text.endswith("next: rung train tx\n")
    assert "left out: 1 empty document\n" in built.err
    assert (here / "tx/dataset.json").read_bytes().endswith(b"}\n")
    assert rung("corpus", "clean", "corpus").err.startswith("rung: missing --out\n")


def test_a_mistake_names_the_flag_as_it_was_typed(rung, here):
    for flag in ("--format", "--data.format"):
        done = rung("corpus", "files", "x", "--out", "y", flag, "csv")
        assert done.err.startswith(f"rung: {flag} is 'csv'\n")
    assert rung("corpus", "files", "x", "--out", "y", "--data.format=csv").err.startswith(
        "rung: --data.format is 'csv'\n"
    )


def test_the_tiles_of_a_page_count_the_same_splits(rung, store):
    rung("tokens", "show", "store", "--html", "page.html")
    found = json.loads(rung("tokens", "show", "store", "--json").out)["splits"]
    page = (store.parent / "page.html").read_text(encoding="utf-8")
    tokens, documents = (sum(split[name] for split in found.values()) for name in ("tokens", "documents"))
    assert f'<span class="detail">{tokens:,}, train and validation</span>' in page
    tile = (
        f'<dt>Documents</dt><dd><span class="value">{documents}</span><span class="detail">train and validation</span>'
    )
    assert tile in page
