"""EPUB books as text, chapter by chapter."""

from __future__ import annotations

import contextlib
import posixpath
import urllib.parse
import zipfile
from collections import Counter
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from rung.corpus.folder import Record
from rung.corpus.markup import declared_encoding, page_text, whole_page, xhtml_as_html
from rung.corpus.unpacking import File, file_of_zip, spooled
from rung.errors import RungError


def epub(file: File, left_out: Counter[str]) -> Iterator[Record]:
    """Yield an EPUB book's text as one document, chapter by chapter in reading order.

    Its metadata has ``title``, ``author``, ``language``, where the book says them. The table of contents is left out.

    Raises:
        RungError: a damaged book, one with DRM, an undecodable byte.
    """
    with contextlib.ExitStack() as open_files:
        stream = file.stream if file.seekable else open_files.enter_context(spooled(file.stream, file.name))
        try:
            book = open_files.enter_context(zipfile.ZipFile(stream))
        except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
            raise _bad_book(file.name, str(error)) from None
        package_path = _package_path(book, file.name)
        package = _xml(book, package_path, file.name)
        chapters = _spine(package, posixpath.dirname(package_path), file.name, left_out)
        locked = _locked(book, file.name)
        if any(chapter in locked for chapter in chapters):
            raise RungError(f"{file.name} is encrypted (DRM)", "only the shop's own reader opens it")
        yield Record(file.name, _about(package), _chapters(book, chapters, file.name, left_out))


# Helpers

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_ABOUT = {"title": "title", "creator": "author", "language": "language"}
_PAGES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")


def _package_path(book: zipfile.ZipFile, name: str) -> str:
    root = _xml(book, _CONTAINER, name).find(".//{*}rootfile")
    path = root.get("full-path") if root is not None else None
    if not path:
        raise _bad_book(name, f"{_CONTAINER} names no package")
    return path


def _spine(package: ElementTree.Element, folder: str, name: str, left_out: Counter[str]) -> list[str]:
    """Return the paths of the pages, in reading order."""
    items = {item.get("id"): item for item in package.iterfind(".//{*}manifest/{*}item")}
    pages = []
    for reference in package.iterfind(".//{*}spine/{*}itemref"):
        item = items.get(reference.get("idref"))
        if item is None:
            raise _bad_book(name, f"its spine names {reference.get('idref')!r}, which its manifest has not")
        if "nav" in (item.get("properties") or "").split():
            left_out["table of contents"] += 1
        elif item.get("media-type") in _PAGES:
            pages.append(posixpath.normpath(posixpath.join(folder, urllib.parse.unquote(item.get("href") or ""))))
        else:
            left_out["pages that are pictures"] += 1
    if not pages:
        raise _bad_book(name, "it has no pages of text")
    return pages


def _chapters(book: zipfile.ZipFile, paths: list[str], name: str, left_out: Counter[str]) -> Iterator[str]:
    first = True
    for path in paths:
        where = f"{name}/{path}"
        with _member(book, path, name) as stream:
            page = file_of_zip(stream, where)
            text = whole_page(page, declared_encoding(page.head) or "utf-8")
        text, _ = page_text(xhtml_as_html(text), left_out)
        if text:
            yield text if first else "\n\n" + text
            first = False


def _about(package: ElementTree.Element) -> dict[str, str]:
    about = {}
    for element, key in _ABOUT.items():
        said = [
            " ".join("".join(one.itertext()).split()) for one in package.iterfind(f".//{{*}}metadata//{{*}}{element}")
        ]
        if any(said):
            about[key] = ", ".join(filter(None, said))
    return about


def _locked(book: zipfile.ZipFile, name: str) -> set[str]:
    """Return the paths of what is encrypted; fonts often are, and do not matter."""
    if _ENCRYPTION not in book.namelist():
        return set()
    found = _xml(book, _ENCRYPTION, name).iterfind(".//{*}CipherReference")
    return {urllib.parse.unquote(one.get("URI") or "") for one in found}


def _xml(book: zipfile.ZipFile, path: str, name: str) -> ElementTree.Element:
    with _member(book, path, name) as stream:
        data = file_of_zip(stream, f"{name}/{path}").stream.read()
    try:
        return ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise _bad_book(name, f"{path}: {error}") from None


def _member(book: zipfile.ZipFile, path: str, name: str) -> Any:
    try:
        return book.open(path)
    except KeyError:
        raise _bad_book(name, f"it has no {path}") from None
    except (RuntimeError, NotImplementedError, zipfile.BadZipFile, OSError) as error:
        raise _bad_book(name, str(error)) from None


def _bad_book(name: str, reason: str) -> RungError:
    return RungError(f"{name} is not a sound EPUB: {reason}", "get it again: it was cut short, or made wrongly")
