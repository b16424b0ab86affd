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
    loss: float  # cross-entropy of this step, nats per target token
    learning_rate: float
    gradient_norm: float  # global norm, before clipping
    tokens_per_second: float
    flops_per_second: float
    data_wait: float  # seconds that the device waited for the input of this step
    seconds: float  # of training so far, over all resumes
    skipped: bool  # the gradient was not finite, so the weights stayed as they were
    epoch: float  # passes over the training text so far
    objective: float | None = None  # what training minimises, where that is not the loss


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
class Mixed:
    """How a mixture of stores stands after ``step``, by the names of the stores."""

    step: int
    epochs: dict[str, float]  # passes over each store's training text so far
    losses: dict[str, float]  # held-out nats per target token, of each store that has text held out
    bits_per_byte: dict[str, float]  # of the same, where the tokens' bytes are known


@dataclass(frozen=True)
class Sampled:
    """Text that the weights after ``step`` wrote."""

    step: int
    prompt: str
    text: str  # what follows the prompt, without it


@dataclass(frozen=True)
class Saved:
    """The checkpoint of ``step`` is whole: ``rung resume`` can go on from it."""

    step: int
    path: str


@dataclass(frozen=True)
class SaveFailed:
    """A save was tried and did not become whole; training goes on, and it is tried again."""

    step: int  # whose state was to be saved
    reason: str
    last_whole: int | None  # the newest step with a whole checkpoint


@dataclass(frozen=True)
class Skipped:
    """The update of ``step`` was not applied."""

    step: int
    in_a_row: int
    reason: str
    documents: list[int]  # ids of the documents that the batch was cut from, ascending
    largest: str  # what was found on looking closer: the first value that is not finite, the largest ones, by name


@dataclass(frozen=True)
class Spiked:
    """The loss of ``step`` lies far above those of the steps before it."""

    step: int
    loss: float
    threshold: float  # that it is over: median + so many robust deviations of the losses before it


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of the weights after ``step``, and of the change that this step made, by group of weights."""

    step: int
    weights: dict[str, float]
    updates: dict[str, float]


@dataclass(frozen=True)
class Hardware:
    """What the machine was doing when ``step`` was done; ``None`` where nobody can tell."""

    step: int
    seconds: float  # of training so far, as in StepDone
    cpu_percent: float | None  # of all cores together, by everyone, since the reading before
    process_cpu_percent: float | None  # by this process; 100 is one core
    process_memory: int | None  # resident bytes of this process
    free_memory: int | None  # bytes available on the machine
    gpus: list[dict[str, float | int | str | None]]
    """One a GPU: ``name``, ``utilization`` (percent), ``memory_used``, ``memory_total`` (bytes), ``temperature``
    (degrees Celsius), ``power`` (watts), ``throttled`` (what holds its clock down; empty for nothing)."""


@dataclass(frozen=True)
class Resumed:
    """The run goes on from the checkpoint of ``step``."""

    step: int
    changes: list[str]  # settings that differ from before, each as "path old -> new"


@dataclass(frozen=True)
class Note:
    """Anything else to tell the person: a profile written, a tracker that failed."""

    step: int
    text: str


@dataclass(frozen=True)
class Finished:
    """The run ended, or stopped in a way that it can be resumed from."""

    step: int
    tokens: int
    seconds: float
    reason: str


Event = (
    StepDone
    | Evaluated
    | Mixed
    | Sampled
    | Saved
    | SaveFailed
    | Skipped
    | Spiked
    | Norms
    | Hardware
    | Resumed
    | Note
    | Finished
)
