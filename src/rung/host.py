"""The host's memory allocator, set for programs that ask for the same large blocks again and again."""

from __future__ import annotations

import ctypes
import sys

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
