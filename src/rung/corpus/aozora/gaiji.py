"""Characters that Aozora Bunko spells out: by JIS X 0213 or Unicode number, by description, as letter and accent."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

How = Literal["jis", "unicode", "description"]

MISSING = "〓"  # U+3013, what Japanese printers set for a character that they lack


def resolve(note: str) -> tuple[str, How] | None:
    """Return the character that a gaiji note means, and how the note says so; None where it does not.

    Args:
        note: what stands between ``※［＃`` and ``］``, such as ``「てへん＋劣」、第3水準1-84-77``.
    """
    plain = unicodedata.normalize("NFKC", _INNER_NOTE.sub("", note)).translate(_DASHES)
    for found in _UNICODE.finditer(plain):
        if (character := _of_unicode(int(found[1], 16))) is not None:
            return character, "unicode"
    for found in _JIS.finditer(plain):
        if (character := of_jis(*map(int, found.groups()))) is not None:
            return character, "jis"
    described = _described(note)
    return (described, "description") if described else None


def of_jis(plane: int, row: int, cell: int) -> str | None:
    """Return the text of a plane, row and cell of JIS X 0213:2004; None where there is none."""
    if plane not in (1, 2) or not (1 <= row <= 94 and 1 <= cell <= 94):
        return None
    code = bytes([0x8F] * (plane - 1) + [0xA0 + row, 0xA0 + cell])
    try:
        return code.decode("euc_jis_2004")
    except UnicodeDecodeError:
        return None


def without_page(note: str) -> str:
    """Return a gaiji note without the page and line that end it, so that notes of one character are alike."""
    return _PAGE.sub("", note)


def compose_accents(text: str) -> tuple[str, int]:
    """Return a text with letter and accent composed (``e'tude`` to ``étude``), and how many were.

    An apostrophe after c, l, m, n or s and before a vowel is an elision (``l'e'cole``), not an accent.
    """
    return _ACCENTED.subn(lambda found: _ACCENTS[found[0]], text)


# Helpers

_INNER_NOTE = re.compile("［＃[^［］]*］")
_DASHES = str.maketrans("‐‑‒–—−ー－", "-" * 8)
_UNICODE = re.compile(r"U\+([0-9A-Fa-f]{4,6})")
# Three numbers are plane, row and cell; two are page and line, and so are those with 巻, 上, 下 among them.
_JIS = re.compile(r"(?<![\d-])([12])-(\d{1,2})-(\d{1,2})(?![\d-])")
_PAGE = re.compile("(?:、(?:[0-9０-９]+巻-)?[0-9０-９]+(?:[-－‐](?:上|下|中|上段|下段|中段|[0-9０-９]+))*)+$")

_KANA = re.compile("(半?濁点付き)?(小書き)?(?:平仮名|片仮名)(.)")
_MARKS = {None: "", "濁点付き": "\u3099", "半濁点付き": "\u309a"}
# Where Unicode has no small form, as of ん, the kana stands as in the other notation: ん［＃「ん」は小書き］.
_SMALL = dict(
    zip(
        "あいうえおつやゆよわかけアイウエオツヤユヨワカケクシスストヌハヒフヘホムラリルレロゐゑをヰヱヲン",
        "ぁぃぅぇぉっゃゅょゎゕゖァィゥェォッャュョヮヵヶㇰㇱㇲㇲㇳㇴㇵㇶㇷㇸㇹㇺㇻㇼㇽㇾㇿ\U0001b150\U0001b151\U0001b152"
        "\U0001b164\U0001b165\U0001b166\U0001b167",
        strict=True,
    )
)
_NAMED = {"感嘆符三つ": "！！！", "ト音記号": "\U0001d11e"}


def _of_unicode(number: int) -> str | None:
    if number > 0x10FFFF or unicodedata.category(chr(number)) in ("Cs", "Co", "Cc"):
        return None  # half of a pair, private or control: no character of a text
    return chr(number)


def _described(note: str) -> str | None:
    said = note.split("、")[0]
    if said in _NAMED:
        return _NAMED[said]
    kana = _KANA.fullmatch(said)
    if not kana:
        return None
    letter = _SMALL.get(kana[3], kana[3]) if kana[2] else kana[3]
    return unicodedata.normalize("NFC", letter + _MARKS[kana[1]])


def _accents() -> dict[str, str]:
    """Return the table of https://www.aozora.gr.jp/accent_separation.html."""
    bases = {
        "`\u0300": "AEINOUaeinou",
        "'\u0301": "ACEILMNORSUYZaceilmnorsuyz",
        "^\u0302": "ACEGHIJOSUWaceghijosuw",
        "~\u0303": "AEINOUaeinou",
        ":\u0308": "AEIOUYaeiouy",
        "_\u0304": "AEIOUaeiou",
        "&\u030a": "AUau",
        ",\u0327": "Cc",
    }
    table = {
        letter + mark[0]: unicodedata.normalize("NFC", letter + mark[1])
        for mark, all_ in bases.items()
        for letter in all_
    }
    table |= {"AE&": "Æ", "ae&": "æ", "OE&": "Œ", "oe&": "œ", "s&": "ß", "!@": "¡", "?@": "¿"}
    return table | {"O/": "Ø", "o/": "ø", "D/": "Đ", "d/": "đ", "H/": "Ħ", "h/": "ħ", "i/": "ɨ", "L/": "Ł", "l/": "ł"}


_ACCENTS = _accents()
_LONGEST_FIRST = sorted(_ACCENTS, key=len, reverse=True)
_ACCENTED = re.compile(f"(?![clmnsCLMNS]'[aeiouhAEIOUH])(?:{'|'.join(map(re.escape, _LONGEST_FIRST))})")
