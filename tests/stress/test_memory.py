"""Memory stays bounded: over a long run, and while saves are asked for faster than the disk takes them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MIB = 2**20


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), **more}


@pytest.mark.slow
def test_twenty_thousand_steps_take_no_more_memory_than_three_thousand(tmp_path):
    """With log, live view, telemetry, norms, spikes, validations, samples and 66 checkpoints."""
    pty = pytest.importorskip("pty", reason="no terminals to be made here")
    ours, theirs = pty.openpty()
    drawn = bytearray()

    def drain() -> None:
        try:
            while part := os.read(ours, 65536):
                drawn.extend(part)
        except OSError:  # the other side is closed
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    command = [sys.executable, HERE / "memory.py", "20000", "1000", tmp_path]
    try:
        done = subprocess.run(
            command, env=environment(TERM="xterm", COLUMNS="100"), stdout=subprocess.PIPE, stderr=theirs, check=True
        )
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    assert drawn.count(b"step") > 50  # the live view was there
    readings = {step: int(size) for step, size in (map(int, line.split()) for line in done.stdout.splitlines())}
    assert list(readings) == list(range(1000, 21000, 1000))
    # The first validation and the first samples, at step 2,000, are part of the warm-up.
    assert max(readings[step] for step in range(4000, 21000, 1000)) - readings[3000] < 3 * MIB


SAVES = """
    import sys, threading, time
    from pathlib import Path
    import jax, jax.numpy as jnp, psutil
    from rung.model.hashes import tree_hashes
    from rung.train import checkpoint, events
    from rung.train.checkpoint import Checkpoints, Progress
    from rung.train.loop import Intervals, Loop

    state = {"weights": {str(n): jnp.full((1024, 5 * 1024), float(n)) for n in range(10)}}  # 200 MiB
    process, stop = psutil.Process(), False

    def watch():
        global peak
        while not stop:
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.002)

    wait_for_disk = checkpoint.on_disk
    def slow(path):
        time.sleep(0.1)
        wait_for_disk(path)
    checkpoint.on_disk = slow

    scalars = {"loss_sum": 1.0, "cross_entropy": 1.0, "targets": 1, "gradient_norm": 1.0, "rate_factor": 1.0}
    scalars |= {"skipped": False, "skipped_in_a_row": 0}
    metrics = {name: jnp.asarray(value) for name, value in scalars.items()}
    add = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    saved = []
    loop = Loop(
        step=lambda state, batch: (add(state), metrics),
        batch=lambda step: None,
        steps=8,
        learning_rate=0.0,
        flops_per_token=0.0,
        intervals=Intervals(save=1),
        emit=lambda event: saved.append(event.step) if isinstance(event, events.Saved) else None,
        checkpoints=Checkpoints(Path(sys.argv[1]), keep=1),
    )
    state = add(state)
    tree_hashes(state)  # compiled
    peak = before = process.memory_info().rss
    threading.Thread(target=watch, daemon=True).start()
    loop.run(state, Progress())
    stop = True
    print(len(saved), before, peak, process.memory_info().rss)
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    "kept", [pytest.param(False, marks=pytest.mark.slow, id="as it is"), pytest.param(True, id="freed memory kept")]
)
def test_saves_hold_one_copy_of_the_state_also_when_the_disk_is_slow(tmp_path, kept):
    program = textwrap.dedent(SAVES)
    if kept:
        program = "from rung.host import keep_freed_memory; keep_freed_memory()\n" + program
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], env=environment(), capture_output=True, text=True, check=True
    )
    saves, before, peak, after = map(int, done.stdout.split())
    copy = 200 * MIB
    assert saves == 8
    assert 0.9 * copy < peak - before < 1.2 * copy
    assert after - before < 0.1 * copy
