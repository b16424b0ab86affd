"""A run folder: where its files are, and a run opened for use."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from rung import config as settings
from rung.config import Config, MeshConfig
from rung.disk import cannot
from rung.errors import RungError, nearest

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
TOKENIZER = "tokenizer.json"
TOKENS = "tokens"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
WEIGHTS = "model.safetensors"
DATA = "data.json"
LOCK = "lock"
LINEAGE = "lineage.json"
# All that Rung writes in a run folder.
FILES = (
    *(CONFIG, ENVIRONMENT, TOKENIZER, METRICS, SAMPLES, WEIGHTS, DATA, LOCK, LINEAGE),
    *("latest", "best", "report.html", "loss.png"),
)
FOLDERS = (TOKENS, "checkpoints", "diverged", "profile", "tensorboard", "wandb")

_LOCK_TRIES = 5


class Run:
    """A run, opened from its folder: its config, tokenizer, model and weights, each read when first asked for.

    Args:
        path: the run folder.

    Raises:
        RungError: the folder is missing, or is no run.
    """

    def __init__(self, path: str | Path):
        if not str(path):
            raise RungError("no run named", "name a run folder, such as runs/demo")
        self.path = Path(path)
        if not self.path.is_dir():
            raise RungError(f"no run folder {path}", _runs_near(self.path))
        if not (self.path / CONFIG).exists():
            raise RungError(f"{path} is not a run: it has no {CONFIG}", "name a folder that `rung train` made")

    @cached_property
    def config(self) -> Config:
        """The config as it was resolved when the run began."""
        return settings.load(self.path / CONFIG)

    @cached_property
    def tokenizer(self) -> Any:
        """The run's ``rung.tokens.tokenizer.Tokenizer``.

        Raises:
            RungError: it is gone, or is not the one that the run began with.
        """
        from rung.tokens.tokenizer import Tokenizer

        try:
            tokenizer = Tokenizer.load(self.path / TOKENIZER, allow_lossy=self.config.tokenizer.allow_lossy)
        except RungError as error:
            raise RungError(error.problem, f"put it back as it was; {self.path / TOKENS} may have a copy") from None
        # A run that was carried elsewhere to be used needs no data.json.
        if (self.path / DATA).exists() and self._data.get("tokenizer", tokenizer.hash) != tokenizer.hash:
            raise RungError(
                f"{self.path / TOKENIZER} is not the tokenizer that {self.path} began with",
                "put the old tokenizer back, or train a new run with the new one",
            )
        return tokenizer

    @cached_property
    def store(self) -> Any:
        """The ``rung.tokens.store.TokenStore`` that the run trains on, or the ``MixedStore`` of several.

        Raises:
            RungError: it is gone, or is not the one that the run began with.
        """
        from rung.run.tokens import open_store

        recorded = self._data["store"]
        names = recorded if isinstance(recorded, list) else [recorded]
        paths = [Path(os.path.normpath(self.path / name)) for name in names]
        data = self.config.data
        store = open_store(paths, self.tokenizer, data.validation_fraction, data.weights)
        if store.identity != self._data["identity"]:
            which = f"{store.path} is not the token store" if len(paths) == 1 else "these are not the token stores"
            raise RungError(
                f"{which} that {self.path} began with", "put the old one back, or train a new run on the new one"
            )
        return store

    def check_tokens(self) -> None:
        """Look whether the token files still hold what the run began with.

        Raises:
            RungError: one does not; the line names it.
        """
        recorded = self._data["store"]
        names = recorded if isinstance(recorded, list) else [recorded]
        for name, then in zip(names, self._data.get("files", ()), strict=False):
            store = Path(os.path.normpath(self.path / name))
            now = _fingerprints(store)
            for shard, hashed in then.items():
                if now.get(shard) != hashed:
                    raise RungError(
                        f"{store / shard} does not hold the tokens that {self.path} began with",
                        "put the old file back, or train a new run on the new one",
                    )

    @cached_property
    def _data(self) -> dict[str, Any]:
        path = self.path / DATA
        try:
            recorded = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(recorded, dict) and {"store", "identity"} <= recorded.keys():
                return recorded
            reason = "is not what Rung writes there"
        except FileNotFoundError:
            reason = "is missing"
        except (OSError, ValueError) as error:
            reason = f"cannot be read: {error}"
        raise RungError(f"{path} {reason}; it says which tokens the run trains on", "put it back as it was")

    @cached_property
    def model(self) -> Any:
        """The run's ``rung.model.Decoder``."""
        from rung.model import Decoder

        # A run may be used on another machine than the one it was trained on, and with one device.
        compute = dataclasses.replace(self.config.compute, attention="auto")
        return Decoder.of(dataclasses.replace(self.config, compute=compute, mesh=MeshConfig()))

    @cached_property
    def weights(self) -> Any:
        """The weights of ``model.safetensors`` on the device: the best by validation, or the last without one."""
        import jax

        from rung.model.files import load_weights

        return jax.device_put(load_weights(self.path / WEIGHTS, self.model.weights()))

    @cached_property
    def generator(self) -> Any:
        """A ``rung.decode.generate.Generator`` of the run's model."""
        from rung.decode.generate import Generator

        return Generator(self.model, self.weights, vocab_size=self.tokenizer.vocab_size, end_id=self.tokenizer.end_id)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a run folder for one process that trains in it; the hold ends with the process, however that ends.

    Raises:
        RungError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system: nothing is held
        yield
        return
    with cannot(f"write in {folder}", "make the folder writable, or copy the run to another place"):
        file = open(folder / LOCK, "a+", encoding="ascii")  # noqa: SIM115 - closed by the with below
    with file:
        for tries_left in reversed(range(_LOCK_TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # `rung runs` takes the lock for a moment to see whether a process has it.
                if tries_left:
                    time.sleep(0.05)
                    continue
                file.seek(0)
                process = file.read().strip() or "another"
                raise RungError(
                    f"{folder} is being trained by process {process}",
                    "wait for it, or stop it with Ctrl-C and resume then",
                ) from None
        with contextlib.suppress(OSError):  # a full disk: the hold is what counts, the number only tells who has it
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode("ascii"))
        yield


def record_data(folder: Path, store: Any, tokenizer: Any, final: Path) -> None:
    """Write down what a run trains on: where its tokens are, seen from its ``final`` place, and the identities."""
    from rung.tokens.mixture import MixedStore, paths_of

    places = [
        str(path.relative_to(folder))
        if path.is_relative_to(folder)
        else os.path.relpath(path.resolve(), final.resolve())
        for path in paths_of(store)
    ]
    record = {
        "store": places if isinstance(store, MixedStore) else places[0],
        "identity": store.identity,
        "tokenizer": tokenizer.hash,
        "files": [_fingerprints(path) for path in paths_of(store)],
    }
    text = json.dumps(record, indent=2)
    (folder / DATA).write_text(text + "\n", encoding="utf-8")


def _fingerprints(store: Path) -> dict[str, str]:
    """Return a hash of each shard in a store's folder, by name, of samples where it is large; none of a bare file."""
    from rung.corpus.sources import Source, fingerprint

    shards = sorted(store.glob("*.safetensors")) if store.is_dir() else []
    return {path.name: fingerprint(Source(path.name, path, path.stat().st_size))["sha256"] for path in shards}


def write_config(folder: Path, config: Config) -> None:
    """Write a run's config, whole or not at all."""
    temporary = folder / f"{CONFIG}.tmp"
    temporary.write_text(settings.to_toml(config), encoding="utf-8")
    temporary.replace(folder / CONFIG)


def environment(mesh: Any) -> dict[str, Any]:
    """Return what a run depends on beside its config: versions, XLA's flags, the devices."""
    import jax
    import jaxlib
    import numpy as np

    from rung import __version__

    devices = mesh.devices.ravel()
    return {
        "rung": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "matmul_precision": str(jax.config.jax_default_matmul_precision or "default"),  # type: ignore[attr-defined]
    }


def _runs_near(path: Path) -> str:
    folder = path.parent
    runs = [str(p.parent) for p in folder.glob(f"*/{CONFIG}")] if folder.is_dir() else []
    return nearest(str(path), runs) if runs else "train one: rung train my-novel.txt"
