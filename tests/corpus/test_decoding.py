"""Decoding: strict, streamed, and the same under every locale."""

from __future__ import annotations

import codecs
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rung.corpus import decoding
from rung.corpus.decoding import text_chunks
from rung.corpus.sources import resolve
from rung.errors import RungError

TEXT = "国境の長いトンネルを抜けると\r\n雪国であった。\r\nCafé \U0001f600\u2028\x00end\n"


def read(path: Path, encoding: str = "utf-8") -> str:
    (source,) = resolve([path])
    return "".join(text_chunks(source, encoding))


def written(folder: Path, data: bytes) -> Path:
    path = folder / "text.txt"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("block", [1, 2, 3, 5, 1 << 18])
@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
def test_a_byte_order_mark_wins_over_the_encoding_and_is_no_text(tmp_path, monkeypatch, mark, encoding, block):
    monkeypatch.setattr(decoding, "_READ_BYTES", block)
    monkeypatch.setattr(decoding, "_PROBE_BYTES", 6)
    path = written(tmp_path, mark + TEXT.encode(encoding))
    assert read(path, "cp932") == read(path) == TEXT


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 18])
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-16", "utf-16-be", "cp932", "euc_jp", "iso2022_jp", "gb18030", "cp1252"]
)
def test_text_comes_back_whatever_the_encoding_and_the_blocks(tmp_path, monkeypatch, encoding, block):
    monkeypatch.setattr(decoding, "_READ_BYTES", block)
    monkeypatch.setattr(decoding, "_PROBE_BYTES", block)
    text = "line\r\n\rnew\n" + ("caf\u00e9" if encoding == "cp1252" else "雪国、ロビー") * 5
    data = text.encode("utf-16-le" if encoding == "utf-16" else encoding)  # without a mark
    assert read(written(tmp_path, data), encoding) == text


@pytest.mark.parametrize("block", [4, 7, 1 << 18])
@pytest.mark.parametrize(
    ("good", "bad", "encoding"),
    [
        ("é" * 100_003, b"\xff", "utf-8"),
        ("雪" * 31, b"\xe9\x9b", "utf-8"),  # a character that never ends
        ("雪" * 31 + "a", b"\x81\x20", "cp932"),
        ("a" * 1001, b"\xd8", "utf-16-le"),
    ],
)
def test_an_undecodable_byte_is_named_with_its_file_offset_and_option(
    tmp_path, monkeypatch, good, bad, encoding, block
):
    if len(good) < 10_000:
        monkeypatch.setattr(decoding, "_READ_BYTES", block)
        monkeypatch.setattr(decoding, "_PROBE_BYTES", block)
    data = good.encode(encoding)
    with pytest.raises(RungError) as caught:
        read(written(tmp_path, data + bad), encoding)
    assert f"text.txt: byte 0x{bad[0]:02x} at offset {len(data)} is not {encoding}" == caught.value.problem
    assert "--encoding" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("国境の長いトンネルを抜けると雪国であった。夜の底が白くなった。", "cp932"),
        ("国境の長いトンネルを抜けると雪国であった。夜の底が白くなった。", "euc_jp"),
        ("국경의 긴 터널을 빠져나오자, 눈의 고장이었다.", "cp949"),
        ("穿过县界长长的隧道，便是雪国。夜空下一片白茫茫。", "gb18030"),
        ("À peine le train était-il sorti du tunnel, c’était déjà la neige…", "cp1252"),
        ("The train came out of the long tunnel.", "utf-16-le"),
        ("The train came out of the long tunnel.", "utf-16-be"),
    ],
)
def test_the_hint_names_the_encoding_that_fits(tmp_path, text, encoding):
    with pytest.raises(RungError) as caught:
        read(written(tmp_path, text.encode(encoding)))
    assert f"--encoding {encoding}" in caught.value.hint
    assert read(tmp_path / "text.txt", encoding) == text


def test_a_binary_file_is_one_clear_line(tmp_path):
    for data, kind in ((b"\x1f\x8b\x08" + bytes(range(256)), "gzip"), (b"\x89PNG\r\n\x1a\n" + bytes(200), "PNG")):
        with pytest.raises(RungError, match=r"^text\.txt") as caught:
            read(written(tmp_path, data))
        assert kind in caught.value.hint
    with pytest.raises(RungError, match="looks binary"):
        read(written(tmp_path, b"ab\x00\x00" * 100))


def test_an_unknown_encoding_is_answered_with_the_near_one(tmp_path):
    path = written(tmp_path, b"text")
    with pytest.raises(RungError, match="unknown encoding 'utf-88'") as caught:
        read(path, "utf-88")
    assert "utf" in caught.value.hint
    for not_text in ("hex", "base64", "rot13", "", "a\0b"):
        with pytest.raises(RungError, match="unknown encoding"):
            read(path, not_text)


def test_the_locale_does_not_matter(tmp_path):
    path = written(tmp_path, TEXT.encode())
    script = (
        "import sys; from rung.config import *; from rung.corpus.sources import resolve\n"
        "from rung.corpus.documents import documents; from rung.tokens.tokenizer import Tokenizer\n"
        "from rung.tokens.store import TokenStore, build_store\n"
        "sources = resolve([sys.argv[1]]); data = DataConfig()\n"
        "tokenizer = Tokenizer.train(documents(sources, data), TokenizerConfig(kind='byte'))\n"
        "store = build_store(sources, tokenizer, sys.argv[2], data)\n"
        "tokenizer = Tokenizer.load(sys.argv[2] + '/tokenizer.json')\n"
        "text = ''.join(tokenizer.decode(store.split(name).read(0, len(store.split(name)))) for name in store.splits)\n"
        "sys.stdout.buffer.write(text.encode())\n"
    )
    command = [sys.executable, "-X", "utf8=0", "-c", script, str(path), str(tmp_path / "store")]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.stdout.decode() == TEXT, done.stderr.decode()
