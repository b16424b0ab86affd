"""How many parameters a config's model has, before there is any text."""

from __future__ import annotations

from typing import Any

from rung.config import Config
from rung.model import Decoder
from rung.model.decoder import with_vocabulary
from rung.model.weights import parameter_count
from rung.run.prepare import Say
from rung.tokens.tokenizer import Tokenizer
from rung.train.optimizer import group_rows, make_optimizer


def count_parameters(config: Config, say: Say) -> int:
    """Return the number of parameters of a config's model, for the vocabulary that the config leads one to expect.

    Args:
        config: resolved.
        say: told where the vocabulary will be known only from the text.

    Raises:
        RungError: a tokenizer file that cannot be loaded.
    """
    wanted = config.tokenizer
    vocab_size = expected_vocabulary(config)
    counted = _count(config, vocab_size)
    if wanted.kind == "char" and not wanted.file and not config.model.vocab_size:
        each = _count(config, vocab_size + 1) - counted
        say(f"counted for {vocab_size:,} characters; the text decides how many there are, {each:,} parameters each")
    return counted


def expected_vocabulary(config: Config) -> int:
    """Return the size of the vocabulary that the config's tokenizer will have, as far as the config tells.

    Raises:
        RungError: a tokenizer file that cannot be loaded.
    """
    wanted = config.tokenizer
    if wanted.file:
        return Tokenizer.load(wanted.file, allow_lossy=wanted.allow_lossy).vocab_size
    if wanted.kind == "byte":
        return Tokenizer.train([], wanted).vocab_size
    return wanted.vocab_size


def optimizer_groups(config: Config) -> list[dict[str, Any]]:
    """Return which rule has how many weights, at which peak rate and decay, for a resolved config.

    Raises:
        RungError: an optimizer that the model has no weights for.
    """
    table = Decoder(with_vocabulary(config.model, expected_vocabulary(config))).weights()
    return group_rows(make_optimizer(table, config.train))


def _count(config: Config, vocab_size: int) -> int:
    return parameter_count(Decoder(with_vocabulary(config.model, vocab_size)).weights())
