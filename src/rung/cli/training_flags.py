"""The flags that say what to train: a preset or a config file, overrides of any setting, the mesh."""

from __future__ import annotations

import argparse
import re
from typing import Any

from rung import config as settings
from rung.cli.flags import add_settings, given_settings, parse_mesh
from rung.config import Config
from rung.errors import RungError


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--preset``, ``--config``, ``--mesh`` and a flag for every setting."""
    parser.add_argument("--preset", metavar="NAME", help=f"start from a preset: {', '.join(settings.preset_names())}")
    parser.add_argument("--config", metavar="FILE", help="start from a TOML file, such as a run's config.toml")
    add_mesh_flag(parser)
    add_settings(parser)


def add_mesh_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--mesh``."""
    parser.add_argument("--mesh", metavar="AXES", help="devices by axis, as data=2")


def add_running_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--time-limit`` and ``--profile``."""
    parser.add_argument(
        "--time-limit", metavar="TIME", help="stop, saved, after this long: seconds, or as 90m, 2h, 1h30m, 1d12h"
    )
    parser.add_argument("--profile", metavar="FIRST:LAST", help="write a profiler trace of these steps")


def time_limit_of(parsed: argparse.Namespace) -> float | None:
    """Return the seconds of ``--time-limit``; ``None`` where it was not given.

    Raises:
        RungError: it is no time, or none at all.
    """
    text = parsed.time_limit
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip().lower())
    if not text.strip() or match is None:
        raise RungError(f"--time-limit is {text!r}, not a time", "write seconds, or as in --time-limit 1h30m")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    limit = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if limit <= 0:
        raise RungError(f"--time-limit is {text!r}, no time at all", "leave it out for none")
    return limit


def profiled_steps(parsed: argparse.Namespace) -> tuple[int, int] | None:
    """Return the first and the last step of ``--profile``; ``None`` where it was not given.

    Raises:
        RungError: it is not ``FIRST:LAST``.
    """
    if parsed.profile is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", parsed.profile)
    if not match or int(match[1]) > int(match[2]):
        raise RungError(f"--profile is {parsed.profile!r}, not FIRST:LAST", "write --profile 10:20 for steps 10 to 20")
    return int(match[1]), int(match[2])


def base_of(parsed: argparse.Namespace) -> Config | None:
    """Return the preset or file that the flags name; ``None`` where they name neither."""
    if parsed.preset and parsed.config:
        raise RungError("both --preset and --config are given", "keep one of them; flags override either")
    if parsed.preset:
        return settings.preset(parsed.preset)
    return settings.load(parsed.config) if parsed.config else None


def changes_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return ``{path: value}`` of all settings given as flags."""
    given, mesh = given_settings(parsed), parse_mesh(parsed.mesh) if parsed.mesh else {}
    for path in given.keys() & mesh.keys():
        raise RungError(f"both --mesh and --{path} are given", "keep one of them")
    return given | mesh
