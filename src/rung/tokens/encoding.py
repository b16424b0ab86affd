"""Text to ids, many pieces at once: by threads of this process, or by an engine's workers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from rung.corpus.workers import Engine
from rung.tokens.engines import UnknownCharacter
from rung.tokens.tokenizer import Tokenizer
from rung.tokens.writing import Part

_AHEAD = 4  # pieces a thread that are waited for
_BATCH_CHARS = 1 << 20  # of text in one task of an engine

Encoded = tuple[str, Any, np.ndarray | UnknownCharacter | None]


def encoded(parts: Iterator[Part], tokenizer: Tokenizer, engine: Engine | None, workers: int) -> Iterator[Encoded]:
    """Yield each part, in order, with the ids of its text; None where it has none.

    A bounded number of parts is held. Threads are enough on one machine: the encoders let go of the interpreter.
    """
    return _by_threads(parts, tokenizer, workers) if engine is None else _by_engine(parts, tokenizer, engine)


# Helpers


def _by_threads(parts: Iterator[Part], tokenizer: Tokenizer, workers: int) -> Iterator[Encoded]:
    workers = workers or os.cpu_count() or 1
    waiting: deque[tuple[str, Any, Future | None]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for split, part in parts:
                waiting.append((split, part, pool.submit(_try, tokenizer, part) if isinstance(part, str) else None))
                if len(waiting) > _AHEAD * workers:
                    yield _done(*waiting.popleft())
            while waiting:
                yield _done(*waiting.popleft())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _done(split: str, part: Any, future: Future | None) -> Encoded:
    return split, part, None if future is None else future.result()


@dataclass(frozen=True)
class _Batch:
    """Texts to encode, and with what: the JSON of a tokenizer, which each worker reads once."""

    tokenizer: str
    dtype: str
    texts: list[str]


def _by_engine(parts: Iterator[Part], tokenizer: Tokenizer, engine: Engine) -> Iterator[Encoded]:
    spelled = tokenizer.to_json()
    dtype = "u2" if tokenizer.vocab_size <= 1 << 16 else "i4"  # what goes between processes is as small as it can be
    waiting: deque[list[Part]] = deque()

    def batches() -> Iterator[_Batch]:
        held: list[Part] = []
        chars = 0
        for part in parts:
            held.append(part)
            chars += len(part[1]) if isinstance(part[1], str) else 0
            if chars >= _BATCH_CHARS or len(held) >= _BATCH_CHARS >> 6:  # or very many that are very short
                waiting.append(held)
                yield _Batch(spelled, dtype, [text for _, text in held if isinstance(text, str)])
                held, chars = [], 0
        waiting.append(held)
        yield _Batch(spelled, dtype, [text for _, text in held if isinstance(text, str)])

    for results in engine.map(_encode, batches()):
        found = iter(results)
        for split, part in waiting.popleft():
            yield split, part, next(found) if isinstance(part, str) else None


def _encode(batch: _Batch) -> list[np.ndarray | UnknownCharacter]:
    """Encode texts; runs in a worker."""
    tokenizer = _tokenizer(batch.tokenizer)
    found = [_try(tokenizer, text) for text in batch.texts]
    return [ids.astype(batch.dtype) if isinstance(ids, np.ndarray) else ids for ids in found]


def _try(tokenizer: Tokenizer, text: str) -> np.ndarray | UnknownCharacter:
    """Return the ids of a text, or what is wrong with it; the writer knows where the text stands."""
    try:
        return tokenizer.encode(text)
    except UnknownCharacter as error:
        return error


@lru_cache(maxsize=1)
def _tokenizer(spelled: str) -> Tokenizer:
    return Tokenizer.from_json(spelled)
