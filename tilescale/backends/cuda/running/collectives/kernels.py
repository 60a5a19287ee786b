# SPDX-License-Identifier: MIT
"""Kernels of collectives: their text, and their loaded functions.

They are CUDA C++ (headers/short_messages.cuh, long_messages.cuh), compiled as stock TileLang compiles its own text,
into the same cache, and launched through the driver. Tile programs would include TileLang's templates, which take
longer to compile, and cannot express threads that poll for data with flags in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tilelang_core import ir
from tilescale.backends.cuda.headers import header
from tilescale.backends.cuda.running import driver

HEADERS = (
    "memory.cuh", "sync.cuh", "words.cuh", "cluster_sum.cuh", "messages.cuh", "combine.cuh", "sums.cuh",
    "short_messages.cuh", "norm_messages.cuh", "long_messages.cuh", "moved_messages.cuh",
    "float8_messages.cuh", "row_messages.cuh", "rounds.cuh",
)  # fmt: skip

C_TYPES = {
    "int8": "signed char", "uint8": "unsigned char", "int32": "int", "int64": "long", "float16": "__half",
    "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double", "int16": "short", "uint16": "unsigned short",
    "uint32": "unsigned", "uint64": "unsigned long", "float8_e4m3": "__nv_fp8_e4m3", "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
}  # fmt: skip
"""Types whose elements can be combined."""

THREADS, SHORT_THREADS = 512, 640
"""Maximum threads of a block, and of one that exchanges short messages with few ranks: 1 MiB of a rank then has as many
lines as the blocks of an H200 have threads."""

SHORT = {"words": "tilescale::InWords", "lines": "tilescale::InLines"}
"""Forms of short messages, and their types in headers/short_messages.cuh."""

LONG = ("slots", "straight", "float8")
"""Forms of long messages."""

CLUSTERS_FROM = (9, 0)
"""The compute capability from which on clusters and early starts of kernels are available."""

Element = tuple[str, ...]
"""The first arguments of a template, which describe elements."""


def combining(dtype: str, reduction: str) -> Element:
    """Elements of a type that are combined."""
    return C_TYPES[dtype], f"tilescale::{reduction.upper()}"


def normalising(dtype: str) -> Element:
    """Elements of a type that are summed, and whose rows are normalized."""
    return (C_TYPES[dtype],)


def moving(dtype: str) -> Element:
    """Elements of a type that are moved, in units that a thread can load at any of their addresses."""
    return (str(min(8, ir.bits(dtype) // 8)),)


def moving_units(dtype: str) -> Element:
    """Such a unit as a C type, with an unused reduction."""
    (size,) = moving(dtype)
    types = {"1": "unsigned char", "2": "unsigned short", "4": "unsigned", "8": "unsigned long"}
    return types[size], "tilescale::SUM"


def blocks_per_sm(form: str, ranks: int) -> int:
    """Blocks of a kernel that an SM should hold: two hide each other's fences, where registers allow it."""
    return 2 if form == "rounds" or (form in LONG and ranks <= 4) else 1


def most_threads(form: str, ranks: int) -> int:
    """Maximum threads of a block, such that each has the registers it needs."""
    return SHORT_THREADS if form in SHORT and ranks <= 4 else THREADS


@dataclass(frozen=True)
class HeaderKernel:
    """One instance of a function of the headers.

    Attributes:
        function: its name there, without the form of its messages.
        form: the form of its messages, "words", "lines", "slots" or "straight", or "rounds".
        ranks: devices of the group.
        flags: the template's last arguments.
        bounds: maximum threads of a block, and minimum blocks of an SM; None for the form's defaults.
    """

    function: str
    form: str
    element: Element
    ranks: int
    flags: tuple[str, ...] = ()
    bounds: tuple[int, int] | None = None

    def name(self, aligned: bool) -> str:
        """The kernel's symbol."""
        return f"{self.function}_{self.form}_{'aligned' if aligned else 'any'}"

    @property
    def blocks_per_sm(self) -> int:
        """Minimum number of its blocks on an SM."""
        return self._bounds[1]

    @property
    def _bounds(self) -> tuple[int, int]:
        return self.bounds or (most_threads(self.form, self.ranks), blocks_per_sm(self.form, self.ranks))

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


class ExchangeArgument(ctypes.Structure):
    """A kernel's argument: `ExchangeArgument` of headers/messages.cuh, which documents its members."""

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
        *((name, ctypes.c_int32) for name in ("rows", "part", "each")),
        ("bias", ctypes.c_uint64),
        ("packed", ctypes.c_int64),
    ]


@cache
def functions(code: bytes, kernel: HeaderKernel, device: int) -> dict[bool, Any]:
    """The kernels loaded on a device, for aligned and for other addresses. Raises DeviceError: a driver error."""
    module = driver.call("cuModuleLoadData", code)
    return {
        aligned: driver.call("cuModuleGetFunction", module, kernel.name(aligned).encode()) for aligned in (True, False)
    }


def launch(
    function: Any,
    blocks: int,
    threads: int,
    exchange: ExchangeArgument,
    device: torch.device,
    follows: bool = False,
    cluster: int | None = None,
) -> Callable[[], None]:
    """A launch of a kernel on the current stream of its device.

    Args:
        follows: whether it may begin before the preceding kernel has ended, for which it waits itself
            (headers/sync.cuh).
        cluster: blocks of a cluster; None for no clusters.
    """
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
