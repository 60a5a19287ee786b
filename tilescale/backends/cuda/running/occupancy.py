# SPDX-License-Identifier: MIT
"""Residency of grids whose programs wait for others of the same grid: all must be on the device at once.

`tilescale/program/waiting.py` finds these grids; this module has the number of programs that a GPU holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilescale.backends.cuda.running import driver
from tilescale.errors import LaunchError, Location


@dataclass(frozen=True)
class KernelImage:
    """A compiled kernel as the driver loads it.

    Attributes:
        code: the device code.
        name: name of the kernel in it.
        threads: threads of one program.
        shared: bytes of dynamic shared memory of one program.
        cluster: programs that start together, along each axis.
    """

    code: bytes
    name: str
    threads: int
    shared: int
    cluster: tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True)
class Occupancy:
    """Number of programs of a kernel that a GPU holds at once.

    Attributes:
        held: programs on the whole device.
        each: programs on one otherwise empty SM.
        sms: SMs of the device.
        cluster: programs that start together.
    """

    held: int
    each: int
    sms: int
    cluster: int = 1

    def __str__(self) -> str:
        whole = f", in whole clusters of {self.cluster}" if self.cluster > 1 else ""
        return f"{self.held} at once ({self.each} on each of {self.sms} SMs{whole})"

    def resident_with(self, spared: int) -> int:
        """Minimum number of programs if some SMs hold something else: each may break as many clusters as it holds
        programs."""
        return max(0, self.held - spared * self.each * self.cluster)


def resident(image: KernelImage, device: int) -> Occupancy:
    """Number of programs of a kernel that a GPU holds at once, from the driver. Raises DeviceError: an error of the
    driver."""
    from cuda.bindings import driver as names

    shared_limit = names.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    count = names.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    sms = driver.call("cuDeviceGetAttribute", count, driver.call("cuDeviceGet", device))
    module, cluster = driver.call("cuModuleLoadData", image.code), math.prod(image.cluster)
    try:
        function = driver.call("cuModuleGetFunction", module, image.name.encode())
        driver.call("cuFuncSetAttribute", function, shared_limit, image.shared)
        each = driver.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, image.threads, image.shared)
        held = each * sms
        if cluster > 1:  # clusters lie inside one GPC, which may not hold a whole number of them
            held = cluster * driver.call("cuOccupancyMaxActiveClusters", function, _clusters(image))
    finally:
        driver.call("cuModuleUnload", module)
    return Occupancy(held, each, sms, cluster)


def _clusters(image: KernelImage) -> Any:
    """A launch of one cluster, in the driver's structure."""
    from cuda.bindings import driver as names

    size, cluster = names.CUlaunchAttributeValue(), names.CUlaunchAttribute()
    size.clusterDim.x, size.clusterDim.y, size.clusterDim.z = image.cluster
    cluster.id, cluster.value = names.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, size
    made = names.CUlaunchConfig()
    made.gridDimX, made.gridDimY, made.gridDimZ = image.cluster
    made.blockDimX, made.blockDimY, made.blockDimZ = image.threads, 1, 1
    made.sharedMemBytes, made.attrs, made.numAttrs = image.shared, [cluster], 1
    return made


def check_resident(program: str, asked: int | None, room: Occupancy, where: Location) -> None:
    """Reject a grid that cannot be wholly resident. Raises LaunchError: they do not all fit. `asked`: programs of the
    grid; None if unknown."""
    if asked is None or asked > room.held:
        grid = "a grid of an extent that is not known before the launch" if asked is None else f"a grid of {asked}"
        raise LaunchError(
            f"{program!r}: programs wait for others of the same grid, {grid}; the device holds {room}, and a waiting "
            "program stays resident",
            hint=f"launch at most {room.held} programs, each doing several tiles in a loop; or give every program "
            "flags of its own, F[bx, ...], so that it waits for those of its own number only",
            where=where,
        )


def check_spared(program: str, asked: int | None, room: Occupancy, spared: int, where: Location) -> None:
    """Reject a grid that waits for messages and leaves their kernels no SM: a deadlock. Raises LaunchError: it does not
    fit on the other SMs.

    Args:
        asked: programs of the grid; None if unknown.
        spared: SMs reserved for messages.
    """
    left = room.resident_with(spared)
    if asked is None or asked > left:
        grid = "of an extent that is not known before the launch" if asked is None else f"of {asked} programs"
        raise LaunchError(
            f"{program!r}: a grid {grid} waits for copies from other nodes, which NCCL makes on {spared} of the "
            f"{room.sms} SMs; the others hold {left} programs at once, and a waiting program stays "
            "resident",
            hint=f"launch at most {left} programs, each doing several tiles in a loop",
            where=where,
        )
