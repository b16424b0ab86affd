"""Compressed files and archives: read as their content, in the folder's order, and every damage named."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from rung.config import DataConfig
from rung.corpus.documents import documents
from rung.corpus.sources import resolve
from rung.corpus.unpacking import unpacked
from rung.errors import RungError

zstd = pytest.importorskip("backports.zstd") if sys.version_info < (3, 14) else pytest.importorskip("compression.zstd")

TEXT = "国境の長いトンネルを抜けると雪国であった。\r\nThe night's depths turned white.\u2028\0 ok\n" * 400
COMPRESS = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zst": zstd.compress}


def read(path, **settings):
    found = documents(resolve([path]), DataConfig(**settings))
    return [(document.name, "".join(document.pieces)) for document in found]


def failed(path, **settings):
    with pytest.raises(RungError) as caught:
        read(path, **settings)
    assert "\n" not in caught.value.problem
    assert "\n" not in caught.value.hint
    return caught.value


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def tar_bytes(members, mode="w"):
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode=mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return held.getvalue()


def zip_bytes(members, compression=zipfile.ZIP_DEFLATED):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return held.getvalue()


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("named", ["novel.txt.{}", "novel.txt", "novel.GZ"])
def test_what_a_file_is_compressed_with_is_told_by_its_content(tmp_path, kind, named):
    path = put(tmp_path / named.format(kind), COMPRESS[kind](TEXT.encode()))
    assert read(path) == [(path.name, TEXT)]


@pytest.mark.parametrize("kind", COMPRESS)
def test_parts_compressed_one_after_the_other_are_one_text(tmp_path, kind):
    parts = b"".join(COMPRESS[kind](part.encode()) for part in ("one\n", "", "two\n"))
    assert read(put(tmp_path / "a.txt", parts)) == [("a.txt", "one\ntwo\n")]


@pytest.mark.parametrize("tool", ["gzip", "xz", "bzip2", "zstd"])
def test_files_of_the_usual_programs_are_read(tmp_path, tool):
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} here")
    path = tmp_path / "novel.txt.z"
    path.write_bytes(subprocess.run([tool, "-c"], input=TEXT.encode(), capture_output=True, check=True).stdout)
    assert read(path) == [("novel.txt.z", TEXT)]


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_compressed_file_cut_anywhere_is_an_error_and_never_a_shorter_text(tmp_path, kind):
    whole = COMPRESS[kind](random.Random(0).randbytes(500).hex().encode() * 3)
    for length in sorted({*range(12, len(whole), 23), len(whole) - 1}):
        error = failed(put(tmp_path / f"cut.{kind}", whole[:length]))
        assert error.problem.startswith(f"cut.{kind}"), error.problem


def test_a_changed_byte_is_found_by_the_checksum_and_the_place_is_said(tmp_path):
    whole = bytearray(gzip.compress(TEXT.encode() * 50))
    whole[-6] ^= 1
    error = failed(put(tmp_path / "novel.gz", bytes(whole)))
    assert "novel.gz: the gzip data is damaged (CRC check failed" in error.problem
    after = int(re.search("after ([0-9,]+) bytes of text", error.problem)[1].replace(",", ""))
    assert after == len(TEXT.encode()) * 50


@pytest.mark.parametrize("kind", COMPRESS)
def test_what_was_good_before_a_cut_is_counted(tmp_path, kind):
    rows = "".join(f'{{"text": "{random.Random(k).randbytes(100).hex()}"}}\n' for k in range(6000)).encode()
    whole = COMPRESS[kind](rows)
    error = failed(put(tmp_path / f"rows.jsonl.{kind}", whole[: len(whole) * 9 // 10]))
    found = re.search("after ([0-9,]+) bytes of text(?:, ([0-9,]+) whole lines)?$", error.problem)
    size, lines = (int((number or "0").replace(",", "")) for number in found.groups())
    assert 0.5 * len(rows) < size < len(rows)
    assert lines == rows[:size].count(b"\n")


def test_a_packed_file_that_is_no_text_may_be_damaged(tmp_path):
    error = failed(put(tmp_path / "a.jsonl.zst", zstd.compress(b'{"text": "x"}\n{"te~')))
    assert "line 2 is not JSON" in error.problem
    assert error.hint.endswith("if they were when packed, the Zstandard file is damaged: get it again")
    assert "the Zstandard file is damaged" in failed(put(tmp_path / "a.txt.zst", zstd.compress(b"a\xff"))).hint
    assert "--format text" in failed(put(tmp_path / "a.jsonl", b"a")).hint


def test_what_is_compressed_twice_is_not_taken_for_text(tmp_path):
    twice = gzip.compress(gzip.compress(random.Random(1).randbytes(3000)))
    assert "gzip file; decompress it first" in failed(put(tmp_path / "a.txt.gz", twice)).hint


def test_a_text_that_begins_like_a_compressed_file_is_text(tmp_path):
    assert read(put(tmp_path / "a.txt", "BZhang wrote: PK, \x1f")) == [("a.txt", "BZhang wrote: PK, \x1f")]


def test_offsets_in_errors_count_the_unpacked_bytes(tmp_path):
    data = b"a" * 300_000 + b"\x83\x65" + b"b" * 10
    error = failed(put(tmp_path / "a.txt.gz", gzip.compress(data)))
    assert error.problem == "a.txt.gz: byte 0x83 at offset 300000 is not utf-8"
    path = put(tmp_path / "sjis.txt.zst", zstd.compress("雪国のトンネル".encode("cp932") * 100))
    assert "--encoding cp932" in failed(path).hint
    assert read(path, encoding="cp932") == [("sjis.txt.zst", "雪国のトンネル" * 100)]


def test_a_zstandard_window_over_the_limit_says_the_way_out(tmp_path):
    options = {zstd.CompressionParameter.window_log: 28, zstd.CompressionParameter.content_size_flag: 0}
    path = tmp_path / "long.zst"
    with zstd.open(path, "wb", options=options) as file:
        for _ in range(3):
            file.write(os.urandom(1 << 10).hex().encode())
            file.flush()
    try:
        assert read(path)
    except RungError as error:
        assert "--long=31" in error.hint  # noqa: PT017 - whether the window counts is the library's affair


# Archives

MEMBERS = {
    "b.txt": TEXT.encode(),
    "a/z.txt": b"z",
    "a.txt": b"a",
    "a/b/deep.txt.gz": gzip.compress(b"deep"),
    "a-b.txt": b"",
    ".hidden": b"\xff",
    "__MACOSX/._b.txt": b"\xff",
    "a/.DS_Store": b"\xff",
}


def pack(kind, members):
    if kind == "zip":
        return zip_bytes(members)
    return tar_bytes(members, {"tar": "w", "tar.gz": "w:gz", "tar.xz": "w:xz", "tar.bz2": "w:bz2"}[kind])


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.xz", "tar.bz2"])
def test_an_archive_is_read_as_the_folder_that_it_was(tmp_path, kind):
    for name, data in MEMBERS.items():
        put(tmp_path / "books" / name, data)
    shutil.rmtree(tmp_path / "books/__MACOSX")
    of_folder = [(name.removeprefix("books/"), text) for name, text in read(tmp_path / "books")]
    path = put(tmp_path / f"x.{kind}", pack(kind, MEMBERS))
    assert read(path) == [(f"x.{kind}/{name}", text) for name, text in of_folder]
    assert len(of_folder) == 5


def test_a_tar_compressed_with_zstandard_and_one_of_another_name(tmp_path):
    data = tar_bytes({"b": b"2", "a": b"1"})
    assert read(put(tmp_path / "x.tar.zst", zstd.compress(data))) == [("x.tar.zst/a", "1"), ("x.tar.zst/b", "2")]
    assert read(put(tmp_path / "x.tgz", gzip.compress(data))) == [("x.tgz/a", "1"), ("x.tgz/b", "2")]
    assert read(put(tmp_path / "archive", data)) == [("archive/a", "1"), ("archive/b", "2")]


def test_archives_nest_once(tmp_path):
    inner = zip_bytes({"two.txt": b"2", "one.txt": b"1"})
    outer = put(tmp_path / "all.zip", zip_bytes({"b.tar.gz": tar_bytes({"t": b"t"}, "w:gz"), "a.zip": inner}))
    assert read(outer) == [("all.zip/a.zip/one.txt", "1"), ("all.zip/a.zip/two.txt", "2"), ("all.zip/b.tar.gz/t", "t")]
    deeper = put(tmp_path / "deeper.zip", zip_bytes({"all.zip": outer.read_bytes()}))
    assert "deeper.zip/all.zip/a.zip is an archive in an archive" in failed(deeper).problem


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_a_damaged_archive_is_an_error_wherever_it_is_cut(tmp_path, kind):
    whole = pack(kind, {f"{k}.txt": random.Random(k).randbytes(700).hex().encode() for k in range(3)})
    end = len(whole) if kind != "tar" else 3 * (512 + 1536)  # what pads a tar after its end may be cut
    for length in range(600, end, 211):
        error = failed(put(tmp_path / f"cut.{kind}", whole[:length]))
        assert error.problem.startswith(f"cut.{kind}"), error.problem


def test_a_damaged_header_in_a_tar_is_not_taken_for_its_end(tmp_path):
    whole = bytearray(tar_bytes({"a": b"1" * 512, "b": b"2" * 512}))
    whole[1024:1040] = b"\xaa" * 16
    assert "x.tar: the tar archive is damaged" in failed(put(tmp_path / "x.tar", bytes(whole))).problem


def test_a_member_with_a_wrong_checksum_is_named(tmp_path):
    whole = bytearray(zip_bytes({"a.txt": b"first", "b.txt": b"second text"}, zipfile.ZIP_STORED))
    at = whole.index(b"second")
    whole[at] ^= 1
    assert "x.zip/b.txt: the zip data is damaged (Bad CRC-32" in failed(put(tmp_path / "x.zip", bytes(whole))).problem


def test_what_an_archive_cannot_give_is_said(tmp_path):
    assert "no files in the archive" in failed(put(tmp_path / "empty.zip", zip_bytes({".hidden": b""}))).problem
    twice = io.BytesIO()
    with tarfile.open(fileobj=twice, mode="w") as archive:
        for text in (b"old", b"new"):
            info = tarfile.TarInfo("a.txt")
            info.size = 3
            archive.addfile(info, io.BytesIO(text))
    assert "x.tar holds a.txt twice" in failed(put(tmp_path / "x.tar", twice.getvalue())).problem
    office = zip_bytes({"[Content_Types].xml": b"", "word/document.xml": b"<x/>"})
    assert "x.docx is an Office document (Word)" in failed(put(tmp_path / "x.docx", office)).problem
    picture = zip_bytes({"a.png": b"\x89PNG\r\n\x1a\n" + bytes(100)})
    error = failed(put(tmp_path / "p.zip", picture))
    assert "p.zip/a.png looks binary" in error.problem
    assert "PNG" in error.hint


def test_an_encrypted_zip_is_named(tmp_path):
    whole = bytearray(zip_bytes({"a.txt": b"secret"}, zipfile.ZIP_STORED))
    whole[6] |= 1  # the flag of the local header
    whole[whole.index(b"PK\x01\x02") + 8] |= 1  # and of the directory
    assert failed(put(tmp_path / "x.zip", bytes(whole))).problem == "x.zip/a.txt is encrypted"


def test_every_byte_of_a_source_is_told_however_it_is_packed(tmp_path):
    packed = {"a.txt": TEXT.encode(), "b.txt.gz": gzip.compress(TEXT.encode())}
    packed |= {kind: pack(kind, MEMBERS) for kind in ("zip", "tar", "tar.gz")}
    for name, data in packed.items():
        (source,) = resolve([put(tmp_path / name, data)])
        told = []
        for file in unpacked(source, told.append):
            while file.stream.read(1000):
                pass
        assert sum(told) == source.size, name
        assert min(told) > 0


def test_a_bomb_streams_in_bounded_memory(tmp_path):
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb", 1) as file:
        info = tarfile.TarInfo("zeros.txt")
        info.size = 1 << 26
        file.write(info.tobuf())
        for _ in range(1 << 6):
            file.write(b"word and" * (1 << 17))
        file.write(bytes(1024))
    program = (
        "import resource, sys; from rung.config import DataConfig; from rung.corpus.sources import resolve\n"
        "from rung.corpus.documents import scan\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(scan(resolve([sys.argv[1]]), DataConfig()).bytes[0])\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    ran = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True, env=environment
    )
    size, grown = map(int, ran.stdout.split())
    assert size == 1 << 26
    assert grown < 32, f"{grown} MB for a text of 64"
