"""The disk: files and folders that are seen whole or not at all, locks, and errors in words."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rung.errors import RungError

_PARTIAL = ".{name}.{process}.partial"


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


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    with whole_file(path) as file:
        file.write(f"{json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False)}\n".encode())


def publish(folder: Path, path: Path) -> None:
    """Give a finished folder its name; what has the name is put aside first, and removed last."""
    aside = None
    if path.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name[:100]}-old-", dir=path.parent))
        path.rename(aside / path.name)
    folder.rename(path)
    if aside:
        shutil.rmtree(aside, ignore_errors=True)


def check_replaceable(folder: Path, files: Iterable[str], folders: Iterable[str], hint: str) -> None:
    """Refuse to replace a folder that holds anything but what Rung writes there.

    Args:
        folder: that is to be replaced, and so removed with all that is in it.
        files: what their names may be, as regular expressions; also where they are half written.
        folders: the names of those that are Rung's whole.
        hint: what to do instead.

    Raises:
        RungError: something else is in it; the first by name is named.
    """
    known = re.compile("|".join(rf"{name}(\.tmp)?|\.{name}\.\d+\.partial" for name in files))
    for entry in sorted(folder.iterdir()):
        if not (entry.name in folders if entry.is_dir() else known.fullmatch(entry.name)):
            raise RungError(f"{entry} is not Rung's, and would be removed with {folder}", hint)


def check_apart(out: Path, sources: Iterable[Path]) -> None:
    """Refuse to make a folder within one of its sources, or in place of what holds one.

    Raises:
        RungError: ``out`` lies in a source or a source in it.
    """
    for source in sources:
        if out.resolve() == source.resolve():
            raise RungError(f"{out} would be made of itself", "name another folder with --out")
        if out.resolve().is_relative_to(source.resolve()):
            raise RungError(f"{out} is in {source}, which it is made of", "name another folder with --out")
        if source.resolve().is_relative_to(out.resolve()):
            raise RungError(f"{source} is in {out}, which would be replaced", "name another folder with --out")


def make_public(path: Path) -> None:
    """Give a temporary folder, which is private, the permissions of any other new one."""
    path.chmod(0o777 & ~_umask())


def on_disk(path: Path) -> None:
    """Wait until the disk has a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def locked(path: Path, out: Path) -> BinaryIO | None:
    """Hold a lock while ``out`` is made, which ends with this process; None where the system has no such locks.

    Raises:
        RungError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:
        return None
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise RungError(f"{out} is being made by another process", "wait for it, or name another folder") from None
    return file


@contextlib.contextmanager
def cannot(do: str, hint: str) -> Iterator[None]:
    """Turn an error of the system into one for the user: ``cannot write runs/a: no space left on device``."""
    try:
        yield
    except OSError as error:
        raise RungError(f"cannot {do}: {reason(error)}", hint) from None


def reason(error: OSError) -> str:
    """Return what the system says of an error, in few words."""
    return (error.strerror or str(error)).lower()


def _umask() -> int:
    """Return the process's file mode mask; asking for it is setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
