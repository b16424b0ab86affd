"""Flags from the config tree: every setting by its path, and the mistakes in them as our two lines."""

from __future__ import annotations

import argparse
import json
import re
import sys
import typing
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from rung import config as settings
from rung.config import Config, Setting
from rung.errors import RungError, nearest

SHORT_NAMES = {
    "encoding": "data.encoding",
    "separator": "data.separator",
    "validation": "data.validation",
    "tokenizer": "tokenizer.file",
    "vocab-size": "tokenizer.vocab_size",
    "context-length": "model.context_length",
    "seed": "train.seed",
    "steps": "train.steps",
    "tokens": "train.tokens",
    "epochs": "train.epochs",
    "batch-size": "train.batch_size",
    "learning-rate": "train.learning_rate",
    "dtype": "model.compute_dtype",
}
"""Short flags for common settings."""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is a ``RungError`` with the nearest flag as its hint."""

    def __init__(self, command: str, description: str, **rest: Any):
        super().__init__(
            prog=f"rung {command}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **rest,
        )
        self.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")

    def parse_args(self, arguments: Any = None, namespace: Any = None) -> Any:
        """Parse; unlike argparse's own, flags may stand between positional arguments."""
        parsed, rest = self.parse_known_intermixed_args(arguments, namespace)
        for word in rest:
            if word.startswith("-") and word != "-":
                flag = word.split("=")[0]
                raise RungError(f"unknown flag {flag}", nearest(flag, self._option_string_actions))
        if rest:
            raise RungError(f"too many arguments: {' '.join(rest)}", f"see {self.prog} --help")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and exiting."""
        raise RungError(message.replace("the following arguments are required:", "missing"), f"see {self.prog} --help")


def add_settings(
    parser: argparse.ArgumentParser, cls: type = Config, short_names: Mapping[str, str] = SHORT_NAMES
) -> None:
    """Add a flag for every setting of a config class, in a group for each part of the tree."""
    short_of = {path: short for short, path in short_names.items()}
    groups: dict[str, Any] = {}
    for path, declared in settings.fields(cls):
        part = path.rpartition(".")[0]
        if part not in groups:
            groups[part] = parser.add_argument_group(f"{part} settings" if part else "settings")
        flags = [f"--{path.replace('_', '-')}"]
        if path in short_of:
            flags.insert(0, f"--{short_of[path]}")
        known: Setting = declared.metadata["setting"]
        kind = settings.field_type(cls, path)
        groups[part].add_argument(
            *flags,
            dest=path,
            default=None,
            metavar=_metavar(kind, known),
            help=_help(known, declared.default),
            **_arity(kind),
        )


def given_settings(parsed: argparse.Namespace, cls: type = Config) -> dict[str, Any]:
    """Return ``{path: value}`` of the settings that were given as flags, in the types of their fields.

    Raises:
        RungError: a value that is not of its field's type.
    """
    given = {path: getattr(parsed, path) for path, _ in settings.fields(cls)}
    return {
        path: _typed(f"--{path.replace('_', '-')}", settings.field_type(cls, path), value)
        for path, value in given.items()
        if value is not None
    }


def parse_mesh(text: str) -> dict[str, Any]:
    """Return ``{"mesh.data": 2}`` of ``"data=2"``.

    Raises:
        RungError: not in that form, or an axis that there is not.
    """
    axes = {path.removeprefix("mesh."): path for path, _ in settings.fields(Config) if path.startswith("mesh.")}
    changes = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in axes:
            raise RungError(f"--mesh {text}: unknown axis {axis!r}", nearest(axis, axes))
        changes[axes[axis]] = _typed(f"--mesh {axis}", int, size)
    return changes


def print_result(result: Mapping[str, Any], as_json: bool, text: str) -> None:
    """Print a command's result: the text for people, or with ``--json`` one JSON object on one line."""
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    elif text:
        print(text)
    sys.stdout.flush()


def say(text: str) -> None:
    """Print a message for the person, beside the result: on standard error."""
    print(text, file=sys.stderr, flush=True)


# Helpers


def _metavar(kind: Any, known: Setting) -> str:
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    if kind is bool:
        return "{true,false}"
    return known.unit.upper().rstrip("S") or {int: "N", float: "X", str: "TEXT"}.get(kind, "TEXT")


def _help(known: Setting, default: Any) -> str:
    if isinstance(default, tuple):
        default = " ".join(default)
    shown = f" (default: {default})" if default not in ("", ()) else ""
    return f"{known.help}{shown}".replace("%", "%%")


def _arity(kind: Any) -> dict[str, Any]:
    if kind is bool:
        return {"nargs": "?", "const": "true"}
    if typing.get_origin(kind) is tuple:
        return {"action": "append"}
    return {}


def _typed(flag: str, kind: Any, text: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        return tuple(_typed(flag, typing.get_args(kind)[0], one) for one in text)
    if kind is bool:
        values = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
        if text.lower() not in values:
            raise RungError(f"{flag} is {text!r}, not true or false", f"write {flag} true or {flag} false")
        return values[text.lower()]
    if kind is int:
        # 1e6 and 3_000 are how people write large whole numbers.
        if not re.fullmatch(r"[+-]?\d[\d_]*(\.\d+)?(e\+?\d+)?", text, re.IGNORECASE) or float(text) != int(float(text)):
            raise RungError(f"{flag} is {text!r}, not a whole number", f"write {flag} as in {flag} 100")
        return int(text) if re.fullmatch(r"[+-]?[\d_]+", text) else int(float(text))
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise RungError(f"{flag} is {text!r}, not a number", f"write {flag} as in {flag} 0.1") from None
    return text
