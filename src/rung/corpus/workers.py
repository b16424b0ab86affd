"""Work spread over the cores of a machine, or over machines by Ray; results come in the order of the tasks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal, Protocol, TypeVar

from rung.errors import RungError

EngineName = Literal["local", "ray"]

_AHEAD = 2  # tasks a worker that are begun before the oldest result is taken: this bounds the memory

Task = TypeVar("Task")
Result = TypeVar("Result")


class Engine(Protocol):
    """Runs a function on many tasks at once; ``workers`` is how many."""

    workers: int

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield the result of each task, in order; tasks are asked for as results are taken."""
        ...


@contextlib.contextmanager
def engine(name: EngineName, workers: int = 0) -> Iterator[Engine]:
    """Give an engine; what it started ends with the block.

    Args:
        name: ``local``: processes on this machine. ``ray``: a Ray cluster, that of RAY_ADDRESS or else one on this
            machine alone.
        workers: tasks at once; 0 is one a core. Results do not depend on it.

    Raises:
        RungError: Ray is not installed, or does not answer.
    """
    made = _Ray(workers) if name == "ray" else _Local(workers or cores())
    try:
        yield made
    except KeyboardInterrupt:
        made.stop()
        raise
    finally:
        made.close()


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Local:
    """Processes, spawned so that no thread or lock of this one is carried over; with one worker, this process."""

    def __init__(self, workers: int):
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        if self.workers == 1:
            yield from map(function, tasks)
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, context, initializer=_begin)
        waiting: deque[Future] = deque()
        try:
            for task in tasks:
                waiting.append(self._pool.submit(function, task))
                if len(waiting) >= _AHEAD * self.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            problem = "a worker process was killed, as the system does when memory runs out"
            raise RungError(problem, "take fewer --workers; the same command goes on from here") from None

    def stop(self) -> None:
        """End at once: what is begun is not waited for."""
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.terminate()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class _Ray:
    """Tasks on a Ray cluster, which runs those of a worker that died again."""

    def __init__(self, workers: int):
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # no telemetry; read when it is imported
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # tasks here take no GPU, and hide none
        try:
            import ray
        except ImportError:
            raise RungError("ray is not installed", "pip install 'rung[ray]', or take --engine local") from None
        self._ray: Any = ray
        self._began = not ray.is_initialized()
        if self._began:
            path = os.pathsep.join(filter(None, [*_own_path(), os.environ.get("PYTHONPATH")]))
            try:
                ray.init(
                    address=os.environ.get("RAY_ADDRESS", "local"),
                    runtime_env={"env_vars": {"PYTHONPATH": path}},
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                )
            except Exception as error:  # a node that does not start raises it bare
                reason = str(error).strip().split("\n")[0]
                raise RungError(f"no Ray cluster: {reason}", "look at RAY_ADDRESS, or take --engine local") from None
        self.workers = workers or max(int(ray.cluster_resources().get("CPU", 1)), 1)

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        # Without an end to the tries: a machine may go again and again. An error of the task itself is not tried again.
        remote = self._ray.remote(num_cpus=1, max_retries=-1)(function)
        waiting: deque[Any] = deque()
        try:
            for task in tasks:
                waiting.append(remote.remote(task))
                if len(waiting) >= _AHEAD * self.workers:
                    yield self._result(waiting.popleft())
            while waiting:
                yield self._result(waiting.popleft())
        finally:
            for one in waiting:
                self._ray.cancel(one, force=True)

    def stop(self) -> None:
        """Nothing more: tasks that are left are cancelled where they are waited for."""

    def close(self) -> None:
        if self._began:
            self._ray.shutdown()

    def _result(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, RungError) else error from None


# Helpers


def _own_path() -> list[str]:
    """Return where this package is, for processes that are started elsewhere."""
    module = sys.modules["rung"].__file__ or ""
    return [os.path.dirname(os.path.dirname(os.path.abspath(module)))]


def _begin() -> None:
    """Leave Ctrl-C to the parent process, and end when it does, however that is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
