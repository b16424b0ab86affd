from __future__ import annotations

import numpy as np
import pytest
from tiny_models import next_logits, tiny

from rung.config import TokenizerConfig
from rung.decode.probabilities import next_token_probabilities, printable, rows
from rung.tokens.tokenizer import Tokenizer

BYTES = Tokenizer.train([], TokenizerConfig(kind="byte"))
MODEL = tiny(vocab_size=300, context_length=8, n_layers=1)  # ids from 257 on are padding


@pytest.mark.parametrize("text", ["a", "abcdefgh", "the text slides past 8 tokens 国境", "123456789"])
def test_every_position_against_one_pass_each(text):
    ids = BYTES.encode(text)
    positions = next_token_probabilities(*MODEL, BYTES, text, top=5)
    assert [position.id for position in positions] == list(ids)
    for n, position in enumerate(positions, start=1):
        logits = next_logits(*MODEL, ids[:n])[: BYTES.vocab_size].astype(np.float64)
        probability = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        order = np.argsort(-probability, kind="stable")
        assert [one.id for one in position.top] == list(order[:5])
        assert [one.rank for one in position.top] == [1, 2, 3, 4, 5]
        np.testing.assert_allclose([one.probability for one in position.top], probability[order[:5]], rtol=1e-4)
        if n == len(ids):
            assert position.next is None
        else:
            assert position.next.id == ids[n]
            assert position.next.rank == list(order).index(ids[n]) + 1
            assert position.next.probability == pytest.approx(probability[ids[n]], rel=1e-4)


def test_the_whole_vocabulary_sums_to_one_without_padding():
    [position] = next_token_probabilities(*MODEL, BYTES, "a", top=10_000)
    assert sorted(one.id for one in position.top) == list(range(BYTES.vocab_size))
    assert sum(one.probability for one in position.top) == pytest.approx(1, abs=1e-5)


def test_an_empty_text_is_the_beginning_of_a_document():
    [position] = next_token_probabilities(*MODEL, BYTES, "")
    assert (position.id, position.piece, position.next) == (BYTES.end_id, "<|endoftext|>", None)
    assert position.top[0].id == int(np.argmax(next_logits(*MODEL, [BYTES.end_id])[: BYTES.vocab_size]))


def test_rows_are_a_table_of_printable_text():
    table = list(rows(next_token_probabilities(*MODEL, BYTES, "a\n雪", top=2)))
    assert table[0] == ("token", "next", "probability", "rank", "most probable next tokens")
    assert [row[0] for row in table[1:]] == ["a", "\\n", "\\xe9", "\\x9b", "\\xaa"]
    assert [row[1] for row in table[1:]] == ["\\n", "\\xe9", "\\x9b", "\\xaa", ""]
    assert all(cell.isprintable() for row in table for cell in row)


def test_a_whole_character_is_printed_as_itself():
    tokenizer = Tokenizer.train([], TokenizerConfig(kind="byte"))
    assert printable(tokenizer, int(tokenizer.encode("x")[0])) == "x"
    assert printable(tokenizer, int(tokenizer.encode("\x1b")[0])) == "\\x1b"
