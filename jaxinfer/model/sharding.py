"""Which axis of which array is divided over which axis of the mesh ("data", "model").

One table from logical axes to mesh axes. An axis that does not divide is replicated: 3 KV heads on 2 devices, for one.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding, PartitionSpec

LOGICAL_TO_MESH = {
    "vocab": "model",
    "kv_heads": "model",
    "mlp": "model",
    "tokens": "data",
}


@dataclass(frozen=True)
class MeshRules:
    """A mesh and the table applied to it."""

    mesh: Mesh

    def spec(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
        """Partition of an array whose dimensions have these logical axes."""
        parts = []
        for size, axis in zip(shape, axes, strict=True):
            mesh_axis = LOGICAL_TO_MESH.get(axis) if axis else None
            divides = mesh_axis is not None and size % self.mesh.shape[mesh_axis] == 0
            parts.append(mesh_axis if divides else None)
        return PartitionSpec(*parts)

    def sharding(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> NamedSharding:
        """The same as a sharding of concrete arrays."""
        return NamedSharding(self.mesh, self.spec(shape, axes))

    @property
    def replicated(self) -> NamedSharding:
        """Every device holds the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())
