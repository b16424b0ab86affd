"""Cleaning a corpus: what goes and what stays, whatever the workers, and after any interruption."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.config import CleanConfig, Filter
from rung.corpus import cleaning
from rung.corpus.cleaning import clean
from rung.corpus.folder import Corpus
from rung.corpus.judging import FILTERS
from rung.corpus.workers import engine
from rung.corpus.writer import CorpusWriter
from rung.errors import RungError

NAMES = ("first", "copy", "nearly", "other", "short", "spam", "numbers", "leaked", "deutsch")


def prose(seed: int, n: int = 400) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(n)]


def texts() -> dict[str, str]:
    first = prose(1)
    return {
        "first": " ".join(first),
        "copy": "\n".join(first) + "\n",
        "nearly": " ".join([*first[:390], "another", "end"]),
        "other": " ".join(prose(2)),
        "short": "hello",
        "spam": "buy now\n" * 50,
        "numbers": "12 345 " * 80,
        "leaked": " ".join([*prose(3), *prose(9, 40)[5:25], *prose(4)]),
        "deutsch": " ".join(prose(5)),
    }


def write(folder: Path, documents, **rest) -> Path:
    with CorpusWriter(folder, "test", **rest) as writer:
        for number, (name, text) in enumerate(documents):
            writer.write(name, text, {"number": number, "title": f"「{name}」"})
            writer.mark(lambda: None)
        writer.finish()
    return folder


def cleaned(source: Path, out: Path | None, workers: int = 1, **settings):
    with engine("local", workers) as made:
        return clean(source, out, CleanConfig(**settings), made)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_every_filter_takes_what_it_should_and_the_rest_stays_as_it_was(tmp_path):
    source = write(tmp_path / "corpus", texts().items())
    (tmp_path / "eval.jsonl").write_text(
        json.dumps({"text": " ".join(prose(9, 40)[:30])}) + "\n" + json.dumps({"text": "too short"}) + "\n"
    )
    result = cleaned(
        source, tmp_path / "out", evaluation=(str(tmp_path / "eval.jsonl"),), remove_contaminated=True, overlap_words=10
    )
    report = result.report
    took = {name: [one["name"] for one in report["filters"][name]["examples"]] for name in FILTERS}
    assert took == {
        "length": ["short"],
        "letters": ["numbers"],
        "scripts": [],
        "repetition": ["spam"],
        "languages": [],
        "duplicates": ["copy"],
        "near-duplicates": ["nearly"],
        "contamination": ["leaked"],
    }
    for name in FILTERS:
        assert report["filters"][name]["documents"] == len(took[name])
        assert report["filters"][name]["bytes"] == sum(len(texts()[one].encode()) for one in took[name])
    assert report["read"] == {"documents": 9, "bytes": sum(len(text.encode()) for text in texts().values())}
    (leak,) = report["contamination"]["listed"]
    assert leak["document"] == "leaked"
    assert leak["text"] == " ".join(prose(9, 40)[5:25])[:200] + " ..." * (len(" ".join(prose(9, 40)[5:25])) > 200)
    assert report["contamination"]["too_short_examples"] == ["eval.jsonl#2"]
    # What stays is byte for byte the line that it was.
    lines = (source / "documents-00000.jsonl").read_bytes().splitlines(keepends=True)
    assert (tmp_path / "out/documents-00000.jsonl").read_bytes() == lines[0] + lines[3] + lines[8]
    assert Corpus.open(tmp_path / "out").report == report
    assert result.corpus.bytes == report["stay"]["bytes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "eval.jsonl", "out"]


AWKWARD = [
    "\ud800 half",
    "nul \0 bell \a",
    "a\r\nb\u2028c\u0085",
    "<|endoftext|>",
    "\ufeffbom",
    "\U0001f600 e\u0301",
    "",
]


@given(st.lists(st.text(st.characters(), max_size=30) | st.sampled_from(AWKWARD), min_size=1, max_size=12))
def test_any_text_stays_byte_for_byte_where_no_filter_takes_it(tmp_path_factory, documents):
    folder = tmp_path_factory.mktemp("any")
    source = write(folder / "corpus", [("first", "x"), *((f"{k}", text) for k, text in enumerate(documents))])
    everything = get_args(Filter)
    result = cleaned(source, folder / "out", skip=everything)
    shard = "documents-00000.jsonl"
    assert (folder / "out" / shard).read_bytes() == (source / shard).read_bytes()
    assert (result.corpus.bytes, result.corpus.characters) == (
        Corpus.open(source).bytes,
        Corpus.open(source).characters,
    )
    assert cleaned(source, None, min_words=31, skip=everything[1:]).report["stay"]["documents"] == 0


def test_a_report_alone_writes_nothing_and_is_the_same(tmp_path):
    source = write(tmp_path / "corpus", texts().items())
    report = cleaned(source, None).report
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
    assert report == cleaned(source, tmp_path / "out").report


def test_overlaps_are_reported_and_kept_unless_they_are_to_go(tmp_path):
    source = write(tmp_path / "corpus", texts().items())
    (tmp_path / "v.txt").write_text(texts()["other"] + " " + texts()["leaked"])
    result = cleaned(source, tmp_path / "out", validation=(str(tmp_path / "v.txt"),))
    assert {one["document"] for one in result.report["contamination"]["listed"]} == {"other", "leaked"}
    assert result.report["filters"]["contamination"]["documents"] == 0
    assert "leaked" in [record.name for record in result.corpus.records()]


def test_what_will_be_held_out_is_held_against_the_rest(tmp_path):
    documents = [(f"{k}", " ".join(prose(k))) for k in range(20)]
    documents[7] = ("7", documents[7][1] + " " + " ".join(prose(3)[50:80]))
    source = write(tmp_path / "corpus", [*documents, ("short", "x")])
    with engine("local", 1) as made:
        result = clean(source, tmp_path / "out", CleanConfig(held_out=0.1), made, choose=lambda scan: {3, 19})
    found = result.report["held_out"]
    assert (found["held_out"], found["found_in_training"], found["documents"]) == (2, 1, 1)
    assert [(one["document"], one["held_out"], one["words"]) for one in found["listed"]] == [("7", "3", 30)]
    with pytest.raises(RungError, match="would change which documents are held out"):
        cleaned(source, tmp_path / "x", held_out=0.1, remove_contaminated=True)


@pytest.mark.medium
def test_the_documents_that_a_build_holds_out_are_those_that_were_looked_at(tmp_path):
    from rung.config import DataConfig, TokenizerConfig
    from rung.run.cleaning import clean_corpus
    from rung.tokens.store import build_store
    from rung.tokens.tokenizer import Tokenizer

    source = write(tmp_path / "corpus", many(60))
    report = clean_corpus(source, tmp_path / "out", CleanConfig(held_out=0.2), workers=1, say=print).report
    data = DataConfig(validation_fraction=0.2)
    store = build_store([tmp_path / "out"], Tokenizer.train([], TokenizerConfig(kind="byte")), tmp_path / "store", data)
    assert report["held_out"]["held_out"] == len(store.split("validation").names) > 3


def many(count: int):
    for number in range(count):
        if number % 5 == 4:
            yield f"copy {number}", " ".join(prose(number - 3, 120))
        elif number % 5 == 3:
            yield f"near {number}", " ".join([*prose(number - 3, 120)[:115], *prose(-number, 5)])
        else:
            yield f"new {number}", " ".join(prose(number, 120))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(cleaning, "_BLOCK_BYTES", 10_000)


@pytest.mark.medium
def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path, small_blocks):
    source = write(tmp_path / "corpus", many(200), shard_bytes=50_000)
    assert len(Corpus.open(source).shards) > 2
    for workers in (1, 2, 3):
        cleaned(source, tmp_path / f"{workers}", workers)
    one = files(tmp_path / "1")
    assert files(tmp_path / "2") == one
    assert files(tmp_path / "3") == one
    report = json.loads(one["corpus.json"])["report"]
    assert report["filters"]["duplicates"]["documents"] == 40
    assert 30 <= report["filters"]["near-duplicates"]["documents"] <= 40


KILLED = """
import sys
from rung.config import CleanConfig
from rung.corpus import cleaning, folder
from rung.corpus.workers import engine
if __name__ == "__main__":
    cleaning._BLOCK_BYTES = 10_000
    cleaning.CorpusWriter.__init__.__kwdefaults__["shard_bytes"] = 30_000
    with engine("local", int(sys.argv[3])) as made:
        done = cleaning.clean(sys.argv[1], sys.argv[2], CleanConfig(), made)
    print(done.resumed)
"""


def start(tmp_path: Path, source: Path, out: Path, workers: int) -> subprocess.Popen:
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    return subprocess.Popen(
        [sys.executable, str(program), str(source), str(out), str(workers)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.medium
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_killed_anywhere_it_goes_on_and_ends_the_same(tmp_path, workers):
    source = write(tmp_path / "corpus", many(250), shard_bytes=60_000)
    whole = start(tmp_path, source, tmp_path / "whole", 1)
    assert whole.communicate()[0] == "0\n"
    out, work = tmp_path / "out", tmp_path / ".out.judged"
    blocks = 0
    for aim in (3, 9):
        process = start(tmp_path, source, out, workers)
        while process.poll() is None and len(list(work.glob("block-*.npz"))) < aim:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not out.exists()
        blocks = len(list(work.glob("block-*.npz")))
        assert blocks >= aim
    last = start(tmp_path, source, out, 3 - workers)
    resumed = int(last.communicate()[0])
    assert last.returncode == 0
    assert resumed >= 9 * 10_000
    assert files(out) == files(tmp_path / "whole")
    assert not work.exists()


def test_killed_while_writing_it_goes_on_from_the_last_whole_shard(tmp_path, small_blocks, monkeypatch):
    source = write(tmp_path / "corpus", many(100), shard_bytes=30_000)
    monkeypatch.setitem(CorpusWriter.__init__.__kwdefaults__, "shard_bytes", 20_000)
    cleaned(source, tmp_path / "whole")
    copy, copied = CorpusWriter.copy, 0

    def dying(self, *arguments):
        nonlocal copied
        copied += 1
        if copied == 50:
            raise KeyboardInterrupt
        copy(self, *arguments)

    monkeypatch.setattr(CorpusWriter, "copy", dying)
    with pytest.raises(KeyboardInterrupt):
        cleaned(source, tmp_path / "out")
    assert cleaned(source, tmp_path / "out").resumed > 0
    assert copied < 50 + 60  # not from the beginning
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_what_was_judged_for_other_settings_or_another_corpus_is_not_taken(tmp_path, monkeypatch):
    source = write(tmp_path / "corpus", texts().items())
    monkeypatch.setattr(cleaning._Cleaning, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cleaned(source, tmp_path / "out")
    assert (tmp_path / ".out.judged").exists()
    monkeypatch.undo()
    result = cleaned(source, tmp_path / "out", min_words=500)
    assert result.resumed == 0
    assert [record.name for record in result.corpus.records()] == ["leaked"]


def test_a_long_document_is_judged_in_bounded_memory_however_it_is_cut(tmp_path):
    text = "\n".join(" ".join(prose(k, 200)) for k in range(1500))  # 1.7 MB in one document
    long_line = "国境の長いトンネルを抜けると雪国であった" * 100_000  # 6 MB without a space
    source = write(tmp_path / "corpus", [("long", text), ("long", text), ("line", long_line), ("b", texts()["other"])])
    result = cleaned(source, tmp_path / "out")
    assert [record.name for record in result.corpus.records()] == ["long", "b"]
    assert result.report["filters"]["repetition"]["examples"][0]["name"] == "line"


def test_mistakes_are_named(tmp_path):
    source = write(tmp_path / "corpus", texts().items())
    with pytest.raises(RungError, match="is not a corpus folder"):
        cleaned(tmp_path, tmp_path / "out")
    with engine("local", 1) as made, pytest.raises(RungError, match="is the corpus itself"):
        clean(source, source, CleanConfig(), made, overwrite=True)
    with pytest.raises(RungError, match=r"no document of .* stays: length took 9"):
        cleaned(source, tmp_path / "out", min_words=10**6)
    with pytest.raises(RungError, match="both training text and held out"):
        cleaned(source, tmp_path / "out", validation=(str(source),))
    with pytest.raises(RungError, match="no file or folder"):
        cleaned(source, tmp_path / "out", evaluation=(str(tmp_path / "none.txt"),))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def dies(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.medium
def test_a_worker_that_is_killed_is_a_mistake_with_a_way_out():
    with engine("local", 2) as made, pytest.raises(RungError, match="a worker process was killed"):
        list(made.map(dies, range(10)))


@pytest.mark.medium
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\nfrom rung.corpus.workers import engine\n"
        "def work(k):\n    print(os.getpid(), flush=True)\n    time.sleep(60)\n"
        "if __name__ == '__main__':\n    with engine('local', 2) as made:\n        list(made.map(work, range(4)))\n"
    )
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/stat").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}/stat").exists() for pid in workers)
