"""Writing a file so that it is seen whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a new file beside ``path`` and rename it to ``path`` when the block ends well; else leave ``path`` alone."""
    path = Path(path)
    partial = path.with_name(_PARTIAL.format(name=path.name, process=os.getpid()))
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def remove_partials(path: str | Path) -> None:
    """Remove what killed processes left half written beside ``path``; for who alone writes it."""
    path = Path(path)
    for partial in path.parent.glob(_PARTIAL.format(name=glob.escape(path.name), process="*")):
        partial.unlink(missing_ok=True)


_PARTIAL = ".{name}.{process}.partial"
