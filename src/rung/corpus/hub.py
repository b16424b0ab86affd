"""Data sets of the Hugging Face Hub, or of a folder laid out like one, through the library ``datasets``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.corpus.rows import as_json, no_column, not_text
from rung.errors import RungError, nearest

_PAGE = "https://huggingface.co/datasets"
_GO_ON = "the same command goes on from what is there"


@dataclass(frozen=True)
class Row:
    """One row of a data set: its text (empty where it has none), and its other columns, as JSON has them."""

    text: str
    metadata: dict[str, Any]


class HubDataset:
    """One split of a data set.

    ``title``: its name, of a folder without what is before it. ``files``: what it is made of,
    ``[{"name", "version"}]``. ``config``: as resolved.

    Args:
        name: ``owner/name``, or a folder with data files and the README.md of a data set.
        config: one of its configs; may be left out where there is one, or a default.
        split: one of its splits; without ``streaming`` also a part of one, ``train[:10%]``.
        revision: a branch, tag or commit.
        streaming: read the files over the network as they are needed; else they are fetched to the cache first.
        column: that holds the text.

    Raises:
        RungError: ``datasets`` is not installed; no network, no such data set, revision, config, split or column; a
            data set that needs a login; a column that is not of text.
    """

    def __init__(
        self,
        name: str,
        *,
        config: str | None = None,
        split: str = "train",
        revision: str | None = None,
        streaming: bool = False,
        column: str = "text",
    ):
        datasets = _library()
        self.name, self._column, self._streaming = name, column, streaming
        asked = _Asked(name, config, split, revision)
        if _looks_like_path(name) and not Path(name).is_dir():
            raise RungError(f"no folder {name}", "name a folder of data files, or a data set of the Hub: owner/name")
        try:
            builder = datasets.load_dataset_builder(name, config, revision=revision)
            if streaming:
                self._rows = builder.as_streaming_dataset(split=split)
            else:
                builder.download_and_prepare()
                self._rows = builder.as_dataset(split=split)
        except Exception as error:
            raise _told(error, asked) from error
        self.title = Path(name).resolve().name if Path(name).is_dir() else name
        self.config: str = builder.config.name
        self.files = _files(builder, split)
        self._left_out = Counter[str]()
        self._choose_columns(self._rows.features)

    @property
    def left_out(self) -> Counter[str]:
        """Columns that hold no text or numbers (images, sound, bytes) and are not read."""
        return self._left_out

    def rows(self, first: int = 0) -> Iterator[Row]:
        """Yield the rows from number ``first`` (from 0) on.

        Raises:
            RungError: a row without text in the column; the network went away; a damaged file.
        """
        if not self._streaming and first >= len(self._rows):  # which the library would not skip
            return
        rows = self._rows.skip(first) if first else self._rows
        number = first
        iterator = iter(rows)
        while True:
            try:
                row = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                raise _told_of_row(error, self.name, number) from error
            number += 1
            yield self._row(row, f"{self.name}, row {number}")

    def _row(self, row: dict[str, Any], where: str) -> Row:
        if self._column not in row:  # a stream whose columns were not known before
            raise no_column(where, self._column, row)
        text = row.pop(self._column)
        if text is not None and not isinstance(text, str):
            raise not_text(where, self._column, f"a {type(text).__name__}")
        return Row(text or "", as_json(row, self._left_out))

    def _choose_columns(self, features: Any) -> None:
        if features is None:
            return
        if self._column not in features:
            raise no_column(self.name, self._column, list(features))
        kind = getattr(features[self._column], "dtype", type(features[self._column]).__name__.lower())
        if kind not in ("string", "large_string", "null"):
            raise not_text(self.name, self._column, str(kind))
        binary = [column for column, feature in features.items() if _holds_bytes(feature)]
        if binary:
            self._rows = self._rows.remove_columns(binary)
            self._left_out.update(f"column {column} (bytes)" for column in binary)


# Helpers


@dataclass(frozen=True)
class _Asked:
    name: str
    config: str | None
    split: str
    revision: str | None


def _library() -> Any:
    """Import ``datasets`` with its progress bars and telemetry off."""
    # Read when the libraries are imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        import datasets
        import huggingface_hub
    except ImportError:
        raise RungError("the library datasets is not installed", "pip install 'rung[hub]'") from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors come back as exceptions
    huggingface_hub.logging.set_verbosity_error()  # not a line for each try
    return datasets


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _files(builder: Any, split: str) -> list[dict[str, str]]:
    """Return the files of a split and what tells their versions: commits or ETags, for local files their times."""
    data_files = builder.config.data_files or {}
    name = split.partition("[")[0]
    chosen = {name: data_files[name]} if name in data_files else data_files
    found = []
    for files in chosen.values():
        versions = getattr(files, "origin_metadata", ())
        for place, file in enumerate(files):
            version = "-".join(map(str, versions[place])) if place < len(versions) else ""
            found.append({"name": str(file).removeprefix(f"{builder.base_path}/"), "version": version})
    return found


def _holds_bytes(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(map(_holds_bytes, feature.values()))
    if isinstance(feature, list | tuple):
        return any(map(_holds_bytes, feature))
    if type(feature).__name__ in ("Image", "Audio", "Video", "Pdf", "Nifti", "Mesh"):
        return True
    if hasattr(feature, "feature"):  # a list of it
        return _holds_bytes(feature.feature)
    return str(getattr(feature, "dtype", "")) in ("binary", "large_binary")


# What went wrong, in our words


def _told(error: Exception, asked: _Asked) -> RungError:
    """Return what an error of the library's comes to while a data set is opened; one that is none of ours is raised."""
    import datasets

    name = asked.name
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return _not_found(str(error), asked)
    if _is_network(error):
        return _no_network(name)
    if isinstance(error, datasets.data_files.EmptyDatasetError | datasets.exceptions.DataFilesNotFoundError):
        return RungError(f"{name} has no data files", "look at what is in it: JSON lines, Parquet, CSV or text files")
    if "scripts are no longer supported" in str(error):
        return RungError(f"{name} is a program that makes data", "ask for it as files, or make them with another tool")
    if type(error) is ValueError:
        return _no_config_or_split(error, asked)
    if isinstance(error, datasets.exceptions.DatasetsError | OSError | ValueError):
        hint = "look at its files: all of one config are of one format, and have the same columns"
        return RungError(f"{name} cannot be read: {_root(error)}", hint)
    raise error


def _not_found(message: str, asked: _Asked) -> RungError:
    name = asked.name
    if "gated" in message:
        hint = f"ask for access at {_PAGE}/{name}, and log in: hf auth login"
        return RungError(f"{name} is gated: its owner gives access by name", hint)
    if "evision" in message:
        return RungError(
            f"{name} has no revision {asked.revision!r}", f"its branches and tags are at {_PAGE}/{name}/tree"
        )
    hint = "look at the spelling, owner/name; a private one needs a login: hf auth login"
    return RungError(f"no data set {name} on the Hub, or none that you may see", hint)


def _no_config_or_split(error: Exception, asked: _Asked) -> RungError:
    import datasets

    name, split = asked.name, asked.split.partition("[")[0]
    try:
        configs = datasets.get_dataset_config_names(name, revision=asked.revision)
        if asked.config is None and len(configs) > 1 and "default" not in configs:
            return RungError(f"{name} has several configs, and none is named", f"--config {_one_of(configs)}")
        if asked.config is not None and asked.config not in configs:
            return RungError(f"{name} has no config {asked.config!r}", _nearest(asked.config, configs))
        splits = datasets.get_dataset_split_names(name, asked.config, revision=asked.revision)
    except (ValueError, OSError, datasets.exceptions.DatasetsError):
        return RungError(f"{name} cannot be read: {_root(error)}", "look at its README.md and its files")
    if split not in splits:
        of_config = f" of config {asked.config!r}" if asked.config else ""
        return RungError(f"{name} has no split {split!r}{of_config}", _nearest(split, splits))
    if split != asked.split:
        hint = "take it without --streaming, or the whole split with --documents N"
        return RungError(f"{name}: a part of a split, {asked.split!r}, cannot be read like this", hint)
    return RungError(f"{name} cannot be read: {_root(error)}", "look at its README.md and its files")


def _told_of_row(error: Exception, name: str, number: int) -> RungError:
    import datasets

    if _is_network(error):
        return RungError(f"{name}: the network went away after row {number:,}: {_root(error)}", _GO_ON)
    if isinstance(error, datasets.exceptions.DatasetsError | OSError | ValueError):
        return RungError(f"{name}, after row {number:,}: {_root(error)}", "look at its files, or take another revision")
    raise error


def _is_network(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, is of the network."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    network = (ConnectionError, TimeoutError, httpx.TransportError, LocalEntryNotFoundError, OfflineModeIsEnabled)
    while error is not None:
        if isinstance(error, network) or (isinstance(error, HfHubHTTPError) and _is_servers(error)):
            return True
        error = error.__cause__
    return False


def _is_servers(error: Any) -> bool:
    response = getattr(error, "response", None)
    return response is not None and response.status_code >= 500


def _no_network(name: str) -> RungError:
    import datasets

    if datasets.config.HF_HUB_OFFLINE:
        problem = f"{name} is not in the cache, and HF_HUB_OFFLINE forbids the network"
        return RungError(problem, "unset HF_HUB_OFFLINE, or name a folder that holds the data set")
    hint = "look at the network and its proxy; or name a folder that holds the data set"
    return RungError(f"the Hub does not answer, and {name} is not in the cache", hint)


def _nearest(name: str, known: Sequence[str]) -> str:
    return nearest(name, known).replace("known names:", "there are")


def _one_of(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
