"""HTML and Markdown as text: what a reader sees stays; what is for machines goes, and is counted."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rung.corpus.decoding import text_chunks
from rung.corpus.folder import Record
from rung.corpus.unpacking import File
from rung.errors import RungError

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

_MOST_BYTES = 128 << 20  # of one page: it is parsed whole, at about ten times its size
_GITHUBS = ("table", "autolink", "strikethrough", "tasklist")  # extensions of Markdown
_DECLARATION_BYTES = 1024  # the HTML standard's limit for where the encoding is declared


def html(file: File, encoding: str, left_out: Counter[str]) -> Iterator[Record]:
    """Yield an HTML file's text as one document; its metadata has the ``title``.

    Paragraphs, headings, lists and tables are set apart by blank lines, items are marked with ``- `` or their number,
    cells are parted by tabs; white space is as a browser shows it. Scripts, styles, templates, drawings and the
    readings of ruby are left out, and so are hidden elements and the alternative texts of pictures. The encoding that
    the file declares wins over ``encoding``.

    Args:
        left_out: what was left out is counted here, by element.

    Raises:
        RungError: an undecodable byte; a page of over 128 MB.
    """
    page = whole_page(file, declared_encoding(file.head) or encoding)
    text, title = page_text(page, left_out)
    yield Record(file.name, {"title": title} if title else {}, iter((text,) if text else ()))


def markdown(file: File, encoding: str, left_out: Counter[str]) -> Iterator[Record]:
    """Yield a Markdown file's text as one document, laid out as that of HTML; Markdown is GitHub's, with footnotes.

    Marks of headings, emphasis and links go, their text stays, as does code; links back from footnotes go. A block of
    settings at the head (between lines of ``---``) is no text: it is the metadata ``front_matter``.

    Raises:
        RungError: as ``html``.
    """
    from cmarkgfm.cmark import Options, markdown_to_html_with_extensions

    source = whole_page(file, encoding)
    metadata = {}
    if head := _FRONT_MATTER.match(source):
        metadata["front_matter"] = head[1]
        source = source[head.end() :]
    source = _without_nul(source, left_out)
    # Raw HTML passes, for the reader of HTML to see.
    options = Options.CMARK_OPT_UNSAFE | Options.CMARK_OPT_FOOTNOTES
    page = markdown_to_html_with_extensions(source, options, extensions=_GITHUBS)
    text, _ = page_text(page, left_out)
    yield Record(file.name, metadata, iter((text,) if text else ()))


def page_text(page: str, left_out: Counter[str]) -> tuple[str, str]:
    """Return the text of an HTML page, without line breaks at its end, and its title."""
    from selectolax.lexbor import LexborHTMLParser

    page = _without_nul(page, left_out)
    if page.lstrip("\ufeff \t\r\n").startswith("<?xml"):
        page = xhtml_as_html(page)
    tree = LexborHTMLParser(page)
    title = tree.css_first("head > title")
    writer = _Writer(left_out, _MAY_HIDE.search(page) is not None)
    assert tree.root is not None, "a parsed page has a root, whatever it holds"
    writer.element(tree.root)
    return writer.text(), " ".join(title.text().split()) if title else ""


# Text from a tree


def _tags(names: str) -> frozenset[str]:
    return frozenset(names.split())


_APART = _tags(
    "p h1 h2 h3 h4 h5 h6 ul ol dl table blockquote pre figure hr section article header footer main nav aside form "
    "fieldset details address menu listing"
)
_LINES = _tags(
    "div li dt dd tr caption figcaption option legend summary body center thead tbody tfoot optgroup hgroup search dir "
    "rtc"
)
_LEFT_OUT = _tags(
    "script style template noscript svg iframe object canvas audio video rt rp annotation annotation-xml noembed "
    "noframes datalist"
)
_KEPT_SPACE = frozenset(("pre", "textarea", "listing", "xmp", "plaintext"))
_CELLS = frozenset(("td", "th"))
_SPACE = re.compile(" *[\t\n\f\r][ \t\n\f\r]*| {2,}")  # but for a single space, which nothing changes
# A line break between two of these is no space (CSS Text 3, segment breaks between wide characters).
_WIDE = "\u2e80-\ua4cf\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\U00020000-\U0003ffff"
_WIDE_BREAK = re.compile(f"(?<=[{_WIDE}])[ \t\f\r]*\n[ \t\n\f\r]*(?=[{_WIDE}])")


class _Writer:
    """Lays out the text of elements: what parts them is written before the next text, so that nothing trails."""

    def __init__(self, left_out: Counter[str], may_hide: bool):
        self._left_out, self._may_hide = left_out, may_hide
        self._parts: list[str] = []
        self._breaks = 0  # line breaks due before the next text
        self._tabs, self._space = 0, False  # what is due on the same line
        self._mark = ""  # of the item that begins
        self._kept_space = 0  # depth of elements that keep their white space
        self._numbers: list[int] = []  # of the next item in each list around; 0: not numbered

    def text(self) -> str:
        return "".join(self._parts)

    def element(self, root: LexborNode) -> None:
        """Write a tree, without recursion: pages nest as deep as they like."""
        node: Any = root
        depth = 0
        while True:
            tag = node.tag
            within = None
            if tag == "-text":
                self._write(node.text_content or "")
            elif tag in _LEFT_OUT:
                self._left_out[tag] += 1
            elif self._may_hide and (why := _hidden(node)):
                self._left_out[why] += 1
            elif tag != "title" and not tag.startswith(("-", "!")):
                self._begin(tag, node)
                within = node.child
                if within is None:
                    self._end(tag, node)
            if within is not None:
                node, depth = within, depth + 1
                continue
            while node.next is None and depth:
                node, depth = node.parent, depth - 1
                self._end(node.tag, node)
            if not depth:
                return
            node = node.next

    def _write(self, text: str) -> None:
        if not self._kept_space:
            if "\n" in text:
                text = _WIDE_BREAK.sub("", text)
            text = _SPACE.sub(" ", text)
            if text.startswith(" "):
                self._space, text = True, text[1:]
        elif text.endswith("\n"):
            # The line break that ends a block is not one more than what parts it from the next.
            whole = text.rstrip("\n")
            if whole:
                self._put(whole)
            self._breaks += len(text) - len(whole)
            return
        if text:
            ends = not self._kept_space and text.endswith(" ")
            self._put(text[:-1] if ends else text)
            self._space = ends

    def _put(self, text: str) -> None:
        if self._parts:
            if self._breaks or self._tabs:
                self._parts.append("\n" * self._breaks + "\t" * self._tabs)
            elif self._space:
                self._parts.append(" ")
        self._parts.append(self._mark + text)
        self._breaks, self._tabs, self._space, self._mark = 0, 0, False, ""

    def _part(self, breaks: int) -> None:
        self._breaks, self._space, self._tabs = max(self._breaks, breaks), False, 0

    def _begin(self, tag: str, node: LexborNode) -> None:
        if tag in _APART:
            self._part(1 if tag in ("ul", "ol") and self._numbers else 2)
        elif tag in _LINES:
            self._part(1)
        elif tag == "br":
            self._breaks, self._space = self._breaks + 1, False
        elif tag == "img" and (node.attributes.get("alt") or "").strip():
            self._left_out["alternative text of a picture"] += 1
        elif tag in _CELLS:
            self._tabs += _is_cell(node.prev)
        if tag in ("ul", "ol", "menu"):
            self._numbers.append(_number(node, "start", 1) if tag == "ol" else 0)
        elif tag == "li":
            self._mark = self._item(node)
        elif tag == "sup" and "footnote-ref" in (node.attributes.get("class") or ""):
            self._put("[")
        if tag in _KEPT_SPACE:
            self._kept_space += 1

    def _end(self, tag: str, node: LexborNode) -> None:
        if tag in _APART:
            self._part(1 if tag in ("ul", "ol") and len(self._numbers) > 1 else 2)
        elif tag in _LINES:
            self._part(1)
        elif tag == "sup" and "footnote-ref" in (node.attributes.get("class") or ""):
            self._put("]")
        if tag == "li":
            self._mark = ""  # of an item without text
        if tag in ("ul", "ol", "menu"):
            self._numbers.pop()
        if tag in _KEPT_SPACE:
            self._kept_space -= 1

    def _item(self, node: LexborNode) -> str:
        indent = "  " * (len(self._numbers) - 1)
        if not self._numbers or not self._numbers[-1]:
            return f"{indent}- "
        number = _number(node, "value", self._numbers[-1])
        self._numbers[-1] = number + 1
        return f"{indent}{number}. "


_MAY_HIDE = re.compile(r"\bhidden\b|display\s*:|footnote-backref", re.IGNORECASE)
_NO_DISPLAY = re.compile(r"(?:^|;)\s*display\s*:\s*none\b", re.IGNORECASE)


def _hidden(node: LexborNode) -> str:
    """Return as what an element is counted that a reader does not see, or sees only as a link back; else ""."""
    if not node.tag or node.tag.startswith(("-", "!")):
        return ""
    attributes = node.attributes
    if "hidden" in attributes or _NO_DISPLAY.search(attributes.get("style") or ""):
        return "hidden element"
    return "link back from a footnote" if "footnote-backref" in (attributes.get("class") or "").split() else ""


def _is_cell(node: LexborNode | None) -> bool:
    while node is not None and node.tag not in _CELLS:
        node = node.prev
    return node is not None


def _number(node: LexborNode, attribute: str, default: int) -> int:
    value = node.attributes.get(attribute) or ""
    return int(value) if re.fullmatch(r"-?[0-9]{1,9}", value) else default


# Characters

_FRONT_MATTER = re.compile(r"---[ \t]*\r?\n(.*?)\r?\n(?:---|\.\.\.)[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_CHARSET = re.compile(rb"""<meta[^>]*?charset\s*=\s*["']?\s*([A-Za-z0-9._:-]+)""", re.IGNORECASE)
_XML_ENCODING = re.compile(rb"""^\s*<\?xml[^>]*?encoding\s*=\s*["']([A-Za-z0-9._:-]+)["']""")
# What the WHATWG encoding standard reads under these names; a page that says UTF-16 in ASCII is not.
_READ_AS = {"iso8859-1": "cp1252", "ascii": "cp1252", "shift_jis": "cp932", "gb2312": "gb18030", "gbk": "gb18030"}
_READ_AS |= {"euc_kr": "cp949", "big5": "big5hkscs", "iso8859-9": "cp1254", "utf-16": "utf-8", "utf-16-le": "utf-8"}

_VOID = "area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr"
_SELF_CLOSED = re.compile(
    rf"""<(?!(?:{_VOID})\b)([A-Za-z][\w:.-]*)((?:\s+[^\s=<>/]+\s*=\s*(?:"[^"]*"|'[^']*'))*)\s*/>""", re.IGNORECASE
)
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)


def whole_page(file: File, encoding: str) -> str:
    """Return a page's text, decoded strictly, markup and all.

    Raises:
        RungError: an undecodable byte; over 128 MB.
    """
    held, size = [], 0
    for chunk in text_chunks(file, encoding):
        held.append(chunk)
        size += len(chunk)
        if size > _MOST_BYTES:
            problem = f"{file.name} is one page of over {_MOST_BYTES >> 20} MB"
            raise RungError(problem, "split it, or read it as it is, markup and all: --format text")
    return "".join(held)


def declared_encoding(head: bytes) -> str | None:
    """Return the encoding that an HTML or XHTML file declares at its head, where it is one that Python knows."""
    head = head[:_DECLARATION_BYTES]
    found = _XML_ENCODING.search(head) or _CHARSET.search(head)
    if found is None:
        return None
    try:
        name = codecs.lookup(found[1].decode("ascii")).name
    except LookupError:
        return None
    return _READ_AS.get(name, name)


def _without_nul(text: str, left_out: Counter[str]) -> str:
    if "\0" not in text:
        return text
    left_out["NUL characters"] += text.count("\0")
    return text.replace("\0", "")


def xhtml_as_html(page: str) -> str:
    """Return XHTML in a form that is the same in HTML, where ``<title/>`` would not end and CDATA be a comment."""
    page = _CDATA.sub(lambda found: found[1].replace("&", "&amp;").replace("<", "&lt;"), page)
    return _SELF_CLOSED.sub(r"<\1\2></\1>", page)
