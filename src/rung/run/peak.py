"""The rate of matrix products that a device can reach: by its data sheet, or measured."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

# NVIDIA's data sheets and architecture white papers, in 1e12 operations a second: bfloat16 and TF32 in tensor cores,
# dense (without the doubling for sparse matrices) and added in float32, and plain float32. The first name that a
# device's kind has in it counts.
_DATA_SHEETS = {
    "B200": (2250.0, 1125.0, 75.0),
    "GH200": (990.0, 495.0, 67.0),
    "H200 NVL": (835.0, 417.0, 60.0),
    "H200": (989.0, 494.0, 67.0),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100 NVL": (835.0, 417.0, 60.0),
    "H100": (989.0, 494.0, 67.0),
    "A100": (312.0, 156.0, 19.5),
    "A10": (125.0, 62.5, 31.2),
    "L40S": (362.0, 183.0, 91.6),
    "L40": (181.0, 90.5, 90.5),
    "L4": (121.0, 60.0, 30.3),
    "RTX 3090": (71.0, 35.6, 35.6),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 5090": (209.5, 104.8, 104.8),
}
_UNITS = ("bfloat16", "tensorfloat32", "float32")
_OTHER_THAN_ITS_SHEET = re.compile("MIG|Laptop|Ti|SUPER|D\\b", re.IGNORECASE)  # a part of a GPU, or another model

_SIZE = {"cpu": 2048}  # of the matrices that are multiplied
_ACCELERATOR_SIZE = 8192
_SECONDS = 0.5


@dataclass(frozen=True)
class Peak:
    """Floating-point operations a second of one device, and where the number is from."""

    flops: float
    source: str


def peak_of(device: jax.Device, dtype: str, precision: str) -> Peak:
    """Return the peak of a device for matrix products of a dtype at a precision, by JAX's name for it.

    A GPU whose data sheet is known has that one's; any other device is measured, which takes a second.
    """
    listed = data_sheet(device.device_kind, dtype, precision)
    if listed is not None:
        return Peak(listed, "data sheet")
    size = _SIZE.get(device.platform, _ACCELERATOR_SIZE)
    return Peak(_measured(device, dtype, precision, size), f"measured, product of {size} x {size}")


def data_sheet(device_kind: str, dtype: str, precision: str) -> float | None:
    """Return the peak of an NVIDIA GPU by the name that its driver gives it; ``None`` for one that is not listed.

    Its products of float32 at a precision below their own are TF32, ``bfloat16`` among them.
    """
    if not device_kind.startswith("NVIDIA"):
        return None
    for name, rates in _DATA_SHEETS.items():
        if re.search(rf"\b{name}\b", device_kind):
            rest = device_kind.split(name, 1)[1]
            if _OTHER_THAN_ITS_SHEET.search(rest):
                return None
            unit = dtype if dtype == "bfloat16" or precision == "float32" else "tensorfloat32"
            return 1e12 * rates[_UNITS.index(unit)]
    return None


def _measured(device: jax.Device, dtype: str, precision: str, size: int) -> float:
    """Return the rate of the fastest of some products of square matrices."""
    a = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(lambda x: jnp.matmul(x, x, precision=precision))
    product(a).block_until_ready()  # compiles
    best, ends = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < ends or best == float("inf"):
        begun = time.perf_counter()
        product(a).block_until_ready()
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best
