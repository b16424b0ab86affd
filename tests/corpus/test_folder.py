"""Corpus folders: what is written comes back, killed work goes on to the same bytes, and damage is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rung.corpus.folder as folder_module
from rung.config import DataConfig
from rung.corpus.documents import documents, scan
from rung.corpus.folder import Corpus, is_corpus, read_lines
from rung.corpus.sources import fingerprint, resolve
from rung.corpus.writer import CorpusWriter
from rung.errors import RungError

TEXTS = ["国境の長い\r\nトンネル", "", 'say "\\u0041" \x00\u2028\x1f\U0001f600\n\n', "<|endoftext|> as characters\\"]


def write(out, texts, **options):
    with CorpusWriter(out, "files", **options) as writer:
        for number, text in enumerate(texts):
            writer.write(f"work-{number}", text, {"title": f"題{number}", "number": number})
            writer.mark(lambda number=number: {"done": number + 1})
        return writer.finish({"kept": len(texts)})


def read(path, **config):
    found = documents(resolve([path]), DataConfig(**config))
    return [(document.name, "".join(document.pieces), dict(document.metadata)) for document in found]


def snapshot(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_documents_come_back_with_name_and_metadata_as_json_lines_that_anyone_reads(tmp_path):
    corpus = write(tmp_path / "c", TEXTS, settings={"ruby": "drop"}, sources=[{"name": "a.txt", "size": 3}])
    assert read(tmp_path / "c") == [
        (f"c/work-{n}", text, {"title": f"題{n}", "number": n}) for n, text in enumerate(TEXTS)
    ]
    lines = (tmp_path / "c/documents-00000.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["text"] for line in lines[:-1]] == TEXTS
    assert lines[-1] == ""
    said = json.loads((tmp_path / "c/corpus.json").read_text())
    assert (said["format"], said["kind"], said["settings"], said["report"]) == (
        1,
        "files",
        {"ruby": "drop"},
        {"kept": 4},
    )
    assert said["bytes"] == sum(len(text.encode()) for text in TEXTS) == corpus.bytes
    assert said["characters"] == sum(map(len, TEXTS))
    assert sorted(snapshot(tmp_path / "c")) == ["corpus.json", "documents-00000.jsonl"]


@given(st.lists(st.text(), min_size=1), st.dictionaries(st.text(), st.text() | st.integers() | st.none()))
def test_any_text_and_any_metadata_come_back(tmp_path_factory, texts, metadata):
    out = tmp_path_factory.mktemp("any") / "c"
    with CorpusWriter(out, "files", shard_bytes=100) as writer:
        for text in texts:
            writer.write("n", iter(text), metadata)  # in pieces of one character
            writer.mark(dict)
        corpus = writer.finish()
    found = [("".join(record.pieces), record.metadata) for record in corpus.records()]
    assert found == [(text, metadata) for text in texts]


@given(st.text(alphabet='ab"\\\n\x00国\U0001f600\ud83d', max_size=60), st.booleans())
def test_a_long_line_is_streamed_to_the_same_text(tmp_path_factory, text, escaped):
    path = tmp_path_factory.mktemp("long") / "documents.jsonl"
    line = (
        f'{{"name": "n", "metadata": {{"text": ", \\"text\\": \\""}}, "text": {json.dumps(text, ensure_ascii=True)}}}\n'
    )
    if not escaped and "\ud83d" not in text:
        line = line[: line.rindex(json.dumps(text))] + json.dumps(text, ensure_ascii=False) + "}\n"
    path.write_bytes(line.encode() * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_module, "_LINE_BYTES", 64)
        patch.setattr(folder_module, "_STREAM_BYTES", 5)
        # A high surrogate before an escaped low one is one character, as json itself has it.
        assert ["".join(record.pieces) for record in read_lines(path)] == [json.loads(line)["text"]] * 2
        assert [record.name for record in read_lines(path)] == ["n", "n"]  # unread text is passed over


def test_a_document_larger_than_the_memory_used_is_written_and_read_in_pieces(tmp_path):
    piece = "長い文章" * 4096
    tracemalloc.start()
    try:
        with CorpusWriter(tmp_path / "c", "files") as writer:
            writer.write("long", (piece for _ in range(1000)))
            corpus = writer.finish()
        counted = scan(resolve([tmp_path / "c"]), DataConfig())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert counted.chars[0] == corpus.characters == 1000 * len(piece)
    assert counted.bytes[0] == corpus.bytes == 3000 * len(piece) > 46 << 20
    assert peak < 40 << 20


def test_a_corpus_is_one_source_also_within_a_folder_and_separators_do_not_cut_it(tmp_path):
    write(tmp_path / "all/corpus-b", TEXTS)
    (tmp_path / "all/a.txt").write_text("plain")
    found = resolve([tmp_path / "all"])
    assert [(source.name, source.kind) for source in found] == [("all/a.txt", "text"), ("all/corpus-b", "corpus")]
    assert found[1].size == sum(len(text.encode()) for text in TEXTS)
    assert [
        text for _, text, _ in read(tmp_path / "all/corpus-b", separator="<|endoftext|>", encoding="cp932")
    ] == TEXTS


def test_progress_ends_at_the_size_of_the_source(tmp_path):
    write(tmp_path / "c", TEXTS)
    told = []
    sources = resolve([tmp_path / "c"])
    for _ in documents(sources, DataConfig(), lambda done, total: told.append((done, total))):
        pass
    assert told[-1] == (sources[0].size, sources[0].size)


def test_the_fingerprint_sees_a_change_of_text_and_of_metadata_and_not_of_the_folders_name(tmp_path):
    prints = []
    for name, texts in (("a", TEXTS), ("b", TEXTS), ("c", [*TEXTS[:3], "<|endoftext|> as characterS\\"])):
        write(tmp_path / name, texts)
        prints.append(fingerprint(resolve([tmp_path / name])[0]))
    assert prints[0]["sha256"] == prints[1]["sha256"] != prints[2]["sha256"]
    assert (prints[0]["name"], prints[0]["bytes"]) == ("a", sum(len(text.encode()) for text in TEXTS))


def test_another_program_s_corpus_json_is_a_file_like_any_other(tmp_path):
    (tmp_path / "corpus.json").write_text('{"words": 3}')
    assert not is_corpus(tmp_path)
    assert [source.name for source in resolve([tmp_path])] == [f"{tmp_path.name}/corpus.json"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "documents-00000.jsonl").unlink(), "documents-00000.jsonl is missing"),
        (lambda path: os.truncate(path / "documents-00000.jsonl", 20), "has 20 bytes"),
        (lambda path: (path / "corpus.json").write_text("{"), "corpus.json is damaged"),
        (lambda path: (path / "corpus.json").write_text('{"format": 9, "kind": "x", "shards": []}'), "format 9"),
        (lambda path: (path / "corpus.json").write_text('{"format": 1, "kind": "x", "shards": [3]}'), "is damaged"),
    ],
)
def test_damage_is_named(tmp_path, damage, said):
    write(tmp_path / "c", TEXTS)
    damage(tmp_path / "c")
    with pytest.raises(RungError, match=said):
        resolve([tmp_path / "c"])


def test_a_line_that_is_no_document_is_named_by_its_number(tmp_path):
    path = tmp_path / "documents.jsonl"
    for bad in ('{"name": "x"}', '{"name": 3, "text": ""}', "[]", "{", '{"name": "x", "text": "', ""):
        path.write_text('{"name": "x", "text": "ok"}\n' + bad + "\n")
        with pytest.raises(RungError, match="line 2 is not a document"):
            list(read_lines(path))


def test_what_is_there_is_kept_unless_asked_and_only_a_corpus_is_replaced(tmp_path):
    write(tmp_path / "c", TEXTS)
    with pytest.raises(RungError, match="exists"):
        write(tmp_path / "c", ["new"])
    assert len(read(tmp_path / "c")) == 4
    write(tmp_path / "c", ["new"], overwrite=True)
    assert [text for _, text, _ in read(tmp_path / "c")] == ["new"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(RungError, match="is not a corpus"):
        write(tmp_path / "mine", ["new"], overwrite=True)
    for name in ("documents-mine.jsonl", "notes.txt"):
        (tmp_path / "c" / name).write_text("years of work")
    with pytest.raises(RungError, match=r"c/documents-mine\.jsonl is not Rung's, and would be removed with"):
        write(tmp_path / "c", ["newer"], overwrite=True)
    assert [text for _, text, _ in read(tmp_path / "c")] == ["new"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "mine"]


def test_two_processes_do_not_make_the_same_corpus(tmp_path):
    with CorpusWriter(tmp_path / "c", "files"), pytest.raises(RungError, match="by another process"):
        CorpusWriter(tmp_path / "c", "files")


KILLED = """
import os, signal, sys
from rung.corpus.writer import CorpusWriter
out, kill_at = sys.argv[1], int(sys.argv[2])
with CorpusWriter(out, "files", settings={"a": 1}, shard_bytes=2000) as writer:
    begin, seen = writer.state or (0, 0)
    print(begin, writer.resumed)
    for number in range(begin, 100):
        if number == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += number
        writer.write(f"{number}", "語" * number, {"number": number})
        writer.mark(lambda: [number + 1, seen])
    writer.finish({"seen": seen})
"""


def test_killed_at_any_document_the_same_command_ends_with_the_same_bytes(tmp_path):
    def run(out, kill_at):
        done = subprocess.run([sys.executable, "-c", KILLED, out, str(kill_at)], capture_output=True, text=True)
        assert done.returncode == (-signal.SIGKILL if kill_at < 100 else 0), done.stderr
        return done.stdout.split()

    run(tmp_path / "whole", 100)
    begins = []
    for kill_at in (0, 30, 31, 77, 100):
        begins += run(tmp_path / "killed", kill_at)[:1]
        assert (tmp_path / "killed").exists() == (kill_at == 100)
    assert snapshot(tmp_path / "whole") == snapshot(tmp_path / "killed")
    assert len(snapshot(tmp_path / "whole")) > 4
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["killed", "whole"]


def test_other_settings_begin_anew(tmp_path):
    for settings in ({"a": 1}, {"a": 2}):
        with CorpusWriter(tmp_path / "c", "files", settings=settings, shard_bytes=10) as writer:
            assert writer.state is None
            writer.write("n", "a long enough text")
            writer.mark(lambda: 1)
    with CorpusWriter(tmp_path / "c", "files", settings={"a": 2}, shard_bytes=10) as writer:
        assert (writer.state, writer.resumed) == (1, 1)
        assert Corpus.open(writer.finish().path).documents == 1
