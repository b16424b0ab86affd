"""Learning BPE merges from text of any length in bounded memory and time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rung.corpus.documents import utf8_length
from rung.errors import RungError
from rung.tokens import engines

if TYPE_CHECKING:
    import tokenizers

# The trainer holds every distinct word, at 70 bytes of memory a byte of text. Text in words repeats them; text without
# spaces (Japanese, one long line) does not, and is sampled once its words, distinct within a piece, exceed the budget.
_DISTINCT_BYTES = 16 << 20
_HELD_BYTES = 256 << 20
# Each merge rewrites whole words, so that the time for runs without a space grows with their length: they are cut for
# learning. Text is encoded uncut.
_RUN_CHARS = 16


@dataclass(frozen=True)
class TrainingText:
    """How much of a text a vocabulary was learned from, in UTF-8 bytes; less than all is evenly spaced pieces of it."""

    used_bytes: int
    total_bytes: int


def train_bpe(
    pieces: Iterable[str], end: str, vocab_size: int, min_frequency: int
) -> tuple[tokenizers.Tokenizer, TrainingText]:
    """Return a byte-level BPE tokenizer with ``end`` as id 0 and all 256 bytes, and what it was learned from.

    Raises:
        RungError: no text at all.
    """
    import tokenizers
    from tokenizers import pre_tokenizers, trainers

    sample, text = _sample(pieces)
    if not sample:
        raise RungError("no text to learn a tokenizer from", "name a file that has text in it")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        show_progress=False,
        special_tokens=[tokenizers.AddedToken(end, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    learner = engines.byte_level_bpe({}, [], None)
    runs = pre_tokenizers.Split(tokenizers.Regex(rf"\S{{{_RUN_CHARS}}}"), "isolated")
    learner.pre_tokenizer = pre_tokenizers.Sequence([runs, engines.byte_level()])
    learner.train_from_iterator(sample, trainer)
    learner.pre_tokenizer = engines.byte_level()
    return learner, text


def _sample(pieces: Iterable[str]) -> tuple[list[str], TrainingText]:
    """Return every piece, or every 2nd, 4th, 8th ... of them: the most that the budgets hold."""
    kept: list[tuple[str, int, int]] = []  # piece, bytes, bytes in distinct words
    stride, total = 1, 0
    for number, piece in enumerate(pieces):
        size = utf8_length(piece)
        total += size
        if number % stride:
            continue
        kept.append((piece, size, sum(map(utf8_length, set(piece.split())))))
        while len(kept) > 1 and (
            sum(distinct for _, _, distinct in kept) > _DISTINCT_BYTES or sum(size for _, size, _ in kept) > _HELD_BYTES
        ):
            kept, stride = kept[::2], stride * 2
    return [piece for piece, _, _ in kept], TrainingText(sum(size for _, size, _ in kept), total)
