"""The mesh and its rules, on four emulated devices; and in programs of their own, where jax has not begun."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from rung.config import MeshConfig
from rung.errors import RungError
from rung.mesh import batch_sharding, make_mesh, replicated, sharding


def test_rows_are_split_and_nothing_else_is():
    mesh = make_mesh(MeshConfig(data=4))
    rows = jax.device_put(np.arange(24).reshape(8, 3), batch_sharding(mesh))
    assert [shard.data.shape for shard in rows.addressable_shards] == [(2, 3)] * 4
    assert np.array_equal(np.concatenate([s.data for s in rows.addressable_shards]), np.arange(24).reshape(8, 3))
    for whole in (replicated(mesh), sharding(mesh, ("vocab", "embed"))):
        copies = jax.device_put(np.arange(24).reshape(8, 3), whole).addressable_shards
        assert [copy.data.shape for copy in copies] == [(8, 3)] * 4


def test_a_part_of_the_devices_can_be_used():
    mesh = make_mesh(MeshConfig(data=2))
    assert list(mesh.devices.flat) == jax.devices()[:2]
    assert mesh.axis_names == ("data",)


def test_too_few_devices_are_named():
    with pytest.raises(RungError, match="mesh data=5 needs 5 devices, and there are 4") as error:
        make_mesh(MeshConfig(data=5))
    assert "--mesh data=4" in error.value.hint


@pytest.mark.parametrize("flags", ["", "--xla_force_host_platform_device_count=3"])
def test_devices_are_emulated_where_none_were_asked_for(flags):
    program = (
        "from rung.config import MeshConfig; from rung.mesh import make_mesh; print(make_mesh(MeshConfig(data=3)).size)"
    )
    environment = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "3\n", done.stderr
