# SPDX-License-Identifier: MIT
"""Grids whose programs wait for others of the same grid: they run only if all of them are on the device at once.

Which grids these are `tilescale/program/waiting.py` says; here is how many programs a GPU holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilescale.errors import DeviceError, LaunchError, Location


@dataclass(frozen=True)
class Image:
    """A compiled kernel as the driver loads it.

    Attributes:
        code: the device code.
        name: of the kernel in it.
        threads: of one program.
        shared: bytes of dynamic shared memory of one program.
        cluster: programs that start together.
    """

    code: bytes
    name: str
    threads: int
    shared: int
    cluster: int = 1


def resident(image: Image, device: int) -> tuple[int, int]:
    """How many programs of a kernel a GPU holds at once, and its multiprocessors, as its driver says.

    Raises:
        DeviceError: the driver refuses.
    """
    from cuda.bindings import driver

    def call(name: str, *arguments: Any) -> Any:
        status, *results = getattr(driver, name)(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{name} of {image.name}: {status.name}")
        return results[0] if results else None

    shared_limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    processors = call("cuDeviceGetAttribute", count, call("cuDeviceGet", device))
    module = call("cuModuleLoadData", image.code)
    try:
        function = call("cuModuleGetFunction", module, image.name.encode())
        call("cuFuncSetAttribute", function, shared_limit, image.shared)
        each = call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, image.threads, image.shared)
    finally:
        call("cuModuleUnload", module)
    # A cluster starts where its programs find room together, so what is left over of each group counts for nothing.
    return each * processors // image.cluster * image.cluster, processors


def check_resident(program: str, asked: int | None, held: int, processors: int, where: Location) -> None:
    """Refuse a grid that cannot be on the device as a whole.

    Args:
        asked: programs of the grid; None if that is not known.
        held: programs that the device holds at once.
    Raises:
        LaunchError: there is no room for all of them.
    """
    if asked is None or asked > held:
        grid = "a grid of an extent that is not known before the launch" if asked is None else f"a grid of {asked}"
        raise LaunchError(
            f"{program!r}: programs wait for others of the same grid, {grid}; the device holds {held} at once "
            f"({held // processors} on each of {processors} processors), and a waiting program stays resident",
            hint=f"launch at most {held} programs, each doing several tiles in a loop; or give every program flags of "
            "its own, F[bx, ...], so that it waits for those of its own number only",
            where=where,
        )


def check_beside(program: str, asked: int | None, held: int, processors: int, spared: int, where: Location) -> None:
    """Refuse a grid that waits for messages and leaves their kernels no processor: they could not come.

    Args:
        asked: programs of the grid; None if that is not known.
        held: programs that the device holds at once, on so many `processors`, of which `spared` are the messages'.
    Raises:
        LaunchError: it does not fit on the other ones.
    """
    room = held // processors * (processors - spared)
    if asked is None or asked > room:
        grid = "of an extent that is not known before the launch" if asked is None else f"of {asked} programs"
        raise LaunchError(
            f"{program!r}: a grid {grid} waits for copies from other nodes, which NCCL makes on {spared} of the "
            f"{processors} processors; the others hold {room} programs at once, and a waiting program stays resident",
            hint=f"launch at most {room} programs, each doing several tiles in a loop",
            where=where,
        )
