"""The memory of a process: its peak from a moment on, and amounts as people read them."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from rung.host import begin_peak, give_back_freed_memory, memory_size, resident_bytes

BLOCK = 96 << 20


def test_an_amount_of_memory():
    assert [memory_size(n) for n in (0, 300 << 20, (1 << 30) - 1, 1 << 30, 141 << 30)] == [
        "0 MiB", "300 MiB", "1024 MiB", "1.0 GiB", "141.0 GiB",
    ]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="what is resident is read from /proc")
def test_a_peak_is_that_since_it_was_begun():
    def take():
        return np.ones(BLOCK, np.int8).sum()

    before = begin_peak()
    take()
    assert resident_bytes("VmHWM") - before > 0.9 * BLOCK
    give_back_freed_memory()
    assert resident_bytes() - before < 0.5 * BLOCK
    before = begin_peak()
    assert resident_bytes("VmHWM") - before < 0.1 * BLOCK
