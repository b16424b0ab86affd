"""The rules: which mesh axis each logical axis is split over. One small table decides every sharding."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: dict[str, str] = {"batch": "data"}
"""Mesh axis of each logical axis. Logical axes that are not named here are whole on every device."""


def sharding(mesh: Mesh, axes: Sequence[str]) -> NamedSharding:
    """Return the sharding of an array whose dimensions have these logical names."""
    return NamedSharding(mesh, PartitionSpec(*(RULES.get(axis) for axis in axes)))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch [B, ...]: rows split over the data axis."""
    return sharding(mesh, ("batch",))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return sharding(mesh, ())
