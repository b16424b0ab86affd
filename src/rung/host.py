"""The process: an allocator for programs that ask for the same large blocks again and again; interrupts that count."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

# Parameters of mallopt in the GNU C library (malloc.h).
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8


def keep_freed_memory() -> None:
    """Ask the allocator to keep what is freed, instead of giving it back to the system after every step.

    A compiled step on a CPU takes its temporary buffers anew each time. Given back in between, each page of them is
    faulted in and zeroed again: a third of the step of a small model. The price is that resident memory stays at its
    peak. Elsewhere than under the GNU C library this does nothing.

    Call it before anything starts a thread, and so before numpy or jax is imported: a thread that has an arena of its
    own gives large blocks back all the same. (From outside a process the same is done by the environment variables
    ``MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647``.)
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextlib.contextmanager
def interrupts_heard() -> Iterator[None]:
    """Let an interrupt count that Python would swallow.

    A handler of a signal may raise ``KeyboardInterrupt`` while an object is cleared away or within a callback of the
    garbage collector, and from there no exception comes out: Python prints it and goes on. Here it is raised again a
    moment later, as by Ctrl-C.
    """
    again: list[threading.Timer] = []

    def unheard(what: Any) -> None:
        if what.exc_type is not KeyboardInterrupt:
            return hook(what)
        timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        again.append(timer)
        timer.start()

    hook, sys.unraisablehook = sys.unraisablehook, unheard
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for timer in again:
            timer.cancel()
