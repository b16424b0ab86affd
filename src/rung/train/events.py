"""What the training loop says while it works: plain values that a listener can log, show or draw.

A listener is any callable that takes one event. The loop knows no listeners beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepDone:
    """One optimizer step is finished, its update applied or skipped."""

    step: int  # steps finished, so the first is 1
    tokens: int  # target tokens so far
    loss: float  # of this step, nats per target token
    learning_rate: float
    gradient_norm: float  # global norm, before clipping
    tokens_per_second: float
    flops_per_second: float
    data_wait: float  # seconds that the device waited for the input of this step
    seconds: float  # of training so far, over all resumes
    skipped: bool  # the gradient was not finite, so the weights stayed as they were
    epoch: float  # passes over the training text so far


@dataclass(frozen=True)
class Evaluated:
    """The whole validation split was scored with the weights after ``step``."""

    step: int
    tokens: int  # target tokens trained on so far
    loss: float  # nats per target token
    perplexity: float
    bits_per_byte: float | None  # None where the tokens' bytes are not known
    targets: int  # that the loss is the mean over
    seconds: float  # of training so far, over all resumes
    is_best: bool  # no validation before it had a lower loss


@dataclass(frozen=True)
class Sampled:
    """Text that the weights after ``step`` wrote."""

    step: int
    prompt: str
    text: str  # what follows the prompt, without it


@dataclass(frozen=True)
class Saved:
    """A checkpoint of ``step`` is being written; it is whole when its folder has its final name."""

    step: int
    path: str


@dataclass(frozen=True)
class Skipped:
    """The update of ``step`` was not applied."""

    step: int
    in_a_row: int
    reason: str


@dataclass(frozen=True)
class Note:
    """Anything else to tell the person: resumed, stopping, profile written."""

    step: int
    text: str


@dataclass(frozen=True)
class Finished:
    """The run ended, or stopped in a way that it can be resumed from."""

    step: int
    tokens: int
    seconds: float
    reason: str


Event = StepDone | Evaluated | Sampled | Saved | Skipped | Note | Finished
