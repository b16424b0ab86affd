"""The memory of a process: its peak from a moment on, and amounts as people read them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rung.host import memory_size


def test_an_amount_of_memory():
    assert [memory_size(n) for n in (0, 300 << 20, (1 << 30) - 1, 1 << 30, 141 << 30)] == [
        "0 MiB", "300 MiB", "1024 MiB", "1.0 GiB", "141.0 GiB",
    ]  # fmt: skip


PEAKS = """
from rung.host import begin_peak, give_back_freed_memory, resident_bytes

BLOCK = 96 << 20
before = begin_peak()
bytearray(b"x") * BLOCK
assert resident_bytes("VmHWM") - before > 0.9 * BLOCK
give_back_freed_memory()
assert resident_bytes() - before < 0.5 * BLOCK
before = begin_peak()
assert resident_bytes("VmHWM") - before < 0.1 * BLOCK
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what is resident is read from /proc")
def test_a_peak_is_that_since_it_was_begun():
    # In a process of its own: this one has memory to give without asking the system.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    subprocess.run([sys.executable, "-c", PEAKS], env=environment, check=True)
