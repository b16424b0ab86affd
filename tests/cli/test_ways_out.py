"""What a command says of the way on or out: commands that can be pasted, the flags as they are typed, what is so."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import rung as package
from rung.run.prepare import CONFIG, ENVIRONMENT

LINE = "It was the best of times, it was the worst of times, and the rain fell in torrents all night.\n"


def refused(done, problem: str, hint: str) -> None:
    lines = done.err.splitlines()
    assert (done.status, len(lines)) == (2, 2), done.err
    assert problem in lines[0]
    assert hint in lines[1]


# Commands to go on with


def test_the_next_command_can_be_pasted(rung, bpe, here):
    (here / "a text.txt").write_text(LINE * 20)
    made = rung("corpus", "files", "a text.txt", "--out", "it's a corpus")
    assert shlex.split(made.text.splitlines()[-1]) == ["next:", "rung", "train", "it's a corpus"]
    built = rung("tokens", "build", "it's a corpus", "--tokenizer", bpe, "--out", "to kens")
    assert shlex.split(built.text.splitlines()[-1]) == ["next:", "rung", "train", "to kens"]
    (here / "a run").mkdir()
    for name in (CONFIG, ENVIRONMENT):
        (here / "a run" / name).touch()
    refused(rung("train", "a text.txt", "--run", "a run"), "a run exists already", "`rung resume 'a run'`")


def test_no_printed_command_names_a_place_unquoted():
    places = re.compile(r"\brung [a-z]+ (?:--?[a-z-]+ |[a-z.]+ )*\{(?!shlex)[^}]*(?:path|run|out|source|file)\b")
    for file in Path(package.__file__).parent.rglob("*.py"):
        found = places.search(file.read_text(encoding="utf-8"))
        assert not found, f"{file.name}: {found[0]}"


# Mistakes, by the flags as they were typed


@pytest.fixture
def corpus(rung, here) -> Path:
    (here / "text.txt").write_text(LINE * 200)
    assert rung("corpus", "files", "text.txt", "--out", "corpus").status == 0
    return here / "corpus"


CLEANING = [
    ("--held-out 1.5", "rung: --held-out is 1.5", "at most 0.5"),
    ("--min-letters -1", "rung: --min-letters is -1", "at least 0"),
    ("--min-words 100 --max-words 50", "--min-words 100 is over --max-words 50", "raise --max-words"),
    ("--max-words 40", "--min-words 50 is over --max-words 40", "50 where it is not given"),
    ("--remove-contaminated", "--remove-contaminated is given, and nothing to look for", "--evaluation"),
    ("--skip contamination", "takes nothing unless it is asked to", "leave --remove-contaminated out"),
    ("--skip repetitions", "--skip is 'repetitions'", "did you mean repetition?"),
]


@pytest.mark.parametrize(("words", "problem", "hint"), CLEANING, ids=[words for words, _, _ in CLEANING])
def test_cleaning_is_refused_before_the_work(rung, corpus, here, words, problem, hint):
    before = sorted(here.rglob("*"))
    refused(rung("corpus", "clean", "corpus", "--out", "clean", *words.split()), problem, hint)
    assert sorted(here.rglob("*")) == before


def test_length_may_be_anything_where_it_is_left_out(rung, corpus):
    done = rung("corpus", "clean", "corpus", "--report-only", "--workers", 1, "--skip", "length", "--max-words", 1)
    assert done.status == 0, done.err


OF_TOKENS = [
    ("tokens build TEXT --out o --validation-fraction 0.9", "rung: --validation-fraction is 0.9", "at most 0.5"),
    ("tokens build TEXT --out o --data.validation-fraction 2", "rung: --data.validation-fraction is 2.0", ""),
    ("tokens import a.bin --validation-fraction 0.9", "rung: --validation-fraction is 0.9", "at most 0.5"),
    ("tokens build TEXT --out o --validation d --validation-fraction 0.3", "both --validation and", "keep one"),
    ("train TEXT --validation d --data.validation-fraction 0.3", "both --validation and --data.validation-f", "keep"),
    ("tokens import llm.bin --dtype uint16", "llm.bin says itself of what type", "leave --dtype out"),
    ("tokens import a.bin --verify --engine ray", "unknown flag --engine", ""),
]


@pytest.mark.parametrize(("words", "problem", "hint"), OF_TOKENS, ids=[words for words, _, _ in OF_TOKENS])
def test_no_flag_of_tokens_is_ignored(rung, bpe, text, here, words, problem, hint):
    ids = np.arange(1, 200, dtype=np.uint16)
    ids.tofile(here / "a.bin")
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    (here / "llm.bin").write_bytes(header.tobytes() + ids.tobytes())
    words = [str(text) if word == "TEXT" else word for word in words.split()]
    refused(rung(*words, "--tokenizer", bpe), problem, hint)


# What is so


def test_a_token_store_is_no_text(rung, text, bpe, here):
    assert rung("tokens", "build", text, "--tokenizer", bpe, "--out", "a store").status == 0
    for words in (["tokens", "build"], ["tokenizer", "train"], ["corpus", "files"]):
        flags = ["--tokenizer", bpe] if words[0] == "tokens" else []
        done = rung(*words, "a store", "--out", "out", *flags)
        refused(done, "a store is a token store, and no text", "`rung train 'a store'` takes it")
    refused(rung("corpus", "show", "a store"), "a store is a token store, and no text", "")


def test_a_folder_of_text_is_no_token_store(rung, here):
    (here / "documents").mkdir()
    (here / "documents/thesis.txt").write_text(LINE)
    refused(rung("tokens", "show", "documents"), "no token store at documents", "name a store")


def test_rows_that_are_none_are_not_said_to_be_a_document(rung, here):
    table = pytest.importorskip("pyarrow").table({"text": []})
    importlib.import_module("pyarrow.parquet").write_table(table, here / "none.parquet")
    refused(rung("corpus", "files", "none.parquet", "--out", "out"), "no text in none.parquet", "text in it")


@pytest.mark.parametrize("name", ["works", "works/one.txt"])
def test_raw_files_are_no_data_set(rung, here, name):
    (here / "works").mkdir()
    (here / "works/one.txt").write_bytes("国境の長いトンネル\n".encode("cp932"))
    refused(rung("corpus", "aozora", name, "--hub", "--out", "out"), f"{name} is no data set", "leave --hub out")
