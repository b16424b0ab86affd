"""The flags that say what to train: a preset or a config file, overrides of any setting, the mesh."""

from __future__ import annotations

import argparse
from typing import Any

from rung import config as settings
from rung.cli.flags import add_settings, given_settings, parse_mesh
from rung.config import Config
from rung.errors import RungError


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--preset``, ``--config``, ``--mesh`` and a flag for every setting."""
    parser.add_argument("--preset", metavar="NAME", help=f"start from a preset: {', '.join(settings.preset_names())}")
    parser.add_argument("--config", metavar="FILE", help="start from a TOML file, such as a run's config.toml")
    parser.add_argument("--mesh", metavar="AXES", help="devices by axis, as data=2")
    add_settings(parser)


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
