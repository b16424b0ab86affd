"""Ctrl-C and SIGTERM in preparation: what a command says, how it ends, and that the same command goes on."""

from __future__ import annotations

import json

import pytest

from rung.corpus import cleaning
from rung.corpus.writer import CorpusWriter
from rung.run import collecting
from rung.tokens import writing

GOES_ON = "hint: the same command goes on from where it was"
BEGINS_AGAIN = "hint: too little was done to keep: the same command begins again"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    lines = (json.dumps({"text": f"It was the {number}th of the lines that he wrote."}) for number in range(400))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def interrupted(patch, where, name: str, at: int, said: str = "") -> None:
    """Interrupt the n-th call of a method."""
    real, calls = getattr(where, name), iter(range(1, 10_000))

    def method(*given, **named):
        if next(calls) == at:
            raise KeyboardInterrupt(*([said] if said else []))
        return real(*given, **named)

    patch.setattr(where, name, method)


def tail(done) -> list[str]:
    return done.err.splitlines()[-2:]


@pytest.mark.parametrize("said", ["", "terminated"])
@pytest.mark.parametrize(("shard_bytes", "hint"), [(2000, GOES_ON), (1 << 20, BEGINS_AGAIN)])
def test_a_corpus_says_whether_it_goes_on(rung, tmp_path, text, monkeypatch, said, shard_bytes, hint):
    monkeypatch.setitem(collecting.collect_files.__kwdefaults__, "shard_bytes", shard_bytes)
    words = ("corpus", "files", text, "--out", tmp_path / "corpus")
    with monkeypatch.context() as patch:
        interrupted(patch, CorpusWriter, "write", 100, said)
        done = rung(*words)
    assert (done.status, tail(done)) == (3, [f"rung: {said or 'interrupted'}", hint])
    again = rung(*words)
    assert again.status == 0
    assert ("going on after" in again.err) == (hint == GOES_ON)


@pytest.mark.parametrize(("at", "hint"), [(1, BEGINS_AGAIN), (3, GOES_ON)])
def test_cleaning_says_whether_it_goes_on(rung, tmp_path, text, monkeypatch, at, hint):
    monkeypatch.setattr(cleaning, "_BLOCK_BYTES", 4000)
    assert rung("corpus", "files", text, "--out", tmp_path / "corpus").status == 0
    words = ("corpus", "clean", tmp_path / "corpus", "--workers", "1")
    with monkeypatch.context() as patch:
        interrupted(patch, cleaning.Judged, "save", at)
        done = rung(*words, "--out", tmp_path / "clean")
    assert (done.status, tail(done)) == (3, ["rung: interrupted", hint])
    assert (tmp_path / ".clean.judged").exists() == (hint == GOES_ON)
    with monkeypatch.context() as patch:
        interrupted(patch, cleaning.Judged, "save", 1)
        assert rung(*words, "--report-only").status == 1  # which keeps nothing


@pytest.mark.parametrize(("save_tokens", "hint"), [(500, GOES_ON), (1 << 24, BEGINS_AGAIN)])
def test_tokenizing_says_whether_it_goes_on(rung, tmp_path, text, monkeypatch, save_tokens, hint):
    monkeypatch.setattr(writing, "_SAVE_TOKENS", save_tokens)
    tokenizer = tmp_path / "tokenizer.json"
    assert rung("tokenizer", "train", text, "--vocab-size", "300", "--out", tokenizer).status == 0
    words = ("tokens", "build", text, "--tokenizer", tokenizer, "--out", tmp_path / "store")
    with monkeypatch.context() as patch:
        interrupted(patch, writing.StoreWriter, "write", 600)
        done = rung(*words)
    assert (done.status, tail(done)) == (3, ["rung: interrupted", hint])
    assert rung(*words).status == 0


def test_what_is_not_taken_up_ends_with_status_1(rung, tmp_path, text, monkeypatch):
    monkeypatch.setattr("rung.run.store.make_tokenizer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    done = rung("tokenizer", "train", text, "--vocab-size", "300", "--out", tmp_path / "tokenizer.json")
    assert (done.status, done.err) == (1, "\nrung: interrupted\nhint: the same command begins again\n")


@pytest.mark.parametrize("command", ["corpus files TEXT", "tokens build TEXT --tokenizer T"])
def test_a_place_that_cannot_be_written_is_not_gone_on_from(rung, tmp_path, text, command):
    tokenizer = tmp_path / "tokenizer.json"
    assert rung("tokenizer", "train", text, "--vocab-size", "300", "--out", tokenizer).status == 0
    words = [{"TEXT": text, "T": tokenizer}.get(word, word) for word in command.split()]
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = rung(*words, "--out", blocked / "x")
    assert done.status == 2
    assert tail(done)[0].startswith(f"rung: cannot write {blocked / 'x'}: ")
    assert tail(done)[1] == "hint: look at the disk and the folder, or name another with --out"
