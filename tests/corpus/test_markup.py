"""HTML, Markdown and EPUB as text: against hand-written layouts, another Markdown library, and any text at all."""

from __future__ import annotations

import html
import io
import re
import zipfile
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.config import DataConfig
from rung.corpus.documents import documents
from rung.corpus.markup import page_text
from rung.corpus.sources import resolve
from rung.errors import RungError


def read(path, left_out=None, **settings):
    found = documents(resolve([path]), DataConfig(**settings), left_out=left_out)
    return [(document.name, "".join(document.pieces), dict(document.metadata)) for document in found]


def failed(path, **settings):
    with pytest.raises(RungError) as caught:
        read(path, **settings)
    assert "\n" not in caught.value.problem + caught.value.hint
    return caught.value


def put(path, data):
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def text_of(page):
    return page_text(page, Counter())[0]


# HTML


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>One   two\n three<p>four", "One two three\n\nfour"),
        ("a<br>b<br><br>c", "a\nb\n\nc"),
        ("<h1>Head</h1>\n<div>a</div>\n<div>b</div>", "Head\n\na\nb"),
        ("a <b> b </b> c<i>d</i>", "a b cd"),
        ("<p>&lt;b&gt; &amp;amp; &#x96ea;&nbsp;&eacute;</p>", "<b> &amp; 雪\u00a0é"),
        ("<ul><li>a<li>b<ol start=3><li>x</li><li>y</ol></ul>c", "- a\n- b\n  3. x\n  4. y\n\nc"),
        ("<ul><li><p>a</p></li><li></li><li><p>b</p></li></ul>", "- a\n\n- b"),
        ("<table><tr><th>a<th>b<tr><td>1<td><td>3</table>", "a\tb\n1\t\t3"),
        ("<pre>\n  x\n\n    y\n</pre>z", "  x\n\n    y\n\nz"),
        ("<p>雪\n国\n  の long\n夜</p>", "雪国の long 夜"),
        ("<p><ruby>漢字<rp>（</rp><rt>かんじ</rt><rp>）</rp></ruby>です", "漢字です"),
        ("<script>if (a < b) {}</script><style>p {}</style><p>x</p><noscript>y</noscript><!-- c -->", "x"),
        ("", ""),
        (" <p> </p> ", ""),
        ("no markup at all", "no markup at all"),
        ("x < y & z", "x < y & z"),
    ],
)
def test_a_page_is_laid_out_as_a_reader_sees_it(page, text):
    assert text_of(page) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=80))
def test_any_text_comes_back_from_a_paragraph(text):
    words = " ".join(word for word in re.split("[ \t\n\f\r]+", text) if word)
    assert text_of(f"<html><body><p>{html.escape(text)}</p></body></html>") == words


def test_what_is_left_out_is_counted_by_element(tmp_path):
    left_out = Counter()
    page = "<title>A &amp; B</title><p>x\0</p><script>1</script><script>2</script><svg><text>y</text></svg>"
    assert read(put(tmp_path / "a.html", page), left_out) == [("a.html", "x", {"title": "A & B"})]
    assert left_out == {"script": 2, "svg": 1, "NUL characters": 1}


def test_what_is_hidden_is_left_out_and_counted(tmp_path):
    left_out = Counter()
    page = (
        "<p hidden>a</p><p style='color: red; DISPLAY : none'>b<b>c</b></p><p style='display: block'>d</p>"
        "<p title=hidden>e</p><img alt='a cat'><img alt=''><img><div hidden><script>x</script><img alt=y></div>"
    )
    assert read(put(tmp_path / "a.html", page), left_out)[0][1] == "d\n\ne"
    assert left_out == {"hidden element": 3, "alternative text of a picture": 1}


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("a<pre>x\n</pre>b", "a\n\nx\n\nb"),
        ("<pre><span>x</span><span>\n</span><span>\n</span>  y\n</pre>", "x\n\n  y"),
        ("<pre>\n\n</pre>b", "b"),
        ("<pre>x\n\n\n\n</pre>b", "x\n\n\n\nb"),
        ("<textarea>x\n</textarea>b", "x\nb"),
    ],
)
def test_a_code_block_is_parted_like_any_other(page, text):
    assert text_of(page) == text


def test_elements_nest_as_deep_as_they_like():
    assert text_of("<div>" * 20_000 + "deep") == "deep"


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [
        ('<meta charset="Shift_JIS">', "cp932"),
        ("<meta http-equiv=content-type content='text/html; charset=x-sjis'>", "cp932"),
        ("<meta charset=gb2312>", "gb18030"),
        ('<?xml version="1.0" encoding="utf-16"?>', "utf-16"),
        ("<meta charset=utf-16>", "utf-8"),
        ("<meta charset=no-such-encoding>", "utf-8"),
        ("", "utf-8-sig"),
    ],
)
def test_the_encoding_that_a_page_declares_is_its_encoding(tmp_path, declared, encoding):
    path = put(tmp_path / "a.htm", f"{declared}<p>雪国①</p>".encode(encoding))
    settings = {"encoding": "cp932"} if "no-such" not in declared and encoding != "utf-8-sig" else {}
    if "x-sjis" in declared:  # unknown to Python: what the user says counts
        settings = {"encoding": "cp932"}
    assert read(path, **settings)[0][1] == "雪国①"


def test_a_page_in_another_encoding_than_said_is_an_error_with_the_offset(tmp_path):
    error = failed(put(tmp_path / "a.html", "<p>雪国のトンネル</p>".encode("cp932")))
    assert error.problem == "a.html: byte 0x90 at offset 3 is not utf-8"
    assert "--encoding cp932" in error.hint


def test_format_text_keeps_a_page_as_it_is(tmp_path):
    page = "<p>x</p>"
    assert read(put(tmp_path / "a.html", page), format="text")[0][1] == page
    assert read(put(tmp_path / "a.txt", page))[0][1] == page
    assert read(put(tmp_path / "a.txt", page), format="html")[0][1] == "x"


# Markdown

MARKDOWN = """Title
=====

A *first* paragraph with **bold**, `code < 1`, a [link](http://x.example "t"),
an ![image](x.png) and <http://auto.example>. 2 * 3 * 4 and snake_case_name.

## Second ##

- item
- item two
    - nested

1. one
2. two

> quoted
> text

```python
def f(x):
    return x  # *not* emphasis
```

    indented code

| a | b |
|---|---|
| 1 | ~~2~~ |

A line\\
broken, and an entity &copy; and \\*no emphasis\\*.

<div>raw <b>html</b></div>
<script>dropped()</script>

***
雪*国*
"""


def test_markdown_is_text_without_its_marks(tmp_path):
    left_out = Counter()
    ((_, text, _),) = read(put(tmp_path / "a.md", MARKDOWN), left_out)
    assert text == (
        "Title\n\nA first paragraph with bold, code < 1, a link, an and http://auto.example. "
        "2 * 3 * 4 and snake_case_name.\n\nSecond\n\n- item\n- item two\n  - nested\n\n1. one\n2. two\n\n"
        "quoted text\n\n"
        "def f(x):\n    return x  # *not* emphasis\n\nindented code\n\na\tb\n1\t2\n\n"
        "A line\nbroken, and an entity © and *no emphasis*.\n\nraw html\n\n雪国"
    )
    assert left_out == {"script": 1, "alternative text of a picture": 1}


def test_markdown_is_what_another_library_makes_of_it(tmp_path):
    from markdown_it import MarkdownIt

    other = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(MARKDOWN)
    assert read(put(tmp_path / "a.markdown", MARKDOWN))[0][1] == text_of(other)


def test_front_matter_is_metadata_and_footnotes_stay(tmp_path):
    left_out = Counter()
    source = "---\ntitle: x\ntags: [a]\n---\nText[^n].\n\n[^n]: The note.\n"
    ((_, text, metadata),) = read(put(tmp_path / "a.md", source), left_out)
    assert text == "Text[1].\n\n1. The note."
    assert metadata == {"front_matter": "title: x\ntags: [a]"}
    assert left_out == {"link back from a footnote": 1}
    assert read(put(tmp_path / "b.md", "---\n\nno settings\n"))[0][1] == "no settings"
    assert read(put(tmp_path / "a.md", source), format="text")[0][1] == source


# EPUB

CONTAINER = """<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
<rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>"""
PACKAGE = """<?xml version="1.0"?>
<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="http://purl.org/dc/elements/1.1/">
<metadata><dc:title>雪国</dc:title><dc:creator>A</dc:creator><dc:creator>B</dc:creator>
<dc:language>ja</dc:language></metadata>
<manifest>
<item id="two" href="text/two%202.xhtml" media-type="application/xhtml+xml"/>
<item id="one" href="text/one.xhtml" media-type="application/xhtml+xml"/>
<item id="toc" href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/>
<item id="pic" href="cover.jpg" media-type="image/jpeg"/>
</manifest>
<spine><itemref idref="toc"/><itemref idref="one"/><itemref idref="two"/><itemref idref="pic"/></spine>
</package>"""
ONE = (
    '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title/><script src="x"/></head>'
    '<body><a id="p1"/><h1>一</h1><p>本文<br/>です。<![CDATA[a < b]]></p></body></html>'
)
TWO = "<html><body><p>The end.</p></body></html>"


def book(path, changes=()):
    members = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "OPS/book.opf": PACKAGE,
        "OPS/text/one.xhtml": ONE,
        "OPS/text/two 2.xhtml": TWO,
        "OPS/nav.xhtml": "<html><body>Contents</body></html>",
        "OPS/cover.jpg": b"\xff\xd8",
    } | dict(changes)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            if data is not None:
                archive.writestr(name, data)
    return path


TEXT_OF_BOOK = "一\n\n本文\nです。a < b\n\nThe end."
ABOUT = {"title": "雪国", "author": "A, B", "language": "ja"}


def test_a_book_is_its_chapters_in_reading_order_with_title_and_author(tmp_path):
    left_out = Counter()
    assert read(book(tmp_path / "a.epub"), left_out) == [("a.epub", TEXT_OF_BOOK, ABOUT)]
    assert left_out == {"table of contents": 1, "pages that are pictures": 1, "script": 1}


def test_a_book_is_told_by_its_content_and_read_within_archives(tmp_path):
    other = book(tmp_path / "a.zip")
    assert read(other) == [("a.zip", TEXT_OF_BOOK, ABOUT)]
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.write(other, "in/a.epub")
    assert read(put(tmp_path / "all.zip", held.getvalue())) == [("all.zip/in/a.epub", TEXT_OF_BOOK, ABOUT)]


def test_what_is_wrong_with_a_book_is_said(tmp_path):
    path = tmp_path / "a.epub"
    assert "a.epub is not an EPUB" in failed(put(path, "just text")).problem
    assert "it has no META-INF/container.xml" in failed(book(path, {"META-INF/container.xml": None})).problem
    assert "it has no OPS/text/one.xhtml" in failed(book(path, {"OPS/text/one.xhtml": None})).problem
    assert "OPS/book.opf: unclosed token" in failed(book(path, {"OPS/book.opf": "<package><"})).problem
    undecodable = failed(book(path, {"OPS/text/one.xhtml": b"<p>\x83\x65</p>"}))
    assert undecodable.problem == "a.epub/OPS/text/one.xhtml: byte 0x83 at offset 3 is not utf-8"
    locked = '<encryption><EncryptedData><CipherReference URI="OPS/text/one.xhtml"/></EncryptedData></encryption>'
    assert "encrypted (DRM)" in failed(book(path, {"META-INF/encryption.xml": locked})).problem
    fonts = '<encryption><EncryptedData><CipherReference URI="OPS/font.otf"/></EncryptedData></encryption>'
    assert read(book(path, {"META-INF/encryption.xml": fonts}))[0][1] == TEXT_OF_BOOK
    whole = book(path).read_bytes()
    for cut in (len(whole) // 2, len(whole) - 5):
        assert "not a sound EPUB" in failed(put(path, whole[:cut])).problem
