"""Memory before the first step: what the compiled step needs, what the device has, and the micro-batch that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from rung.config import TrainConfig
from rung.errors import RungError

Step = Callable[[Any, Any], Any]


def compile_step(
    make: Callable[[TrainConfig], Any], config: TrainConfig, arguments: tuple[Any, Any], data: int
) -> Step:
    """Return the step, compiled for the shapes of ``arguments``, after checking that it fits the device.

    Args:
        make: the jitted step for a config, as ``rung.train.step.make_step``; called again with smaller micro-batches
            when the one asked does not fit.
        config: the one asked.
        arguments: (state, batch), on the devices.
        data: devices that a micro-batch is split over.

    Raises:
        RungError: it does not fit; the hint names the largest micro-batch that does.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arguments)
    step = make(config)
    compiled = step.lower(*shapes).compile()
    free = free_bytes(next(iter(jax.tree.leaves(arguments)[0].devices())))
    if free is None or new_bytes(compiled) <= free:
        # Not `compiled`: its outputs are shards that Orbax cannot save. `step` calls the same program.
        return step

    def fits(micro: int) -> bool:
        smaller = dataclasses.replace(config, micro_batch_size=micro)
        return new_bytes(make(smaller).lower(*shapes).compile()) <= free

    asked = config.micro_batch_size or config.batch_size
    raise out_of_memory(new_bytes(compiled), free, _largest(config.batch_size, asked, data, fits), asked)


def out_of_memory(needed: int | None, free: int | None, largest: int | None, asked: int) -> RungError:
    """Return the error of a step that does not fit, with the way out."""
    what = "a step" if needed is None else f"a step needs {_size(needed)} more"
    has = "the device has no more memory" if free is None else f"the device has {_size(free)} free"
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


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
