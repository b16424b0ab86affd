"""What benchmarks in turns share: programs that wait for their turn, the load that others make, the machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_MATRIX_FLAGS = ("sse4_2", "fma", "avx", "amx", "asimd", "sve")  # beginnings of what decides the speed of products


class Program:
    """A program that answers each line of its standard input with one line of JSON."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def ask(self, line: str) -> dict[str, Any]:
        """Send one line, return the JSON of the answer.

        Raises:
            RuntimeError: the program ended instead of answering.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self.close()
            command = " ".join(map(str, self._process.args))
            raise RuntimeError(f"{command} ended with status {self._process.returncode}")
        return json.loads(answer)

    def turn(self, line: str) -> dict[str, Any]:
        """As ``ask``; ``outside_load`` in the answer is what others used of all processors meanwhile, from 0 to 1."""
        begun, busy, own = time.perf_counter(), busy_seconds(), self.processor_seconds()
        answer = self.ask(line)
        others = busy_seconds() - busy - (self.processor_seconds() - own)
        capacity = (time.perf_counter() - begun) * (os.cpu_count() or 1)
        return {**answer, "outside_load": max(0.0, others / capacity)}

    def processor_seconds(self) -> float:
        """Return the processor time of the program and of those that it started, to a hundredth."""
        import psutil

        total = 0.0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    total += times.user + times.system
        return total

    def close(self) -> None:
        """End the program."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


def busy_seconds() -> float:
    """Return the seconds that the processors of the machine have worked, all together.

    Time that a hypervisor gave to other machines is among it: to a program it is load like any other.
    """
    import psutil

    times = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")  # guest time is in user time
    return sum(getattr(times, name, 0.0) for name in names)


# Where it was measured


def machine() -> dict[str, Any]:
    """Return what a number depends on: processor, its vector instructions, cores, memory, Python."""
    import psutil

    model, flags = platform.processor() or platform.machine(), []
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() in ("flags", "Features"):
                flags = sorted(flag for flag in value.split() if flag.startswith(_MATRIX_FLAGS))
    return {
        "processor": model,
        "flags": flags,
        "cores": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def versions(*names: str) -> dict[str, str]:
    """Return those of the packages that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def commit() -> str:
    """Return the commit that is checked out, with ``+`` where files of the program or the benchmarks differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def warn(text: str) -> None:
    """Print a message for the person who waits."""
    print(text, file=sys.stderr, flush=True)
