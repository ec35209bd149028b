"""Which axis of which array is divided over which axis of the mesh ("data", "model").

One table from logical axes to mesh axes. An axis of a matrix may hold units of several values each, which stay whole (a
KV head's columns), and several members one after another, of which each device needs the same share (gate and up):

    columns as read     g0 g1 g2 g3 u0 u1 u2 u3
    dealt to 2 devices  g0 g1 u0 u1|g2 g3 u2 u3

So matrices have two dimensions, are divided along one, and are never reshaped: a reshape that no sharding can express
would put all weights together again in every dispatch. An axis whose units do not divide is replicated: 3 KV heads on 2
devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LOGICAL_TO_MESH = {
    "vocab": "model",
    "kv_heads": "model",
    "mlp": "model",
    "tokens": "data",
}


class PackedAxis(NamedTuple):
    """An axis of num_members * num_units * (some size) values.

    Attributes:
      name: a key of LOGICAL_TO_MESH.
      num_units: of each member; never split.
      num_members: arrays side by side, dealt to the devices together.
    """

    name: str
    num_units: int
    num_members: int = 1


# A name alone is an axis of one unit per index; None is never divided.
Axis = str | PackedAxis | None


@dataclass(frozen=True)
class MeshRules:
    """A mesh and the table applied to it."""

    mesh: Mesh

    def num_parts(self, name: str, num_units: int) -> int:
        """Devices that a logical axis is divided over; 1 where it is replicated."""
        mesh_axis = LOGICAL_TO_MESH.get(name)
        size = self.mesh.shape[mesh_axis] if mesh_axis else 1
        return size if num_units % size == 0 else 1

    def spec(self, shape: tuple[int, ...], axes: tuple[Axis, ...]) -> PartitionSpec:
        """Partition of an array whose dimensions have these logical axes."""
        parts = []
        for size, axis in zip(shape, axes, strict=True):
            name, num_units, num_members = _packed(axis, size)
            assert size % (num_units * num_members) == 0, (size, axis)
            mesh_axis = LOGICAL_TO_MESH.get(name)
            divides = mesh_axis is not None and num_units % self.mesh.shape[mesh_axis] == 0
            parts.append(mesh_axis if divides else None)
        return PartitionSpec(*parts)

    def sharding(self, shape: tuple[int, ...], axes: tuple[Axis, ...]) -> NamedSharding:
        """The same as a sharding of concrete arrays."""
        return NamedSharding(self.mesh, self.spec(shape, axes))

    def deal(self, value: np.ndarray, axes: tuple[Axis, ...]) -> np.ndarray:
        """An array as read, with the members of its axes in the order in which devices hold them."""
        for i, axis in enumerate(axes):
            name, num_units, num_members = _packed(axis, value.shape[i])
            parts = self.num_parts(name, num_units)
            if num_members > 1 and parts > 1:
                outer, inner = value.shape[:i], value.shape[i + 1 :]
                dealt = value.reshape(*outer, num_members, parts, -1, *inner).swapaxes(i, i + 1)
                value = dealt.reshape(value.shape)
        return value

    @property
    def replicated(self) -> NamedSharding:
        """Every device holds the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())


def _packed(axis: Axis, size: int) -> PackedAxis:
    return axis if isinstance(axis, PackedAxis) else PackedAxis(axis or "", size)
