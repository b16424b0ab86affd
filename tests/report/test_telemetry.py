import importlib.util
import os
import subprocess
import sys
import time
import types

import psutil
import pytest

from rung.report.metrics import to_line
from rung.report.telemetry import THROTTLE_REASONS, Telemetry
from rung.train.events import Evaluated, Hardware


class Gone(Exception):
    """Stands for NVMLError_GpuIsLost."""


class FakeNvml(types.ModuleType):
    """The functions and constants of pynvml that telemetry needs, over GPUs that a test can take away."""

    NVML_TEMPERATURE_GPU = 0
    nvmlClocksEventReasonGpuIdle = 0x1
    nvmlClocksEventReasonApplicationsClocksSetting = 0x2
    nvmlClocksEventReasonSwPowerCap = 0x4
    nvmlClocksEventReasonHwSlowdown = 0x8
    nvmlClocksEventReasonSyncBoost = 0x10
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80
    nvmlClocksEventReasonDisplayClockSetting = 0x100

    def __init__(self, names=("NVIDIA H200", b"Tesla T4"), reasons=0x4 | 0x40):
        super().__init__("pynvml")
        self._names, self._reasons = names, reasons
        self._lost = set()
        self._calls = []

    def nvmlInit(self):
        self._calls.append("init")

    def nvmlShutdown(self):
        self._calls.append("shutdown")

    def nvmlDeviceGetCount(self):
        return len(self._names)

    def nvmlDeviceGetHandleByIndex(self, index):
        self._calls.append("handle")
        return index

    def nvmlDeviceGetName(self, handle):
        return self._names[handle]

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._seen(handle)
        return types.SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._seen(handle)
        return types.SimpleNamespace(total=150 << 30, free=50 << 30, used=100 << 30)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        self._seen(handle)
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetPowerUsage(self, handle):
        self._seen(handle)
        if handle == 1:
            raise Gone("Not Supported")
        return 654_321  # milliwatts

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        self._seen(handle)
        return self._reasons

    def _seen(self, handle):
        if handle in self._lost:
            raise Gone("GPU is lost")


def readings(monkeypatch, make_step, nvml, steps=1, every_seconds=1e-9):
    """Return what telemetry emits over some steps, with its own events given back to it as a run does."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    emitted = []

    def emit(event):
        emitted.append(event)
        telemetry(event)

    telemetry = Telemetry(every_seconds, emit)
    with telemetry:
        for step in range(1, steps + 1):
            telemetry(make_step(step))
    assert all(isinstance(event, Hardware) for event in emitted)
    return emitted


def test_the_stand_in_has_what_the_real_library_has():
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    for name in vars(FakeNvml):
        if name.startswith(("nvml", "NVML")):
            real = getattr(pynvml, name)
            assert real == getattr(FakeNvml, name) or callable(real)
    assert {name for name, _ in pynvml.c_nvmlMemory_t._fields_} == {"total", "free", "used"}
    assert {name for name, _ in pynvml.c_nvmlUtilization_t._fields_} == {"gpu", "memory"}
    # Every reason that the library knows has words, but that a GPU is idle, and names for the same bit.
    prefix = "nvmlClocksEventReason"
    reasons = {getattr(pynvml, name) for name in dir(pynvml) if name.startswith(prefix)}
    named = {getattr(pynvml, name) for name in THROTTLE_REASONS}
    assert reasons - named == {0, pynvml.nvmlClocksEventReasonGpuIdle, pynvml.nvmlClocksEventReasonAll}


def test_gpus_are_read_in_units_and_words(monkeypatch, make_step):
    nvml = FakeNvml()
    first, _, last = readings(monkeypatch, make_step, nvml, steps=3)
    assert (last.step, last.seconds) == (3, make_step(3).seconds)
    h200 = {
        "name": "NVIDIA H200",
        "utilization": 97,
        "memory_used": 100 << 30,
        "memory_total": 150 << 30,
        "temperature": 61,
        "power": 654.321,
        "throttled": "power limit; temperature, seen by the hardware",
    }
    assert first.gpus == [h200, {**h200, "name": "Tesla T4", "power": None}]
    assert b'"power": null' in to_line(first)
    assert nvml._calls == ["init", "handle", "handle", "shutdown"]  # opened once, whatever the number of readings


def test_an_idle_gpu_is_not_held_back(monkeypatch, make_step):
    (reading,) = readings(monkeypatch, make_step, FakeNvml(reasons=0x1))
    assert reading.gpus[0]["throttled"] == ""


def test_a_gpu_that_vanishes_is_not_known_and_the_rest_goes_on(monkeypatch, make_step):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    emitted = []
    telemetry = Telemetry(1e-9, emitted.append)
    telemetry(make_step(1))
    nvml._lost.add(0)
    telemetry(make_step(2))
    before, after = emitted
    assert before.gpus[0]["utilization"] == 97
    assert after.gpus[0] == {**dict.fromkeys(before.gpus[0]), "name": "NVIDIA H200"}
    assert after.gpus[1] == before.gpus[1]
    nvml.nvmlShutdown = None  # even the end may fail
    telemetry.close()
    telemetry.close()
    telemetry(make_step(3))
    assert len(emitted) == 2


@pytest.mark.parametrize("how", ["not installed", "no driver", "no count", "no handle"])
def test_without_gpus_the_rest_is_read(monkeypatch, make_step, how):
    def fail(*_):
        raise Gone(how)

    nvml = FakeNvml()
    broken = {"no driver": "nvmlInit", "no count": "nvmlDeviceGetCount", "no handle": "nvmlDeviceGetHandleByIndex"}
    if how in broken:
        setattr(nvml, broken[how], fail)
    (reading,) = readings(monkeypatch, make_step, None if how == "not installed" else nvml)
    assert all(
        value is None or name == "name" for gpu in reading.gpus for name, value in gpu.items() if how == "no driver"
    )
    if how != "no handle":
        assert reading.gpus == []
    assert reading.process_memory > 1 << 20


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed")
def test_the_real_library_without_a_driver_stops_nothing():
    # In a process of its own, which no driver of this machine can reach.
    program = (
        "import ctypes\n"
        "def missing(*_, **__): raise OSError('no libnvidia-ml')\n"
        "import pynvml\n"
        "pynvml.CDLL = missing\n"
        "from rung.report.telemetry import _Gpus\n"
        "gpus = _Gpus()\n"
        "print(gpus.read())\n"
        "gpus.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_processor_and_memory_agree_with_the_system(monkeypatch, make_step):
    emitted = []
    with Telemetry(1e-9, emitted.append) as telemetry:
        telemetry(make_step(1))
        block = bytearray(os.urandom(1 << 20) * 64)  # 64 MiB that are really there
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass
        telemetry(make_step(2))
        resident = psutil.Process().memory_info().rss
        del block
    _, after = emitted
    assert abs(after.process_memory - resident) < 64 << 20
    assert 0 < after.process_cpu_percent < 100 * (os.cpu_count() + 1)
    assert 0 < after.cpu_percent <= 100
    assert 0 < after.free_memory < psutil.virtual_memory().total


def test_what_cannot_be_read_is_none(monkeypatch, make_step):
    monkeypatch.setitem(sys.modules, "psutil", None)
    (reading,) = readings(monkeypatch, make_step, None)
    assert reading == Hardware(1, make_step(1).seconds, None, None, None, None, [])


def test_readings_are_so_many_seconds_apart_and_only_at_steps(monkeypatch, make_step):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    emitted = []
    telemetry = Telemetry(10.0, emitted.append)
    telemetry(Evaluated(0, 0, 9.0, 9.0, None, 1, 0.0, True))
    assert emitted == []
    for step in range(1, 101):
        telemetry(make_step(step))
        now[0] += 0.5
    assert [event.step for event in emitted] == [1, 21, 41, 61, 81]


def test_zero_seconds_are_never(monkeypatch, make_step):
    assert readings(monkeypatch, make_step, FakeNvml(), every_seconds=0) == []
