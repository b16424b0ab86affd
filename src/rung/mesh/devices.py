"""The mesh: the devices of a run, arranged along named axes."""

from __future__ import annotations

import dataclasses
import math

import jax

from rung.config import MeshConfig
from rung.errors import RungError


def make_mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """Return a mesh of the first devices, in the shape that ``config`` gives.

    All axes are of type Auto: the compiler carries shardings through the model from the weights and the batch, so that
    the same model code runs on every mesh (docs/architecture.md says more).

    On a CPU without enough devices, which is a CPU that has not been asked for several, JAX is asked to emulate them.

    Raises:
        RungError: there are fewer devices than the mesh has places.
    """
    shape = dataclasses.asdict(config)
    size = math.prod(shape.values())
    _emulate_cpu_devices(size)
    devices = jax.devices()
    if len(devices) < size:
        named = ",".join(f"{axis}={length}" for axis, length in shape.items())
        raise RungError(
            f"mesh {named} needs {size} devices, and there are {len(devices)} ({devices[0].platform})",
            f"use --mesh data={len(devices)}, or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={size}",
        )
    axis_types = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=axis_types, devices=devices[:size])


def _emulate_cpu_devices(size: int) -> None:
    """Ask for ``size`` emulated CPU devices while that is still possible; on other platforms it changes nothing."""
    if size == 1 or jax.config.jax_num_cpu_devices >= size:  # type: ignore[attr-defined]
        return
    try:
        jax.config.update("jax_num_cpu_devices", size)
    except RuntimeError:
        pass  # the devices exist already; make_mesh counts them
