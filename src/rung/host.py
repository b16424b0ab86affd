"""The process: its memory, and an allocator that keeps it; kept compilations; interrupts that count."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Parameters of mallopt in the GNU C library (malloc.h).
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8

_CACHE_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Ask the allocator to keep what is freed, instead of giving it back to the system after every step.

    A compiled step on a CPU takes its temporary buffers anew each time. Given back in between, each page of them is
    faulted in and zeroed again: a third of the step of a small model. The price is that resident memory stays at its
    peak. Elsewhere than under the GNU C library this does nothing.

    Call it before anything starts a thread, and so before numpy or jax is imported: a thread that has an arena of its
    own gives large blocks back all the same. (From outside a process the same is done by the environment variables
    ``MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647``.)
    """
    library = _gnu_c_library()
    if library is not None:
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Give the system what the allocator keeps until now, so that what is resident is in use."""
    library = _gnu_c_library()
    if library is not None:
        library.malloc_trim(0)


def resident_bytes(what: str = "VmRSS") -> int:
    """Return the resident memory of this process; with ``VmHWM`` its peak. 0 where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{what}:"):
                return 1024 * int(line.split()[1])
    return 0


def begin_peak() -> int:
    """Let the peak of resident memory begin anew from what is resident now; returns that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident_bytes()


def memory_size(n_bytes: float) -> str:
    """Return an amount of memory for people: 512 MiB, 1.2 GiB."""
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


def keep_compilations() -> None:
    """Let JAX keep compiled programs in the user's cache folder, for the next process; call it before JAX is imported.

    A program is found there by what it computes, the versions and the options; the folder is the machine's own, since
    code for one processor need not run on another. It holds a gibibyte at most, of which the longest unused go first.
    ``JAX_COMPILATION_CACHE_DIR`` names another folder, and ``JAX_ENABLE_COMPILATION_CACHE=0`` keeps nothing.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    # No home, or one that cannot be written: nothing is kept.
    with contextlib.suppress(OSError, RuntimeError):
        folder = _cache_folder() / "compiled" / _processor()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return
        for program in folder.glob("*-cache"):
            # JAX notes when each was used last. One without such a note, of a process killed between the two, would
            # let nothing be kept any more.
            if not program.with_name(f"{program.name.removesuffix('-cache')}-atime").exists():
                program.unlink(missing_ok=True)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(_CACHE_BYTES)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
        # On a full disk, say: what was compiled serves all the same.
        warnings.filterwarnings("ignore", message=".*persistent compilation cache")


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


def _gnu_c_library() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def _cache_folder() -> Path:
    """Return where the system wants a user's caches to be."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "rung"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rung"
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative one is to be passed over
    return (named if named.is_absolute() else Path.home() / ".cache") / "rung"


def _processor() -> str:
    """Return a name for this kind of processor: its architecture, and a digest of what it says it can."""
    abilities = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        abilities = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(abilities.encode()).hexdigest()[:12]}"
