"""Generation of text: whole characters as they come, stop strings, and why each text ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rung.config import GenerateConfig
from rung.decode.generate import Chunk, Generator, Note
from rung.tokens.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class Completion:
    """One finished continuation.

    Attributes:
        text: what was generated, without the prompt and without the stop string.
        ids: the tokens generated: without the end-of-text token; with those that spell the stop string.
        reason: ``end`` of text, a ``stop`` string, or ``length``: ``max_tokens`` reached.
    """

    text: str
    ids: tuple[int, ...]
    reason: Literal["end", "stop", "length"]


@dataclass(frozen=True)
class Piece:
    """Some text of one sample, in whole characters; the last piece of a sample (perhaps empty) has the completion."""

    sample: int
    text: str
    completion: Completion | None = None


def generate_text(
    generator: Generator, tokenizer: Tokenizer, prompt: str, settings: GenerateConfig, note: Note | None = None
) -> Iterator[Piece]:
    """Yield continuations of ``prompt`` as they come; the pieces of a sample joined are its completion's text.

    Text that may turn out to begin a stop string is held back until it is known.

    Raises:
        RungError: a setting out of bounds.
    """
    chunks = generator.generate_ids(tokenizer.encode(prompt), settings, note)
    return _pieces(
        chunks, [_Sample(StreamDecoder(tokenizer), StopStrings(settings.stop)) for _ in range(settings.samples)]
    )


def complete(
    generator: Generator, tokenizer: Tokenizer, prompt: str, settings: GenerateConfig, note: Note | None = None
) -> list[Completion]:
    """Return the continuations of ``prompt``, one a sample; see ``generate_text``."""
    pieces = generate_text(generator, tokenizer, prompt, settings, note)
    done = {piece.sample: piece.completion for piece in pieces if piece.completion is not None}
    return [done[sample] for sample in range(settings.samples)]


class StopStrings:
    """Passes text on up to the first stop string.

    The first is the one complete first; of those that end together, the longest. How the text is cut into pieces does
    not matter.
    """

    def __init__(self, stops: Sequence[str]):
        assert all(stops), "a stop string has characters"
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return ``(text that is sure to come before any stop string, whether a stop string was met)``."""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        sure = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[sure:]
        return text[:sure], False

    def flush(self) -> str:
        """Return what was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held


@dataclass
class _Sample:
    """A continuation in the making."""

    decoder: StreamDecoder
    stops: StopStrings
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    done: bool = False

    def push(self, ids: np.ndarray) -> tuple[str, bool]:
        """Take tokens, up to the one that completes a stop string; return ``(new text, whether one did)``."""
        texts, stopped = [], False
        for token in ids:
            self.ids.append(int(token))
            text, stopped = self.stops.push(self.decoder.push([int(token)]))
            texts.append(text)
            if stopped:
                break
        self.texts += texts
        return "".join(texts), stopped

    def finish(self) -> tuple[str, bool]:
        """Return the text still held back, and whether it completes a stop string after all."""
        text, stopped = self.stops.push(self.decoder.flush())
        text += self.stops.flush()
        self.texts.append(text)
        return text, stopped

    def completion(self, reason: Literal["end", "stop", "length"]) -> Completion:
        self.done = True
        return Completion("".join(self.texts), tuple(self.ids), reason)


def _pieces(chunks: Iterator[Chunk], samples: list[_Sample]) -> Iterator[Piece]:
    for chunk in chunks:
        for number, (sample, ids, ended) in enumerate(zip(samples, chunk.ids, chunk.ended, strict=True)):
            if sample.done:
                continue
            text, stopped = sample.push(ids)
            if not stopped and ended:
                rest, stopped = sample.finish()
                text += rest
            if stopped or ended:
                yield Piece(number, text, sample.completion("stop" if stopped else "end"))
            elif text:
                yield Piece(number, text)
        if all(sample.done for sample in samples):
            return
    for number, sample in enumerate(samples):
        if not sample.done:
            text, stopped = sample.finish()
            yield Piece(number, text, sample.completion("stop" if stopped else "length"))


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
