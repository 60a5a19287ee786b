# SPDX-License-Identifier: MIT
"""Grids that must be resident as a whole, and errors if they do not fit."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import tilescale.language as T
from tilescale.backends.cuda.running import grids, occupancy
from tilescale.backends.cuda.running.occupancy import KernelImage, Occupancy, check_resident, check_spared, resident
from tilescale.errors import LaunchError, Location
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse
from tilescale.program import waiting
from tilescale.program.grids import programs
from tilescale.program.model import Control, GridPhase, Launch, Part, Sequence
from tilescale.program.waiting import waits_across

MACHINE = Machine.load("h200-sxm-8")
BLOCKS, DEVICES = 8, 4
SIZES = {"device": DEVICES}


def program(case: str):
    @T.prim_func
    def flags(F: T.Tensor((64,), "int32"), E: T.Tensor((BLOCKS, 4), "int32"), at: T.int32):
        with T.Kernel(device=DEVICES, block=(BLOCKS // 2, 2), threads=128) as (bx, by):
            with T.Scale("block") as (b, _):
                with T.Scale("device") as (d, n):
                    if case == "own":
                        T.signal(F[bx + by * 4], dst=(d + 1) % n)
                        T.wait(F[bx + by * 4], ">=", 1)
                    if case == "by rank of the block":
                        T.signal(F[b], dst=(d + 1) % n)
                        T.wait(F[by * 4 + bx], ">=", 1)
                    if case == "one for each sender":
                        T.signal(E[by * 4 + bx, d], dst=(d + 1) % n)
                        T.wait(E[by * 4 + bx, (d + 3) % 4], ">=", 1)
                    if case == "flat, one for each sender":
                        T.signal(F[(bx + by * 4) * 4 + d], dst=(d + 1) % n)
                        T.wait(F[(bx + by * 4) * 4 + (d + 3) % 4], ">=", 1)
                    if case == "several of its own":
                        for k in T.serial(4):
                            T.signal(F[(bx + by * 4) * 4 + k], dst=(d + 1) % n)
                        for k in T.serial(4):
                            T.wait(F[(bx + by * 4) * 4 + k], ">=", 1)
                    if case == "from earlier phases":
                        T.wait(F[0], ">=", 1)
                    if case == "collective":
                        T.barrier()
                    if case == "the first send":
                        if b < 2:
                            T.signal(F[d], dst=(d + 1) % n)
                        else:
                            T.wait(F[(d + 3) % 4], ">=", 2)
                    if case == "the last send":
                        if b >= 6:
                            T.signal(F[d], dst=(d + 1) % n)
                        else:
                            T.wait(F[(d + 3) % 4], ">=", 2)
                    if case == "some of the first send":
                        if F[63] < 2:
                            T.signal(F[d], dst=(d + 1) % n)
                        if b >= 2:
                            T.wait(F[(d + 3) % 4], ">=", 2)
                    if case == "one for all":
                        T.signal(F[0], dst=(d + 1) % n)
                        T.wait(F[0], ">=", 8)
                    if case == "one for a row":
                        T.signal(F[by], dst=(d + 1) % n)
                        T.wait(F[by], ">=", 4)
                    if case == "the next block's":
                        T.signal(F[bx + by * 4], dst=(d + 1) % n)
                        T.wait(F[(bx + by * 4 + 1) % 8], ">=", 1)
                    if case == "overlapping":
                        for k in T.serial(4):
                            T.signal(F[bx + by * 4 + k], dst=(d + 1) % n)
                        T.wait(F[bx + by * 4], ">=", 1)
                    if case.startswith("polls"):
                        seen = T.alloc_var("int32")
                        seen = 0
                        if case == "polls what the last one stores":
                            if b == 7:
                                T.atomic_store(F[0], 1)
                        elif b == 0:
                            T.atomic_store(F[0], 1)
                        if b > 0:
                            while seen == 0:
                                seen = T.atomic_load(F[0])
                    if case == "not known":
                        T.signal(F[bx + by * 4], dst=(d + 1) % n)
                        T.wait(F[bx + by * 4 + at], ">=", 1)

    return flags


def phases(part: Part, launch: Launch | None = None) -> Iterator[tuple[GridPhase, Launch]]:
    if isinstance(part, Launch):
        yield from phases(part.body, part)
    elif isinstance(part, Sequence | Control):
        for inner in part.parts:
            yield from phases(inner, launch)
    elif isinstance(part, GridPhase):
        yield part, launch


def found(func: Any) -> Location | None:
    program = analyse(func, MACHINE)
    ((phase, launch),) = phases(program.body)
    assert programs(launch, SIZES) == BLOCKS
    return waits_across(phase, launch, program, MACHINE, SIZES)


@pytest.mark.parametrize(
    "case",
    [
        "own",
        "by rank of the block",
        "one for each sender",
        "flat, one for each sender",
        "several of its own",
        "from earlier phases",
        "collective",
        "the first send",
        "polls what the first one stores",
    ],
)
def test_programs_that_wait_for_those_of_their_own_or_lower_numbers(case: str):
    assert found(program(case)) is None


def test_a_wait_that_no_user_wrote_is_one(monkeypatch: pytest.MonkeyPatch):
    """Rewrites add waits without a line: ranks took them for none, some of them, as they looked in different orders."""
    monkeypatch.setattr(waiting, "location", lambda *given: None)
    func = program("one for all")
    ((phase, launch),) = phases(analyse(func, MACHINE).body)
    assert found(func) == launch.where is not None
    assert waiting.first_wait(phase, launch) == launch.where
    assert found(program("own")) is None


@pytest.mark.parametrize(
    "case",
    [
        *("one for all", "one for a row", "the next block's", "overlapping", "not known"),
        *("the last send", "some of the first send", "polls what the last one stores"),
    ],
)
def test_programs_that_wait_for_others(case: str):
    where = found(program(case))
    assert where is not None and where.file == __file__ and where.what == "waits here"


def planes(sends: int):
    """A grid that is as wide as it turns out to be, three planes high: one sends, those after the first one wait."""
    n = T.dynamic("n")

    @T.prim_func
    def flags(F: T.Tensor((n,), "int32")):
        with T.Kernel(device=DEVICES, block=(T.ceildiv(n, 4), 3), threads=128) as (bx, by):
            with T.Scale("block"), T.Scale("device") as (d, count):
                if by == sends:
                    T.signal(F[bx], dst=(d + 1) % count)
                if by > 0:
                    T.wait(F[0], ">=", 1)

    return flags


@pytest.mark.parametrize("sends", [0, 1])
def test_planes_of_a_grid_of_unknown_extent(sends: int):
    program = analyse(planes(sends), MACHINE)
    ((phase, launch),) = phases(program.body)
    assert programs(launch, SIZES) is None
    assert (waits_across(phase, launch, program, MACHINE, SIZES) is None) == (sends == 0)


def test_a_grid_that_fits_is_accepted():
    check_resident("crowd", 132, Occupancy(132, 1, 132), Location("program.py", 3))


@pytest.mark.parametrize("asked", [265, None])
def test_a_grid_that_does_not_fit_is_refused(asked: int | None):
    with pytest.raises(LaunchError, match=r"264 at once \(2 on each of 132 SMs\)") as raised:
        check_resident("crowd", asked, Occupancy(264, 2, 132), Location("program.py", 3, "waits here"))
    assert asked is None or f"a grid of {asked}" in raised.value.message
    assert raised.value.where[0].line == 3


@pytest.mark.parametrize(("asked", "grid"), [(249, "a grid of 249 programs"), (None, "of an extent that is not known")])
def test_a_grid_that_waits_for_messages_leaves_them_sms(asked: int | None, grid: str):
    room, where = Occupancy(264, 2, 132), Location("program.py", 3, "waits here")
    check_spared("crowd", 248, room, 8, where)
    with pytest.raises(LaunchError, match=grid):
        check_spared("crowd", asked, room, 8, where)


def test_a_grid_of_clusters_has_room_for_whole_ones():
    room = Occupancy(120, 1, 132, 8)
    check_resident("crowd", 120, room, Location("program.py", 3))
    with pytest.raises(LaunchError, match="120 at once .1 on each of 132 SMs, in whole clusters of 8"):
        check_resident("crowd", 128, room, Location("program.py", 3))
    # An SM that is taken breaks one cluster, at any position.
    check_spared("crowd", 88, room, 4, Location("program.py", 3))
    with pytest.raises(LaunchError, match="the others hold 88 programs at once"):
        check_spared("crowd", 89, room, 4, Location("program.py", 3))


class Driver:
    """An H100: clusters of 8 programs, one on each SM, of which GPCs of 16 or 18 hold two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.asked: list[Any] = []
        values = {
            "cuDeviceGetAttribute": 132,
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": 1,
            "cuOccupancyMaxActiveClusters": 15,
        }
        record = lambda: SimpleNamespace(clusterDim=SimpleNamespace())  # noqa: E731
        numbers = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16,
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4,
        )
        kinds = dict.fromkeys(("CUfunction_attribute", "CUdevice_attribute", "CUlaunchAttributeID"), numbers)
        records = dict.fromkeys(("CUlaunchAttributeValue", "CUlaunchAttribute", "CUlaunchConfig"), record)
        bindings = SimpleNamespace(driver=SimpleNamespace(**kinds, **records))
        for name, module in (("cuda", SimpleNamespace(bindings=bindings)), ("cuda.bindings", bindings)):
            monkeypatch.setitem(sys.modules, name, module)

        def call(name: str, *given: Any) -> Any:
            self.asked.append((name, *given))
            return values.get(name)

        monkeypatch.setattr(occupancy.driver, "call", call)


def test_the_driver_says_how_many_clusters_a_device_holds(monkeypatch: pytest.MonkeyPatch):
    asked = Driver(monkeypatch).asked
    assert resident(KernelImage(b"code", "f", 256, 1024), 0) == Occupancy(132, 1, 132)
    assert not any(name == "cuOccupancyMaxActiveClusters" for name, *_ in asked)
    assert ("cuFuncSetAttribute", None, 8, 1024) in asked, "else the driver takes shared memory of the default limit"
    assert resident(KernelImage(b"code", "f", 256, 1024, (4, 2, 1)), 0) == Occupancy(120, 1, 132, 8)
    ((_, _, launch),) = (each for each in asked if each[0] == "cuOccupancyMaxActiveClusters")
    assert (launch.gridDimX, launch.gridDimY, launch.gridDimZ) == (4, 2, 1)
    assert (launch.blockDimX, launch.sharedMemBytes, launch.numAttrs) == (256, 1024, 1)
    assert vars(launch.attrs[0].value.clusterDim) == {"x": 4, "y": 2, "z": 1}
    assert asked[-1][0] == "cuModuleUnload"


def test_what_is_looked_at_is_compiled_as_the_kernel_is(monkeypatch: pytest.MonkeyPatch):
    """Other flags give it other registers."""
    seen: list[Any] = []
    made = SimpleNamespace(text='extern "C" __global__ void f() {}', dynamic_shared=0)
    monkeypatch.setattr(grids.stock, "compiled", lambda kernel: made)
    monkeypatch.setattr(grids.stock, "device_code", lambda *given: seen.append(given))
    monkeypatch.setattr(grids, "waits_across", lambda *given: Location("program.py", 3))
    monkeypatch.setattr(grids, "kernels", lambda text: iter([SimpleNamespace(name="f", threads=128)]))
    monkeypatch.setattr(grids, "programs", lambda launch, sizes: 1)
    monkeypatch.setattr(occupancy, "resident", lambda image, device: Occupancy(1, 1, 1))
    own = SimpleNamespace(
        sizes=(), spared=0, program=SimpleNamespace(name="f"), target=SimpleNamespace(machine=MACHINE),
        device=SimpleNamespace(index=0),
    )  # fmt: skip
    flags = ["-maxrregcount=64"]
    kernel = SimpleNamespace(target="cuda", pass_configs={"tl.enable_fast_math": True}, compile_flags=flags)
    grids.check_residency(own, SimpleNamespace(launch=SimpleNamespace(cluster=(1, 1, 1))), kernel)
    assert seen == [(made.text, "cuda", {"tl.enable_fast_math": True}, flags)]
