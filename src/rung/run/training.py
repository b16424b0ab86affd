"""A training run from sources to report, and its continuation: the harness and everything that listens to it."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rung import config as settings
from rung.config import Config, GenerateConfig
from rung.decode.generate import Generator
from rung.decode.text import complete
from rung.errors import RungError
from rung.evaluate.held_out import HeldOut, compiled_loss, held_out_loss
from rung.mesh import make_mesh
from rung.model import Decoder
from rung.model.files import load_weights, save_weights
from rung.model.weights import parameter_count
from rung.report.html import write_report
from rung.report.metrics import Metrics, MetricsLog, read_metrics, truncate_after
from rung.report.progress import Progress as ProgressView
from rung.run.folder import (
    CONFIG,
    ENVIRONMENT,
    METRICS,
    SAMPLES,
    WEIGHTS,
    Run,
    environment,
    held,
    record_data,
    write_config,
)
from rung.run.prepare import Say, new_folder, prepare
from rung.tokens.batches import Batches, validation_batches
from rung.tokens.store import TokenStore
from rung.tokens.tokenizer import Tokenizer
from rung.train import events
from rung.train.checkpoint import Checkpoints, Progress, read_pointer
from rung.train.loop import Diverged, Intervals, Loop
from rung.train.memory import compile_step
from rung.train.optimizer import make_optimizer
from rung.train.schedule import rate_factor
from rung.train.step import initial_state, make_step, place

_TRAIN_LOSS_STEPS = 100  # the train loss of a result is the mean over so many last steps


def train(
    sources: str | Path | Sequence[str | Path],
    config: Config | None = None,
    changes: Mapping[str, Any] | None = None,
    *,
    run: str | Path | None = None,
    overwrite: bool = False,
    profile: tuple[int, int] | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Train a model on text, and write a run folder with everything that came of it.

    Args:
        sources: files, folders, globs, ``-`` for standard input, or one token store.
        config: what to train, such as ``rung.preset("demo")``; ``None``: chosen for the text.
        changes: settings changed in it, ``{"model.d_model": 256}``.
        run: the run folder; ``None``: ``runs/<name>``, the name being the config's, or that of the first source.
        overwrite: replace a run that is there.
        profile: first and last step of a profiler trace, counted from 1, which goes to ``profile/`` in the run folder.
        say: told what is chosen and done; ``None``: standard error.

    Returns:
        ``run``, ``steps``, ``tokens``, ``parameters``, ``train_loss`` (nats per token, the mean of the last
        ``train_loss_steps`` steps),
        ``validation_loss``, ``perplexity``, ``bits_per_byte`` (all of the last validation; ``None`` without one),
        ``seconds`` (of training), ``report`` (its path), ``stopped`` (why it ended early, or ``None``).

    Raises:
        RungError: anything wrong with the sources or settings; nothing is left behind.
        Diverged: too many updates in a row were not finite.
    """
    say = say or _to_standard_error
    changes = dict(changes or {})
    names = [str(source) for source in ([sources] if isinstance(sources, str | Path) else sources)]
    folder = Path(run) if run else Path("runs") / _name(names, config, changes)
    with new_folder(folder, overwrite) as temporary:
        _refuse_own(names, folder)
        # Contradictions are found, and devices claimed, before any work; JAX can emulate devices only at first.
        adapted, _ = settings.adapt(config or Config(), changes)
        if config is not None:
            settings.resolve(adapted)
        mesh = make_mesh(adapted.mesh)
        prepared = prepare(names, config, changes, temporary, say)
        _check_profile(profile, prepared.config.train.steps)
        record_data(temporary, prepared.store, prepared.tokenizer, final=folder)
        write_config(temporary, prepared.config)
        (temporary / ENVIRONMENT).write_text(json.dumps(environment(mesh), indent=2) + "\n", encoding="utf-8")
    return _Training(Run(folder), mesh, say, profile).go(resumed=False)


def resume(run: str | Path, steps: int | None = None, *, say: Say | None = None) -> dict[str, Any]:
    """Continue a run from its last whole checkpoint, exactly as if it had not stopped.

    Args:
        run: the run folder.
        steps: a new, greater length of the run; its schedule is that of a run of this length from here on.
        say: as in ``train``.

    Returns:
        As ``train``; of a run that is done already, what it came to.

    Raises:
        RungError: no such run, no checkpoint where there was one, fewer steps than are done, or the data or the
            tokenizer are no longer those of the run.
    """
    say = say or _to_standard_error
    opened = Run(run)
    notes: list[str] = []
    if steps is not None and steps != opened.config.train.steps:
        changed, notes = settings.adapt(opened.config, {"train.steps": steps})
        notes.insert(0, f"train.steps {opened.config.train.steps:,} -> {steps:,}; the schedule now ends there")
        opened.config = settings.resolve(changed)
    return _Training(opened, make_mesh(opened.config.mesh), say, notes=notes).go(resumed=True)


class Interrupted(RungError):
    """Training was broken off without a save; its last checkpoint stays."""

    status = 3


class _Training:
    """One process's part in a run: builds what the loop calls, runs it, and reports."""

    def __init__(
        self,
        run: Run,
        mesh: jax.sharding.Mesh,
        say: Say,
        profile: tuple[int, int] | None = None,
        notes: Sequence[str] = (),
    ):
        self.run, self.mesh, self.say = run, mesh, say
        self.config: Config = run.config
        self.tokenizer: Tokenizer = run.tokenizer
        self.store: TokenStore = run.store
        self.model = Decoder(self.config.model)
        self.profile = (*profile, run.path / "profile") if profile else None
        self.notes = notes  # said when it is sure that training begins
        self.recent_losses: deque[float] = deque(maxlen=_TRAIN_LOSS_STEPS)

    def go(self, resumed: bool) -> dict[str, Any]:
        """Train to the end, or until a signal asks to stop; return the result."""
        with held(self.run.path), _stop_on_signals() as stop:
            try:
                return self._go(resumed, stop)
            except KeyboardInterrupt:
                raise Interrupted(
                    f"interrupted at once; {self.run.path} is at its last checkpoint",
                    f"go on from there with: rung resume {self.run.path}",
                ) from None

    def _go(self, resumed: bool, stop: Callable[[], str | None]) -> dict[str, Any]:
        config, run = self.config, self.run
        batches = self._batches()
        context, batch_size, steps = config.model.context_length, config.train.batch_size, config.train.steps
        optimizer = make_optimizer(self.model.weights(), config.train)
        factor = rate_factor(config.train, steps, batch_size * context)
        state = initial_state(self.model, optimizer, config.train.seed, self.mesh)
        with contextlib.ExitStack() as stack:
            checkpoints = Checkpoints(run.path, config.checkpoint.keep)
            stack.callback(checkpoints.close)
            progress = Progress()
            if resumed:
                state, progress = self._restored(checkpoints, state)
                if progress.step >= steps:
                    return self._done(state, progress)
                write_config(run.path, config)
                for name in (METRICS, SAMPLES):
                    truncate_after(run.path / name, progress.step)
                self._recall()
            self._introduce(progress)
            log = stack.enter_context(MetricsLog(run.path / METRICS, config.train.log_every_steps))
            view = stack.enter_context(ProgressView(steps))
            listeners = (log, view, self._remember)

            def emit(event: events.Event) -> None:
                for listener in listeners:
                    listener(event)

            if resumed:
                emit(events.Note(progress.step, f"resumed at step {progress.step:,} of {steps:,}"))
            step = compile_step(
                lambda train: make_step(self.model, optimizer, factor, train, self.mesh),
                config.train,
                (state, place(batches(progress.step), self.mesh)),
                config.mesh.data,
            )
            loop = Loop(
                step=step,
                batch=lambda step: place(batches(step), self.mesh),
                steps=steps,
                learning_rate=config.train.learning_rate,
                flops_per_token=self.model.flops_per_token(),
                intervals=Intervals(
                    evaluate=config.evaluate.every_steps,
                    sample=config.sample.every_steps,
                    save=config.checkpoint.every_steps,
                ),
                emit=emit,
                evaluate=self._evaluate if "validation" in self.store.splits else None,
                sample=self._sample if config.sample.max_tokens and config.sample.prompts else None,
                write_weights=self._write_weights,
                checkpoints=checkpoints,
                max_skipped=config.train.max_skipped,
                should_stop=stop,
                steps_per_epoch=steps / max(1e-9, batches.epoch(steps)),
                profile=self.profile,
                on_divergence=lambda step: self._write_batch(batches(step), step),
            )
            try:
                state, progress, held_out = loop.run(state, progress)
            except Diverged:
                self._report()
                raise
            stopped = stop() if progress.step < steps else None
        self._report()
        if stopped:
            self.say(f"stopped at step {progress.step:,} ({stopped}), saved; go on with: rung resume {run.path}")
        return self._result(progress, held_out, stopped)

    def _restored(self, checkpoints: Checkpoints, state: Any) -> tuple[Any, Progress]:
        """Return the state and the progress of the newest whole checkpoint, or the initial ones before the first.

        Raises:
            RungError: checkpoints are gone, or do not fit the config.
        """
        path, steps = self.run.path, self.config.train.steps
        self._check_shapes()
        try:
            state, progress = checkpoints.restore(state)
        except RungError:
            if read_pointer(path / "latest") is not None:
                raise
            self.say(f"{path} has no checkpoint yet: from the start")
            return state, Progress()
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise RungError(
                f"the newest checkpoint of {path} cannot be restored: {reason}",
                f"if {CONFIG} was edited, put it back; if it is damaged, remove it: the one before serves",
            ) from None
        lengthened = steps != settings.load(path / CONFIG).train.steps
        if progress.step > steps or (lengthened and progress.step == steps):
            raise RungError(f"{path} has done {progress.step:,} steps, and {steps:,} are asked", "ask for more steps")
        return state, progress

    def _check_shapes(self) -> None:
        """Refuse a config that was edited into another model, before Orbax begins to read what will not fit."""
        expected = {weight.path: weight.shape for weight in self.model.weights()}
        for name, shape in _read_shapes(self.run.path / WEIGHTS).items():
            if shape != expected.get(name):
                raise RungError(
                    f"{self.run.path}: weight {name} is {shape}, and {CONFIG} makes it {expected.get(name, 'none')}",
                    f"put {CONFIG} back as it was, or train a new run",
                )

    def _done(self, state: Any, progress: Progress) -> dict[str, Any]:
        """Return the result of a run that had been done before, as its log has it."""
        path = self.run.path
        self.say(f"{path} is done: {progress.step:,} steps; a longer run: rung resume {path} --steps N")
        try:
            load_weights(path / WEIGHTS, self.model.weights())
        except RungError as error:
            self.say(f"{error.problem}; written again, as they are at step {progress.step:,}")
            self._write_weights(state["weights"], progress)
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
        write_report(self.run.path, weights)

    def _batches(self) -> Batches:
        config, split = self.config, self.store.split("train")
        return Batches(
            split,
            context_length=config.model.context_length,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            windows=config.data.windows,
            segments=self._segments(split),
        )

    def _segments(self, split: Any) -> bool:
        return not self.config.data.cross_documents and len(split.document_starts) > 1

    def _evaluate(self, weights: Any) -> HeldOut:
        split = self.store.split("validation")
        return held_out_loss(
            compiled_loss(self.model),
            weights,
            validation_batches(
                split,
                context_length=self.config.model.context_length,
                batch_size=_multiple(self.config.evaluate.batch_size, self.config.mesh.data),
                segments=self._segments(split),
            ),
            self.tokenizer.token_bytes,
            lambda batch: place(batch, self.mesh),
        )

    def _sample(self, weights: Any) -> list[tuple[str, str]]:
        sample = self.config.sample
        # Samples are drawn on one device, whatever the mesh.
        weights = jax.device_put(weights, self.mesh.devices.ravel()[0])
        generator = Generator(self.model, weights, vocab_size=self.tokenizer.vocab_size, end_id=self.tokenizer.end_id)
        drawn = GenerateConfig(max_tokens=sample.max_tokens, temperature=sample.temperature, top_k=sample.top_k)
        return [(prompt, complete(generator, self.tokenizer, prompt, drawn)[0].text) for prompt in sample.prompts]

    def _write_weights(self, weights: Any, progress: Progress) -> None:
        loss = progress.best_loss
        metadata = {"step": str(progress.step), "tokens": str(progress.tokens), "format": "rung"}
        if loss is not None:
            metadata["validation_loss"] = f"{loss:.6f}"
        save_weights(self.run.path / WEIGHTS, jax.device_get(weights), metadata)

    def _write_batch(self, batch: Mapping[str, np.ndarray], step: int) -> None:
        """Keep the batch whose update was the last of too many that were not finite."""
        from safetensors.numpy import save_file

        path = self.run.path / f"batch-{step}.safetensors"
        save_file({name: np.ascontiguousarray(array) for name, array in batch.items()}, path)
        self.say(f"the batch of step {step + 1} is in {path}")

    def _remember(self, event: events.Event) -> None:
        if isinstance(event, events.StepDone) and not event.skipped:
            self.recent_losses.append(event.loss)

    def _introduce(self, progress: Progress) -> None:
        model = self.config.model
        devices = self.mesh.devices.ravel()
        for note in self.notes:
            self.say(note)
        self.say(
            f"model: {parameter_count(self.model.weights()):,} parameters; {model.n_layers} layers, d_model "
            f"{model.d_model}, {model.n_heads} heads of {model.d_head}, context {model.context_length}; "
            f"{model.compute_dtype} on {len(devices)} x {devices[0].device_kind}"
        )
        if progress.step:
            self.say(f"from step {progress.step:,} of {self.config.train.steps:,}")

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


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in a file; none where it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return {}


def _refuse_own(sources: Sequence[str], folder: Path) -> None:
    """Refuse to train from what is in the folder that will be replaced."""
    for source in sources:
        if folder.exists() and Path(source).resolve().is_relative_to(folder.resolve()):
            raise RungError(f"{source} is in {folder}, which would be replaced", "choose another place with --run")


def _check_profile(profile: tuple[int, int] | None, steps: int) -> None:
    if profile and not 1 <= profile[0] <= profile[1] <= steps:
        raise RungError(
            f"steps {profile[0]} to {profile[1]} are to be profiled, and the run has steps 1 to {steps}",
            "choose steps within the run, as --profile 10:20",
        )


def _name(sources: Sequence[str], config: Config | None, changes: Mapping[str, Any] | None) -> str:
    name = (changes or {}).get("name") or (config.name if config else "")
    if not name:
        # Of a pattern, the folder that it is in.
        parts = [part for part in Path(sources[0]).resolve().parts if not glob.has_magic(part)] if sources else []
        name = "standard-input" if list(sources) == ["-"] else Path(*parts).stem if parts else ""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".") or "run"


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _to_standard_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 (the default of a library call that people watch)


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[Callable[[], str | None]]:
    """Give a function that returns the name of the signal that asked to stop, or ``None``.

    The first Ctrl-C (or SIGTERM) asks; the second interrupts at once.
    """
    asked: list[str] = []

    def ask(number: int, _: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)
        with contextlib.suppress(OSError):
            # Not print: the signal may have come in the middle of one.
            os.write(2, f"\n{asked[0]}: stopping after this step; once more stops at once\n".encode())

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
