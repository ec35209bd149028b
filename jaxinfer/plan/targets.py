"""The chips that programs can be compiled for, by name, and the published figures that predictions rest on.

    v5e        v5e:2x4        tpu7x:2x2x1        h200        h200:8        cpu
    chip       chip:topology (chips)             chip        chip:GPUs     this machine's own devices

Everything here is per device, which is what jax calls a device: one chip, but half a chip of a tpu7x. Compiling needs
the vendor's compiler (libtpu, or jax's CUDA plugin), never the chip. No program is compiled here.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import re
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxinfer.config import gpu_memory_ratio, prepare_tpu_compiler
from jaxinfer.errors import ConfigError
from jaxinfer.step.memory import free_bytes

GB, GIB, TERA = 10**9, 1 << 30, 10**12
INSTALL = {
    "tpu": 'compiling for {name} needs libtpu, which is not installed; run: pip install "jaxinfer[aot]" '
    '(or: pip install "jax[tpu]")',
    "gpu": "compiling for {name} needs jax's CUDA plugin and NVIDIA's compiler, which are not installed; run: "
    'pip install "jaxinfer[aot]" (or, at the version of jax: pip install jax-cuda13-plugin jax-cuda13-pjrt '
    "nvidia-cuda-nvcc nvidia-nvvm)",
}


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device of a kind, in its vendor's figures.

    Attributes:
      name: as in a target's name.
      title: as its vendor calls it.
      platform: "tpu", "gpu" or "cpu".
      kinds: jax's names of such devices.
      memory_bytes: published; of one device.
      usable_bytes: what the compiler or the driver leaves of it to programs; None where it is not known beforehand.
      bytes_per_s: of its memory.
      flops_per_s: of dense products, by the dtype they are computed in.
      link_bytes_per_s: to the other chips together, one direction.
      source: where the figures are from.
      devices_per_chip: devices that jax makes of one chip.
      num_dims: of its topologies; 0 where chips are only counted.
      host_chips: most chips that one machine holds.
    """

    name: str
    title: str
    platform: str
    kinds: tuple[str, ...]
    memory_bytes: int
    usable_bytes: int | None
    bytes_per_s: float | None
    flops_per_s: dict[str, float] = field(hash=False)
    link_bytes_per_s: float | None
    source: str
    devices_per_chip: int = 1
    num_dims: int = 0
    host_chips: int = 8

    def peak(self, dtype: str) -> tuple[float, str] | None:
        """(FLOP/s, dtype computed in) of products of this dtype; a dtype without units of its own computes wider."""
        for name in (dtype, "bfloat16", "float32"):
            if name in self.flops_per_s:
                return self.flops_per_s[name], name
        return None


def _tpu(name: str, title: str, kind: str, bf16: float, **more: Any) -> Chip:
    # float32 products at jax's default precision are one bfloat16 pass; the engine's keep float32, which takes six.
    rates = {"float32": bf16 / 6, "bfloat16": bf16} | more.pop("rates", {})
    return Chip(name=name, title=title, platform="tpu", kinds=(kind,), flops_per_s=rates, **more)


def _hopper(name: str, title: str, **more: Any) -> Chip:
    rates = {"float32": 67 * TERA, "bfloat16": 989.5 * TERA, "int8": 1979 * TERA, "float8_e4m3fn": 1979 * TERA}
    return Chip(name=name, title=title, platform="gpu", flops_per_s=rates, link_bytes_per_s=450 * GB, **more)


_TPU_DOCS = "https://docs.cloud.google.com/tpu/docs/"
# The usable bytes of TPUs are the limit that libtpu 0.0.42's compiler states when a program is too large; those of GPUs
# are the device_memory_size of XLA's own descriptions.
CHIPS: tuple[Chip, ...] = (
    _tpu(
        "v4",
        "TPU v4",
        "TPU v4",
        275 * TERA,
        rates={"int8": 275 * TERA},
        memory_bytes=32 * GIB,
        usable_bytes=int(30.75 * GIB),
        bytes_per_s=1200 * GB,
        link_bytes_per_s=300 * GB,
        source=_TPU_DOCS + "v4",
        num_dims=3,
        host_chips=4,
    ),
    _tpu(
        "v5e",
        "TPU v5e",
        "TPU v5 lite",
        197 * TERA,
        rates={"int8": 393 * TERA},
        memory_bytes=16 * GIB,
        usable_bytes=int(15.75 * GIB),
        bytes_per_s=819 * GB,
        link_bytes_per_s=200 * GB,
        source=_TPU_DOCS + "v5e",
        num_dims=2,
    ),
    _tpu(
        "v5p",
        "TPU v5p",
        "TPU v5",
        459 * TERA,
        rates={"int8": 918 * TERA},
        memory_bytes=95 * GIB,
        usable_bytes=int(95.74 * GIB),
        bytes_per_s=2765 * GB,
        link_bytes_per_s=600 * GB,
        source=_TPU_DOCS + "v5p",
        num_dims=3,
        host_chips=4,
    ),
    _tpu(
        "v6e",
        "TPU v6e",
        "TPU v6 lite",
        918 * TERA,
        rates={"int8": 1836 * TERA},
        memory_bytes=32 * GIB,
        usable_bytes=int(31.25 * GIB),
        bytes_per_s=1640 * GB,
        link_bytes_per_s=400 * GB,
        source=_TPU_DOCS + "v6e",
        num_dims=2,
    ),
    _tpu(
        "tpu7x",
        "TPU7x (half a chip)",
        "TPU7x",
        2307 / 2 * TERA,
        rates={"float8_e4m3fn": 4614 / 2 * TERA},
        memory_bytes=96 * GIB,
        usable_bytes=int(94.75 * GIB),
        bytes_per_s=7380 / 2 * GB,
        link_bytes_per_s=600 / 2 * GB,
        source=_TPU_DOCS + "tpu7x",
        devices_per_chip=2,
        num_dims=3,
        host_chips=4,
    ),
    _hopper(
        "h100",
        "NVIDIA H100 SXM",
        kinds=("NVIDIA H100 80GB HBM3",),
        memory_bytes=80 * GB,
        usable_bytes=84_929_347_584,
        bytes_per_s=3350 * GB,
        source="https://www.nvidia.com/en-us/data-center/h100/",
    ),
    _hopper(
        "h200",
        "NVIDIA H200 SXM",
        kinds=("NVIDIA H200",),
        memory_bytes=141 * GB,
        usable_bytes=150_110_011_392,
        bytes_per_s=4800 * GB,
        source="https://www.nvidia.com/en-us/data-center/h200/",
    ),
)
CHIP_NAMES = (*(chip.name for chip in CHIPS), "cpu")

_HOPPER_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{kind}"
"""


@dataclass(frozen=True)
class Target:
    """A chip, and how many of them.

    Attributes:
      topology: of the TPU slice, as "2x4"; the number of GPUs; "" for this machine's own devices.
      is_local: the devices are this machine's own, and programs could run on them.
    """

    chip: Chip
    topology: str
    is_local: bool = False

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{self.topology}" if self.topology else self.chip.name

    @property
    def num_chips(self) -> int:
        return self.num_devices // self.chip.devices_per_chip

    @property
    def num_devices(self) -> int:
        """Devices there are."""
        if self.is_local:
            return len(jax.devices())
        return math.prod(map(int, self.topology.split("x"))) * self.chip.devices_per_chip

    def devices(self) -> np.ndarray:
        """Its devices, in jax's order. Not local ones can be compiled for, and nothing else.

        Raises:
          ConfigError: the vendor's compiler is not installed, or knows no such topology.
        """
        if self.is_local:
            return np.array(jax.devices())
        if why := missing_compiler(self.chip.platform):
            raise ConfigError(why.format(name=self.name))
        # What is installed may also drive a device here; planning takes none.
        jax.config.update("jax_platforms", "cpu")
        try:
            return np.array(self._topology().devices)
        except (jax.errors.JaxRuntimeError, ValueError) as why:
            raise ConfigError(f"target {self.name}: the compiler has no such topology: {why}") from why

    def mesh(self, tensor_parallel: int = 1) -> Mesh:
        """The mesh ("data", "model") of its first devices.

        Raises:
          ConfigError: there are fewer devices; or as `devices` does.
        """
        devices = self.devices()
        if tensor_parallel > len(devices):
            raise ConfigError(
                f"tensor_parallel_size is {tensor_parallel}; {self.name} has {len(devices)} devices; name a larger one"
            )
        return Mesh(devices[:tensor_parallel].reshape(1, tensor_parallel), ("data", "model"))

    def usable_bytes(self) -> int:
        """Memory of one device that programs may use."""
        if self.is_local:
            return free_bytes(self.devices()[0])
        usable = self.chip.usable_bytes or self.chip.memory_bytes
        # On a GPU jax's allocator takes a part of the memory at start, and the engine has that.
        return int(usable * gpu_memory_ratio()) if self.chip.platform == "gpu" else usable

    def _topology(self) -> topologies.TopologyDescription:
        if self.chip.platform == "gpu":
            # XLA schedules for 0.8 of the memory it is told of, where it has no allocator to ask for its size.
            bandwidth, memory = int(self.chip.bytes_per_s or 0), int(self.usable_bytes() / 0.8)
            config = _HOPPER_CONFIG.format(bandwidth=bandwidth, memory=memory, kind=self.chip.kinds[0])
            # Slices x machines x devices of a machine.
            shape = f"1x1x{self.topology}"
            return topologies.get_topology_desc(shape, platform="cuda", topology=shape, target_config=config)
        prepare_tpu_compiler()
        options: dict[str, Any] = {}
        sizes = [int(size) for size in self.topology.split("x")]
        if math.prod(sizes) <= self.chip.host_chips:
            options["chips_per_host_bounds"] = [*sizes, 1][:3]
        if self.chip.name == "v4":
            options["chip_config_name"] = "megacore"  # both cores of a chip as one device, as jax has it on the chip
        return topologies.get_topology_desc(f"{self.chip.name}:{self.topology}", platform="tpu", **options)


def missing_compiler(platform: str) -> str | None:
    """What to install before programs can be compiled for a platform, with {name} for the target's; None: nothing."""
    if platform == "tpu":
        return None if _has("libtpu") else INSTALL["tpu"]
    if platform == "gpu":
        plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
        return None if any(_has(plugin) for plugin in plugins) else INSTALL["gpu"]
    return None


def find_target(name: str | None = None, num_devices: int = 1) -> Target:
    """A target by name.

    Args:
      name: `chip` or `chip:topology`; None for this machine's own devices.
      num_devices: devices needed; a name without topology is given the smallest usual one that has them.

    Raises:
      ConfigError: there is no such chip, or it has no such topology; the message says what there is.
    """
    if name is None or name == "cpu":
        return _local(name)
    chip_name, colon, topology = name.strip().lower().partition(":")
    chips = {chip.name: chip for chip in CHIPS}
    if chip_name == "cpu":
        raise ConfigError(f"target {name!r}: cpu is this machine, and has no topology; give: cpu")
    if chip_name not in chips:
        near = difflib.get_close_matches(chip_name, CHIP_NAMES, 1)
        raise ConfigError(
            f"target {name!r} is unknown"
            + (f"; did you mean {near[0]!r}?" if near else "")
            + f"; there are: {', '.join(CHIP_NAMES)}; with a topology, for example: v5e:2x4, v5p:2x2x1, h200:8"
        )
    chip = chips[chip_name]
    if not colon:
        return Target(chip, _usual_topology(chip, -(-num_devices // chip.devices_per_chip)))
    dims = chip.num_dims or 1
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})" + f"{{{dims - 1}}}", topology):
        example = {3: "2x2x1", 2: "2x4", 1: "8"}[dims]
        what = "topology" if chip.num_dims else "number of GPUs"
        raise ConfigError(f"target {name!r}: {topology!r} is no {what} of {chip.title}; one is {chip.name}:{example}")
    return Target(chip, topology)


def _usual_topology(chip: Chip, num_chips: int) -> str:
    """The smallest of the usual shapes with so many chips: one machine's, then doubled in turn."""
    if not chip.num_dims:
        return str(num_chips)
    sizes = [2, 2, 1][: chip.num_dims]
    while math.prod(sizes) < num_chips:
        # The last of the smallest dimensions grows: 2x2, 2x4, 4x4; 2x2x1, 2x2x2, 2x2x4.
        last = max(i for i, size in enumerate(sizes) if size == min(sizes))
        sizes[last] *= 2
    return "x".join(map(str, sizes))


def _local(name: str | None) -> Target:
    """This machine's devices."""
    if name == "cpu":
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0]
    for chip in CHIPS:
        if device.device_kind in chip.kinds:
            return Target(chip, "", is_local=True)
    return Target(
        Chip(
            name=device.platform,
            title=device.device_kind,
            platform=device.platform,
            kinds=(device.device_kind,),
            memory_bytes=free_bytes(device),
            usable_bytes=None,
            bytes_per_s=None,
            flops_per_s={},
            link_bytes_per_s=None,
            source="this machine",
        ),
        "",
        is_local=True,
    )


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
