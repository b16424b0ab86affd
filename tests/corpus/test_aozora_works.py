"""Works of Aozora Bunko: parts of files, passages read by hand, the whole shared archive, and how they are found."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zipfile

import pytest

from rung.cli.corpus_aozora import lines
from rung.corpus.aozora.build import Choices, build_from_files, build_from_rows
from rung.corpus.aozora.files import decode, find, read
from rung.corpus.aozora.parts import parse
from rung.corpus.hub import Row
from rung.corpus.sources import resolve
from rung.errors import RungError

RULE = "-" * 55
LEGEND = (
    f"{RULE}\n【テキスト中に現れる記号について】\n\n《》：ルビ\n（例）私《わたくし》は\n\n［＃］：入力者注\n{RULE}\n"
)
COLOPHON = "底本：「こころ」集英社文庫\n　　　1991年2月25日第1刷\n入力：某\n1999年1月1日作成\n青空文庫作成ファイル：\n"


def file_of(body, title="こころ\n夏目漱石\n\n", legend=LEGEND, colophon=COLOPHON):
    return title + legend + body + colophon


# Parts


def test_header_and_colophon_are_taken_off_and_told_as_metadata():
    work = parse(
        file_of(
            "\n　私《わたくし》は\n\n「うん」\n\n\n", title="坊っちゃん《ぼっちゃん》\n副題\n夏目漱石\n森鴎外訳\n\n"
        )
    )
    assert work.text == "　私は\n\n「うん」"
    assert work.metadata == {
        "title": "坊っちゃん",
        "subtitle": "副題",
        "author": "夏目漱石",
        "contributors": ["森鴎外訳"],
        "colophon": COLOPHON.strip(),
    }


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (file_of("\n本文。\n\n", legend=""), "本文。"),
        (
            file_of("\n一\n" + RULE + "\n底本：と書いてあつた。\n二\n\n" + "行\n" * 400),
            "一\n" + RULE + "\n底本：と書いてあつた。\n二\n\n" + "行\n" * 399 + "行",
        ),
        (file_of("\n本文。\n", colophon="［＃本文終わり］\n翻訳の底本：X\n" + COLOPHON), "本文。"),
        (file_of("\n本文。\n" + RULE + "\n●入力者注\n※１　注\n" + RULE + "\n"), "本文。"),
        (file_of("\n本文。\n" + RULE + "\n", colophon="\n" + COLOPHON), "本文。"),
        ("［表記について］は無い\n\n" * 2, "［表記について］は無い\n\n［表記について］は無い"),
        ("題\n著者\n\n［表記について］\n●ルビは「《ルビ》」\n" + RULE + "\n　本文《ほんぶん》\n" + COLOPHON, "　本文"),
        ("ただの文。\n\n次の文。\n", "ただの文。\n\n次の文。"),  # neither legend nor colophon: all of it is text
        ("", ""),
    ],
)
def test_variants_of_the_parts(raw, text):
    work = parse(raw)
    assert work.text == text
    assert sum(work.characters.values()) == len(raw)


# Passages, read in the files and written down by hand

PASSAGES = {
    "000148/files/773_ruby_5968": [  # こころ: headings, indents, ruby
        "上　先生と私\n\n\n一\n\n　私はその人を常に先生と呼んでいた。だからここでもただ先生と書くだけで"
        "本名は打ち明けない。これは世間を憚かる遠慮というよりも、",
    ],
    "000879/files/128_ruby_2046": [  # 羅生門: marked ruby, a ruby with an iteration mark, a note on the source
        "　或日の暮方の事である。一人の下人が、羅生門の下で雨やみを待つてゐた。\n　廣い門の下には、"
        "この男の外に誰もゐない。唯、所々丹塗の剥げた、大きな圓柱に、蟋蟀が一匹とまつてゐる。羅生門が、朱雀大路",
        "門の屋根が、斜につき出した甍",
    ],
    "000129/files/2522_ruby_5001": [  # 青年: gaiji in a row with one ruby, accents with ruby
        "咖啡に crème を誂えたが、クレエムが来たかと思う",
        "題号なんぞの大きい活字を拾って、Phèdre なんという題号を見て、ぼんやり考え込んでいた。",
        "給仕が ham-eggs か何か持って来たので、",
    ],
    "000879/files/69_ruby_1321": [  # 河童: blocks of notes on lines of their own, a gaiji by description
        "遺伝的義勇隊を募る！！！\n健全なる男女の河童よ！！！\n悪遺伝を撲滅するために\n不健全なる男女の河童と結婚せよ！！！\n"
        "　僕はもちろんその時にもそんなことの行なわれないことをラップに話して聞かせました。",
    ],
    "000081/files/4410_ruby_26656": [  # 虔十公園林: dialogue on short lines, small kana
        "　虔十のおっかさんはきらきらの三本鍬を動かすのをやめてじっと虔十の顔を見て云ひました。\n"
        "「杉苗七百ど、どごさ植\U0001b151らぃ。」\n「家のうしろの野原さ。」\n　そのとき虔十の兄さんが云ひました。\n",
    ],
    "000879/files/37_ruby_1265": [  # 戯作三昧: marks of Chinese read as Japanese
        "「何時もながら、結構な御出来ですな。私は王摩詰を思ひ出します。食随鳴磬巣烏下、行踏空林落葉声",
    ],
    "000129/files/49245_txt_36153": [  # 言語の起原: a gaiji that is not resolved, and quoted in the next note
        "學人は小兒の〓聲、簡單なるものより複雜なるものに進み、言語の原料となると云ひ、",
    ],
    "000081/files/1058_ruby_4709": ["　（えゝ　８　γ　ｅ　６　α\n"],  # 春と修羅: ruby on signs
    "000148/files/794_ruby_4237": [
        "クールベエというやつがいる。vérité vraie. なんでも事実でなければ"
    ],  # 三四郎: ruby in accents
    "000081/files/47027_ruby_37026": ["はんのき　アルヌスランダー　鏡鏡鏡鏡をつるし"],  # notes set in two lines
}


@pytest.fixture(scope="module")
def archive(shared_data):
    return shared_data / "aozora/aozora-raw-4-authors.tar.xz"


@pytest.fixture(scope="module")
def every_work(archive):
    """All files of the shared archive, each version: name, text as it is, work."""
    sources = resolve([archive])
    works = []
    for file, data in read(sources, find(sources, all_versions=True).files):
        text, _ = decode(data, file.name)
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        works.append((file.name, text, parse(text, name=file.name)))
    return works


def test_passages_of_works_read_by_hand(every_work):
    texts = {name.partition("cards/")[2].rpartition("/")[0]: work.text for name, _, work in every_work}
    for name, passages in PASSAGES.items():
        for passage in passages:
            assert passage in texts[name], name
    assert texts["000148/files/773_ruby_5968"].startswith("上　先生と私\n\n\n一\n")
    assert texts["000148/files/784_txt"].startswith("　二月二十八日には生暖たかい風が朝から吹いた。")


def test_every_file_of_the_archive_parses_and_every_character_is_accounted_for(every_work):
    assert len(every_work) == 899
    for name, text, work in every_work:
        assert work.has_header, name
        assert work.has_colophon, name
        assert work.text.strip("\n") == work.text != "", name
        assert {"title", "author", "colophon"} <= work.metadata.keys(), name
        tally = work.tally
        assert sum(work.characters.values()) == len(text), name
        assert tally.kept + sum(tally.dropped.values()) == work.characters["body"], name
        assert tally.kept + tally.inserted == len(work.text), name
        assert work.characters["header"] < 2000, name
        assert "青空文庫" not in work.text[-300:], name
    authors = {work.metadata["author"] for _, _, work in every_work}
    assert authors == {
        *("夏目漱石", "夏目金之助", "芥川龍之介", "芥川竜之介", "AKUTAGAWA Ryunosuke", "森鴎外", "森林太郎"),
        *("宮沢賢治", "宮澤賢治"),
    }


def test_no_notation_is_left_in_the_archive_but_three_brackets_which_are_listed(every_work):
    left = []
    for name, _, work in every_work:
        listed = {one["text"][0] for one in work.tally.ill_formed}
        left += [(name, found[0]) for found in re.finditer("《|》|｜|／[″゛]?＼|＃|※［|［※", work.text)]
        unpaired = work.text.count("］") - work.text.count("［")
        left += [(name, "］")] * unpaired
        assert {character for file, character in left if file == name} <= listed
        assert not re.search("〔[^〕]*[A-Za-z]['`^:&~](?![ 〕])[^〕]*〕", work.text), name
        assert not work.tally.unknown or name.endswith("2522_ruby.txt")
    assert [(name.rpartition("/")[2], character) for name, character in left] == [
        ("682_txt.txt", "］"),
        ("682_txt.txt", "］"),
        ("56923_ruby_66668.txt", "》"),
    ]


# A corpus of them


def test_the_archive_becomes_a_corpus_of_one_document_a_work_with_everything_counted(archive, tmp_path):
    corpus = build_from_files(resolve([archive]), tmp_path / "c", Choices())
    report = corpus.report
    assert (report["files"], report["works"], corpus.documents) == (856, 856, 856)
    assert len(report["other_versions"]) == 899 - 856
    characters = report["characters"]
    parts = ("header", "colophon", "surrounding", "body", "carriage returns")
    assert characters["files"] == sum(characters[name] for name in parts)
    assert characters["body"] == characters["kept"] + characters["notation"]
    assert characters["notation"] == sum(kind["characters"] for kind in report["notation"].values())
    assert corpus.characters == characters["kept"] + characters["inserted"]
    gaiji = report["gaiji"]
    assert gaiji["resolved"] > 30 * gaiji["unresolved"]
    assert gaiji["unresolved"] == sum(n for files in report["unresolved_gaiji"].values() for n in files.values())
    records = {record.metadata["card"]: record for record in corpus.records()}
    assert len(records) == 856
    about = records["773"].metadata
    assert (about["title"], about["author"], about["person"]) == ("こころ", "夏目漱石", "000148")
    assert about["colophon"].startswith("底本：「こころ」集英社文庫、集英社")
    assert about["orthography"] == "新字新仮名"


def test_works_and_orthography_choose_and_the_text_begins_alike(archive, tmp_path):
    sources = resolve([archive])
    corpus = build_from_files(sources, tmp_path / "c", Choices(works=7, orthography="旧字旧仮名"))
    assert corpus.documents == 7
    assert {record.metadata["orthography"] for record in corpus.records()} == {"旧字旧仮名"}
    assert corpus.report["orthography_left_out"] == corpus.report["files"] - 7
    with pytest.raises(RungError, match="have 49 works in 旧字旧仮名, and 50 are asked for"):
        build_from_files(sources, tmp_path / "d", Choices(works=50, orthography="旧字旧仮名"))
    assert not (tmp_path / "d").exists()


def test_killed_and_begun_again_it_ends_with_the_same_bytes(tmp_path):
    for number in range(30):
        path = tmp_path / f"raw/{number}_ruby_{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(
            file_of(f"\n　本文※［＃「口＋斗」、{number}-1］《よみ》\n" * 20).replace("\n", "\r\n").encode("cp932")
        )
    sources = resolve([tmp_path / "raw"])

    class Killed(BaseException):
        pass

    def stop(done, total):
        if done > total * 0.7:
            raise Killed

    build_from_files(sources, tmp_path / "whole", Choices(), shard_bytes=1000)
    with pytest.raises(Killed):
        build_from_files(sources, tmp_path / "killed", Choices(), shard_bytes=1000, on_progress=stop)
    said = []
    build_from_files(sources, tmp_path / "killed", Choices(), shard_bytes=1000, say=said.append)
    assert re.fullmatch("going on after (?:1[0-9]|2[0-9]) works, which are there already", said[0])
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("whole", "killed")]
    assert files[0] == files[1]
    assert len(files[0]) > 3
    assert json.loads(files[0]["corpus.json"])["report"]["gaiji"] == {"resolved": 0, "unresolved": 600}


# Files


def test_text_is_found_in_folders_and_in_zips_within_archives(tmp_path):
    data = file_of("\n本文。\n").replace("\n", "\r\n").encode("cp932")
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("kokoro.txt", data)
        archive.writestr("fig1.png", b"\x89PNG")
    outer = tmp_path / "repository.tar.xz"
    with tarfile.open(outer, "w:xz") as archive:
        for name, content in (
            ("aozorabunko/cards/000148/files/773_ruby_5968.zip", zipped.getvalue()),
            ("aozorabunko/cards/000148/files/773_txt.txt", data),
            ("aozorabunko/index.html", b"<html>"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    found = find(resolve([outer]))
    assert [(file.person, file.card, file.version) for file in found.files] == [("000148", "773", (5968, True))]
    assert found.files[0].name.endswith("773_ruby_5968.zip/kokoro.txt")
    assert found.passed_over == {".png": 1, ".html": 1}
    assert len(found.other_versions) == 1
    assert [content for _, content in read(resolve([outer]), found.files)] == [data]


def test_files_without_numbers_are_works_of_their_own(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes("本文".encode("cp932"))
    corpus = build_from_files(resolve([tmp_path]), tmp_path / "out", Choices())
    assert [(record.metadata["title"], "".join(record.pieces)) for record in corpus.records()] == [
        ("a", "本文"),
        ("b", "本文"),
    ]
    assert len(corpus.report["without_header"]) == len(corpus.report["without_colophon"]) == 2


@pytest.mark.parametrize(
    ("text", "encoding", "told"),
    [
        ("雪国～①", "cp932", "cp932"),
        ("俱や𠮟る、~\\", "shift_jis_2004", "shift_jis_2004"),
        ("国境の長い\ufeff", "utf-8", "utf-8"),
        ("ASCII only", "ascii", "cp932"),
    ],
)
def test_the_encoding_is_found_out(text, encoding, told):
    data = (
        text.translate({0x7E: "‾", 0x5C: "¥"}).encode(encoding)
        if encoding == "shift_jis_2004"
        else text.encode(encoding)
    )
    assert decode(data, "a.txt") == (text, told)


def test_signs_and_kana_are_the_same_text_in_both_encodings():
    pairs = [bytes((a, b)) for a in range(0x81, 0x85) for b in (*range(0x40, 0x7F), *range(0x80, 0xFD))]
    checked = 0
    for data in [bytes((a,)) for a in range(0x80)] + pairs:
        try:
            as_cp932 = decode(data, "a.txt", "cp932")[0]
            as_2004 = decode(data, "a.txt", "shift_jis_2004")[0]
        except RungError:
            continue
        assert as_cp932 == as_2004, data.hex()
        checked += 1
    assert checked > 600


@pytest.mark.parametrize("encoding", ["auto", "shift_jis_2004"])
def test_iteration_marks_are_read_in_shift_jis_2004(encoding):
    data = "俱に※［＃「口」、1-2］いろ／＼～－".translate({0xFF3C: "\\", 0xFF5E: "\u301c", 0xFF0D: "\u2212"})
    text, told = decode(data.encode("shift_jis_2004"), "a.txt", encoding)
    assert told == "shift_jis_2004"
    assert text.endswith("いろ／＼～－")
    work = parse(text)
    assert work.text.endswith("いろ〳〵～－")
    assert work.tally.found["iteration mark"] == 1


def test_utf_16_is_named_with_the_way_out():
    with pytest.raises(RungError, match=r"x/a\.txt is UTF-16") as caught:
        decode("雪国".encode("utf-16"), "x/a.txt")
    assert caught.value.hint == "make it UTF-8 first: iconv -f UTF-16 -t UTF-8 a.txt > utf-8.txt"


def test_notes_at_the_ends_leave_no_empty_lines():
    raw = "［＃ここから２字下げ］\n\n本文\n\n［＃ここで字下げ終わり］"
    work = parse(raw)
    assert work.text == "本文"
    assert sum(work.characters.values()) == len(raw)
    assert work.tally.kept + sum(work.tally.dropped.values()) == work.characters["body"]


def test_a_plain_text_is_said_to_be_one_without_empty_tables(tmp_path):
    (tmp_path / "a.txt").write_text("ただの文。\n二行目。\n", "utf-8")
    corpus = build_from_files(resolve([tmp_path / "a.txt"]), tmp_path / "c", Choices())
    assert corpus.report["plain"] == ["a.txt"]
    told = "\n".join(lines(corpus))
    assert "plain text, without any notation, taken whole: a.txt" in told
    assert "()" not in told
    assert "found" not in told


def test_bytes_of_no_encoding_are_named_with_their_offset():
    with pytest.raises(RungError, match="byte 0xff at offset 4 is neither cp932 nor Shift_JIS-2004"):
        decode("雪国".encode("cp932") + b"\xff\xff", "a.txt")
    with pytest.raises(RungError, match="byte 0x90 at offset 0 is not utf-8"):
        decode("雪国".encode("cp932"), "a.txt", "utf-8")


def test_sources_without_text_files(tmp_path):
    (tmp_path / "a.html").write_text("<p>")
    with pytest.raises(RungError, match=r"no text files in the sources: 1 \.html"):
        build_from_files(resolve([tmp_path]), tmp_path / "out", Choices())


# Rows of the data set


def row(number, spelling="新字新仮名", text="本文。"):
    meta = {"作品ID": f"{number:06d}", "作品名": f"題{number}", "文字遣い種別": spelling, "姓": "夏目", "名": "漱石"}
    return Row(text, {"footnote": "底本：「X」", "meta": meta | {"人物ID": "000148", "公開日": "2000-01-02"}})


def build(rows, out, choices):
    return build_from_rows(lambda first: rows[first:], out, choices, sources=[{"name": "local"}])


def test_rows_of_the_data_set_become_works(tmp_path):
    rows = [row(1), row(2, "旧字旧仮名"), row(3, text=""), row(773), row(5)]
    corpus = build(rows, tmp_path / "c", Choices(works=2, orthography="新字新仮名"))
    about = [record.metadata for record in corpus.records()]
    assert [(one["title"], one["author"], one["card"]) for one in about] == [
        ("題1", "夏目漱石", "1"),
        ("題773", "夏目漱石", "773"),
    ]
    assert about[0]["index"]["公開日"] == "2000-01-02"
    assert about[0]["colophon"] == "底本：「X」"
    report = corpus.report
    assert (report["works"], report["rows"], report["orthography_left_out"], report["empty"]) == (2, 4, 1, ["000003"])
    with pytest.raises(RungError, match="have 3 works in 新字新仮名, and 9 are asked for"):
        build(rows, tmp_path / "d", Choices(works=9, orthography="新字新仮名"))


def test_rows_of_another_data_set_are_refused(tmp_path):
    with pytest.raises(RungError, match="row 0 has no meta with 文字遣い種別; beside the text it has url"):
        build([Row("a", {"url": "b"})], tmp_path / "c", Choices())


def test_a_data_set_of_files_is_read_by_the_library_as_the_hub_s_is(tmp_path):
    pytest.importorskip("datasets", reason="extra hub")
    from rung.run.corpus import aozora_of_hub

    folder = tmp_path / "aozorabunko-clean"
    folder.mkdir()
    rows = [row(1), row(2, "新字旧仮名", "旧"), row(3, text="三。\n「うん」\n")]
    lines = [json.dumps({"text": one.text, **one.metadata}, ensure_ascii=False) for one in rows]
    with gzip.open(folder / "aozorabunko-dedupe-clean.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    corpus = aozora_of_hub(str(folder), tmp_path / "c", Choices(orthography="新字新仮名"), say=str)
    assert [("".join(one.pieces), one.metadata["title"]) for one in corpus.records()] == [
        ("本文。", "題1"),
        ("三。\n「うん」\n", "題3"),
    ]
    assert corpus.info["sources"][0]["name"] == "aozorabunko-clean"
