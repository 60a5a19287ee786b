# SPDX-License-Identifier: MIT
"""Kernels of collectives: their text, and the functions that the driver makes of it.

They are CUDA C++ (headers/short_messages.cuh, long_messages.cuh), compiled as stock TileLang compiles what it
generates, into the same cache, and launched through the driver. Tile programs would carry TileLang's templates, which
take longer to compile, and have no words for threads that poll for data with flags in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tilelang_core import ir
from tilescale.backends.cuda.headers import header
from tilescale.backends.cuda.running import driver

if TYPE_CHECKING:
    import torch

HEADERS = (
    "sync.cuh", "words.cuh", "cluster_sum.cuh", "messages.cuh", "combine.cuh", "sums.cuh", "short_messages.cuh",
    "norm_messages.cuh", "long_messages.cuh", "moved_messages.cuh", "row_messages.cuh", "rounds.cuh",
)  # fmt: skip

C_TYPES = {
    "int8": "signed char", "uint8": "unsigned char", "int32": "int", "int64": "long", "float16": "__half",
    "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double", "int16": "short", "uint16": "unsigned short",
    "uint32": "unsigned", "uint64": "unsigned long", "float8_e4m3": "__nv_fp8_e4m3", "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
}  # fmt: skip
"""Types whose elements are combined."""

THREADS, SHORT_THREADS = 512, 640
"""Threads of a block at most, and of one that exchanges short messages with few ranks: 1 MiB of a rank are then as many
lines as the blocks of an H200 have threads for."""

SHORT = {"words": "tilescale::InWords", "lines": "tilescale::InLines"}
"""Forms of short messages, and what headers/short_messages.cuh calls them."""

LONG = ("slots", "straight")
"""Forms of long messages."""

CLUSTERS_FROM = (9, 0)
"""The compute capability from which on blocks are in clusters, and kernels may begin early."""

Element = tuple[str, ...]
"""What elements are, as the first arguments of a template."""


def combining(dtype: str, reduction: str) -> Element:
    """Elements of a type that are combined."""
    return C_TYPES[dtype], f"tilescale::{reduction.upper()}"


def normalising(dtype: str) -> Element:
    """Elements of a type that are summed, and whose rows are normalised."""
    return (C_TYPES[dtype],)


def moving(dtype: str) -> Element:
    """Elements of a type that are moved: as many bytes as a thread may load at once from anywhere."""
    return (str(min(8, ir.bits(dtype) // 8)),)


def moving_units(dtype: str) -> Element:
    """The same as a C type, with a reduction that nobody makes."""
    (size,) = moving(dtype)
    types = {"1": "unsigned char", "2": "unsigned short", "4": "unsigned", "8": "unsigned long"}
    return types[size], "tilescale::SUM"


def blocks_per_processor(form: str, ranks: int) -> int:
    """Blocks of a kernel to be on a processor at once: two hide each other's fences, where registers allow it."""
    return 2 if form == "rounds" or (form in LONG and ranks <= 4) else 1


def most_threads(form: str, ranks: int) -> int:
    """Threads of a block at most: as many as leave each the registers that it needs."""
    return SHORT_THREADS if form in SHORT and ranks <= 4 else THREADS


@dataclass(frozen=True)
class Kernel:
    """One instance of a function of the headers.

    Attributes:
        function: its name there, without the form of its messages.
        form: of its messages, "words", "lines", "slots" or "straight", or "rounds".
        ranks: devices of the group.
        flags: the template's last arguments.
        bounds: threads of a block at most, and its blocks that are to be on a processor at once; None for those of the
            form.
    """

    function: str
    form: str
    element: Element
    ranks: int
    flags: tuple[str, ...] = ()
    bounds: tuple[int, int] | None = None

    def name(self, aligned: bool) -> str:
        """What the driver calls it."""
        return f"{self.function}_{self.form}_{'aligned' if aligned else 'any'}"

    @property
    def blocks_per_processor(self) -> int:
        """Its blocks that are to be on a processor at once."""
        return self._bounds[1]

    @property
    def _bounds(self) -> tuple[int, int]:
        return self.bounds or (most_threads(self.form, self.ranks), blocks_per_processor(self.form, self.ranks))

    @property
    def text(self) -> str:
        """CUDA C++: the headers, and a kernel for aligned addresses and one for any."""
        kernels = "".join(self._entry(aligned) for aligned in (True, False))
        return "".join(header(name) + "\n" for name in HEADERS) + kernels

    def _entry(self, aligned: bool) -> str:
        how, *which = ("short", SHORT[self.form]) if self.form in SHORT else (self.form,)
        arguments = ", ".join([*which, *self.element, str(self.ranks), str(aligned).lower(), *self.flags])
        return (
            f'extern "C" __global__ void __launch_bounds__{self._bounds}\n'
            f"{self.name(aligned)}(const __grid_constant__ tilescale::Exchange x) {{\n"
            f"  tilescale::{self.function}_{how}<{arguments}>(x);\n}}\n"
        )


class Exchange(ctypes.Structure):
    """What a kernel takes: `Exchange` of headers/messages.cuh, where its members are explained."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("source", "target")),
        *((name, ctypes.c_int64) for name in ("bytes", "total", "source_step", "target_step")),
        ("workspace", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("stride", "slot")),
        *((name, ctypes.c_uint64) for name in ("counts", "report")),
        ("limit", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rank", "root", "first", "step", "shift", "devices", "blocks", "site")),
        ("table", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("pieces", ctypes.c_int32),
        ("received", ctypes.c_uint64),
        ("behind", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("residual", "weight", "normed", "quantized", "scales")),
        *((name, ctypes.c_float) for name in ("eps", "weight_offset")),
        *((name, ctypes.c_int32) for name in ("rows", "part", "power")),
    ]


@cache
def functions(code: bytes, kernel: Kernel, device: int) -> dict[bool, Any]:
    """The kernels as the driver has loaded them on a device, by whether addresses are aligned.

    Raises:
        DeviceError: the driver refuses.
    """
    module = driver.call("cuModuleLoadData", code)
    return {
        aligned: driver.call("cuModuleGetFunction", module, kernel.name(aligned).encode()) for aligned in (True, False)
    }


def launch(
    function: Any,
    blocks: int,
    threads: int,
    exchange: Exchange,
    device: torch.device,
    follows: bool = False,
    cluster: int | None = None,
) -> Callable[[], None]:
    """What puts a kernel on the current stream of its device.

    Args:
        follows: whether it may begin before the one in front of it has ended, and awaits that (headers/sync.cuh).
        cluster: the blocks of one; None for no clusters.
    """
    import torch
    from cuda.bindings import driver as names

    stream, index, name = torch._C._cuda_getCurrentRawStream, device.index, "cuLaunchKernelEx"
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(exchange))
    packed, start = ctypes.addressof(pointers), driver.function(name)
    config = names.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    if torch.cuda.get_device_capability(device) >= CLUSTERS_FROM:
        config.attrs = _attributes(follows, cluster)
        config.numAttrs = len(config.attrs)

    def run(_kept: object = (exchange, pointers)) -> None:
        config.hStream = stream(index)
        (status,) = start(config, function, packed, 0)
        if status:
            raise driver.refused(name, status)

    return run


def _attributes(follows: bool, cluster: int | None) -> list[Any]:
    from cuda.bindings import driver as names

    kinds, early, shape = names.CUlaunchAttributeID, names.CUlaunchAttribute(), names.CUlaunchAttribute()
    early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = int(follows)
    if cluster is None:
        return [early]
    shape.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    shape.value.clusterDim.x, shape.value.clusterDim.y, shape.value.clusterDim.z = cluster, 1, 1
    return [early, shape]
