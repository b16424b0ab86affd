"""Raw Aozora Bunko files: found in files, folders and archives, told apart by work and version, decoded."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from rung.corpus.sources import Source
from rung.corpus.unpacking import unpacked
from rung.errors import RungError

ENCODINGS = ("cp932", "shift_jis_2004", "utf-8")


@dataclass(frozen=True)
class RawFile:
    """One text file, wherever it lies; ``name`` is its path, also through archives.

    ``card`` is the work's number at Aozora Bunko and ``person`` the author's, where the path has them.
    ``version`` orders the files of one work: the number of the file, and whether it has ruby.
    """

    name: str
    person: str = ""
    card: str = ""
    version: tuple[int, bool] = (-1, False)


@dataclass
class Found:
    """The text files of some sources, in their order, and what lies beside them."""

    files: list[RawFile]
    passed_over: Counter[str]  # extension of files that are no text: how many
    other_versions: list[str]  # names of files left out for a newer one of the same work


def find(sources: Sequence[Source], *, all_versions: bool = False) -> Found:
    """Find the text files, in the order of their paths; of several files of one work the newest, if not all.

    The newest is the one with the highest number in its name, ``773_ruby_5968``. Nothing is read but archives.

    Raises:
        RungError: an archive that is damaged.
    """
    found, passed_over = [], Counter[str]()
    for source in sources:
        for file in unpacked(source):
            if file.suffix == ".txt":
                found.append(_raw_file(_tidy(file.name)))
            else:
                passed_over[file.suffix or PurePosixPath(file.name).name] += 1
    if all_versions:
        return Found(found, passed_over, [])
    newest: dict[tuple[str, str], tuple[int, bool]] = {}
    for raw in found:
        if raw.card:
            work = raw.person, raw.card
            newest[work] = max(newest.get(work, raw.version), raw.version)
    chosen = [raw for raw in found if not raw.card or newest[raw.person, raw.card] == raw.version]
    names = {raw.name for raw in chosen}
    return Found(chosen, passed_over, [raw.name for raw in found if raw.name not in names])


def read(
    sources: Sequence[Source], files: Sequence[RawFile], on_bytes: Callable[[int], None] | None = None
) -> Iterator[tuple[RawFile, bytes]]:
    """Yield ``files``, which ``find`` found in ``sources``, with their bytes; one is in memory at a time.

    Raises:
        RungError: an archive that is damaged; sources that have changed since.
    """
    wanted = iter(files)
    raw = next(wanted, None)
    for source in sources:
        for file in unpacked(source, on_bytes):
            if raw is not None and _tidy(file.name) == raw.name:
                yield raw, file.stream.read()
                raw = next(wanted, None)
    if raw is not None:
        raise RungError(f"{raw.name} is gone", "the sources changed while they were read; begin again")


def decode(data: bytes, name: str, encoding: str = "auto") -> tuple[str, str]:
    """Return the text of a file, its line ends as they are, and its encoding.

    ``auto``: UTF-8 where it is that; else cp932, and Shift_JIS-2004 where there are bytes that only that knows.

    Raises:
        RungError: bytes of no such encoding, named with their offset.
    """
    if data.startswith(_UTF_16):
        raise RungError(f"{name} is UTF-16", f"make it UTF-8 first: iconv -f UTF-16 -t UTF-8 {_last(name)} > utf-8.txt")
    if encoding != "auto":
        try:
            return _decoded(data, encoding), encoding
        except UnicodeDecodeError as error:
            raise _undecodable(name, error, f"is not {encoding}") from None
    try:
        if not data.isascii():
            return _decoded(data, "utf-8"), "utf-8"
    except UnicodeDecodeError:
        pass
    try:
        text = _decoded(data, "cp932")
        if not _PRIVATE.search(text):
            return text, "cp932"
    except UnicodeDecodeError as error:
        as_cp932: UnicodeDecodeError | None = error
    else:
        as_cp932 = None
    try:
        return _decoded(data, "shift_jis_2004"), "shift_jis_2004"
    except UnicodeDecodeError as error:
        raise _undecodable(name, as_cp932 or error, "is neither cp932 nor Shift_JIS-2004") from None


# Helpers

_PRIVATE = re.compile("[\ue000-\uf8ff]")  # what cp932 makes of the second plane of JIS X 0213
# What Python's tables of Shift_JIS-2004 make of some bytes, and what those are in cp932: ASCII where JIS has a yen sign
# and an overline, and full-width characters, among them the backslash of the iteration marks ／＼.
_AS_CP932 = str.maketrans("¥‾\\\u301c\u2016\u2212¢£¬", "\\~＼\uff5e\u2225\uff0d￠￡￢")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PERSON = re.compile(r"(?:^|/)(\d{6})/")
_CARD = re.compile(r"(?:^|/)(\d+)_(ruby|txt)(?:_(\d+))?(?:\.[a-z]+)?(?=/|$)")


def _tidy(name: str) -> str:
    return name.replace("/./", "/")  # as tar writes what is packed from within a folder


def _raw_file(name: str) -> RawFile:
    cards = list(_CARD.finditer(name))
    if not cards:
        return RawFile(name)
    card, kind, number = cards[-1].groups()
    persons = _PERSON.findall(name)
    return RawFile(name, persons[-1] if persons else "", card, (int(number or -1), kind == "ruby"))


def _decoded(data: bytes, encoding: str) -> str:
    text = data.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    return text.translate(_AS_CP932) if encoding == "shift_jis_2004" else text


def _undecodable(name: str, error: UnicodeDecodeError, is_not: str) -> RungError:
    problem = f"{name}: byte 0x{error.object[error.start]:02x} at offset {error.start} {is_not}"
    known = ", ".join(ENCODINGS)
    return RungError(problem, f"--encoding is one of {known}; make other text UTF-8 first: iconv -f ENCODING -t UTF-8")


def _last(name: str) -> str:
    return PurePosixPath(name).name
