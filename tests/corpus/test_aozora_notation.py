"""The notation of Aozora Bunko: each kind by hand, and that nothing is lost, whatever the text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.corpus.aozora.gaiji import compose_accents, of_jis, resolve
from rung.corpus.aozora.notation import Tally, clean, kind_of_note
from rung.corpus.aozora.orthography import orthography


def cleaned(text, **options):
    return clean(text, **options)[0]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("私《わたくし》はその人を", "私はその人を"),
        ("所々｜丹塗《にぬり》の剥げた", "所々丹塗の剥げた"),
        ("事｜\n反《かへ》つて", "事\n反つて"),  # a mark at the end of a line is of what begins the next
        ("蟋蟀《きり／″＼す》が、いよ／＼", "蟋蟀が、いよ〳〵"),
        ("しみ／″＼と", "しみ〴〵と"),
        ("けら［＃「けら」に傍点］の", "けらの"),
        ("［＃５字下げ］一［＃「一」は中見出し］\n\n　私は", "一\n\n　私は"),
        ("上\n［＃改ページ］\n下", "上\n下"),  # a line of notes goes whole
        ("上\n［＃ここから２字下げ］［＃ここから横組み］\n中\n［＃ここで字下げ終わり］", "上\n中\n"),
        ("上\n　［＃地付き］\n下", "上\n　\n下"),
        ("替［＃レ］天行［＃（フ）］［＃二］道［＃一］の", "替天行道の"),
        ("※［＃「てへん＋劣」、第3水準1-84-77］られて", "挘られて"),
        ("※［＃二の字点、1-2-22］々", "〻々"),
        ("※［＃「口＋耆」、第3水準１－１５－２１、12-上-3］", of_jis(1, 15, 21)),
        ("※［＃「にんべん＋斎」、U+5115、12-3］", "儕"),
        ("※［＃「口＋斗」、26-3］聲［＃「※［＃「口＋斗」、26-3］聲」に白丸傍点］を", "〓聲を"),
        ("大※［＃「大※」に傍点］［＃「郷－即のへん」、第3水準1-92-90］", "大" + of_jis(1, 92, 90)),
        ("※※［＃「珈琲」の「おうへん」が「くちへん」］店", "〓〓店"),
        ("　　※　　", "　　※　　"),
        ("※［＃始め二重山括弧、1-1-52］名※［＃終わり二重山括弧、1-1-53］", "《名》"),
        ("デ※［＃濁点付き片仮名エ、380-5］ロツプ", "デエ\u3099ロツプ"),
        ("植※［＃小書き平仮名ゑ、49-6］らぃ、植るな※［＃小書き平仮名ん、50-11］て", "植\U0001b151らぃ、植るなんて"),
        ("ウ※［＃小書き片仮名ヰ、138-4］スキー", "ウ\U0001b164スキー"),
        ("募る※［＃感嘆符三つ、63-8］", "募る！！！"),
        ("〔E'cole des Femmes〕《エコオル》", "École des Femmes"),
        ("〔oe&ille`res〕 や 〔Besanc,on〕、〔amicitiae& inimica〕", "œillères や Besançon、amicitiæ inimica"),
        ("〔L'e'cole, 1879〕 〔te^te-a`-te^te〕", "L'école, 1879 tête-à-tête"),
        ("〔Le《ル》 Roman《ロマン》 expe'rimental〕", "Le Roman expérimental"),
        ("〔小岩井農場〕と〔以下原稿なし〕", "〔小岩井農場〕と〔以下原稿なし〕"),  # brackets of the text
        ("ハックニー馬［※１］の［はがき］", "ハックニー馬の［はがき］"),
        ("「ええ。」\n\n「うん」\n", "「ええ。」\n\n「うん」\n"),
    ],
)
def test_each_kind_of_notation(raw, text):
    assert cleaned(raw) == text
    assert not clean(raw)[1].ill_formed


def test_readings_may_be_kept_in_parentheses():
    raw = "私《わたくし》は｜丹塗《にぬり》、誤《》、 vraie《※［＃濁点付き片仮名エ、514-9］リテ》"
    assert cleaned(raw, readings="parentheses") == "私（わたくし）は丹塗（にぬり）、誤、 vraie（エ\u3099リテ）"


@pytest.mark.parametrize(
    "raw",
    [
        "終りのない《括弧",
        "《行頭の読み》は",
        "閉じる》だけ",
        "丸太｜線",
        "［＃閉じない注",
        "※［＃閉じない外字",
        "捨てる］",
    ],
)
def test_ill_formed_notation_stays_as_text_and_is_listed(raw):
    text, tally = clean(f"前\n{raw}\n後", name="a.txt", first_line=10)
    assert text == f"前\n{raw}\n後"
    assert {(one["file"], one["line"]) for one in tally.ill_formed} == {("a.txt", 11)}
    assert not tally.dropped


def test_what_is_not_resolved_or_known_is_listed_by_note_and_file():
    tally = Tally()
    for name in ("a.txt", "b.txt", "b.txt"):
        tally.add(clean("獸※［＃「口＋斗」、27-1］［＃何か新しい注］", name=name)[1])
    assert tally.unresolved == {"「口＋斗」": {"a.txt": 1, "b.txt": 2}}
    assert tally.unknown == {"何か新しい注": {"a.txt": 1, "b.txt": 2}}
    assert tally.gaiji == {"unresolved": 3}
    assert Tally.from_json(tally.as_json()) == tally


def test_kinds_of_notes():
    said = {
        "「葢」は底本では「蓋」": "source",
        "「底本」に傍点": "emphasis",  # what is quoted says nothing of the kind
        "１字下げ": "indent",
        "地から３字上げ": "indent",
        "ここから改行天付き、折り返して１字下げ": "indent",
        "「図」の左に「ず」のルビ": "reading",
        "図1（fig1_1.png、横10×縦20）入る": "figure",
        "甲": "return mark",
        "（ノ）": "okurigana",
        "「12」は縦中横": "layout",
    }
    assert {note: kind_of_note(note) for note in said} == said


@given(st.text(st.characters(exclude_characters="［］※《》｜／＼〔〕＃", exclude_categories=["Cs"])))
def test_text_without_notation_passes_through(text):
    found, tally = clean(text)
    assert found == text
    assert tally == Tally(kept=len(text))


# Soup of all that the notation is made of, whole and broken.
PARTS = st.sampled_from(
    [
        *"［］※《》｜／″＼〔〕＃\n　私あe'&,",
        "［＃",
        "※［＃",
        "［＃改ページ］",
        "※［＃「口」、1-2-3］",
        "第3水準1-84-77",
        "《よみ》",
        "〔e'〕",
    ]
)


@given(st.lists(PARTS | st.text(max_size=3)).map("".join), st.sampled_from(["drop", "parentheses"]))
def test_every_character_is_kept_or_counted_as_notation(text, readings):
    found, tally = clean(text, readings=readings)
    assert tally.kept + sum(tally.dropped.values()) == len(text)
    assert tally.kept + tally.inserted == len(found)
    if not tally.inserted:  # what is kept stands in its order
        rest = iter(text)
        assert all(character in rest for character in found)


def test_the_numbers_of_jis_are_those_of_its_tables():
    # From JIS X 0213:2004: a character of JIS X 0208, one of each plane beyond, one made of two code points, none.
    assert (of_jis(1, 16, 1), of_jis(1, 84, 77), of_jis(2, 1, 1)) == ("亜", "挘", "\U00020089")
    assert of_jis(1, 6, 88) == "ㇷ\u309a"
    assert (of_jis(2, 2, 1), of_jis(3, 1, 1), of_jis(1, 95, 1)) == (None, None, None)


def test_page_and_line_are_no_code():
    for note in (
        "「口＋桑」、42-13",
        "「石＋昔」、186-上-10",
        "「貝＋冒」、8巻-125-上-16",
        "「X」、129-1-3",
        "「X」、U+D800、1-2",
    ):
        assert resolve(note) is None
    assert resolve("「※［＃「口」、第3水準1-84-77］のつくり」、12-3") is None  # the code of a part is not its own


def test_accents_and_elisions():
    assert compose_accents("n'est pas l'e'cole, c'est d'E'tat; S'wia,t Ic' O/ AE& ?@ Nun~ez") == (
        "n'est pas l'école, c'est d'État; Świa,t Ić Ø Æ ¿ Nuñez",
        8,
    )


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        (
            "学校で気が変わったと言って、国の会に来た。そうでしょう。だろう。そんなようなものだった。歩いていた。",
            "新字新仮名",
        ),
        ("学校で気が変つたと云つて国の会に来た。さうでせう。だらう。そんなやうな人がゐる。思ふ。", "新字旧仮名"),
        ("學校で氣が變つたと云つて國の會に來た。さうでせう。だらう。そんなやうな人がゐる。思ふ。", "旧字旧仮名"),
        # Small っ says nothing: 宮沢賢治's books have it beside old kana.
        (
            "学校で気が変ったと云って国の会に来た。困ってゐた。さうでせう。やうな人だと思ひました。云はうとして笑った。",
            "新字旧仮名",
        ),
        ("学校で気が変った。国の会に来た。行って帰った。取って売った。", "新字新仮名"),
        ("雪。", None),
    ],
)
def test_the_spelling_of_a_text(text, spelling):
    assert orthography(text) == spelling


@pytest.mark.parametrize(
    "part", ["｜", "《", "》", "［＃", "［", "］", "※", "〔", "／", "《よ》", "※［＃「口」、1-2］", "［＃注］", "｜あ"]
)
def test_a_long_line_takes_no_more_than_its_length(part):
    # In time that grows with the square, each of these takes minutes.
    text, tally = clean(part * 100_000 + "［＃")
    assert tally.kept + tally.inserted == len(text)


def test_no_notation_is_left_in_what_was_well_formed():
    raw = "｜一《い》［＃「一」に傍点］二《に》※［＃「てへん＋劣」、第3水準1-84-77］／＼"
    assert not re.search("[［］《》｜／＼※＃]", cleaned(raw))
