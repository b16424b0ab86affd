"""Devices: the mesh of named axes, and the rules from a weight's logical axes to mesh axes."""

from __future__ import annotations

from rung.mesh.devices import make_mesh
from rung.mesh.rules import batch_sharding, replicated, sharding

__all__ = ["batch_sharding", "make_mesh", "replicated", "sharding"]
