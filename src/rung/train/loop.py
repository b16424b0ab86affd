"""The training loop: feeds the step, keeps the device ahead of Python, and says what happens in events.

It knows no listeners. Who wants to hear of a step, a validation or a save is handed in as ``emit``.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from rung.errors import RungError
from rung.evaluate.held_out import HeldOut
from rung.train import events
from rung.train.checkpoint import Checkpoints, Outcome, Progress
from rung.train.spikes import Spikes
from rung.train.step import Batch, State

_BATCHES_AHEAD = 2
_FIRST_RETRY, _LONGEST_RETRY = 10.0, 300.0  # seconds to wait after a save that failed, doubled each time
_LAST_RETRY = 5.0  # seconds between tries when there is nothing else left to do


class Diverged(RungError):
    """The gradient was not finite too many times in a row."""

    status = 1


class Vanished(RungError):
    """The run folder is gone at the end of the run."""

    status = 1


@dataclass(frozen=True)
class Intervals:
    """Steps between the loop's other work; 0 for never."""

    log: int = 1
    evaluate: int = 0
    sample: int = 0
    save: int = 0
    save_seconds: float = 0.0
    norms: int = 0


@dataclass
class Loop:
    """A training run, ready to go: everything that the loop calls.

    Attributes:
        step: ``(state, batch) -> (state, metrics)`` of ``rung.train.step.make_step``.
        batch: from the number of a step to its batch, on the devices.
        steps: the step to end at.
        learning_rate: peak, for the log.
        flops_per_token: of training, for the log.
        intervals: when to evaluate, sample and save. At the end it does each once more, where it is done at all.
        emit: called with every event.
        evaluate: held-out loss of weights; ``None``: no validation.
        sample: ``weights -> [(prompt, text)]``; ``None``: no samples.
        write_weights: called with (weights, progress) when the best has moved, and without validation at the end.
        checkpoints: where to save; ``None``: nowhere.
        sync: called by the thread that saves, before a checkpoint is whole: puts on the disk what was told of the steps
            before it and written of them, or raises, and then the save has failed.
        max_skipped: non-finite updates in a row that end the run.
        should_stop: asked after every step; a reason ends the run early, after a save.
        steps_per_epoch: for the log.
        profile: steps to trace with the profiler, first and last, counted from 1, and where to write the trace.
        norms: ``(copy, norms)``: a copy of weights that outlives the step, and ``norms(before, after)`` of
            ``rung.train.norms``; ``None``: none are taken.
        spikes: watches the losses.
        look_closer: called with (step, weights) where an update was skipped; returns the documents of the batch, and a
            line on what was found.
        on_divergence: called with (step, weights) where the update was the last of too many skipped.
    """

    step: Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]
    batch: Callable[[int], Batch]
    steps: int
    learning_rate: float
    flops_per_token: float
    intervals: Intervals
    emit: Callable[[Any], None]
    evaluate: Callable[[Any], HeldOut] | None = None
    sample: Callable[[Any], list[tuple[str, str]]] | None = None
    write_weights: Callable[[Any, Progress], None] | None = None
    checkpoints: Checkpoints | None = None
    sync: Callable[[], None] = lambda: None
    max_skipped: int = 10
    should_stop: Callable[[], str | None] = lambda: None
    steps_per_epoch: float = 0.0
    profile: tuple[int, int, Path] | None = None
    norms: tuple[Callable[[Any], Any], Callable[[Any, Any], tuple[Any, Any]]] | None = None
    spikes: Spikes = field(default_factory=lambda: Spikes(0.0))
    look_closer: Callable[[int, Any], tuple[list[int], str]] = lambda step, weights: ([], "")
    on_divergence: Callable[[int, Any], None] = lambda step, weights: None

    def run(self, state: State, progress: Progress) -> tuple[State, Progress, HeldOut | None]:
        """Train from ``progress.step`` to ``steps``; returns the state, what was reached, and the last validation.

        Raises:
            Diverged: too many non-finite updates in a row. The last checkpoint stays.
        """
        self._progress = progress
        self._last_evaluation: HeldOut | None = None
        self._reason = "done"
        self._saves = _Saves(self.checkpoints, self.intervals, self.emit, self.sync)
        with _Prefetch(self.batch, range(progress.step, self.steps)) as batches:
            state = self._steps(state, batches)
        if self._progress.step == self.steps:
            self._reason = self._finish(state) or self._reason
        else:
            self._saves.end()
        done = self._progress
        self.emit(events.Finished(done.step, done.tokens, done.seconds, self._reason))
        return state, done, self._last_evaluation

    def _steps(self, state: State, batches: Iterator[tuple[Batch, float]]) -> State:
        pending: _Pending | None = None
        self._clock = time.perf_counter()
        for number in range(self._progress.step, self.steps):
            self._profile(number, state)
            batch, waited = next(batches)
            if pending is not None and (self._due(number + 1) or number + 1 == self.steps):
                # The step that comes is waited for: read together with this one, it would seem to take no time.
                self._stepped(pending, state)
                pending = None
            before = self.norms[0](state["weights"]) if self.norms and self._norms_due(number + 1) else None
            state, metrics = self.step(state, batch)
            norms = self.norms[1](before, state["weights"]) if self.norms and before is not None else None
            # The device computes this step while Python reads the metrics of the one before it.
            if pending is not None:
                self._stepped(pending, state)
            pending = _Pending(number, metrics, waited, norms)
            done = number + 1
            stop = self.should_stop()
            self._saves.hear()
            if stop is not None or self._due(done) or done == self.steps:
                self._stepped(pending, state)
                pending = None
                if done < self.steps:
                    # What is due is done before a stop too: a resumed run begins after it.
                    self._between(state, done, stopping=stop is not None)
                    if stop is not None:
                        self._reason = stop
                        break
        self._profile(self._progress.step, state, at_end=True)
        return state

    def _due(self, done: int) -> bool:
        i = self.intervals
        return any(interval and done % interval == 0 for interval in (i.evaluate, i.sample)) or self._saves.due(done)

    def _norms_due(self, done: int) -> bool:
        return bool(self.intervals.norms) and done % self.intervals.norms == 0

    def _between(self, state: State, done: int, stopping: bool) -> None:
        """Do what is due after a step; its time is not training time."""
        i = self.intervals
        if i.evaluate and done % i.evaluate == 0:
            self._evaluate(state)
        if i.sample and done % i.sample == 0:
            self._sample(state)
        if stopping or self._saves.due(done):
            self._saves.begin(state, self._saved_progress)
        self._clock = time.perf_counter()

    def _finish(self, state: State) -> str | None:
        """Do what is done at the end; returns what asked to stop before the last state was saved."""
        self._evaluate(state)
        self._sample(state)
        if self.evaluate is None and self.write_weights is not None:
            self.write_weights(state["weights"], self._progress)
        self._saves.begin(state, self._saved_progress)
        return self._saves.insist(state, self._saved_progress, self.should_stop)

    @property
    def _saved_progress(self) -> Progress:
        return dataclasses.replace(self._progress, losses=tuple(self.spikes.losses))

    def _stepped(self, pending: _Pending, state: State) -> None:
        """Read the metrics of a step, count it, and tell of it."""
        values = {name: value.item() for name, value in jax.device_get(pending.metrics).items()}
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        targets, done = values["targets"], pending.number + 1
        objective, loss = values["loss_sum"] / max(1, targets), values["cross_entropy"] / max(1, targets)
        threshold = None if values["skipped"] else self.spikes.push(loss)
        self._progress = dataclasses.replace(
            self._progress,
            step=done,
            tokens=self._progress.tokens + targets,
            seconds=self._progress.seconds + seconds,
        )
        rate = targets / seconds if seconds > 0 else 0.0
        if done % self.intervals.log == 0 or values["skipped"] or threshold is not None or done == self.steps:
            self.emit(
                events.StepDone(
                    step=done,
                    tokens=self._progress.tokens,
                    loss=loss,
                    learning_rate=values["rate_factor"] * self.learning_rate,
                    gradient_norm=values["gradient_norm"],
                    tokens_per_second=rate,
                    flops_per_second=rate * self.flops_per_token,
                    data_wait=pending.waited,
                    seconds=self._progress.seconds,
                    skipped=values["skipped"],
                    epoch=done / self.steps_per_epoch if self.steps_per_epoch else 0.0,
                    objective=objective if objective < loss or objective > loss else None,
                )
            )
        if pending.norms is not None:
            weights, updates = jax.device_get(pending.norms)
            self.emit(events.Norms(done, *({k: v.item() for k, v in one.items()} for one in (weights, updates))))
        if threshold is not None:
            self.emit(events.Spiked(done, loss, threshold))
        if values["skipped"]:
            self._skipped(done, values, state)

    def _skipped(self, done: int, values: dict[str, Any], state: State) -> None:
        in_a_row = values["skipped_in_a_row"]
        what = "gradient" if math.isfinite(values["loss_sum"]) else "loss"
        if what == "loss" and math.isfinite(values["cross_entropy"]):
            what = "objective"  # the loss itself is
        documents, found = self.look_closer(done - 1, state["weights"])
        if int(state["step"]) > done and int(state["skipped_in_a_row"]) == 0:
            found += "; looked at with the weights of one update later"  # the step after it had been given out already
        self.emit(events.Skipped(done, in_a_row, f"the {what} is not finite", documents, found))
        if in_a_row >= self.max_skipped or in_a_row == done == self.steps:  # the whole of a short run
            self.on_divergence(done - 1, state["weights"])
            self._saves.wait()
            raise Diverged(
                f"{in_a_row} updates in a row were not finite, the last at step {done}; weights are those before them",
                "lower train.z_loss: the loss is finite, and the objective is not"
                if what == "objective"
                else "lower train.learning_rate, or lengthen the warm-up; train.max_skipped sets the number",
            )
        self._clock = time.perf_counter()

    def _evaluate(self, state: State) -> None:
        if self.evaluate is None:
            return
        result = self.evaluate(state["weights"])
        self._last_evaluation = result
        done = self._progress
        # A loss that is not a number is never the best: nothing that comes later would be below it.
        is_best = result.loss < (math.inf if done.best_loss is None else done.best_loss)
        if is_best:
            self._progress = dataclasses.replace(done, best_step=done.step, best_loss=result.loss)
            if self.write_weights is not None:
                self.write_weights(state["weights"], self._progress)
        self.emit(
            events.Evaluated(
                step=done.step,
                tokens=done.tokens,
                loss=result.loss,
                perplexity=result.perplexity,
                bits_per_byte=result.bits_per_byte,
                targets=result.targets,
                seconds=done.seconds,
                is_best=is_best,
            )
        )

    def _sample(self, state: State) -> None:
        if self.sample is not None:
            for prompt, text in self.sample(state["weights"]):
                self.emit(events.Sampled(self._progress.step, prompt, text))

    def _profile(self, done: int, state: State, at_end: bool = False) -> None:
        """After ``done`` steps, start the profiler if the next is the first of its range, stop it after the last."""
        if self.profile is None:
            return
        first, last, folder = self.profile
        if done == first - 1 and not at_end:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(folder))
        elif first <= done and (done == last or at_end):
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self.profile = None
            self.emit(events.Note(done, f"profile of steps {first} to {done} written to {folder}"))


@dataclass(frozen=True)
class _Pending:
    """A step that was given to the device and whose metrics have not been read."""

    number: int
    metrics: dict[str, jax.Array]
    waited: float
    norms: tuple[Any, Any] | None


class _Saves:
    """When to save, and what to do about a save that fails: say so, train on, and try again later."""

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        intervals: Intervals,
        emit: Callable[[Any], None],
        sync: Callable[[], None],
    ):
        self._checkpoints, self._intervals, self._emit, self._sync = checkpoints, intervals, emit, sync
        self._last = time.monotonic()
        self._wait = 0.0  # seconds after the last try, where that failed

    def due(self, done: int) -> bool:
        """Return whether a checkpoint is due after a step: by steps, by minutes, or again after one that failed."""
        if self._checkpoints is None:
            return False
        i, since = self._intervals, time.monotonic() - self._last
        by_steps = i.save and done % i.save == 0
        return bool(by_steps or (i.save_seconds and since >= i.save_seconds) or (self._wait and since >= self._wait))

    def begin(self, state: State, progress: Progress) -> None:
        """Begin a save, after the one before it."""
        if self._checkpoints is not None:
            self.wait()
            self._checkpoints.save(state, progress, self._sync)
            self._last = time.monotonic()

    def hear(self) -> None:
        """Tell of a save that has ended."""
        if self._checkpoints is not None:
            self._tell(self._checkpoints.outcome())

    def wait(self) -> bool:
        """Wait for the save that runs, and tell of it; returns false where it failed."""
        return self._checkpoints is None or self._tell(self._checkpoints.wait())

    def end(self) -> bool:
        """Wait for the last save; returns false where it failed.

        Raises:
            Vanished: it failed because the run folder is gone.
        """
        whole = self.wait()
        if not whole and self._checkpoints is not None and not self._checkpoints.run.is_dir():
            raise Vanished(
                f"{self._checkpoints.run} is gone, and the run has ended: its last state is saved nowhere",
                "if the folder comes back, `rung resume` goes on from its last checkpoint",
            )
        return whole

    def insist(self, state: State, progress: Progress, should_stop: Callable[[], str | None]) -> str | None:
        """Wait until the last save of a run is whole, trying again until it is, or until told to stop: returns why."""
        while not self.end():
            ends = time.monotonic() + _LAST_RETRY
            while time.monotonic() < ends:
                if (reason := should_stop()) is not None:
                    return reason
                time.sleep(0.1)
            self.begin(state, progress)
        return None

    def _tell(self, outcome: Outcome | None) -> bool:
        if outcome is None:
            return True
        assert self._checkpoints is not None
        if outcome.error is None:
            self._wait = 0.0
            self._emit(events.Saved(outcome.step, str(outcome.path)))
            return True
        self._wait = min(_LONGEST_RETRY, 2 * self._wait or _FIRST_RETRY)
        whole = self._checkpoints.steps()
        self._emit(events.SaveFailed(outcome.step, outcome.error, whole[-1] if whole else None))
        return False


class _Prefetch:
    """Batches made by a thread, a few ahead of the loop; iterating gives (batch, seconds waited for it)."""

    def __init__(self, batch: Callable[[int], Batch], steps: range):
        self._batch, self._steps = batch, steps
        self._ready: queue.Queue[Any] = queue.Queue(_BATCHES_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, daemon=True)

    def __enter__(self) -> Iterator[tuple[Batch, float]]:
        self._thread.start()
        return self._take()

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)
            except queue.Empty:
                pass

    def _fill(self) -> None:
        try:
            for step in self._steps:
                if self._closed.is_set():
                    return
                self._ready.put(self._batch(step))
        except BaseException as error:
            self._ready.put(error)

    def _take(self) -> Iterator[tuple[Batch, float]]:
        for _ in self._steps:
            begun = time.perf_counter()
            item = self._ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item, time.perf_counter() - begun
