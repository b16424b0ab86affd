"""Memory before the first step: what the compiled step needs, what the device has, and the micro-batch that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from rung.config import TrainConfig
from rung.errors import RungError
from rung.host import memory_size

Step = Callable[[Any, Any], Any]


class Compiling:
    """A step that is being compiled, for shapes alone, while the state is still made or read.

    Args:
        make: the jitted step for a config, as ``rung.train.step.make_step``; called again with smaller micro-batches
            when the one asked does not fit.
        config: the one asked.
        shapes: of (state, batch), with their shardings.
        data: devices that a micro-batch is split over.
    """

    def __init__(self, make: Callable[[TrainConfig], Any], config: TrainConfig, shapes: tuple[Any, Any], data: int):
        self._make, self._config, self._shapes, self._data = make, config, shapes, data
        self._step = make(config)
        self._pool = ThreadPoolExecutor(1, "rung-compile")
        self._compiled = self._pool.submit(lambda: self._step.lower(*shapes).compile())
        self._pool.shutdown(wait=False)

    def step(self) -> Step:
        """Wait for the step, and return it after checking that it fits the device beside all that is there now.

        Raises:
            RungError: it does not fit; the hint names the largest micro-batch that does.
        """
        compiled = self._compiled.result()
        sharding = jax.tree.leaves(self._shapes)[0].sharding
        free = free_bytes(next(iter(sharding.device_set)))
        if free is None or new_bytes(compiled) <= free:
            # Not `compiled`, which takes arrays placed just so and no others. `step` calls the same program.
            return self._step

        def fits(micro: int) -> bool:
            smaller = dataclasses.replace(self._config, micro_batch_size=micro)
            return new_bytes(self._make(smaller).lower(*self._shapes).compile()) <= free

        batch_size = self._config.batch_size
        asked = self._config.micro_batch_size or batch_size
        raise out_of_memory(new_bytes(compiled), free, _largest(batch_size, asked, self._data, fits), asked)


def out_of_memory(needed: int | None, free: int | None, largest: int | None, asked: int) -> RungError:
    """Return the error of a step that does not fit, with the way out."""
    what = "a step" if needed is None else f"a step needs {memory_size(needed)} more"
    has = "the device has no more memory" if free is None else f"the device has {memory_size(free)} free"
    problem = f"out of memory: {what} with micro-batches of {asked}, and {has}"
    if largest is None:
        return RungError(problem, "no micro-batch fits: make the model or the context smaller")
    return RungError(
        problem, f"--train.micro-batch-size {largest} is the largest that fits; the batch stays what it is"
    )


def new_bytes(compiled: Any) -> int:
    """Return the bytes a device that a compiled step takes beyond its arguments: temporaries and new outputs."""
    analysis = compiled.memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def free_bytes(device: jax.Device) -> int | None:
    """Return the bytes that are free for a program on ``device``; ``None`` where nobody can tell.

    An accelerator's runtime knows. On a CPU it is what the system calls available, shared by emulated devices.
    """
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"] - statistics["bytes_in_use"]
    if device.platform != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kibibytes is None else int(kibibytes) * 1024 // jax.local_device_count()


def _largest(batch_size: int, asked: int, data: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest micro-batch below ``asked`` that fits, by bisection: a smaller one never needs more."""
    sizes = [size for size in range(data, asked, data) if batch_size % size == 0]
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low - 1] if low else None
