"""``rung corpus aozora`` on the command line, and what follows it on the corpus it makes."""

from __future__ import annotations

import pytest

RAW = """題
著者

-------------------------------------------------------
【テキスト中に現れる記号について】

《》：ルビ
（例）私《わたくし》は
-------------------------------------------------------

［＃５字下げ］一［＃「一」は中見出し］

　私《わたくし》は※［＃「口＋斗」、26-3］。
「うん」

底本：「本」出版社
入力：某
青空文庫作成ファイル：
"""


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    for card in (7, 8, 9):
        text = RAW.replace("私《わたくし》", f"私《わたくし》{card}" * 40).replace("\n", "\r\n")
        (folder / f"{card}_ruby_1.txt").write_bytes(text.encode("cp932"))
    (folder / "7_txt_0.txt").write_bytes(b"older")
    (folder / "fig1.png").write_bytes(b"\x89PNG")
    return folder


def test_counts_for_people_and_as_json(rung, raw, tmp_path):
    done = rung("corpus", "aozora", raw, "--out", tmp_path / "c")
    assert done.status == 0
    assert "3 works" in done.text
    assert "1 file left out, of works that have a newer one" in done.text
    assert "passed over: 1 .png" in done.text
    assert "characters spelled out: 3 not resolved, which stand as 〓" in done.text
    assert "not resolved: 「口＋斗」 (3 in raw/7_ruby_1.txt and 2 more)" in done.text
    again = rung("corpus", "aozora", raw, "--out", tmp_path / "c", "--works", 2, "--overwrite", "--json")
    assert (again.json["documents"], again.json["report"]["gaiji"]) == (2, {"resolved": 0, "unresolved": 2})
    assert len(again.out.splitlines()) == 1


def test_the_corpus_trains_a_tokenizer_and_makes_tokens(rung, raw, tmp_path):
    rung("corpus", "aozora", raw, "--out", tmp_path / "c")
    made = rung("tokenizer", "train", tmp_path / "c", "--vocab-size", 300, "--out", tmp_path / "t.json", "--json")
    assert made.json["vocab_size"] > 257
    tokens = rung(
        "tokens", "build", tmp_path / "c", "--tokenizer", tmp_path / "t.json", "--out", tmp_path / "k", "--json"
    )
    assert tokens.json["train"]["documents"] + tokens.json["validation"]["documents"] == 3


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        ((), "no source named", "--hub"),
        (("raw", "--works", "9"), "the sources have 3 works, and 9 are asked for", "ask for fewer"),
        (("raw", "--works", "0"), "--works is 0", "one work or more"),
        (("raw", "--revision", "main"), "--revision is of a data set of the Hub", "--hub"),
        (("a", "b", "--hub"), "2 data sets are named", "reads one"),
        (("a", "--hub", "--ruby", "parentheses"), "are for raw files", "leave them out"),
        (("raw/fig1.png",), "no text files in the sources: 1 .png", ".txt"),
        (("raw", "--encoding", "utf-8"), "raw/7_ruby_1.txt: byte 0x91 at offset 0 is not utf-8", "--encoding"),
    ],
)
def test_mistakes_are_two_lines(rung, raw, tmp_path, monkeypatch, words, problem, hint):
    monkeypatch.chdir(tmp_path)
    done = rung("corpus", "aozora", *words, "--out", "c")
    assert done.status == 2
    first, second = done.err.splitlines()
    assert problem in first
    assert hint in second
    assert not (tmp_path / "c").exists()
