"""What a setting is: a field of a dataclass with help, unit and bounds; settings by path, and the check of a value."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rung.errors import RungError, nearest

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Setting:
    """What is known of one field beyond its type and default; kept in the dataclass field's metadata."""

    help: str
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False  # the bound itself is excluded
    open_high: bool = False


def setting(default: Any, help: str, **rest: Any) -> Any:
    """Declare a config field: its default, its help text, and the keywords of ``Setting``."""
    return field(default=default, metadata={"setting": Setting(help, **rest)})


def fields(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """Yield ``(path, field)`` of each setting in a config class, sub-configs included, in order."""
    for f in dataclasses.fields(cls):
        if isinstance(f.default, tuple) or not dataclasses.is_dataclass(f.default):
            yield prefix + f.name, f
        else:
            yield from fields(type(f.default), f"{prefix}{f.name}.")


def field_type(cls: type, path: str) -> Any:
    """Return the resolved type of the setting at ``path`` within ``cls``."""
    *parents, name = path.split(".")
    for parent in parents:
        cls = typing.get_type_hints(cls)[parent]
    return typing.get_type_hints(cls)[name]


def value_at(config: Any, path: str) -> Any:
    """Return the value of the setting at ``path``."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(path, value)`` of everything in nested dicts that is no dict."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def replaced(node: Any, path: list[str], value: Any) -> Any:
    """Return a dataclass with the value at ``path``, a list of names, put in the old one's place."""
    if len(path) > 1:
        value = replaced(getattr(node, path[0]), path[1:], value)
    return dataclasses.replace(node, **{path[0]: value})


def to_dict(config: Any) -> dict[str, Any]:
    """Return the config as nested dicts of plain values, ready for TOML or JSON."""
    return {
        f.name: to_dict(value)
        if dataclasses.is_dataclass(value)
        else list(value)
        if isinstance(value, tuple)
        else value
        for f in dataclasses.fields(config)
        for value in [getattr(config, f.name)]
    }


def check_value(path: str, kind: Any, value: Any, where: str) -> Any:
    """Return ``value`` converted to ``kind`` (a config field's type) where nothing is lost by it.

    Raises:
        RungError: the value is of another type, or not among the choices.
    """
    origin = typing.get_origin(kind)
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise RungError(
                f"{where}: {path} is {value!r}",
                nearest(str(value), choices) if isinstance(value, str) else f"one of {choices}",
            )
        return value
    if origin is tuple:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list | tuple):
            raise RungError(f"{where}: {path} is {value!r}, not a list", f"write {path.split('.')[-1]} = [...]")
        return tuple(check_value(path, typing.get_args(kind)[0], one, where) for one in values)
    assert not isinstance(kind, types.UnionType), f"{path}: a config field has one type"
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise RungError(f"{where}: {path} is {value!r}, not {_TYPE_NAMES[kind]}", f"give {path} {_TYPE_NAMES[kind]}")
    return value


def check_bounds(path: str, bounds: Setting, value: Any, where: str) -> None:
    """Raise a RungError when a number is outside the setting's bounds, or not a number at all.

    ``where`` says what the setting is in, as a file; it is empty where ``path`` is a flag, which needs no more.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low_ok = value > bounds.low if bounds.open_low else value >= bounds.low
    high_ok = value < bounds.high if bounds.open_high else value <= bounds.high
    if not (low_ok and high_ok) or not math.isfinite(value):
        limits = []
        if bounds.low > -math.inf:
            limits.append(f"{'over' if bounds.open_low else 'at least'} {bounds.low:,.10g}")
        if bounds.high < math.inf:
            limits.append(f"{'below' if bounds.open_high else 'at most'} {bounds.high:,.10g}")
        named = f"{where}: {path}" if where else path
        finite = [] if math.isfinite(value) and limits else ["finite"]
        raise RungError(f"{named} is {value}", f"it must be {' and '.join(finite + limits)}")
