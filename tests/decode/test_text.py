from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny

from rung.config import GenerateConfig, TokenizerConfig
from rung.decode.generate import Chunk, Generator
from rung.decode.text import Completion, Piece, StopStrings, complete, generate_text
from rung.tokens.tokenizer import Tokenizer

AB = st.text("ab", max_size=30)
AB_STOP = st.text("ab", min_size=1, max_size=4)
BYTES = Tokenizer.train([], TokenizerConfig(kind="byte"))


class Scripted:
    """Stands in for a generator: says what it is told to, some tokens a chunk."""

    def __init__(self, scripts, chunk_tokens=3, ends=False):
        self.scripts, self.chunk_tokens, self.ends = [list(script) for script in scripts], chunk_tokens, ends
        self.chunks_taken = 0

    def generate_ids(self, prompt_ids, settings, note=None):
        longest = max(map(len, self.scripts))
        for at in range(0, longest + 1, self.chunk_tokens):
            self.chunks_taken += 1
            stop = at + self.chunk_tokens
            ids = tuple(np.array(script[at:stop], np.int32) for script in self.scripts)
            yield Chunk(ids, tuple(self.ends and len(script) < stop for script in self.scripts))


def run(texts, stop=(), **options) -> tuple[list[Piece], list[Completion]]:
    generator = Scripted([BYTES.encode(text) for text in texts], **options)
    settings = GenerateConfig(samples=len(texts), stop=stop)
    pieces = list(generate_text(generator, BYTES, "prompt", settings))
    completions = complete(generator, BYTES, "prompt", settings)
    for sample, completion in enumerate(completions):
        own = [piece for piece in pieces if piece.sample == sample]
        assert "".join(piece.text for piece in own) == completion.text, "streamed text is the whole text"
        assert [piece.completion for piece in own] == [None] * (len(own) - 1) + [completion], (
            "the last piece and no other"
        )
    return pieces, completions


def first_stop(text: str, stops) -> tuple[str, bool]:
    """Return the text up to the stop string that is complete first, by trying every end."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30)),
)
def test_stop_strings_wherever_the_text_is_cut(text, stops, cuts):
    strings, out, stopped = StopStrings(stops), "", False
    for start, end in itertools.pairwise(sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})):
        piece, stopped = strings.push(text[start:end])
        out += piece
        if stopped:
            break
    assert (out + strings.flush(), stopped) == first_stop(text, stops)


@given(AB, st.lists(AB_STOP, min_size=1, max_size=3))
def test_no_more_is_held_back_than_could_begin_a_stop_string(text, stops):
    expected, stopped = first_stop(text, stops)
    out, _ = StopStrings(stops).push(text)
    if not stopped:
        assert any(stop.startswith(expected[len(out) :]) for stop in stops)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 7, 100])
def test_a_stop_string_across_tokens_and_chunks(chunk_tokens):
    _, [completion] = run(["one\ntwo\n\nthree"], stop=("\n\n",), chunk_tokens=chunk_tokens)
    assert completion == Completion("one\ntwo", tuple(BYTES.encode("one\ntwo\n\n")), "stop")


def test_a_beginning_of_a_stop_string_is_printed_when_nothing_follows():
    _, [completion] = run(["so EN"], stop=("END",))
    assert (completion.text, completion.reason) == ("so EN", "length")


def test_generation_stops_when_every_sample_has():
    generator = Scripted([BYTES.encode("a." + 100 * "x"), BYTES.encode("bcd." + 100 * "x")], chunk_tokens=2)
    completions = complete(generator, BYTES, "", GenerateConfig(samples=2, stop=(".",)))
    assert [one.text for one in completions] == ["a", "bcd"]
    assert generator.chunks_taken == 2


def test_reasons():
    _, completions = run(["ended", "longer than that", "st-op here"], stop=("-op",), ends=True)
    assert [one.reason for one in completions] == ["end", "end", "stop"]
    _, [completion] = run(["cut"])
    assert completion.reason == "length"


def test_nothing_generated_is_an_empty_completion():
    model, weights = tiny(vocab_size=BYTES.vocab_size, n_layers=1)
    generator = Generator(model, weights, vocab_size=BYTES.vocab_size, end_id=BYTES.end_id)
    pieces = list(generate_text(generator, BYTES, "x", GenerateConfig(max_tokens=0, samples=2)))
    assert pieces == [Piece(n, "", Completion("", (), "length")) for n in range(2)]


@given(
    st.lists(st.text(max_size=12), min_size=1, max_size=3),
    st.integers(1, 5),
    st.lists(st.text(min_size=1, max_size=2), max_size=2),
)
def test_any_text_streams_whole(texts, chunk_tokens, stops):
    pieces, completions = run(texts, stop=tuple(stops), chunk_tokens=chunk_tokens)
    assert [one.text for one in completions] == [first_stop(text, stops)[0] for text in texts]
    assert not any("\ufffd" in piece.text for piece in pieces if "\ufffd" not in "".join(texts))


def test_japanese_and_emoji_come_in_whole_characters():
    text = "雪国の🚄👩‍👧"
    pieces, [completion] = run([text], chunk_tokens=1)
    assert completion.text == text
    assert [piece.text for piece in pieces if piece.text] == list(text)


def test_bytes_that_are_no_character_equal_the_decoded_whole():
    ids = [*BYTES.encode("a雪")[:-1], *BYTES.encode("b"), *BYTES.encode("雪")[:2]]
    generator = Scripted([ids], chunk_tokens=2)
    [completion] = complete(generator, BYTES, "", GenerateConfig(stop=("never",)))
    assert completion.text == BYTES.decode(ids)
    assert completion.text.count("\ufffd") == 2


def test_a_model_streams_what_its_ids_decode_to():
    model, weights = tiny(vocab_size=300, n_layers=1)  # ids from 257 on are padding
    generator = Generator(model, weights, vocab_size=BYTES.vocab_size, end_id=BYTES.end_id)
    settings = GenerateConfig(max_tokens=80, temperature=3.0, samples=2, ignore_end=True)
    pieces = list(generate_text(generator, BYTES, "国境の", settings))
    for sample in range(2):
        completion = next(piece.completion for piece in pieces if piece.sample == sample and piece.completion)
        assert len(completion.ids) == 80
        assert "".join(piece.text for piece in pieces if piece.sample == sample) == BYTES.decode(completion.ids)
