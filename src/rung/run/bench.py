"""How fast and how large the training step of a config is on this machine, over batches and ways of attention.

No text is needed: the tokens are random. They go through the loop that trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rung import config as settings
from rung.config import Config
from rung.errors import RungError
from rung.host import begin_peak, give_back_freed_memory, memory_size, resident_bytes
from rung.mesh import batch_sharding, make_mesh
from rung.model import Decoder
from rung.model.decoder import with_vocabulary
from rung.model.weights import parameter_count
from rung.run.parameters import expected_vocabulary
from rung.run.peak import peak_of
from rung.run.prepare import Say
from rung.tokens.batches import Batches
from rung.tokens.mapped import Tokens
from rung.train.checkpoint import Progress
from rung.train.loop import Intervals, Loop
from rung.train.memory import free_bytes, new_bytes
from rung.train.optimizer import make_optimizer
from rung.train.step import abstract_state, initial_state, make_step, place

_ROUND_SECONDS = 1.0  # of a round, but at least one step and at most so many:
_ROUND_STEPS = 200
_MOST_TOKENS = 1 << 22
_RATE = 1e-6  # of the peak learning rate: random tokens teach nothing, and weights that diverge are no measurement
_FROM_CACHE = "/jax/compilation_cache/cache_retrieval_time_sec"  # an event of JAX


@dataclass(frozen=True)
class Row:
    """One point of a sweep; where it ``failed``, why, and what was found before that.

    Attributes:
        attention: asked. backend: that computes it.
        batch: sequences whose gradient is computed at once.
        tokens_per_second, step_seconds: medians over the rounds, and the lowest and the highest of them.
        mfu: model FLOPs utilization, nominal operations (``flops_per_token`` of the model) over what the devices can
            do (Chowdhery et al. 2022, arXiv:2204.02311).
        compile_seconds: of tracing and compiling. compiled_before: the program came from JAX's cache on the disk.
        planned_bytes: a device's memory for a step as the compiler plans it, state and batch included.
        peak_bytes: what the point took at most on a device, by its runtime; of a CPU what the process grew by.
            ``None``: not known, as where an earlier point of the sweep took more.
    """

    attention: str
    batch: int
    backend: str = ""
    tokens_per_second: tuple[float, float, float] | None = None
    step_seconds: tuple[float, float, float] | None = None
    mfu: float | None = None
    compile_seconds: float | None = None
    compiled_before: bool = False
    planned_bytes: int | None = None
    peak_bytes: int | None = None
    failed: str = ""


def bench(
    config: Config, say: Say, *, batches: Sequence[int] = (), attentions: Sequence[str] = (), rounds: int = 5
) -> dict[str, Any]:
    """Return what was measured: ``rows`` (one for each attention and batch), and what they are of.

    Args:
        config: a preset with its changes, not resolved.
        say: told what is measured, as it begins.
        batches: sequences whose gradient is computed at once; none: ``train.micro_batch_size``. A step is of one
            micro-batch: with more of them, each takes the same again.
        attentions: values of ``compute.attention``; none: the config's own.
        rounds: measurements of each point.

    Returns:
        What is measured of several points stands in their rows, also what fails. ``interrupted``: Ctrl-C ended it, and
        the rows are those of the points before it.

    Raises:
        RungError: contradictions in the config, a mesh of more devices than there are, or the only point there is fails
            by the user's mistake.
    """
    if attentions:
        config = settings.override(config, {"compute.attention": "auto"})  # nothing is computed in the config's own way
    config = settings.resolve(config)
    config = dataclasses.replace(config, model=with_vocabulary(config.model, expected_vocabulary(config)))
    mesh = make_mesh(config.mesh)
    device = mesh.devices.ravel()[0]
    model = Decoder.of(config)
    # A CPU's product takes all of it, however many devices it stands for.
    n_peaks = 1 if device.platform == "cpu" else mesh.devices.size
    peak = peak_of(device, config.model.compute_dtype, model.matmul_precision)
    points = [
        (attention, batch)
        for attention in attentions or [config.compute.attention]
        for batch in batches or [config.train.micro_batch_size]
    ]
    rows: list[Row] = []
    interrupted = False
    for attention, batch in points:
        say(f"attention {attention}, batch {batch}: compiling, then {rounds} rounds")
        changes = {"compute.attention": attention, "train.batch_size": batch, "train.micro_batch_size": batch}
        row = Row(attention, batch)
        try:
            row = _measured(settings.resolve(settings.override(config, changes)), row, mesh, rounds)
        except KeyboardInterrupt:
            if not rows:
                raise
            interrupted = True
            break
        except RungError as error:
            if len(points) == 1:
                raise
            row = dataclasses.replace(row, failed="; ".join(filter(None, (error.problem, error.hint))))
        except (RuntimeError, ValueError) as error:
            # What a compiler or a device may say of a point is no reason to keep the others from being measured.
            row = dataclasses.replace(row, failed=_first_line(error))
        rows.append(row)
    # What others do to a machine makes it slower, never faster: a measured peak is the higher of two.
    peak = max(peak, peak_of(device, config.model.compute_dtype, model.matmul_precision), key=lambda one: one.flops)
    for number, row in enumerate(rows):
        if row.tokens_per_second is not None:
            share = row.tokens_per_second[0] * model.flops_per_token() / (peak.flops * n_peaks)
            rows[number] = dataclasses.replace(row, mfu=share)
    return {
        "parameters": parameter_count(model.weights()),
        "context_length": config.model.context_length,
        "compute_dtype": config.model.compute_dtype,
        "matmul_precision": model.matmul_precision,
        "device": device.device_kind,
        "devices": mesh.devices.size,
        "peak_flops": peak.flops * n_peaks,
        "peak_source": peak.source,
        "flops_per_token": model.flops_per_token(),
        "rows": [dataclasses.asdict(row) for row in rows],
        "interrupted": interrupted,
    }


def _measured(config: Config, row: Row, mesh: jax.sharding.Mesh, rounds: int) -> Row:
    """Return the row of one point, measured."""
    device = mesh.devices.ravel()[0]
    model = Decoder.of(config)
    optimizer = make_optimizer(model.weights(), config.train)
    step: Any = make_step(model, optimizer, lambda number: jnp.float32(_RATE), config.train, mesh)
    batches = _random_batches(config)
    row = dataclasses.replace(row, backend=model.attention_backend(segments=False).backend)

    # Shapes alone: beside a state that does not fit there would be no telling so.
    one = jax.ShapeDtypeStruct(
        (config.train.batch_size, config.model.context_length), jnp.int32, sharding=batch_sharding(mesh)
    )
    shapes = (abstract_state(model, optimizer, mesh), {"tokens": one, "targets": one})
    begun = time.perf_counter()
    with _cache_hits() as hits:
        compiled = step.lower(*shapes).compile()
    row = dataclasses.replace(
        row,
        compile_seconds=time.perf_counter() - begun,
        compiled_before=bool(hits),
        planned_bytes=compiled.memory_analysis().argument_size_in_bytes + new_bytes(compiled),
    )
    free = free_bytes(device)
    if free is not None and row.planned_bytes is not None and row.planned_bytes > free:
        return dataclasses.replace(
            row,
            failed=f"out of memory: a step takes {memory_size(row.planned_bytes)}, and {memory_size(free)} are free",
        )

    memory = _Memory(device)
    trained = _Trained(step, batches, mesh, initial_state(model, optimizer, config.train.seed, mesh))
    trained.seconds(1)  # the first is no measurement: a device is woken, buffers are made
    n_steps = round(min(_ROUND_STEPS, max(1.0, _ROUND_SECONDS / (trained.seconds(2) / 2))))
    seconds = [trained.seconds(n_steps) / n_steps for _ in range(rounds)]
    tokens = config.train.batch_size * config.model.context_length
    rates = [tokens / one for one in seconds]
    return dataclasses.replace(
        row,
        tokens_per_second=_spread(rates),
        step_seconds=_spread(seconds),
        peak_bytes=memory.taken(),
    )


class _Trained:
    """A state that goes on training when it is asked to."""

    def __init__(self, step: Any, batches: Batches, mesh: jax.sharding.Mesh, state: Any):
        self._step, self._batches, self._mesh = step, batches, mesh
        self._state, self._progress = state, Progress()

    def seconds(self, steps: int) -> float:
        """Train so many steps through the training loop; returns what they took."""
        loop = Loop(
            step=self._step,
            batch=lambda step: place(self._batches(step), self._mesh),
            steps=self._progress.step + steps,
            learning_rate=0.0,
            flops_per_token=0.0,
            intervals=Intervals(),
            emit=lambda event: None,
        )
        begun = time.perf_counter()
        self._state, self._progress, _ = loop.run(self._state, self._progress)
        return time.perf_counter() - begun


class _Memory:
    """What is taken of a device's memory from here on."""

    def __init__(self, device: jax.Device):
        self._device = device
        gc.collect()
        give_back_freed_memory()
        if device.platform == "cpu":
            self._before, self._peak_before = begin_peak(), 0
        else:
            self._before, self._peak_before = (self._statistic(n) for n in ("bytes_in_use", "peak_bytes_in_use"))

    def taken(self) -> int | None:
        """Return the most that was taken at once; ``None`` where that cannot be told."""
        if self._device.platform == "cpu":
            peak = resident_bytes("VmHWM")
        else:
            peak = self._statistic("peak_bytes_in_use")
        # A device's runtime knows the highest of all its time only.
        return peak - self._before if peak > self._peak_before else None

    def _statistic(self, name: str) -> int:
        return (self._device.memory_stats() or {}).get(name, 0)


def _random_batches(config: Config) -> Batches:
    c, B = config.model, config.train.batch_size
    count = min(4 * B * c.context_length, _MOST_TOKENS) + c.context_length + 1
    tokens = np.random.default_rng(0).integers(c.vocab_size, size=count, dtype=np.uint32)
    return Batches(
        Tokens([tokens], np.zeros(1, np.int64)),
        context_length=c.context_length,
        batch_size=B,
        seed=config.train.seed,
        windows="random",
        segments=False,
    )


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[str]]:
    """Collect what JAX takes from its cache on the disk."""
    hits: list[str] = []

    def heard(event: str, duration_secs: float, **rest: str | int) -> None:
        if event == _FROM_CACHE:
            hits.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
