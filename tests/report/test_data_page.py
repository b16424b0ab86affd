"""Looks at text and tokens: nothing in a text can break page or terminal, edges stand where documents meet."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest

from rung.config import DataConfig, TokenizerConfig
from rung.corpus.look import look_at
from rung.corpus.sources import resolve
from rung.report.data_page import TextView, TokenView, text_lines, text_page, token_lines, token_page
from rung.tokens.batches import Batches
from rung.tokens.look import look_at_split, windows
from rung.tokens.mapped import Tokens
from rung.tokens.tokenizer import Tokenizer

NASTY = '<script>alert("雪")</script> & \x1b[31m </div> \u202e'


class Parsed(HTMLParser):
    """Checks that tags are closed in order, and keeps text and what is marked."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.boxes: list[tuple[str, str]] = []  # (classes, text) of each token
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag in ("meta", "br"):
            return
        self.open.append(tag)
        if tag in ("b", "i") and "title" in (given := dict(attributes)):
            self.boxes.append((f"{tag} {given['class']}", ""))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.boxes and self.open and self.open[-1] in ("b", "i"):
            self.boxes[-1] = (self.boxes[-1][0], self.boxes[-1][1] + data)


@pytest.fixture
def text_view(tmp_path):
    (tmp_path / "a.txt").write_text(f"{NASTY}<end>{'long ' * 400}", encoding="utf-8")
    sources = resolve([tmp_path / "a.txt"])
    look = look_at(sources, DataConfig(separator="<end>"))
    return TextView(NASTY, [{"name": NASTY, "bytes": 5}], look, {"en": 1, "ja": 1}, {NASTY: NASTY})


def view(ids, starts=(0,), length=16, segments=True, tokenizer=None) -> TokenView:
    tokenizer = tokenizer or Tokenizer.train([], TokenizerConfig(kind="byte"))
    split = Tokens([np.array(ids)], np.array(starts), end_id=tokenizer.end_id)
    batches = Batches(split, context_length=length, batch_size=4, seed=0, windows="random", segments=segments)
    return TokenView(
        "store", tokenizer, {"train": look_at_split(split, tokenizer)}, {"train": 2}, windows(batches, 0, 4), length
    )


def test_a_page_of_text_stays_whole_whatever_the_text_is(text_view):
    page = text_page(text_view)
    parsed = Parsed(page)
    assert NASTY not in page
    assert '<script>alert("雪")</script> & \\x1b[31m </div>' in parsed.text
    assert "://" not in page
    for words in ("Documents by length", "Latin", "Languages", "Of 2 documents", "How the corpus was made"):
        assert words in parsed.text
    lines = text_lines(text_view)
    assert not any("\x1b" in line for line in lines)
    letters = sum(letter.isascii() and letter.isalpha() for letter in NASTY) + 4 * 400
    assert any(line.split()[:2] == ["Latin", f"{letters:,}"] for line in lines)


def test_boxes_are_the_tokens_in_order_and_edges_stand_where_documents_begin():
    tokenizer = Tokenizer.train([], TokenizerConfig(kind="byte"))
    first, second = "snow 雪\nline", "<b>&</b> next"
    ids = [*tokenizer.encode(first).tolist(), 0, *tokenizer.encode(second).tolist()]
    seen = view(ids, (0, len(first.encode()) + 1), len(ids) - 1)
    parsed = Parsed(token_page(seen))
    row = parsed.boxes[: len(ids) - 1]
    assert [k for k, (classes, _) in enumerate(row) if "border" in classes] == [len(first.encode())]
    assert row[len(first.encode())][1] == "<|endoftext|>"
    shown = "".join(text for _, text in row)
    assert shown == "snow ▫▫雪⏎\nline<|endoftext|><b>&</b> nex"
    assert "document begins" in "\n".join(token_lines(seen))
    apart = view(ids, (0, len(first.encode()) + 1), len(ids) - 1, segments=False)
    assert not any("border" in classes for classes, _ in Parsed(token_page(apart)).boxes)
    assert "documents are not told apart" in "\n".join(token_lines(apart))


def test_a_position_without_a_target_is_struck_out():
    tokenizer = Tokenizer.train([], TokenizerConfig(kind="byte"))
    split = Tokens([np.arange(1, 21)], np.array([0]), end_id=0)
    batches = Batches(split, context_length=16, batch_size=3, seed=0, windows="contiguous", segments=False)
    shown = windows(batches, 0, 3)
    seen = TokenView("x", tokenizer, {"train": look_at_split(split, tokenizer)}, {"train": 1}, shown, 16)
    struck = [classes.startswith("i") for classes, _ in Parsed(token_page(seen)).boxes]
    assert struck == [bool(target < 0) for window in shown for target in window.targets_T]
    assert any(struck)


def test_a_table_of_a_row_shows_both_ends_and_each_border():
    seen = view(np.arange(1, 200) % 250 + 1, (0, 60, 120), 150)
    lines = token_lines(seen)
    for window in seen.windows:
        borders = np.flatnonzero(np.diff(window.segments_T)) + 1
        at = next(n for n, line in enumerate(lines) if line.startswith(f"step 1, row {window.row}"))
        block = lines[at + 2 :]
        block = block[: block.index("")] if "" in block else block
        positions = [int(line.split()[0]) for line in block if line.split()[0].isdigit()]
        assert {0, 149, *borders.tolist()} <= set(positions)
        assert positions == sorted(positions)
