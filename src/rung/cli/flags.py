"""Flags from the config tree: every setting by its path, and the mistakes in them as our two lines."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

from rung import config as settings
from rung.config import Config, Setting
from rung.errors import RungError, nearest
from rung.setting import check_bounds

SHORT_NAMES = {
    "encoding": "data.encoding",
    "format": "data.format",
    "text-column": "data.text_column",
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
    """argparse, but a mistake is a ``RungError`` with the nearest flag as its hint, and text may begin with a dash."""

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
        """Parse; unlike argparse's own, flags may stand between positional arguments.

        Words after ``--`` are text, and so is a word with a single dash, as ``-hello``: all flags but ``-h`` have two.
        A flag whose value may be left out takes the next word only where that can be its value.
        """
        words = sys.argv[1:] if arguments is None else arguments
        parsed, rest = self.parse_known_intermixed_args(list(self._marked(words)), namespace)
        for word in rest:
            if word.startswith("--"):
                flag = word.split("=")[0]
                raise RungError(f"unknown flag {flag}", nearest(flag, self._option_string_actions))
        if rest:
            hint = "after -- all words are text: put flags before it" if "--" in words else f"see {self.prog} --help"
            raise RungError(f"too many arguments: {' '.join(rest).replace(_MARK, '')}", hint)
        flags = [word.split("=")[0] for word in words]
        actions = self._option_string_actions
        parsed.typed_as = {actions[flag].dest: flag for flag in flags if flag in actions}  # a setting has two names
        for name, value in vars(parsed).items():
            if isinstance(value, list):
                setattr(parsed, name, [one.removeprefix(_MARK) for one in value])
            elif isinstance(value, str):
                setattr(parsed, name, value.removeprefix(_MARK))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and exiting."""
        problem = message.replace(_MARK, "").replace("the following arguments are required:", "missing")
        raise RungError(problem, f"see {self.prog} --help")

    def _marked(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the words, each that is text although it begins with a dash with a mark before it."""
        for place, word in enumerate(words):
            if word == "--":
                yield from (_MARK + text for text in words[place + 1 :])
                return
            action = self._option_string_actions.get(word)
            following = words[place + 1] if place + 1 < len(words) else ""
            if action is not None and action.nargs == "?" and not _OPTIONAL_VALUE.fullmatch(following):
                yield f"{word}={action.const}"
            elif word.startswith("--") and word.endswith("=--"):  # which argparse would drop
                yield f"{word[:-2]}{_MARK}--"
            elif action is None and re.match("-[^-]", word):
                yield _MARK + word
            else:
                yield word


def add_settings(
    parser: argparse.ArgumentParser,
    cls: type = Config,
    short_names: Mapping[str, str] = SHORT_NAMES,
    only: Collection[str] | None = None,
) -> None:
    """Add a flag for every setting of a config class (or those of ``only``), in a group for each part of the tree."""
    short_of = {path: short for short, path in short_names.items()}
    groups: dict[str, Any] = {}
    for path, declared in settings.fields(cls):
        if only is not None and path not in only:
            continue
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
        RungError: a value that is not of its field's type, or out of its bounds; two flags of which one would do
            nothing.
    """
    given = {}
    typed_as = getattr(parsed, "typed_as", {})
    for path, declared in settings.fields(cls):
        text = getattr(parsed, path, None)
        if text is not None:
            flag = typed_as.get(path, f"--{path.replace('_', '-')}")
            given[path] = typed(flag, settings.field_type(cls, path), text, is_path=path in _PATHS)
            check_bounds(flag, declared.metadata["setting"], given[path], "")
    if given.get("data.validation") and "data.validation_fraction" in given:
        flags = " and ".join(
            typed_as.get(path, f"--{path.replace('_', '-')}")
            for path in ("data.validation", "data.validation_fraction")
        )
        raise RungError(f"both {flags} are given", "keep one of them")
    return given


def typed(flag: str, kind: Any, text: Any, *, is_path: bool = False) -> Any:
    """Return the value of a flag in the type of its setting.

    Raises:
        RungError: it is not of that type.
    """
    if typing.get_origin(kind) is tuple:
        return tuple(typed(flag, typing.get_args(kind)[0], one, is_path=is_path) for one in text)
    if typing.get_origin(kind) is Literal and all(isinstance(one, str) for one in typing.get_args(kind)):
        if text not in typing.get_args(kind):
            raise RungError(f"{flag} is {text!r}", nearest(text, typing.get_args(kind)))
        return text
    if kind is bool:
        values = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
        if text.lower() not in values:
            raise RungError(f"{flag} is {text!r}, not true or false", f"write {flag} true or {flag} false")
        return values[text.lower()]
    if kind is int:
        return _whole_number(flag, text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise RungError(f"{flag} is {text!r}, not a number", f"write {flag} as in {flag} 0.1") from None
    return text if is_path else as_text(flag, text)


def as_text(name: str, argument: str) -> str:
    """Return a word of the command line as the UTF-8 that it is, whatever the locale took its bytes for.

    Raises:
        RungError: it is not UTF-8, nor text of the locale.
    """
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeDecodeError as error:
        if not any("\udc80" <= letter <= "\udcff" for letter in argument):
            return argument
        byte = error.object[error.start]
        problem = f"{name} is not UTF-8: byte 0x{byte:02x} at offset {error.start}"
        raise RungError(problem, "give it on standard input, converted with iconv -t UTF-8") from None
    except UnicodeEncodeError:  # a caller's text, that the locale could not have given
        return argument


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
        changes[axes[axis]] = typed(f"--mesh {axis}", int, size)
    return changes


def print_result(result: Mapping[str, Any], as_json: bool, text: str) -> None:
    """Print a command's result: the text for people, or with ``--json`` one JSON object on one line.

    JSON has no NaN and no infinity: such a value is ``null``, and ``not_finite`` says which it was, by its key.
    """
    if as_json:
        odd = {key: value for key, value in result.items() if isinstance(value, float) and not math.isfinite(value)}
        if odd:
            told = {key: repr(float(value)) for key, value in odd.items()}
            result = {**result, "not_finite": told}
        # In ASCII, so that no reader's encoding matters, nor what it takes for the end of a line.
        print(json.dumps(_finite(result), allow_nan=False))
    elif text:
        print(text)
    sys.stdout.flush()


def say(text: str) -> None:
    """Print a message for the person, beside the result: on standard error."""
    print(text, file=sys.stderr, flush=True)


def standard_input() -> str:
    """Return all of standard input as text.

    Raises:
        RungError: it is not UTF-8.
    """
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"standard input: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8"
        raise RungError(problem, "convert it, as with iconv -t UTF-8") from None


# Helpers

_MARK = "\0text\0"  # no word of a command line has a NUL
_OPTIONAL_VALUE = re.compile("true|false|yes|no|[0-9]+", re.IGNORECASE)
_PATHS = ("tokenizer.file", "data.validation")  # their bytes are the file system's, not text


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


def _finite(value: Any) -> Any:
    """Return ``value`` with ``None`` for each number in it that is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole_number(flag: str, text: str) -> int:
    # 1e6 and 3_000 are how people write large whole numbers.
    if re.fullmatch(r"[+-]?\d+(_\d+)*", text):
        return int(text)
    if re.fullmatch(r"[+-]?\d+(_\d+)*(\.\d+)?(e\+?\d+)?", text, re.IGNORECASE):
        number = float(text)
        if math.isfinite(number) and number == int(number):
            return int(number)
    raise RungError(f"{flag} is {text!r}, not a whole number", f"write {flag} as in {flag} 100")
