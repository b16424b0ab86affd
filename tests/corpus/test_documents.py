"""Documents: splitting, streaming in bounded pieces, counting."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from rung.config import DataConfig
from rung.corpus.documents import PIECE_CHARS, _split, documents, even_pieces, scan
from rung.corpus.sources import resolve

SEPARATOR = "<|endoftext|>"


def texts(path, separator=SEPARATOR):
    found = documents(resolve([path]), DataConfig(separator=separator))
    return [(document.name, "".join(document.pieces)) for document in found]


def chunked(text, sizes):
    """Cut ``text`` into chunks of the given sizes, over and over."""
    start, k = 0, 0
    while start < len(text):
        yield text[start : start + sizes[k % len(sizes)]]
        start, k = start + sizes[k % len(sizes)], k + 1


def test_a_separator_on_a_line_of_its_own_leaves_no_trace(tmp_path):
    path = tmp_path / "two.txt"
    path.write_bytes(b"one\n<|endoftext|>\nline\r\n<|endoftext|>\r\n\nthree<|endoftext|>four\n<|endoftext|>\n")
    assert texts(path) == [
        ("two.txt#1", "one\n"),
        ("two.txt#2", "line\r\n"),
        ("two.txt#3", "\nthree"),
        ("two.txt#4", "four\n"),
    ]


def test_a_separator_that_ends_a_line_takes_no_more_than_itself(tmp_path):
    path = tmp_path / "verse.txt"
    path.write_text("one\n\n\ntwo")
    assert texts(path, "\n\n") == [("verse.txt#1", "one"), ("verse.txt#2", "\ntwo")]


def test_empty_documents_between_separators_are_there_and_counted(tmp_path):
    path = tmp_path / "gaps.txt"
    path.write_text(f"{SEPARATOR}one{SEPARATOR}{SEPARATOR}\n{SEPARATOR}two{SEPARATOR}")
    assert [text for _, text in texts(path)] == ["one", "", "", "two"]
    counted = scan(resolve([path]), DataConfig(separator=SEPARATOR))
    assert (counted.n_documents, counted.empty, list(counted.bytes)) == (2, 2, [3, 3])


@given(
    st.text(alphabet="ab\r\n", max_size=60),
    st.sampled_from(["a", "ab", "aab", "abab", "\n", "a\n", "\r\n", "ba\r"]),
    st.lists(st.integers(1, 7), min_size=1),
)
def test_streamed_splitting_equals_splitting_the_whole(text, separator, sizes):
    line_break = "" if separator[-1] in "\r\n" else "(?:\r?\n)?"
    whole = re.split(re.escape(separator) + line_break, text)
    whole = whole[not whole[0] :]  # nothing before the first separator, or after the last, is no document
    whole = whole[: len(whole) - (not whole[-1])] if whole else whole
    assert ["".join(part) for part in _split(chunked(text, sizes), separator)] == whole


def test_a_document_left_unread_does_not_shift_the_next(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(SEPARATOR.join("word " * n for n in (100_000, 50_000, 3)))
    found = documents(resolve([path]), DataConfig(separator=SEPARATOR))
    assert [next(document.pieces)[-8:] for document in found][2] == "rd word "


@given(
    st.text(alphabet="ab \n\u3000\x1c\x85", max_size=80), st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1)
)
def test_pieces_are_the_text_bounded_and_alike_however_it_comes(text, limit, sizes):
    pieces = list(even_pieces(chunked(text, sizes), limit))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= limit for piece in pieces)
    assert pieces == list(even_pieces(iter([text]), limit))


def test_pieces_end_between_a_letter_and_a_space_where_they_can():
    text = "word  and\nanother " * 20_000
    pieces = list(even_pieces(iter([text])))
    assert len(pieces) == -(-len(text) // PIECE_CHARS)
    for piece in pieces[1:]:
        assert piece[0] == " "
    for piece in pieces[:-1]:
        assert not piece[-1].isspace()
        assert len(piece) > PIECE_CHARS - 20


def test_progress_counts_every_byte(tmp_path):
    for k in range(3):
        (tmp_path / f"{k}.txt").write_text("\ufeff" * (k == 1) + "é" * 200_000)
    told = []
    scan(resolve([tmp_path]), DataConfig(), lambda done, total: told.append((done, total)))
    assert told[-1] == (1_200_003, 1_200_003)
    assert told == sorted(told)
