"""TensorBoard and Weights & Biases: where else a run can be followed. One that fails is given up; no run stops for it.

What is written is the same for both: ``scalars`` names each value. TensorBoard's files are made of the package's own
records and messages. Its writer would do, but imports TensorFlow where that is installed; tensorboardX imports PyTorch,
and on a full disk its thread dies and the next events block the run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, Literal, Protocol

from rung import config as settings
from rung.config import Config
from rung.errors import RungError
from rung.report.words import visible
from rung.train.events import (
    Evaluated,
    Event,
    Finished,
    Hardware,
    Norms,
    Note,
    Resumed,
    Sampled,
    SaveFailed,
    Skipped,
    Spiked,
    StepDone,
)

TENSORBOARD, WANDB = "tensorboard", "wandb"  # the packages, their extras, and their folders in a run's folder
RUN_ID = "run-id"  # in wandb/: the run's name at Weights & Biases
MOST_WAITING = 10_000  # events that a tracker may be behind before it is given up
CLOSE_SECONDS = 60.0  # given to a tracker at the end to finish its work
START_SECONDS = 30.0  # given to Weights & Biases to answer at the start of an online run
UPLOAD_SECONDS = 45.0  # of those, given to Weights & Biases to send what is left; it stays in wandb/ all the same
FLUSH_SECONDS = 2.0  # between flushes of TensorBoard's file, when there are events
MIB = 2**20


class Tracker(Protocol):
    """A listener that writes a run elsewhere. It may fail, and it may hang."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


def check_trackers(config: Config) -> None:
    """Find out, before any work is done, whether the trackers that a config asks for can be had.

    Raises:
        RungError: a package is not installed, or Weights & Biases is to be used online and nobody is logged in.
    """
    for name, wanted in ((TENSORBOARD, config.track.tensorboard), (WANDB, config.track.wandb)):
        if wanted and not _is_installed(name):
            raise RungError(
                f"track.{name} is on, and the package {name} is not installed",
                f"pip install 'rung[{name}]', or leave --track.{name} away",
            )
    if config.track.wandb and config.track.wandb_mode == "online":
        _check_login()


def trackers(
    config: Config, folder: str | Path, done: int = 0, tell: Callable[[Note], None] = lambda note: None
) -> list[Guarded]:
    """Return a guarded listener for each tracker that a config asks for, at work already.

    Args:
        config: of the run.
        folder: of the run.
        done: steps that the run has done before. What a killed process wrote of later ones is superseded.
        tell: told once of each tracker that is given up, in the thread that calls the listener or closes it.
    """
    folder, found = Path(folder), []
    if config.track.tensorboard:
        found.append(Guarded("TensorBoard", lambda: TensorBoard(folder / TENSORBOARD, config, done), tell))
    if config.track.wandb:
        found.append(Guarded("Weights & Biases", lambda: WeightsAndBiases(folder, config), tell))
    for tracker in found:
        tracker.every_steps = config.train.log_every_steps
    return found


class Guarded:
    """A listener that hands events to a tracker in a thread of its own, and gives it up when it fails or hangs.

    The caller never waits for the tracker but in ``close``, and no exception of the tracker's reaches it.

    Args:
        name: of the tracker, for people.
        make: makes the tracker; called in the thread.
        tell: told once, by a ``Note`` with the reason, when the tracker is given up.
        close_seconds: given to the tracker at the end.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        tell: Callable[[Note], None],
        close_seconds: float = CLOSE_SECONDS,
    ):
        self.name = name
        self.every_steps = 1  # steps between those that the tracker is told of, as in the log
        self._tell = tell
        self._close_seconds = close_seconds
        self._step = 0
        self._given_up = self._closed = False
        self._failure: str | None = None
        self._events: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, args=(make,), name=name, daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._step = event.step
        if self._given_up or self._closed or not self._wanted(event):
            return
        if self._failure is not None:
            self._give_up(self._failure)
            return
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._give_up(f"it does not keep up, and {MOST_WAITING:,} events wait")

    def close(self) -> None:
        """Let the tracker finish, for a while; tell of it if it has failed."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + self._close_seconds
        with contextlib.suppress(queue.Full):
            self._events.put(None, timeout=0 if self._given_up else self._close_seconds)
        if self._given_up:
            return
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"it did not finish within {self._close_seconds:g} seconds")
        elif self._failure is not None:
            self._give_up(self._failure)

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wanted(self, event: Event) -> bool:
        return not isinstance(event, StepDone) or event.skipped or event.step == 1 or event.step % self.every_steps == 0

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._tell(Note(self._step, f"{self.name} is given up, training goes on: {reason}"))

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while (event := self._events.get()) is not None and not self._given_up:
                tracker(event)
            tracker.close()
        except BaseException as error:  # whatever it is, it is not the run's
            self._failure = _reason(error)


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event that are worth a curve, by the name that a tracker shows them under."""
    match event:
        case StepDone():
            objective = {} if event.objective is None else {"train/objective": event.objective}
            return {
                "train/loss": event.loss,
                **objective,
                "train/learning_rate": event.learning_rate,
                "train/gradient_norm": event.gradient_norm,
                "train/tokens": event.tokens,
                "train/epoch": event.epoch,
                "speed/tokens_per_second": event.tokens_per_second,
                "speed/flops_per_second": event.flops_per_second,
                "speed/data_wait_seconds": event.data_wait,
                "speed/seconds": event.seconds,
            }
        case Evaluated():
            values = {"validation/loss": event.loss, "validation/perplexity": event.perplexity}
            return (
                values if event.bits_per_byte is None else {**values, "validation/bits_per_byte": event.bits_per_byte}
            )
        case Norms():
            ratios = {
                f"update_to_weight/{group}": event.updates[group] / norm
                for group, norm in event.weights.items()
                if norm and group in event.updates
            }
            return {f"norms/{group}": norm for group, norm in event.weights.items()} | ratios
        case Hardware():
            return _hardware(event)
        case Skipped():
            return {"events/skipped_in_a_row": event.in_a_row}
        case Spiked():
            return {"events/spike": event.loss}
    return {}


def _hardware(event: Hardware) -> dict[str, float]:
    values: dict[str, Any] = {
        "cpu_percent": event.cpu_percent,
        "process_cpu_percent": event.process_cpu_percent,
        "process_memory_mib": _mib(event.process_memory),
        "free_memory_mib": _mib(event.free_memory),
    }
    for n, gpu in enumerate(event.gpus):
        values |= {
            f"gpu{n}_utilization_percent": gpu.get("utilization"),
            f"gpu{n}_memory_mib": _mib(gpu.get("memory_used")),
            f"gpu{n}_temperature_celsius": gpu.get("temperature"),
            f"gpu{n}_power_watts": gpu.get("power"),
            f"gpu{n}_throttled": None if gpu.get("throttled") is None else float(bool(gpu["throttled"])),
        }
    return {f"hardware/{name}": value for name, value in values.items() if value is not None}


class TensorBoard:
    """Writes a run to one more file in a folder that ``tensorboard --logdir`` shows.

    The file begins with a session at the step after ``done``: TensorBoard drops what earlier files have from there on.
    Its horizontal axis is the step; the target tokens are a curve of their own, ``train/tokens``.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, config: Config, done: int = 0):
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._config = config
        self._writer = RecordWriter(open(_next_file(folder), "xb"))  # noqa: SIM115 - open as long as the run
        self._flushed = 0.0
        self._write(file_version="brain.Event:2")
        self._write(done + 1, session_log=SessionLog(status=SessionLog.START))
        self._write(done, summary=_text("config", settings.to_toml(config)))
        self._write(done, summary=_hyperparameters(config))
        self._writer.flush()

    def __call__(self, event: Event) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if values := scalars(event):
            named = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._write(event.step, summary=Summary(value=named))
        if isinstance(event, Sampled):
            tag = f"samples/{_number(event.prompt, self._config)}"
            self._write(event.step, summary=_text(tag, f"{event.prompt}{event.text}"))
        elif words := _words(event):
            self._write(event.step, summary=_text("events", words))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int = 0, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        self._writer.write(Record(wall_time=time.time(), step=step, **content).SerializeToString())


class WeightsAndBiases:
    """Writes a run to Weights & Biases, in ``wandb/`` in its folder; a resumed run goes on under the same id.

    Offline nothing leaves the machine. A step that is there already (a killed process wrote it) is written once more by
    the resumed one, with the same values, and left out when it is sent.

    Raises:
        Exception: whatever ``wandb`` raises.
    """

    def __init__(self, folder: Path, config: Config):
        wandb = _wandb(config.track.wandb_mode)
        self._html = wandb.Html
        self._config = config
        self._finished = False
        online = config.track.wandb_mode == "online"
        self._run: Any = wandb.init(
            project=config.track.wandb_project,
            id=_run_id(folder),
            name=config.name or folder.resolve().name,
            dir=str(folder),
            config=settings.to_dict(config),
            mode=config.track.wandb_mode,
            resume="allow" if online else None,
            settings=_quiet_settings(wandb),
        )
        self._run.define_metric("validation/loss", summary="min")
        self._run.define_metric("validation/bits_per_byte", summary="min")

    def __call__(self, event: Event) -> None:
        values: dict[str, Any] = dict(scalars(event))
        if isinstance(event, Sampled):
            text = f"<b>{escape(visible(event.prompt))}</b>{escape(visible(event.text))}"
            page = self._html(f'<pre style="white-space: pre-wrap">{text}</pre>', inject=False)
            values[f"samples/{_number(event.prompt, self._config)}"] = page
        if values:
            self._run.log(values, step=event.step)
        self._finished = self._finished or isinstance(event, Finished)

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._finished else 1)


# TensorBoard's messages


def _next_file(folder: Path) -> Path:
    """Return a new file's path that sorts after those that are there, which is the order that they are read in."""
    times = [
        int(found[1]) for path in folder.iterdir() if (found := re.match(r"events\.out\.tfevents\.(\d+)", path.name))
    ]
    made = max([int(time.time()), *(then + 1 for then in times)])
    return folder / f"events.out.tfevents.{made:010d}.{socket.gethostname()}.{os.getpid()}.0"


def _text(tag: str, text: str) -> Any:
    """Return a message of text that is shown as it is: indented, so that nothing in it is taken for Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    indented = "\n".join(f"    {line}" for line in visible(text).split("\n"))
    one = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[indented.encode("utf-8")], tensor_shape=one)
    metadata = create_summary_metadata(display_name="", description="")
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def _hyperparameters(config: Config) -> Any:
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    values: dict[str, Any] = {}
    for path, _ in settings.fields(Config):
        value: Any = config
        for part in path.split("."):
            value = getattr(value, part)
        values[path] = visible(", ".join(map(str, value))) if isinstance(value, tuple) else value
    return hparams_pb(values)


# Weights & Biases


def _wandb(mode: Literal["offline", "online"]) -> Any:
    """Import the package, its reports on itself off, unless the environment asks for them."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    # Before any run, or it greets on standard error.
    wandb.setup(settings=wandb.Settings(silent=True, mode=mode))
    return wandb


def _quiet_settings(wandb: Any) -> Any:
    """Return settings under which it writes what it is told, and nothing on the machine, the code or the terminal."""
    return wandb.Settings(
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        save_code=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
        init_timeout=START_SECONDS,
        finish_timeout=UPLOAD_SECONDS,
        reinit="create_new",  # whatever else in this process has a run of its own
    )


def _check_login() -> None:
    wandb = _wandb("online")
    try:
        logged_in, reason = wandb.login(prompt=False, verify=False), ""
    except wandb.Error as error:
        logged_in, reason = False, f": {_reason(error)}"
    if not logged_in:
        raise RungError(
            f"track.wandb_mode is online, and nobody is logged in to Weights & Biases{reason}",
            "log in with `wandb login`, set WANDB_API_KEY, or stay offline: --track.wandb-mode offline",
        )


def _run_id(folder: Path) -> str:
    path = folder / WANDB / RUN_ID
    with contextlib.suppress(FileNotFoundError):
        if known := path.read_text(encoding="ascii").strip():
            return known
    path.parent.mkdir(parents=True, exist_ok=True)
    made = secrets.token_hex(4)
    path.write_text(f"{made}\n", encoding="ascii")
    return made


# Helpers


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a mere folder of this name, such as ./wandb, has no origin


def _words(event: Event) -> str | None:
    match event:
        case Note():
            return event.text
        case Skipped():
            return f"update skipped, {event.in_a_row} in a row: {event.reason}"
        case Spiked():
            return f"loss {event.loss:.4g} is a spike, over {event.threshold:.4g}"
        case SaveFailed():
            return f"not saved: {event.reason}"
        case Resumed():
            return "\n".join([f"resumed at step {event.step:,}", *event.changes])
        case Finished():
            return f"ended: {event.reason}"
    return None


def _number(prompt: str, config: Config) -> int:
    """Return which of the config's prompts this is, from 1; 0 for none of them."""
    return config.sample.prompts.index(prompt) + 1 if prompt in config.sample.prompts else 0


def _reason(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _mib(number: Any) -> float | None:
    return None if number is None else float(number) / MIB
