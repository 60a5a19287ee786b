# SPDX-License-Identifier: MIT
"""Memory orders in the source of each device function, in program order; no compiler is needed.

`test_device_functions.py` checks the PTX of the same source, where nvcc is installed.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tilescale.backends.cuda import headers as cuda
from tilescale.backends.hip import headers as hip
from tilescale.backends.tilelang import headers

TOPS = ("tilescale", "tilelang_core", "tests")

FUNCTION = re.compile(
    r"^( *)(?:static )?__device__ [^\n]*?(\w+)\([^;{]*\) (?:const )?(\{ [^\n]*\}$|\{\n.*?^\1\})",
    re.DOTALL | re.MULTILINE,
)
PARTS = re.compile(
    r"asm volatile\(\"([\w.]+ ?%?\d?)|\b(__threadfence_system|__syncwarp|complete_stores|drain|acquired|load_acquire"
    r"|store_release|store_relaxed|add_release|add_relaxed|notify_ranks|fence|count_of_device|cluster_barrier|order_stores|store_words|load_words"
    r"|store_line|load_line|clear|of_cluster|__syncthreads|__syncthreads_and|nvshmemx?_\w+|await_siblings)(?:<S>)?\("
    r"|\b(complete|start_put|put|update_flag|put_flag|notify_siblings)(?:<SET>)?\((?=\)|from|flags|counters)"
)
"""An instruction of PTX, or a call of what orders."""

ORDERS = {
    "memory.cuh": {
        "now_ns": ["mov.u64 %0"],
        # The next grid begins when this one may read the previous grid's data.
        "follow_grid": ["griddepcontrol.wait", "griddepcontrol.launch_dependents"],
        "fence": ["fence.acq_rel.sys"],
        "complete_stores": ["cp.async.bulk.wait_group %0", "fence.proxy.async.global"],
        # Bulk copies are complete and ordered before the fence that releases them.
        "drain": ["complete_stores", "fence"],
        "acquired": ["fence.proxy.async.global", "fence.proxy.async.shared"],
        "load_acquire": [f"ld.acquire.{scope}.global.{kind} %0" for kind in ("u32", "u64") for scope in ("sys", "gpu")],
        "store_relaxed": ["st.relaxed.sys.global.s32 ", "st.relaxed.sys.global.s64 "],
        "add_relaxed": ["red.relaxed.sys.global.add.u64 "],
        "add_release": [
            f"red.release.{scope}.global.add.{kind} " for kind in ("u32", "u64") for scope in ("sys", "gpu")
        ],
        "store_release": [f"st.release.{scope}.global.{kind} " for kind in ("u32", "u64") for scope in ("sys", "gpu")],
        "count_of_device": ["atom.acq_rel.gpu.global.add.u32 %0"],
        "store_whole": ["st.global.v4.b32 ", "st.global.v2.b32 "],
    },
    "sync.cuh": {
        # A report's words are written before its state, and the state before any wait is stopped.
        "fail": ["__threadfence_system"] * 3,
        "wait": ["load_acquire"],
        "wait_any": ["load_acquire"],
        # A thread that is a unit of its own orders its bulk copies, and publishes its stores, by itself.
        "wait_by_thread": ["acquired"],
        "wait_any_by_thread": ["acquired"],
        "signal_by_thread": ["complete_stores"],
        "signal": ["store_release", "add_release"],
        "release": ["store_release", "add_release"],
        "notify_ranks": ["store_relaxed"],
        # One fence releases the stores for all ranks; only then does a thread read theirs.
        "barrier": ["drain", "notify_ranks", "load_acquire"],
    },
    # The other lanes come after lane 0's acquire, and their bulk copies after them.
    "producer.cuh": {"wait_by_producer": ["__syncwarp", "acquired"]},
    "siblings.cuh": {
        "notify_siblings": ["store_relaxed"],
        "await_siblings": ["load_acquire"],
        "barrier_of_siblings": ["drain", "notify_siblings", "await_siblings"],
    },
    "nvshmem.cuh": {
        # All threads have started what they start before one waits for it, and none goes on before.
        "complete": ["__syncthreads", "nvshmem_quiet", "__syncthreads"],
        # Stores of threads, bulk copies too, are visible before any of them requests a read.
        "start_put": ["drain", "__syncthreads", "nvshmemx_putmem_nbi_warp", "nvshmemx_putmem_nbi_block"],
        "put": ["start_put", "complete"],
        # Zeros outside the tensor come before the data inside; bulk copies may read both.
        "get": [
            *("drain", "__syncthreads", "drain", "__syncthreads"),
            *("nvshmemx_getmem_nbi_warp", "nvshmemx_getmem_nbi_block", "complete", "acquired"),
        ],
        # Until it is there: a later call may zero the flag.
        "update_flag": [
            *("nvshmemx_signal_op", "nvshmem_uint_atomic_set", "nvshmem_uint_atomic_add"),
            "nvshmem_quiet",
        ],
        "put_flag": ["update_flag"],
        "signal_pe": ["drain", "update_flag"],
        "put_signal": [
            *("drain", "__syncthreads", "nvshmemx_putmem_signal_nbi_block", "complete"),
            *("put", "put_flag"),
        ],
        # Other groups are signalled only after all of the local group have arrived.
        "barrier_of_groups": [
            *("drain", "notify_siblings", "await_siblings"),
            *("drain", "nvshmem_uint_atomic_set", "nvshmem_quiet", "await_siblings"),
        ],
    },
    "cluster.cuh": {
        "at_peer": ["mapa.u64 %0"],
        # Bulk copies are complete before the arrival, which releases; what follows the wait comes after its acquire.
        "cluster_barrier": [
            "complete_stores",
            "acquired",
            "__syncwarp",
            "barrier.cluster.arrive.release.aligned",
            "barrier.cluster.wait.acquire.aligned",
            "acquired",
        ],
    },
    "rendezvous.cuh": {
        "await_ranks": ["load_acquire"],
        "barrier_of_ranks": ["drain", "notify_ranks"],
        "clear": ["clear"],
        "come": ["fence", "notify_ranks"],
        # Blocks signal completion; the first one waits for all of them, and only then clears the flags.
        "leave": ["drain", "add_relaxed", "notify_ranks", "load_acquire", "clear"],
        "count": ["count_of_device", "clear"],
    },
    "words.cuh": {
        # A vector of two words arrives as a whole, each with the message's number in it.
        "store_words": ["st.relaxed.sys.global.v2.u64 "],
        "load_words": ["ld.relaxed.sys.global.v2.u64 "],
        # The threads of a line are together in one instruction.
        "store_line": ["__syncwarp", "store_words"],
        "load_line": ["__syncwarp", "load_words"],
        "order_stores": ["fence.acq_rel.sys"],
    },
    # Parts are zero before others of the cluster store theirs; these are words with a number, which need no order.
    "cluster_sum.cuh": {
        "OfCluster": ["barrier.cluster.arrive.release"],
        "ready": ["barrier.cluster.wait.acquire", "__syncthreads"],
        "store": ["mapa.shared", "st.relaxed.cluster.shared"],
        "load": ["ld.relaxed.cluster.shared.v2.u64 "],
    },
    # A group's maximum is zero before the cluster's barrier ahead of the first row, and before each next row; it is
    # complete before a thread reads it.
    "norm_messages.cuh": {"reduce_norm_short": ["clear", "of_cluster", "clear", "__syncthreads"]},
    "short_messages.cuh": {
        "store": ["store_words", "store_line"],
        "load": ["load_words", "load_line"],
        "end": ["__syncthreads"],
    },
    "long_messages.cuh": {
        # Stores of the block precede the flags, and reads follow them.
        "notify": ["__syncthreads", "order_stores", "store_relaxed"],
        "await_arrival": ["load_acquire", "__syncthreads_and"],
        "end": ["__syncthreads"],
    },
    "rounds.cuh": {
        "notify": ["__syncthreads", "order_stores", "store_relaxed"],
        "await_arrival": ["load_acquire", "__syncthreads_and"],
        "end": ["__syncthreads"],
    },
}
"""File -> function -> its memory orders; overloads after one another. Other functions have none."""


@pytest.mark.parametrize("name", ORDERS)
def test_what_functions_say_about_order(name: str):
    found: dict[str, list[str]] = {}
    for _, function, body in FUNCTION.findall(cuda.header(name)):
        said = ["".join(found) for found in PARTS.findall(body)]
        if said:
            found.setdefault(function, []).extend(said)
    assert found == ORDERS[name]


SETS = {"cuda": cuda, "hip": hip}
"""Packages of instruction sets."""


def files(package: Any) -> dict[str, str]:
    """Name -> text of the files of a package."""
    return {path.name: path.read_text(encoding="utf-8") for path in Path(package.__file__).parent.glob("*.cuh")}


def test_headers_are_listed_and_name_files_that_exist():
    texts, own = files(headers), files(cuda)
    assert set(re.findall(r"\w+\.cuh\b", headers.__doc__ or "")) == texts.keys() | own.keys()
    root = Path(headers.__file__).parents[4]
    found = [f"/{path.relative_to(root).as_posix()}" for top in TOPS for path in (root / top).rglob("*.py")]
    named = {name for text in (*texts.values(), *own.values()) for name in re.findall(r"[\w/]+\.py\b", text)}
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in found)]


@pytest.mark.parametrize("name", SETS)
def test_an_instruction_set_has_what_others_call(name: str):
    """It has the files of CUDA with all of their functions, except those for bulk copies and dependent launches."""
    own, of_cuda = files(SETS[name]), files(cuda)
    assert own.keys() == of_cuda.keys()
    assert set(re.findall(r"\w+\.cuh\b", SETS[name].__doc__ or "")) == own.keys()
    functions = re.compile(r"^__device__ [^\n;]*?(\w+)\(", re.MULTILINE)
    missing = {file: {*functions.findall(text)} - {*functions.findall(own[file])} for file, text in of_cuda.items()}
    assert missing["memory.cuh"] <= {"follow_grid", "store_whole"} and not missing["adders.cuh"]
