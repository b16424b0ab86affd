"""Corpora of files and of data sets: the same text as the sources, and the same bytes after being cut short."""

from __future__ import annotations

import gzip
import itertools
import json
import zipfile

import pytest

from rung.config import DataConfig
from rung.corpus import writer as corpus_writer
from rung.corpus.documents import documents
from rung.corpus.folder import Corpus
from rung.corpus.sources import resolve
from rung.errors import RungError
from rung.run.collecting import collect_files, collect_hub


def quiet(text):
    pass


def bytes_of(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.fixture
def sources(tmp_path):
    """Return a folder with a text, rows with an empty one, a page in an archive, and a book's worth of lines."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("雪国\r\n")
    rows = [json.dumps({"text": f"row {k} " * 40, "id": k}) for k in range(50)]
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join([*rows, '{"text": ""}']).encode()))
    with zipfile.ZipFile(folder / "c.zip", "w") as archive:
        archive.writestr("page.html", "<title>T</title><p>page</p><script>1</script>")
        archive.writestr("more.txt", "more\n" * 1000)
    return folder


def text_of(*paths, **settings):
    return [
        (dict(document.metadata), "".join(document.pieces))
        for document in documents(resolve(paths), DataConfig(**settings), metadata=True)
    ]


def test_a_corpus_of_files_is_their_documents_with_what_is_known_of_them(sources, tmp_path):
    corpus = collect_files([str(sources)], tmp_path / "out", DataConfig(), say=quiet)
    assert text_of(corpus.path) == [(meta, text) for meta, text in text_of(sources) if text]
    assert corpus.documents == 53
    assert corpus.report == {"read": 54, "empty": 1, "left_out": {"script": 1}}
    assert [source["name"] for source in corpus.info["sources"]] == ["texts/a.txt", "texts/b.jsonl.gz", "texts/c.zip"]


class Killed(BaseException):
    pass


def killed_after(monkeypatch, n_documents):
    """Let the process die, as far as a test can, when it has begun to write so many documents."""
    write, count = corpus_writer.CorpusWriter.write, itertools.count(1)

    def dying(self, *arguments):
        if next(count) > n_documents:
            raise Killed
        write(self, *arguments)

    monkeypatch.setattr(corpus_writer.CorpusWriter, "write", dying)


def cut_short_and_gone_on(monkeypatch, make, out, n_documents):
    said = []
    for _ in range(100):
        with monkeypatch.context() as patched:
            killed_after(patched, n_documents)
            try:
                make(out, said.append)
                return said
            except Killed:
                assert not out.exists()
    raise AssertionError("it never came to an end")


@pytest.mark.parametrize("n_documents", [7, 20, 49])
def test_files_cut_short_anywhere_end_identical(sources, tmp_path, monkeypatch, n_documents):
    def make(out, say):
        return collect_files([str(sources)], out, DataConfig(), shard_bytes=1500, say=say)

    whole = make(tmp_path / "whole", quiet)
    assert len(whole.shards) > 5
    said = cut_short_and_gone_on(monkeypatch, make, tmp_path / "cut", n_documents)
    assert bytes_of(tmp_path / "cut") == bytes_of(whole.path)
    assert said[0].startswith("going on after ")


def test_files_that_changed_in_between_are_begun_anew(sources, tmp_path, monkeypatch):
    def make(out, say):
        return collect_files([str(sources)], out, DataConfig(), shard_bytes=1500, say=say)

    with monkeypatch.context() as patched:
        killed_after(patched, 30)
        with pytest.raises(Killed):
            make(tmp_path / "cut", quiet)
    (sources / "a.txt").write_text("千羽鶴")
    said = []
    make(tmp_path / "cut", said.append)
    assert bytes_of(tmp_path / "cut") == bytes_of(make(tmp_path / "whole", quiet).path)
    assert said == []


def test_nothing_but_empty_documents_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(RungError, match=r"no text in .*a.jsonl"):
        collect_files([str(tmp_path / "a.jsonl")], tmp_path / "out", DataConfig(), say=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


# Data sets of the Hub


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "novels"
    folder.mkdir()
    for part in range(3):
        texts = [None if k % 10 == 3 else f"work {part}.{k} " * 30 for k in range(20)]
        table = pa.table({"text": texts, "n": list(range(20))})
        pq.write_table(table, folder / f"train-0000{part}-of-00003.parquet", row_group_size=6)
    return folder


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_cut_short_ends_identical_and_takes_exactly_as_many_as_asked(
    data_set, tmp_path, monkeypatch, streaming
):
    def make(out, say):
        return collect_hub(str(data_set), out, streaming=streaming, n_documents=40, shard_bytes=1500, say=say)

    whole = make(tmp_path / "whole", quiet)
    assert whole.documents == 40
    assert len(whole.shards) > 5
    rows = [(part, k) for part in range(3) for k in range(20) if k % 10 != 3][:40]
    assert text_of(whole.path) == [({"n": k}, f"work {part}.{k} " * 30) for part, k in rows]
    assert whole.report["empty"] == 5
    cut_short_and_gone_on(monkeypatch, make, tmp_path / "cut", 9)
    assert bytes_of(tmp_path / "cut") == bytes_of(whole.path)


def test_fewer_documents_than_asked_is_an_error_with_the_number(data_set, tmp_path):
    with pytest.raises(RungError, match="novels has 54 documents with text in 'train', and 55 are asked"):
        collect_hub(str(data_set), tmp_path / "out", n_documents=55, say=quiet)
    assert collect_hub(str(data_set), tmp_path / "out", n_documents=54, say=quiet).documents == 54
    assert Corpus.open(tmp_path / "out").kind == "hub"
