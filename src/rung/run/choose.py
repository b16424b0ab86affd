"""The choices made for a person who names only a text: vocabulary, size, length; each said with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rung.config import Config, override, preset

_VOCABULARIES = ((100e3, 512), (500e3, 1024), (2e6, 2048), (20e6, 4096), (200e6, 8192), (2e9, 16384))
_LARGEST_VOCABULARY = 32768

LENGTHS = ("train.steps", "train.tokens", "train.epochs")
_STEP_SETTINGS = ("train.batch_size", "model.context_length")
_VOCABULARY_SETTINGS = ("tokenizer.vocab_size", "tokenizer.kind", "tokenizer.file")
_HELD_OUT_SETTINGS = ("data.validation", "data.validation_fraction")

_MOST_EPOCHS = 8.0  # past this a model of this size repeats the text more than it learns from it
_FEWEST_STEPS = 200  # below this even a short text is not learned
_MOST_STEPS = 2000  # some ten minutes on two cores; who wants more asks for it
_MOST_HELD_OUT = 300e3  # bytes: a validation reads all of them, and should stay short beside the training between


@dataclass(frozen=True)
class Choice:
    """One setting that was chosen, and why."""

    path: str
    value: object
    reason: str


def choose(text_bytes: int, platform: str, given: Mapping[str, Any]) -> tuple[Config, list[Choice]]:
    """Return a config for a text of ``text_bytes`` on a device of ``platform`` (``cpu``, ``gpu``, ``tpu``), and why.

    On a CPU the model is the demo's, which learns a book in minutes; on an accelerator a text of a gigabyte or more
    gets GPT-2 small. Nothing is chosen that the person has ``given``, as ``{path: value}``.
    """
    if platform != "cpu" and text_bytes >= 1e9:
        reason = f"a text of {text_bytes / 1e9:.1f} GB and a {platform}: GPT-2 small"
        return preset("gpt2-small"), [Choice("preset", "gpt2-small", reason)]
    config = preset("demo")
    size = f"{text_bytes / 1e6:.2f} MB" if text_bytes >= 1e5 else f"{text_bytes:,} bytes"
    choices = [Choice("preset", "demo", "a model that learns a book in minutes on a CPU")]
    vocab_size = 0
    if not any(given.get(path) for path in _VOCABULARY_SETTINGS):
        vocab_size = next((size for limit, size in _VOCABULARIES if text_bytes < limit), _LARGEST_VOCABULARY)
        choices.append(Choice("tokenizer.vocab_size", vocab_size, f"for {size} of text"))
    if not any(path in given for path in LENGTHS):
        sized = override(config, {path: value for path, value in given.items() if path in _STEP_SETTINGS})
        tokens = text_bytes * (1 - config.data.validation_fraction) / _bytes_per_token(vocab_size)
        steps_per_epoch = tokens / (sized.train.batch_size * sized.model.context_length)
        steps = int(min(_MOST_STEPS, max(_FEWEST_STEPS, _MOST_EPOCHS * steps_per_epoch)))
        reason = f"some {steps / max(steps_per_epoch, 1e-9):.3g} passes over the text"
        choices.append(Choice("train.steps", steps, reason))
    if (
        not any(path in given for path in _HELD_OUT_SETTINGS)
        and text_bytes * config.data.validation_fraction > _MOST_HELD_OUT
    ):
        fraction = round(_MOST_HELD_OUT / text_bytes, 6)
        choices.append(
            Choice("data.validation_fraction", fraction, "some 0.3 MB held out, which a validation reads quickly")
        )
    changes = {choice.path: choice.value for choice in choices if choice.path != "preset"}
    # The run is named for its text, and validated ten times whatever its length.
    return override(config, {**changes, "name": "", "evaluate.every_steps": 0}), choices


def _bytes_per_token(vocab_size: int) -> float:
    """Return roughly how many bytes a token of a BPE vocabulary trained on the text stands for; 0: not known.

    A straight line through what novels in English and in Japanese gave for vocabularies of 512 to 8,192.
    """
    return max(1.0, 0.5 * math.log2(max(vocab_size, 1)) - 2.15) if vocab_size else 3.0
