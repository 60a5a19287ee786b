# SPDX-License-Identifier: MIT
"""PTX of the device functions: orders and scopes of memory operations, and fences.

A release that becomes relaxed, or a fence that is lost, gives wrong results rarely and on some machines only.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tilescale.backends.cuda.headers import header

FUNCTIONS = "\n".join(map(header, ("memory.cuh", "sync.cuh", "producer.cuh", "rendezvous.cuh", "words.cuh")))

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")

ORDERING = re.compile(
    r"\b(?:ld|st|red|atom)\.(?:acquire|release|acq_rel|relaxed|volatile)[\w.]*|\bfence[\w.]*|\bmembar[\w.]*"
    r"|\bcp\.async\.bulk[\w.]*(?: \d+)?|\bbar\.warp\.sync|\bsetp\.[lg][te]\.s32"
)
"""Instructions that order memory operations, and the comparisons of the flags that are waited for."""

COUNTED = ["ld.volatile.global.u64", "ld.volatile.global.u32", "atom.acq_rel.gpu.global.add.u32"]

KERNELS = {
    "drain": ("tilescale::drain();", ["cp.async.bulk.wait_group 0", "fence.proxy.async.global", "fence.acq_rel.sys"]),
    "complete_stores": ("tilescale::complete_stores();", ["cp.async.bulk.wait_group 0", "fence.proxy.async.global"]),
    "complete_stores_but": (
        "tilescale::complete_stores<3>();",
        ["cp.async.bulk.wait_group 3", "fence.proxy.async.global"],
    ),
    "acquired": ("tilescale::acquired();", ["fence.proxy.async.global", "fence.proxy.async.shared"]),
    "load_acquire": ("out[0] = tilescale::load_acquire(flags);", ["ld.acquire.sys.global.u32"]),
    "load_acquire_u": ("out[0] = tilescale::load_acquire((unsigned*)flags);", ["ld.acquire.sys.global.u32"]),
    "load_acquire_l": ("out[0] = tilescale::load_acquire((long*)flags);", ["ld.acquire.sys.global.u64"]),
    "load_acquire_ul": ("out[0] = tilescale::load_acquire((unsigned long*)flags);", ["ld.acquire.sys.global.u64"]),
    "add_release": ("tilescale::add_release(flags, 2);", ["red.release.sys.global.add.u32"]),
    "add_release_u": ("tilescale::add_release((unsigned*)flags, 2u);", ["red.release.sys.global.add.u32"]),
    "add_release_l": ("tilescale::add_release((long*)flags, 2l);", ["red.release.sys.global.add.u64"]),
    "add_release_ul": ("tilescale::add_release((unsigned long*)flags, 2ul);", ["red.release.sys.global.add.u64"]),
    "store_release": ("tilescale::store_release(flags, 2);", ["st.release.sys.global.u32"]),
    "store_release_u": ("tilescale::store_release((unsigned*)flags, 2u);", ["st.release.sys.global.u32"]),
    "store_release_l": ("tilescale::store_release((long*)flags, 2l);", ["st.release.sys.global.u64"]),
    "store_release_ul": ("tilescale::store_release((unsigned long*)flags, 2ul);", ["st.release.sys.global.u64"]),
    "store_relaxed": ("tilescale::store_relaxed(flags, 2);", ["st.relaxed.sys.global.s32"]),
    "store_relaxed_l": ("tilescale::store_relaxed((long*)flags, 2l);", ["st.relaxed.sys.global.s64"]),
    "add_relaxed_l": ("tilescale::add_relaxed((long*)flags, 2l);", ["red.relaxed.sys.global.add.u64"]),
    "count": (
        "tilescale::count(flags, report);",
        [*COUNTED, "ld.volatile.global.u64", "st.volatile.u64"],
    ),
    "count_and_clear": (
        "tilescale::count(flags, report, (unsigned long*)out, 1l);",
        [*COUNTED, "st.volatile.global.u64", "ld.volatile.global.u64", "st.volatile.u64"],
    ),
    "clear": (
        "tilescale::clear(flags, 1l, (unsigned long*)out, 1l);",
        ["st.volatile.global.u32", "st.volatile.global.u64"],
    ),
    "store_words": (
        "tilescale::store_words((tilescale::Words*)report, tilescale::numbered(1, 2, (unsigned)at));",
        ["st.relaxed.sys.global.v2.u64"],
    ),
    "load_words": (
        "out[0] = tilescale::load_words((const tilescale::Words*)report).first;",
        ["ld.relaxed.sys.global.v2.u64"],
    ),
    "order_stores": ("tilescale::order_stores();", ["fence.acq_rel.sys"]),
    "release_adds": ("tilescale::release<0, int>(at, 1);", ["red.release.sys.global.add.u32"]),
    "release_sets": ("tilescale::release<1, int>(at, 1);", ["st.release.sys.global.u32"]),
}
"""Name -> the call, and the instructions in their order."""

DRAINED = "cp.async.bulk.wait_group 0 fence.proxy.async.global fence.acq_rel.sys"
"""Instructions of drain()."""

CONTAINED = {
    "signal_adds": ("tilescale::signal<0, int>(flags, at, 8, 1, report, 0);", ["red.release.sys.global.add.u32"]),
    "signal_of_device": (
        "tilescale::signal<0, int, tilescale::DEVICE>(flags, at, 8, 1, report, 0);",
        ["red.release.gpu.global.add.u32"],
    ),
    "wait_of_device": (
        "tilescale::wait<tilescale::GE, int, tilescale::DEVICE>(flags, at, 8, 1, limit, report, 0);",
        ["ld.acquire.gpu.global.u32"],
    ),
    "signal_sets": ("tilescale::signal<1, int>(flags, at, 8, 1, report, 0);", ["st.release.sys.global.u32"]),
    "wait": (
        "tilescale::wait<tilescale::GE, int>(flags, at, 8, 1, limit, report, 0);",
        ["ld.acquire.sys.global.u32"],
    ),
    "wait_by_producer": (
        "tilescale::wait_by_producer<tilescale::GE, int>(flags, at, 8, 1, limit, report, 0);",
        ["ld.acquire.sys.global.u32", "bar.warp.sync fence.proxy.async.global"],
    ),
    "barrier": (
        "tilescale::barrier(flags, at, 0, 0, 2, at, flags, limit, report, 0);",
        [DRAINED, "st.relaxed.sys.global.s32", "ld.acquire.sys.global.u32"],
    ),
    "barrier_of_ranks": (
        "tilescale::barrier_of_ranks(report, at, 0, 0, 2, flags, 0, limit, report, 0);",
        [DRAINED, "st.relaxed.sys.global.s64", "ld.acquire.sys.global.u64"],
    ),
    "come": (
        "tilescale::come(report, at, 0, 2, flags, 0, report);",
        ["fence.acq_rel.sys st.relaxed.sys.global.s64"],
    ),
    "enter": (
        "tilescale::enter(report, at, 0, 0, 2, flags, 0, limit, report, 0);",
        ["ld.acquire.sys.global.u64"],
    ),
    "leave": (
        "tilescale::leave(report, at, 0, 0, 2, flags, 0, limit, report, 0, (unsigned*)out, 1l);",
        [DRAINED, "red.relaxed.sys.global.add.u64", "ld.acquire.sys.global.u64", "st.volatile.global.u32"],
    ),
}
"""Functions that report failures too, whose blocks have any order: runs of instructions that must exist."""


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The ordering instructions of a kernel for each function."""
    made = [_kernel(name, call) for name, (call, _) in {**KERNELS, **CONTAINED}.items()]
    return _instructions(FUNCTIONS + "\n" + "\n".join(made), tmp_path_factory.mktemp("ptx"))


def _kernel(name: str, call: str) -> str:
    arguments = "int* flags, long* out, long at, long limit, long* report"
    return f'extern "C" __global__ void {name}_({arguments}) {{ {call} }}'


def _instructions(text: str, folder: Path) -> dict[str, list[str]]:
    source = folder / "functions.cu"
    source.write_text(text, encoding="utf-8")
    command = ["nvcc", "-arch=sm_90a", "-std=c++17", "-O3", "--ptx", "-o", str(folder / "functions.ptx"), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    found = (folder / "functions.ptx").read_text(encoding="utf-8")
    bodies = re.findall(r"\.entry (\w+)_\(.*?\n\{\n(.*?)\n\}", found, re.DOTALL)
    return {name: ORDERING.findall(body) for name, body in bodies}


@pytest.mark.parametrize("name", KERNELS)
def test_instructions_of_a_function(name: str, ptx: dict[str, list[str]]):
    assert ptx[name] == KERNELS[name][1]


@pytest.mark.parametrize("name", CONTAINED)
def test_instructions_among_those_of_reports(name: str, ptx: dict[str, list[str]]):
    assert not _missing(ptx[name], CONTAINED[name][1])


def _missing(found: list[str], wanted: list[str]) -> list[str]:
    return [run for run in wanted if f" {run} " not in f" {' '.join(found)} "]


FENCED = {"barrier", "barrier_of_ranks", "come", "leave"}
"""Functions that signal several ranks: one fence releases the stores for all of them."""


@pytest.mark.parametrize("name", sorted(CONTAINED.keys() - FENCED))
def test_nothing_of_a_function_is_relaxed(name: str, ptx: dict[str, list[str]]):
    """Flags are accessed by acquires and releases only; volatile accesses are those of reports and local counters."""
    weak = ("relaxed", ".cta") if name.endswith("_of_device") else ("relaxed", ".cta", ".gpu")
    assert not [found for found in ptx[name] if any(part in found for part in weak)]


@pytest.mark.parametrize("name", sorted(FENCED))
def test_what_is_relaxed_is_released_by_a_fence(name: str, ptx: dict[str, list[str]]):
    """After a fence of the system, at its scope, written only, and before anything is acquired."""
    assert not _unreleased(ptx[name])


def _unreleased(found: list[str]) -> list[str]:
    """Relaxed writes without a releasing fence, and other accesses that are too weak."""
    wrong = [one for one in found if "relaxed" in one and not one.startswith(("st.relaxed.sys", "red.relaxed.sys"))]
    wrong += [one for one in found if ".gpu" in one or ".cta" in one]
    relaxed = [i for i, one in enumerate(found) if "relaxed" in one]
    before, between = found[: relaxed[0]], found[relaxed[0] : relaxed[-1]]
    if "fence.acq_rel.sys" not in before or [one for one in before if one.startswith("ld.acquire")]:
        wrong.append(found[relaxed[0]])
    return wrong + [one for one in between if "relaxed" not in one and not one.startswith("setp")]


FENCE = 'asm volatile("fence.acq_rel.sys;" ::: "memory");'
PROXY_FENCE = 'asm volatile("fence.proxy.async.global;" ::: "memory");'
WEAKER = [
    ("red.release.sys.global.add.u32", "red.relaxed.sys.global.add.u32", "add_release"),
    ("ld.acquire.sys.global.u32", "ld.relaxed.sys.global.u32", "wait"),
    ("st.release.sys.global.u32", "st.release.gpu.global.u32", "store_release"),
    (FENCE, "", "drain"),
    (PROXY_FENCE, "", "wait_by_producer"),
    (FENCE, "", "barrier"),
    ("st.relaxed.sys.global.s64", "st.relaxed.gpu.global.s64", "come"),
    ("red.relaxed.sys.global.add.u64", "red.relaxed.gpu.global.add.u64", "leave"),
    ("ld.acquire.sys.global.u64", "ld.relaxed.sys.global.u64", "leave"),
    ("wait_group %0;", "wait_group.read %0;", "drain"),
    (PROXY_FENCE, "", "complete_stores"),
    ("__syncwarp();", "", "wait_by_producer"),
]
"""A replacement in the functions, and a function that it weakens."""


@pytest.fixture(scope="module")
def weaker(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The ordering instructions of kernels whose functions are weaker, each in a namespace of its own, in one text."""
    changes = [*WEAKER, *((FENCE, "", name) for name in FENCED)]
    parts = {f"{_space(right, wrong)}::": _weakened(right, wrong) for right, wrong, _ in changes}
    for right, wrong, name in changes:
        space = _space(right, wrong)
        kernel = _kernel(f"{name}_{space}", {**KERNELS, **CONTAINED}[name][0])
        parts[f"{space}::{name}"] = kernel.replace("tilescale::", f"{space}::")
    return _instructions("\n".join(parts.values()), tmp_path_factory.mktemp("weaker"))


def _space(right: str, wrong: str) -> str:
    return f"weak_{sorted({change[:2] for change in WEAKER}).index((right, wrong))}"


def _weakened(right: str, wrong: str) -> str:
    """The functions with a change, in their namespace."""
    weak, space = FUNCTIONS.replace(right, wrong), _space(right, wrong)
    assert weak != FUNCTIONS
    return weak.replace("tilescale", space).replace("TILESCALE", space.upper())


@pytest.mark.parametrize("name", sorted(FENCED))
def test_a_lost_fence_is_found(name: str, weaker: dict[str, list[str]]):
    assert _unreleased(weaker[f"{name}_{_space(FENCE, '')}"])


@pytest.mark.parametrize(("right", "wrong", "name"), WEAKER)
def test_a_weaker_function_is_found(right: str, wrong: str, name: str, weaker: dict[str, list[str]]):
    assert _missing(weaker[f"{name}_{_space(right, wrong)}"], {**KERNELS, **CONTAINED}[name][1])
