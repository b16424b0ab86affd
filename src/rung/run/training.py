"""A training run from sources to report, and its continuation: the harness and everything that listens to it."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rung import config as settings
from rung.config import Config, GenerateConfig
from rung.decode.generate import Generator
from rung.decode.text import complete
from rung.disk import cannot
from rung.errors import RungError
from rung.evaluate.held_out import HeldOut, compiled_loss, held_out_loss
from rung.mesh import batch_sharding
from rung.model import Decoder
from rung.model.weights import parameter_count
from rung.report.html import write_report
from rung.report.metrics import Metrics, MetricsLog, read_metrics, truncate_after
from rung.report.progress import Progress as ProgressView
from rung.report.telemetry import Telemetry
from rung.report.trackers import trackers
from rung.run.best import BestWeights
from rung.run.divergence import Divergence
from rung.run.folder import (
    LINEAGE,
    METRICS,
    SAMPLES,
    Run,
    held,
    write_config,
)
from rung.run.prepare import Say
from rung.run.stopping import StopReason, asked_to_stop
from rung.run.validation import over_split
from rung.tokens.batches import Batches
from rung.tokens.mixture import Mixture, Store, training_batches
from rung.tokens.tokenizer import Tokenizer
from rung.train import events
from rung.train.checkpoint import Checkpoints, NoCheckpoint, Progress
from rung.train.loop import Diverged, Intervals, Loop
from rung.train.memory import Compiling
from rung.train.norms import copy_of, make_norms
from rung.train.optimizer import make_optimizer
from rung.train.schedule import rate_factor
from rung.train.spikes import Spikes
from rung.train.step import abstract_state, initial_state, make_step, place

_TRAIN_LOSS_STEPS = 100  # the train loss of a result is the mean over so many last steps


class Interrupted(RungError):
    """Training was broken off without a save; its last checkpoint stays."""

    status = 3


class Training:
    """One process's part in a run: builds what the loop calls, runs it, and reports.

    Args:
        run: opened; its config is the one to train by.
        mesh: of the devices.
        say: told what is done.
        profile: first and last step of a profiler trace.
        time_limit: seconds after which to stop.
    """

    def __init__(
        self,
        run: Run,
        mesh: jax.sharding.Mesh,
        say: Say,
        profile: tuple[int, int] | None = None,
        time_limit: float | None = None,
    ):
        self.run, self.mesh, self.say = run, mesh, say
        self.config: Config = run.config
        self.tokenizer: Tokenizer = run.tokenizer
        self.store: Store = run.store
        self.model = Decoder.of(self.config)
        self.optimizer = make_optimizer(self.model.weights(), self.config.train)
        self.tokens_per_step = self.config.train.batch_size * self.config.model.context_length
        self.profile = (*profile, run.path / "profile") if profile else None
        self.time_limit = time_limit
        self.recent_losses: deque[float] = deque(maxlen=_TRAIN_LOSS_STEPS)
        self.best = BestWeights(run.path, say)
        self._held_out: HeldOut | None = None
        self._step: Compiling | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What makes the run the run that it is; saved in every checkpoint."""
        return {
            "config": settings.to_dict(self.config),
            "tokenizer": self.tokenizer.hash,
            "data": self.store.identity,
        }

    def initial_state(self) -> Any:
        """Return the state of a run that begins with weights of its own."""
        return initial_state(self.model, self.optimizer, self.config.train.seed, self.mesh)

    def begin(self) -> dict[str, Any]:
        """Train from the beginning to the end, or until something asks to stop; return the result."""
        return self._held(lambda stop: self._train(stop, None))

    def resume(self, check: Callable[[dict[str, Any], Progress], list[str]]) -> dict[str, Any]:
        """Train on from the newest whole checkpoint; return the result.

        Args:
            check: of (identity, progress) of a checkpoint: returns what has changed since, or raises.
        """
        return self._held(lambda stop: self._train(stop, check))

    def _held(self, train: Callable[[StopReason], dict[str, Any]]) -> dict[str, Any]:
        with held(self.run.path), asked_to_stop(self.time_limit) as stop:
            try:
                return train(stop)
            except KeyboardInterrupt:
                raise Interrupted(
                    f"interrupted at once; {self.run.path} is at its last checkpoint",
                    f"go on from there with: rung resume {shlex.quote(str(self.run.path))}",
                ) from None

    def _train(self, stop: StopReason, check: Callable[[dict[str, Any], Progress], list[str]] | None) -> dict[str, Any]:
        config, run = self.config, self.run
        steps = config.train.steps
        checkpoints = Checkpoints(run.path, config.checkpoint.keep, config.checkpoint.keep_every_steps, self.identity)
        state, progress, changes = self._start(checkpoints, check)
        if progress.step >= steps:
            return self._done(state, progress)
        self._introduce("segments" in self._batches()(progress.step))
        with contextlib.ExitStack() as stack:
            log = MetricsLog(run.path / METRICS, config.train.log_every_steps)
            stack.callback(self._close, log)
            view = stack.enter_context(ProgressView(steps))
            listeners: list[Callable[[Any], None]] = [log, view, self._remember]

            def emit(event: events.Event) -> None:
                for listener in listeners:
                    listener(event)
                if sources := self._sources_at(event):
                    emit(sources)

            listeners += [stack.enter_context(tracker) for tracker in trackers(config, run.path, progress.step, emit)]
            listeners.append(stack.enter_context(Telemetry(config.track.hardware_every_seconds, emit)))
            if check is not None:
                emit(events.Resumed(progress.step, changes))
            try:
                loop = self._loop(state, progress, checkpoints, emit, log, stop)
                state, progress, held_out = loop.run(state, progress)
            except Diverged:
                self._report()
                raise
            finally:
                checkpoints.wait()
        stopped = None if progress.step == steps and steps in checkpoints.steps() else stop()
        self._report()
        if stopped:
            self._say_stopped(stopped, progress, checkpoints)
        return self._result(progress, held_out, stopped)

    def _loop(
        self,
        state: Any,
        progress: Progress,
        checkpoints: Checkpoints,
        emit: Callable[[events.Event], None],
        log: MetricsLog,
        stop: StopReason,
    ) -> Loop:
        config = self.config
        batches, steps = self._batches(), config.train.steps
        divergence = Divergence(self.run.path, self.model, batches, self.mesh, config.train, self.say)

        def sync() -> None:
            log.sync()
            self.best.sync()

        return Loop(
            step=self._compiling().step(),
            batch=lambda step: place(batches(step), self.mesh),
            steps=steps,
            learning_rate=config.train.learning_rate,
            flops_per_token=self.model.flops_per_token(),
            intervals=Intervals(
                evaluate=config.evaluate.every_steps,
                sample=config.sample.every_steps,
                save=config.checkpoint.every_steps,
                save_seconds=60 * config.checkpoint.every_minutes,
                norms=config.train.norms_every_steps,
            ),
            emit=emit,
            evaluate=self._evaluate if "validation" in self.store.splits else None,
            sample=self._sample if config.sample.max_tokens and config.sample.prompts else None,
            write_weights=self.best.write,
            checkpoints=checkpoints,
            sync=sync,
            max_skipped=config.train.max_skipped,
            should_stop=stop,
            steps_per_epoch=steps / max(1e-9, batches.epoch(steps)),
            profile=self.profile,
            norms=(copy_of, make_norms(self.model.weights())),
            spikes=Spikes(config.train.spike_threshold, progress.losses),
            look_closer=divergence.look_closer,
            on_divergence=divergence.keep,
        )

    def _compiling(self) -> Compiling:
        """Return the step on its way: it is compiled while the state is made or read."""
        if self._step is None:
            train, steps = self.config.train, self.config.train.steps
            factor = rate_factor(train, steps, self.tokens_per_step)
            state = abstract_state(self.model, self.optimizer, self.mesh)
            batch = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(self.mesh)),
                self._batches()(0),
            )
            self._step = Compiling(
                lambda train: make_step(self.model, self.optimizer, factor, train, self.mesh),
                train,
                (state, batch),
                self.config.mesh.data,
            )
        return self._step

    def _start(
        self, checkpoints: Checkpoints, check: Callable[[dict[str, Any], Progress], list[str]] | None
    ) -> tuple[Any, Progress, list[str]]:
        """Return the state and the progress to begin with, and what has changed since they were saved.

        Raises:
            RungError: checkpoints are gone, or are not of this run.
        """
        path = self.run.path
        changes: list[str] = []

        def see(identity: dict[str, Any], progress: Progress) -> None:
            if check is not None:
                changes[:] = check(identity, progress)
            if progress.step < self.config.train.steps:
                if self.profile and self.profile[0] <= progress.step:
                    raise RungError(
                        f"steps from {self.profile[0]:,} are to be profiled, and {progress.step:,} are done",
                        f"choose later ones, as --profile {progress.step + 10}:{progress.step + 20}",
                    )
                self._compiling()

        try:
            # Its shapes alone: beside what is restored there may be no room for another state.
            restored = checkpoints.restore(abstract_state(self.model, self.optimizer, self.mesh), see)
        except NoCheckpoint:
            if (path / LINEAGE).exists():
                raise RungError(
                    f"{path} has no checkpoint, and began with the weights of another run",
                    "start it again with --from and --overwrite",
                ) from None
            if check is not None:
                self.say(f"{path} has no checkpoint yet: from the start")
            self._compiling()
            state, progress = self.initial_state(), Progress()
        else:
            state, progress = restored.state, restored.progress
            if int(state["skipped_in_a_row"]) >= self.config.train.max_skipped:
                # The setting was lowered below what has been skipped: the step would apply no update any more.
                state = {**state, "skipped_in_a_row": jax.numpy.zeros_like(state["skipped_in_a_row"])}
            for problem in restored.problems:
                self.say(f"{problem}; going on from step {progress.step:,}")
        if check is not None and progress.step < self.config.train.steps:
            self._go_back(state, progress)
        return state, progress, changes

    def _go_back(self, state: Any, progress: Progress) -> None:
        """Bring config, logs and best weights to where the run goes on from."""
        path = self.run.path
        with cannot(f"write in {path}", "make room, or make the folder writable; nothing is lost"):
            write_config(path, self.config)
            for name in (METRICS, SAMPLES):
                truncate_after(path / name, progress.step)
            if progress.best_step:
                self.best.mend(self.model.weights(), state, progress)
        log, every = self._recall(), self.config.train.log_every_steps
        told = log.steps["step"]
        if progress.step and (not len(told) or told[0] > 1 or told[-1] <= progress.step - every):
            self.say(f"{path / METRICS} has lost steps before {progress.step:,}: what is told of them is incomplete")
        for problem in log.problems:
            self.say(f"{path}: {problem}")

    def _close(self, log: MetricsLog) -> None:
        try:
            log.close()
        except OSError as error:
            # No checkpoint is whole before its lines are on the disk, so that these are of steps after the last.
            self.say(f"the last lines of {self.run.path / METRICS} are not written: {error.strerror}")

    def _done(self, state: Any, progress: Progress) -> dict[str, Any]:
        """Return the result of a run that had been done before, as its log has it."""
        path = self.run.path
        longer = "--steps N" + ("" if self.config.train.schedule == "constant" else " --reschedule")
        resume = f"rung resume {shlex.quote(str(path))} {longer}"
        self.say(f"{path} is done: {progress.step:,} steps; a longer run: {resume}")
        self.best.mend(self.model.weights(), state, progress)
        log = self._recall()
        self._report()
        return self._result(progress, log.evaluations[-1] if log.evaluations else None, None)

    def _recall(self) -> Metrics:
        """Read the log back, and the losses of its last steps."""
        log = read_metrics(self.run.path / METRICS)
        self.recent_losses.extend(log.steps["loss"][~log.steps["skipped"]].tolist())
        return log

    def _report(self) -> None:
        weights = [(weight.path, weight.shape, weight.size, weight.decay) for weight in self.model.weights()]
        try:
            write_report(self.run.path, weights)
        except OSError as error:
            self.say(f"the report of {self.run.path} cannot be written: {error.strerror}")

    def _batches(self) -> Batches | Mixture:
        config = self.config
        return training_batches(
            self.store,
            context_length=config.model.context_length,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            windows=config.data.windows,
            cross_documents=config.data.cross_documents,
        )

    def _evaluate(self, weights: Any) -> HeldOut:
        config, token_bytes = self.config, self.tokenizer.token_bytes
        loss = compiled_loss(self.model)
        self._held_out = over_split(
            self.store,
            "validation",
            lambda batches, _: held_out_loss(
                loss, weights, batches, token_bytes, lambda batch: place(batch, self.mesh)
            ),
            context_length=config.model.context_length,
            batch_size=_multiple(config.evaluate.batch_size, config.mesh.data),
            cross_documents=config.data.cross_documents,
        )
        return self._held_out

    def _sources_at(self, event: events.Event) -> events.Mixed | None:
        """Return how the stores of a mixture stand after a validation, or at the end where there is none."""
        wanted = events.Evaluated if "validation" in self.store.splits else events.Finished
        batches = self._batches() if isinstance(event, wanted) else None
        if not isinstance(batches, Mixture):
            return None
        scored = self._held_out.sources if self._held_out else {}
        bits = {name: one.bits_per_byte for name, one in scored.items()}
        return events.Mixed(
            event.step,
            batches.epochs(event.step),
            {name: one.loss for name, one in scored.items()},
            {name: value for name, value in bits.items() if value is not None},
        )

    def _sample(self, weights: Any) -> list[tuple[str, str]]:
        sample = self.config.sample
        # Samples are drawn on one device, whatever the mesh.
        weights = jax.device_put(weights, self.mesh.devices.ravel()[0])
        generator = Generator(self.model, weights, vocab_size=self.tokenizer.vocab_size, end_id=self.tokenizer.end_id)
        drawn = GenerateConfig(max_tokens=sample.max_tokens, temperature=sample.temperature, top_k=sample.top_k)
        return [(prompt, complete(generator, self.tokenizer, prompt, drawn)[0].text) for prompt in sample.prompts]

    def _remember(self, event: events.Event) -> None:
        if isinstance(event, events.StepDone) and not event.skipped:
            self.recent_losses.append(event.loss)

    def _introduce(self, segments: bool) -> None:
        model, devices = self.config.model, self.mesh.devices.ravel()
        self.say(
            f"model: {parameter_count(self.model.weights()):,} parameters; {model.n_layers} layers, d_model "
            f"{model.d_model}, {model.n_heads} heads of {model.d_head}, context {model.context_length}; "
            f"{model.compute_dtype} on {len(devices)} x {devices[0].device_kind}"
        )
        if model.n_layers:
            self.say(
                f"computed: attention by {self.model.attention_backend(segments=segments)}; "
                f"products in {self._products()}; remat {self.config.compute.remat}"
            )

    def _products(self) -> str:
        """Return what matrix products are computed in on this device."""
        asked = self.config.compute.matmul_precision
        if self.config.model.compute_dtype == "bfloat16" or self.mesh.devices.ravel()[0].platform != "cpu":
            return self.model.matmul_precision
        if asked == "float32":
            return asked
        return f"float32 (a CPU has no other: compute.matmul_precision {asked} does nothing)"

    def _say_stopped(self, reason: str, progress: Progress, checkpoints: Checkpoints) -> None:
        saved = checkpoints.steps()
        if progress.step in saved:
            kept = "saved"
        else:
            kept = f"not saved; the last checkpoint is of step {saved[-1]:,}" if saved else "not saved: no checkpoint"
        resume = f"rung resume {shlex.quote(str(self.run.path))}"
        self.say(f"stopped at step {progress.step:,} ({reason}), {kept}; go on with: {resume}")

    def _result(
        self, progress: Progress, held_out: HeldOut | events.Evaluated | None, stopped: str | None
    ) -> dict[str, Any]:
        return {
            "run": str(self.run.path),
            "steps": progress.step,
            "tokens": progress.tokens,
            "parameters": parameter_count(self.model.weights()),
            "train_loss": float(np.mean(self.recent_losses)) if self.recent_losses else None,
            "train_loss_steps": len(self.recent_losses),
            "validation_loss": held_out.loss if held_out else None,
            "perplexity": held_out.perplexity if held_out else None,
            "bits_per_byte": held_out.bits_per_byte if held_out else None,
            "seconds": progress.seconds,
            "report": str(self.run.path / "report.html"),
            "stopped": stopped,
        }


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def say_to_standard_error(text: str) -> None:
    """Print a message for the person."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 (the default of a library call that people watch)
