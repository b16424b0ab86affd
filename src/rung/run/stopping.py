"""What asks a run to stop before its end: Ctrl-C, SIGTERM, a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rung.host import interrupts_heard
from rung.report.words import duration

StopReason = Callable[[], "str | None"]
"""Says why to stop; ``None``: go on."""


@contextlib.contextmanager
def asked_to_stop(time_limit: float | None) -> Iterator[StopReason]:
    """Give a function that returns the name of the signal that asked to stop, or the time limit that has passed.

    The first Ctrl-C (or SIGTERM) asks; the second interrupts at once.

    Args:
        time_limit: seconds from now; ``None``: none.
    """
    ends = None if time_limit is None else time.monotonic() + time_limit
    signals: list[str] = []

    def reason() -> str | None:
        if signals:
            return signals[0]
        if ends is not None and time.monotonic() >= ends:
            return f"time limit of {duration(time_limit or 0)}"
        return None

    def ask(number: int, _: Any) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(signal.Signals(number).name)
        with contextlib.suppress(OSError):
            # Not print: the signal may have come in the middle of one.
            os.write(2, f"\n{signals[0]}: stopping after this step; once more stops at once\n".encode())

    if threading.current_thread() is not threading.main_thread():
        yield reason
        return

    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with interrupts_heard():
            yield reason
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
