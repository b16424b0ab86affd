"""What the machine does while a run trains: processor, memory, and NVIDIA GPUs through the driver's own library."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from rung.train.events import Event, Hardware, StepDone

GpuReading = dict[str, "float | int | str | None"]

# What holds a GPU's clock down, by the constant of NVML that has its bit. An idle GPU's low clock is no restraint.
THROTTLE_REASONS = {
    "nvmlClocksEventReasonApplicationsClocksSetting": "clock setting",
    "nvmlClocksEventReasonSwPowerCap": "power limit",
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSyncBoost": "another GPU's clock",
    "nvmlClocksEventReasonSwThermalSlowdown": "temperature, seen by the driver",
    "nvmlClocksEventReasonHwThermalSlowdown": "temperature, seen by the hardware",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksEventReasonDisplayClockSetting": "display clock",
}

_Value = TypeVar("_Value")


class Telemetry:
    """A listener that reads the machine from time to time, and tells what it read as a ``Hardware`` event.

    It reads when a step is done: at the first, and whenever so many seconds have passed since. What cannot be read is
    ``None``; no failure of a reading reaches the run. ``emit`` may call this listener again.

    Args:
        every_seconds: between readings, by the clock on the wall; 0: none is made.
        emit: told each reading.
    """

    def __init__(self, every_seconds: float, emit: Callable[[Event], None]):
        self._every_seconds, self._emit = every_seconds, emit
        self._due = 0.0
        self._host = _Host() if every_seconds else None
        self._gpus = _Gpus() if every_seconds else None

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone) and self._host and self._gpus and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every_seconds
            host, gpus = self._host.read(), self._gpus.read()
            self._emit(Hardware(event.step, event.seconds, gpus=gpus, **host))

    def close(self) -> None:
        """Let go of the GPUs' library. Events after it are not read for."""
        if self._gpus:
            self._gpus.close()
        self._host = self._gpus = None

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Host:
    """The processor and the memory, by psutil."""

    def __init__(self) -> None:
        self._psutil: Any = _or_none(_import_psutil)
        self._process: Any = _or_none(lambda: self._psutil.Process())
        self._read_processor()  # a percentage is of the time since the reading before

    def read(self) -> dict[str, Any]:
        cpu, own = self._read_processor()
        return {
            "cpu_percent": cpu,
            "process_cpu_percent": own,
            "process_memory": _or_none(lambda: int(self._process.memory_info().rss)),
            "free_memory": _or_none(lambda: int(self._psutil.virtual_memory().available)),
        }

    def _read_processor(self) -> tuple[float | None, float | None]:
        return (
            _or_none(lambda: float(self._psutil.cpu_percent(interval=None))),
            _or_none(lambda: float(self._process.cpu_percent(interval=None))),
        )


class _Gpus:
    """Every NVIDIA GPU of the machine, by NVML; none where its library or the driver is missing."""

    def __init__(self) -> None:
        self._nvml: Any = _or_none(_import_nvml)
        self._handles: list[tuple[Any, str | None]] = []
        if self._nvml:
            for n in range(_or_none(self._nvml.nvmlDeviceGetCount) or 0):
                handle, name = _or_none(functools.partial(self._open, n)) or (None, None)
                self._handles.append((handle, name))

    def read(self) -> list[GpuReading]:
        return [self._read(handle, name) for handle, name in self._handles]

    def close(self) -> None:
        self._handles = []
        if self._nvml:
            _or_none(self._nvml.nvmlShutdown)

    def _read(self, handle: Any, name: str | None) -> GpuReading:
        nvml: Any = self._nvml if handle is not None else None  # with nothing to ask, every reading fails
        memory: Any = _or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        return {
            "name": name,
            "utilization": _or_none(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            "memory_used": _or_none(lambda: int(memory.used)),
            "memory_total": _or_none(lambda: int(memory.total)),
            "temperature": _or_none(lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
            "power": _or_none(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),  # from milliwatts
            "throttled": _or_none(lambda: self._throttled(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))),
        }

    def _open(self, n: int) -> tuple[Any, str]:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(n)
        name = self._nvml.nvmlDeviceGetName(handle)
        return handle, name.decode("utf-8", errors="replace") if isinstance(name, bytes) else str(name)

    def _throttled(self, bits: int) -> str:
        return "; ".join(words for constant, words in THROTTLE_REASONS.items() if bits & getattr(self._nvml, constant))


def _import_psutil() -> Any:
    import psutil

    return psutil


def _import_nvml() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def _or_none(read: Callable[[], _Value]) -> _Value | None:
    # Whatever a driver or the system may raise: a reading is never worth a run.
    with contextlib.suppress(Exception):
        return read()
    return None
