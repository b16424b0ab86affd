"""Weights in a safetensors file, named by their paths in the table."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rung.errors import RungError
from rung.model.weights import Tree, WeightTable, flatten, unflatten


def save_weights(path: str | Path, weights: Tree, metadata: Mapping[str, str]) -> None:
    """Write weights to a safetensors file, whole or not at all.

    Args:
        path: of the file; an older one is replaced when the new one is whole.
        weights: nested dict of arrays; a tied matrix stands in it, and in the file, once.
        metadata: texts for the file's header, which holds them as one JSON object named ``rung``: so the same weights
            are the same file, byte for byte.

    Raises:
        OSError: it cannot be written, for the reason in ``strerror``; nothing is left of it.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    arrays = {name: np.ascontiguousarray(array) for name, array in flatten(weights).items()}
    try:
        save_file(arrays, temporary, metadata={"rung": json.dumps(dict(metadata), sort_keys=True)})
        temporary.chmod(0o644)  # the library makes it private
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise OSError(errno.EIO, why_unwritten(error), str(path)) from None


def why_unwritten(error: Exception) -> str:
    """Return why a file could not be written, in the system's words, which safetensors passes on within its own."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    system = re.search(r"I/O error: (.+) \(os error \d+\)", text)
    return system[1] if system else text


def load_weights(path: str | Path, table: WeightTable) -> Tree:
    """Read the weights of ``table`` from a safetensors file, as host arrays.

    Raises:
        RungError: the file is missing or damaged, or holds other weights than the table; the line names the first.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise RungError(
            f"no weights at {path}", "the run writes them at its first validation; train it further"
        ) from None
    except SafetensorError as error:
        raise RungError(
            f"{path} is damaged: {error}", "`rung resume` writes it again from the last checkpoint"
        ) from None
    expected = {weight.path: weight.shape for weight in table}
    for name in sorted(expected.keys() | arrays.keys()):
        found = arrays[name].shape if name in arrays else "missing"
        if found != expected.get(name, "not in the model"):
            raise RungError(
                f"{path}: weight {name} is {found}, and the config says {expected.get(name, 'not in the model')}",
                "the file and the config belong to different models",
            )
    return unflatten({name: arrays[name] for name in expected})


def read_metadata(path: str | Path) -> dict[str, str]:
    """Return the texts in the header of a safetensors file; empty where the file is missing or damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            return dict(json.loads((file.metadata() or {}).get("rung", "{}")))
    except (OSError, SafetensorError):
        return {}
