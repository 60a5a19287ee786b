# SPDX-License-Identifier: MIT
"""Kernels of collectives as text: what orders their memory operations, in PTX, and the grids that they are given."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tilescale.backends.cuda.running import driver
from tilescale.backends.cuda.running.collectives import exchanges
from tilescale.backends.cuda.running.collectives.exchanges import (
    SHARING,
    KernelCapacity,
    data_bytes,
    rows_grid,
    short_grid,
    slots_grid,
)
from tilescale.backends.cuda.running.collectives.kernels import (
    C_TYPES,
    ExchangeArgument,
    HeaderKernel,
    combining,
    launch,
    moving,
    normalising,
)

KIB, MIB, PROCESSORS = 1 << 10, 1 << 20, 132

ORDERING = re.compile(r"\b(?:ld|st)\.(?:acquire|release|relaxed)[\w.]*|\bfence[\w.]*|\b(?:bar|barrier)\.[\w.]*")

NORM = ("2", "false", "false", "tilescale::ROW", "false")
KERNELS = [
    HeaderKernel("reduce", "words", combining("bfloat16", "sum"), 3, ("true",)),
    HeaderKernel("reduce", "lines", combining("bfloat16", "sum"), 3, ("true",)),
    HeaderKernel("reduce_norm", "lines", normalising("bfloat16"), 2, NORM, (256, 2)),
    HeaderKernel("reduce_twice", "slots", combining("float32", "max"), 2),
    HeaderKernel("broadcast", "slots", moving("float16"), 3),
    HeaderKernel("reduce", "slots", combining("float8_e4m3", "sum"), 2, ("true",)),
]


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Instructions that order memory operations in each kernel, in the order of the text."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    folder: Path = tmp_path_factory.mktemp("ptx")
    first, *others = (kernel.text for kernel in KERNELS)
    text = first + "".join(other[other.index('extern "C" __global__') :] for other in others)
    (folder / "kernels.cu").write_text(text, encoding="utf-8")
    command = ["nvcc", "-arch=sm_90a", "-std=c++20", "--ptx", "-o", str(folder / "kernels.ptx")]
    subprocess.run([*command, str(folder / "kernels.cu")], check=True, capture_output=True, timeout=240)
    ptx = (folder / "kernels.ptx").read_text(encoding="utf-8")
    bodies = re.findall(r"\.entry (\w+)\(.*?\n\{\n(.*?)\n\}", ptx, re.DOTALL)
    return {name: ORDERING.findall(body) for name, body in bodies}


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("kernel", KERNELS[:3], ids=lambda kernel: f"{kernel.function} {kernel.form}")
def test_short_messages_need_no_fence(kernel: HeaderKernel, aligned: bool, entries: dict[str, list[str]]):
    found = [what for what in entries[kernel.name(aligned)] if what != "bar.warp.sync"]
    of_cluster = {
        "barrier.cluster.arrive.release", "barrier.cluster.wait.acquire", "st.relaxed.cluster.shared",
        "ld.relaxed.cluster.shared.v2.u64",
    }  # fmt: skip
    words = {"st.relaxed.sys.global.v2.u64", "ld.relaxed.sys.global.v2.u64", "bar.sync"}
    assert set(found) == (words | of_cluster if kernel.function == "reduce_norm" else words)
    assert kernel.function != "reduce_norm" or "cluster" in found[0], "blocks arrive when nothing is stored yet"
    load, store = (found.index(f"{what}.relaxed.sys.global.v2.u64") for what in ("ld", "st"))
    assert load > store, "all are sent first"


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("kernel", KERNELS[1:3], ids=lambda kernel: kernel.function)
def test_the_threads_of_a_line_store_and_load_together(
    kernel: HeaderKernel, aligned: bool, entries: dict[str, list[str]]
):
    found = entries[kernel.name(aligned)]
    at = [i for i, what in enumerate(found) if what.endswith("relaxed.sys.global.v2.u64")]
    assert at and all("bar.warp.sync" in found[max(0, i - 2) : i] for i in at), found


@pytest.mark.parametrize("kernel", KERNELS[3:], ids=lambda kernel: kernel.function)
def test_flags_are_told_after_a_barrier_and_a_fence(kernel: HeaderKernel, entries: dict[str, list[str]]):
    found = entries[kernel.name(True)]
    told = [i for i, x in enumerate(found) if x.startswith("st.relaxed")]
    assert told and all("fence.acq_rel.sys" in found[max(0, i - 2) : i] for i in told), found
    fences = [i for i, x in enumerate(found) if x.startswith("fence")]
    assert fences and all(found[i - 1] == "bar.sync" for i in fences), found
    heard = [i for i, x in enumerate(found) if x.startswith("ld.acquire.sys")]
    assert heard and any(x.startswith(("bar.red", "barrier.cta.red")) for x in found[heard[-1] :]), "all hear of it"


def test_a_structure_is_packed_as_the_kernel_reads_it(tmp_path: Path):
    """The compiler's offsets of all members against ctypes'."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    text = KERNELS[0].text
    begin = text.index("struct Exchange {")
    members = [name for name, _ in ExchangeArgument._fields_]
    offsets = "".join(f'std::printf("%zu ", offsetof(Exchange, {name}));' for name in members)
    program = f"typedef long i64;\n{text[begin : text.index('};', begin)]}}};\nint main() {{ {offsets} }}\n"
    source = tmp_path / "offsets.cpp"
    source.write_text(f"#include <cstddef>\n#include <cstdio>\n{program}", encoding="utf-8")
    subprocess.run(["g++", "-o", str(tmp_path / "offsets"), str(source)], check=True, capture_output=True, timeout=60)
    printed = subprocess.run([str(tmp_path / "offsets")], check=True, capture_output=True, text=True).stdout
    assert [int(n) for n in printed.split()] == [getattr(ExchangeArgument, name).offset for name in members]


# -- launches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "follows", "cluster", "wanted"),
    [
        ((9, 0), False, None, {"early": 0}),
        ((9, 0), True, None, {"early": 1}),
        ((10, 0), True, 4, {"early": 1, "cluster": (4, 1, 1)}),
        ((8, 0), True, 1, {}),
    ],
)
def test_what_a_launch_asks_for(
    capability: tuple[int, int],
    follows: bool,
    cluster: int | None,
    wanted: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
):
    found: list[object] = []

    def start(config: Any, function: object, arguments: int, extra: int) -> tuple[int]:
        attributes: dict[str, object] = {}
        for one in config.attrs[: config.numAttrs]:
            if "CLUSTER" in one.id.name:
                shape = one.value.clusterDim
                attributes["cluster"] = shape.x, shape.y, shape.z
            else:
                attributes["early"] = one.value.programmaticStreamSerializationAllowed
        found.extend([config.gridDimX, config.blockDimX, int(config.hStream), function, attributes])
        return (0,)

    monkeypatch.setattr(driver, "function", lambda name: start)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    launch("function", 8, 192, ExchangeArgument(), torch.device("cuda", 0), follows, cluster)()
    assert found == [8, 192, 77, "function", wanted]


# -- grids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [512, 640])
@pytest.mark.parametrize("sharing", SHARING.values())
@pytest.mark.parametrize("nbytes", [1, 8, 9, 120, 121, 4 * KIB, 64 * KIB, 100_002, 256 * KIB, MIB, 3 * MIB + 2])
def test_grids_of_short_messages_have_room_for_all(nbytes: int, sharing: int, most: int):
    grid = short_grid(nbytes, PROCESSORS, sharing, most)
    flags = -(-nbytes // data_bytes(sharing))
    assert grid.blocks <= PROCESSORS and grid.threads <= most and grid.threads % 32 == 0
    assert grid.slot >= 16 * sharing * -(-flags // grid.blocks) and grid.slot & (grid.slot - 1) == 0


@pytest.mark.parametrize(
    "room",
    [KernelCapacity(PROCESSORS, 3, 256, 8, 2), KernelCapacity(PROCESSORS, 1, 512, 1)],
    ids=["clusters", "blocks"],
)
@pytest.mark.parametrize("sharing", SHARING.values())
@pytest.mark.parametrize("nbytes", [16, 120, 128, 2064, 12 * KIB, 12 * KIB + 8, 16 * KIB, 32 * KIB])
def test_grids_of_rows_have_room_for_all(nbytes: int, sharing: int, room: KernelCapacity):
    for rows in (*range(1, 800), *range(800, 5001, 60)):
        (blocks, threads, slot), cluster, part, each = rows_grid(rows, nbytes, 256, room, sharing)
        units = sharing * -(-part // data_bytes(sharing))
        assert blocks <= room.blocks and threads <= room.threads and threads % 32 == 0
        assert cluster <= room.cluster and blocks % cluster == 0 and cluster & (cluster - 1) == 0
        assert part % 256 == 0 and nbytes <= part * cluster < nbytes + 256 * cluster
        assert threads * each >= units and each <= (2 if room.cluster > 1 else 8), "a thread has them in registers"
        assert each <= rows_grid(room.blocks, nbytes, 256, room, sharing).each, "the kernel is made for as many"
        clusters = blocks // cluster
        assert clusters <= rows and slot >= 16 * units * -(-rows // clusters)


def test_few_rows_have_many_processors():
    """12 and 16 KiB: of lines no block has fewer than 128 threads, and none more than 256."""
    room = KernelCapacity(PROCESSORS, 3, 256, 8, 2)
    spreads = [rows_grid(rows, 12 * KIB, 256, room, 8) for rows in (1, 32, 138, 512)]
    assert [(*spread.grid[:2], spread.cluster) for spread in spreads] == [
        (4, 224, 4), (128, 224, 4), (276, 224, 2), (396, 224, 2)
    ]  # fmt: skip
    assert rows_grid(6, 12 * KIB, 256, room, 1)[:3] == ((48, 192, 4 * KIB), 8, 1536)
    assert rows_grid(16, 16 * KIB, 256, room, 8)[:3] == ((128, 160, 4 * KIB), 8, 2 * KIB)


def test_small_tensors_are_spread_over_the_processors():
    sizes = (KIB, 64 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB)
    assert [short_grid(n, PROCESSORS, 1, 640)[:2] for n in sizes] == [
        (1, 128), (64, 128), (128, 256), (128, 512), (132, 512), (132, 512)
    ]  # fmt: skip
    assert [short_grid(n, PROCESSORS, 8, 640)[:2] for n in sizes] == [
        (1, 128), (35, 128), (110, 160), (122, 288), (129, 544), (132, 544)
    ]  # fmt: skip


@pytest.mark.parametrize("peers", [1, 3, 7, 71])
@pytest.mark.parametrize("nbytes", [1, 8192, MIB, 100 * MIB + 2])
def test_long_messages_fit_their_slots(nbytes: int, peers: int):
    grid = slots_grid(nbytes, 2 * PROCESSORS, peers)
    assert 1 <= grid.blocks <= 2 * PROCESSORS
    assert exchanges.SMALLEST_SLOT <= grid.slot <= exchanges.LARGEST_SLOT and grid.slot & (grid.slot - 1) == 0


def test_all_types_of_the_table_have_a_type_of_c():
    from tilescale.backends.tilelang.lowering.implemented import COMBINED

    assert {*COMBINED} == C_TYPES.keys()
