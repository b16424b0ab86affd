"""JSON lines and Parquet: a document a row, read as pyarrow and json read them, with every bad row named."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.config import DataConfig
from rung.corpus.documents import documents, scan, text_size
from rung.corpus.rows import _lines
from rung.corpus.sources import resolve
from rung.errors import RungError


def read(path, metadata=True, left_out=None, **settings):
    found = documents(resolve([path]), DataConfig(**settings), metadata=metadata, left_out=left_out)
    return [(document.name, "".join(document.pieces), dict(document.metadata)) for document in found]


def failed(path, **settings):
    with pytest.raises(RungError) as caught:
        read(path, **settings)
    assert "\n" not in caught.value.problem + caught.value.hint
    return caught.value


def put(path, data):
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@given(st.lists(st.text(), min_size=1), st.booleans())
def test_any_text_comes_back_from_json_lines(tmp_path_factory, texts, escaped):
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    lines = [json.dumps({"text": text, "n": n}, ensure_ascii=escaped) for n, text in enumerate(texts)]
    path = put(tmp_path_factory.mktemp("any") / "a.jsonl", "\n".join(lines))
    assert [(text, meta["n"]) for _, text, meta in read(path)] == list(zip(texts, range(len(texts)), strict=True))


@given(st.text(alphabet="a\n\r\u2028\x85"), st.lists(st.integers(1, 5), min_size=1))
def test_lines_end_at_line_feeds_alone_however_the_text_comes(text, sizes):
    chunks, at, k = [], 0, 0
    while at < len(text):
        chunks.append(text[at : at + sizes[k % len(sizes)]])
        at, k = at + sizes[k % len(sizes)], k + 1
    lines = text.split("\n")
    assert list(_lines(iter(chunks))) == (lines if lines[-1] else lines[:-1])


def test_a_row_is_named_by_its_line_and_keeps_its_other_columns(tmp_path):
    lines = [
        '{"id": 7, "text": "one\\ntwo", "meta": {"a": [1, null]}}',
        "",
        '{"text": "", "id": 8}\r',
        '{"text": null}',
    ]
    path = put(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + "\n".join(lines).encode())
    assert read(path) == [
        ("a.jsonl#1", "one\ntwo", {"id": 7, "meta": {"a": [1, None]}}),
        ("a.jsonl#3", "", {"id": 8}),
        ("a.jsonl#4", "", {}),
    ]
    assert scan(resolve([path]), DataConfig()).empty == 2


def test_json_lines_in_other_encodings_and_packed(tmp_path):
    line = '{"本文": "雪国"}\n'
    for name, data in (
        ("a.jsonl", line.encode("utf-16")),
        ("b.ndjson.gz", gzip.compress(line.encode())),
    ):
        assert read(put(tmp_path / name, data), text_column="本文") == [(f"{name}#1", "雪国", {})]
    path = put(tmp_path / "c.jsonl", line.encode("cp932"))
    assert read(path, text_column="本文", encoding="cp932") == [("c.jsonl#1", "雪国", {})]
    assert "byte 0x96 at offset 2" in failed(path).problem


def test_the_separator_cuts_no_row(tmp_path):
    path = put(tmp_path / "a.jsonl", '{"text": "a<|endoftext|>b"}')
    assert read(path, separator="<|endoftext|>") == [("a.jsonl#1", "a<|endoftext|>b", {})]


@pytest.mark.parametrize(
    ("line", "problem", "hint"),
    [
        ('{"text": "a"', "a.jsonl, line 2 is not JSON: Expecting ',' delimiter at character 13", "--format text"),
        ("[1]", "a.jsonl, line 2 is a list, not an object", "one JSON object"),
        ('{"txet": "a"}', "a.jsonl, line 2 has no column 'text'", "--text-column txet"),
        ('{"tex": "a", "id": 1}', "a.jsonl, line 2 has no column 'text'", "did you mean --text-column tex?"),
        ('{"id": 1, "story": "a"}', "a.jsonl, line 2 has no column 'text'", "name one of id, story"),
        ('{"text": ["a"]}', "a.jsonl, line 2: column 'text' is a list, not text", "--text-column NAME"),
        ('{"text": 3}', "a.jsonl, line 2: column 'text' is a number, not text", "--text-column NAME"),
        (
            '{"text": "\\ud83d"}',
            "a.jsonl, line 2: the text has half a surrogate pair, \\ud83d",
            "cut a character in two",
        ),
        ("[" * 100_000, "a.jsonl, line 2 cannot be read: maximum recursion", "leave the line out"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, problem, hint):
    error = failed(put(tmp_path / "a.jsonl", '{"text": "ok"}\n' + line + "\n"))
    assert error.problem.startswith(problem)
    assert hint in error.hint


def test_a_file_without_rows_is_an_empty_document(tmp_path):
    path = put(tmp_path / "a.jsonl", "\n\n")
    assert read(path) == [("a.jsonl", "", {})]


def test_format_says_what_a_name_does_not(tmp_path):
    path = put(tmp_path / "a.txt", '{"text": "x"}\n')
    assert read(path)[0][1] == '{"text": "x"}\n'
    assert read(path, format="jsonl")[0][1] == "x"
    path = path.rename(tmp_path / "a.jsonl")
    assert read(path, format="text")[0][1] == '{"text": "x"}\n'


def test_a_long_line_takes_time_in_its_length_alone(tmp_path):
    text = "a" * 30_000_000
    ((_, found, _),) = read(put(tmp_path / "a.jsonl", json.dumps({"text": text})))
    assert found == text


def test_the_size_of_a_text_is_that_of_what_is_in_its_files(tmp_path):
    put(tmp_path / "a.jsonl", json.dumps({"text": "雪国", "rest": "x" * 1000}, ensure_ascii=True))
    put(tmp_path / "b.txt.gz", gzip.compress(b"a" * 100_000))
    put(tmp_path / "c.txt", "雪")
    assert text_size(resolve([tmp_path]), DataConfig()) == 6 + 100_000 + 3


# Parquet

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def table(tmp_path, columns, name="a.parquet", **rest):
    path = tmp_path / name
    pq.write_table(pa.table(columns), path, **rest)
    return path


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_texts_of_every_arrow_type_of_text(tmp_path, kind):
    kinds = {"string": pa.string(), "large_string": pa.large_string(), "string_view": pa.string_view()}
    texts = pa.array(["one\0\r\n", "", None, "雪国"])
    texts = texts.dictionary_encode() if kind == "dictionary" else texts.cast(kinds[kind])
    path = table(tmp_path, {"text": texts, "n": [1, 2, 3, 4]})
    assert read(path) == [
        ("a.parquet#1", "one\0\r\n", {"n": 1}),
        ("a.parquet#2", "", {"n": 2}),
        ("a.parquet#3", "", {"n": 3}),
        ("a.parquet#4", "雪国", {"n": 4}),
    ]
    assert [meta for *_, meta in read(path, metadata=False)] == [{}] * 4


def test_columns_become_metadata_as_json_has_them_and_bytes_are_left_out_with_a_count(tmp_path):
    columns = {
        "text": ["a"],
        "when": [datetime.datetime(2020, 1, 2, 3)],
        "price": [decimal.Decimal("1.50")],
        "odd": [float("nan")],
        "far": [float("inf")],
        "tags": [["x", "y"]],
        "of": [{"a": None, "b": 1}],
        "image": [{"bytes": b"\xff", "path": "x"}],
        "raw": [b"\xff"],
    }
    left_out = Counter()
    ((_, _, metadata),) = read(table(tmp_path, columns), left_out=left_out)
    assert metadata == {
        "when": "2020-01-02T03:00:00",
        "price": "1.50",
        "odd": None,
        "far": "inf",
        "tags": ["x", "y"],
        "of": {"a": None, "b": 1},
    }
    numbers = {"NaN in metadata (null instead)": 1, "infinity in metadata (text instead)": 1}
    assert left_out == {"column image (bytes)": 1, "column raw (bytes)": 1, **numbers}


def test_many_row_groups_and_compressions_in_order(tmp_path):
    texts = [f"text {k} " * (k % 50) for k in range(3000)]
    for compression in ("snappy", "zstd", "gzip", "none"):
        path = table(tmp_path, {"text": texts}, row_group_size=700, compression=compression)
        assert [text for _, text, _ in read(path)] == texts


def test_parquet_is_told_by_its_content_and_within_archives(tmp_path):
    import zipfile

    path = table(tmp_path, {"text": ["a"]})
    plain = path.rename(tmp_path / "a.bin")
    assert read(plain) == [("a.bin#1", "a", {})]
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.write(plain, "in/a.parquet")
    assert read(tmp_path / "x.zip") == [("x.zip/in/a.parquet#1", "a", {})]


def test_what_is_wrong_with_a_parquet_file_is_said(tmp_path):
    path = table(tmp_path, {"content": ["a"], "image": [b"x"], "n": [1]})
    assert failed(path).problem == "a.parquet has no column 'text'"
    assert "--text-column content" in failed(path, text_column="contents").hint
    assert failed(path, text_column="n").problem == "a.parquet: column 'n' is int64, not text"
    assert failed(path, text_column="image").problem == "a.parquet: column 'image' is binary, not text"
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) // 2, 10):
        assert "a.parquet, after row 0: damaged Parquet" in failed(put(path, whole[:cut])).problem
    assert failed(put(path, b"not parquet")).problem == "a.parquet is not Parquet, whose files begin with PAR1"
    wrong = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    assert "column 'text' is not UTF-8" in failed(table(tmp_path, {"text": wrong})).problem


def test_a_damaged_page_is_found(tmp_path):
    path = table(tmp_path, {"text": [f"{k} text" * 20 for k in range(2000)]}, compression="zstd")
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 3 : len(whole) // 3 + 50] = bytes(50)
    assert "damaged Parquet" in failed(put(path, bytes(whole))).problem


def test_one_row_group_of_any_size_is_read_in_bounded_memory(tmp_path):
    path = tmp_path / "big.parquet"
    texts = pa.array([f"{k:06d} " * 1500 for k in range(20_000)])  # 210 MB
    pq.write_table(pa.table({"text": texts}), path, row_group_size=20_000, use_dictionary=False, compression="none")
    program = (
        "import resource, sys; from rung.config import DataConfig; from rung.corpus.sources import resolve\n"
        "from rung.corpus.documents import scan\n"
        "import pyarrow.parquet\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(sum(scan(resolve([sys.argv[1]]), DataConfig()).bytes))\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    ran = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True, env=environment
    )
    size, grown = map(int, ran.stdout.split())
    assert size == 20_000 * 7 * 1500
    assert grown < 80, f"{grown} MB for 210 MB in one row group"


def test_numbers_that_json_has_not_are_counted_and_keys_twice_refused(tmp_path):
    left_out = Counter()
    row = '{"text": "x", "a": NaN, "b": {"c": [Infinity, -Infinity, 1.5]}}\n'
    assert read(put(tmp_path / "a.jsonl", row), left_out=left_out) == [
        ("a.jsonl#1", "x", {"a": None, "b": {"c": ["inf", "-inf", 1.5]}})
    ]
    assert left_out == {"NaN in metadata (null instead)": 1, "infinity in metadata (text instead)": 2}
    error = failed(put(tmp_path / "b.jsonl", '{"text": "x"}\n{"text": "y", "b": {"c": 1, "d": 2, "c": 3}}\n'))
    assert error.problem == "b.jsonl, line 2 has the key 'c' twice in one object"
