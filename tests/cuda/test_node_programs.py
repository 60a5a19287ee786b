# SPDX-License-Identifier: MIT
"""Programs whose tiles go between nodes: what carries them, their text, and what they compute."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tests.cuda import node_programs as programs
from tests.cuda.support import bodies, lowered, program
from tilescale.backends.base import Target
from tilescale.backends.cuda import support
from tilescale.backends.tilelang import headers
from tilescale.backends.tilelang.lowering import internode
from tilescale.backends.tilelang.nvshmem_link import IMPL
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine
from tilescale.settings import settings

NODES, LOCAL = 2, 2
SIZES = {level: programs.extents(level, NODES, LOCAL)[0] for level in ("node", "device")}
TARGET = {"kind": "cuda", "arch": "sm_90a"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two servers of two GPUs, in a job with NVSHMEM's heap; the path of the description, which is in force."""
    monkeypatch.setenv("TILESCALE_HEAP", IMPL)
    settings.cache_clear()
    path = tmp_path / "two.yaml"
    text = f"extends: h200-sxm-8x4\nlevels:\n  node:\n    count: {NODES}\n  device:\n    count: {LOCAL}\n"
    path.write_text(text, encoding="utf-8")
    with tilescale.use_machine(str(path)):
        yield str(path)
    settings.cache_clear()


@pytest.mark.parametrize("level", ["node", "device"])
def test_they_compute_what_they_say(level: str, machine: str):
    ranks = range(NODES * LOCAL)
    for name, (func, shapes, wanted) in programs.cases(level, NODES, LOCAL).items():
        everybody = [programs.arguments(shapes, rank, seed=1) for rank in ranks]
        given = [args[0].double() for args in everybody]
        tilescale.emulate(func, everybody)
        for rank in ranks:
            among, me = programs.siblings(level, NODES, LOCAL, rank)
            for position, expected in wanted([given[r] for r in among], me).items():
                found = everybody[rank][position].double()
                assert found.equal(expected.double()), f"{name}, rank {rank}, argument {position}"


@pytest.mark.parametrize(("make", "level"), [(programs.ring, "node"), (programs.barrier, "device")])
def test_text_of_programs(make: Any, level: str, machine: str, golden: Any):
    func = make(level, SIZES[level])
    golden(f"nodes/{make.__name__}", bodies(lowered(func, machine).source({"target": TARGET})))


def notes(func: Any, machine: str) -> list[str]:
    taken_apart = program(func, machine)
    return list(support.lower(taken_apart, Target.of(taken_apart, Machine.load(machine))).notes)


def test_the_schedule_says_what_carries_them(machine: str):
    assert notes(programs.ring("node", SIZES["node"]), machine) == [
        "T.copy(tile, Y, dst=): nvshmem (nodes share no memory, through a workspace)",
        "T.signal of flags between nodes: nvshmem",
    ]
    assert "T.barrier of level 'device': by peer memory inside, by nvshmem between" in notes(
        programs.barrier("device", SIZES["device"]), machine
    )
    found = notes(programs.collectives("node", SIZES["node"], NODES), machine)
    assert "T.allreduce of level 'node': one_shot through nvshmem, as nodes do not all share memory" in found


def test_what_shares_memory_needs_no_library(machine: str):
    @T.prim_func
    def inside(X: T.Tensor((32, 64), "float32"), Y: T.Tensor((32, 64), "float32")):
        with T.Kernel(node=NODES, device=LOCAL, block=1, threads=64):
            tile = T.alloc((32, 64), "float32", level="l1")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(X, tile)
                T.copy(tile, Y, dst=(rank + 1) % size)
                T.barrier()
                T.allreduce(tile)
                T.copy(tile, Y)

    made = lowered(inside, machine)
    text = made.source({"target": TARGET})
    assert "nvshmem" not in text and "nvshmem" not in "".join(made.notes)
    assert "siblings(device_rank, 2, (node_rank * 2), 1, slot_shift, 2)" in bodies(text)
    assert not made.lowered.rendezvous.inside, "devices of several nodes synchronize in two steps"


def test_a_wire_without_it_is_refused(machine: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(internode, "path_between", lambda target: SimpleNamespace(mechanisms=()))
    with pytest.raises(UnsupportedError, match="of programs between devices(.|\n)*has no mechanism 'nvshmem'"):
        notes(programs.barrier("device", SIZES["device"]), machine)


# -- the barrier, on threads -------------------------------------------------------------------------------------------

HOST = """
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
namespace tilescale {
typedef long i64;
enum Kind { TIMEOUT, OUTSIDE, ABSENT };
enum Outcome { READY, LATE, STOPPED };
inline i64 stopped(const i64*) { return 0; }
inline void notify_host(const i64*) {}
inline void drain() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline int load_acquire(const int* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_relaxed(int* p, int v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void fail(i64* report, Kind, int, i64 index, i64, i64) { *report = 100 + index; }
template <typename R> Outcome await(R ready, i64 limit, const i64*) {
  for (i64 turn = 0; turn < limit; ++turn) {
    if (ready()) return READY;
    turn < 64 ? std::this_thread::yield() : std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return LATE;
}
}  // namespace tilescale
constexpr int NODES = 3, NEAR = 2, ALL = NODES * NEAR, STRIDE = 4 * ALL;
static int memory[ALL][STRIDE];  // of a node, slots are rotated by one
static thread_local int me;
inline int* instance(int device) { return memory[device / NEAR * NEAR + (device + 1) % NEAR]; }
inline void nvshmem_quiet() {}
inline void nvshmem_uint_atomic_set(unsigned* here, unsigned value, int pe) {
  __atomic_store_n((unsigned*)instance(pe) + ((int*)here - instance(me)), value, __ATOMIC_RELEASE);
}
"""

RUN = """
extern "C" int run(int by_node, int missing) {
  std::vector<std::thread> ranks;
  std::atomic<int> came[3][40] = {}, wrong{0};
  std::atomic<long> absent{0};
  for (auto& m : memory) for (int& word : m) word = 0;
  for (int rank = 0; rank < ALL; ++rank) ranks.emplace_back([&, rank] {
    using namespace tilescale;
    if (rank == missing) return;
    me = rank;
    int place = rank % NEAR, team = by_node ? place : 0, size = by_node ? NODES : ALL, epochs[2] = {0, 0};
    Siblings s = by_node ? siblings(rank / NEAR, size, place, NEAR, 1, NEAR) : siblings(rank, size, 0, 1, 1, NEAR);
    i64 report = 0;
    for (int turn = 0; turn < 40 && !report; ++turn) {
      came[team][turn] += 1;
      int* base = memory[rank / NEAR * NEAR];
      barrier_of_groups(base, STRIDE, s, by_node ? 1 : NEAR, 1, epochs, missing < 0 ? 1L << 40 : 1L << 12, &report, 0);
      if (!report && came[team][turn] != size) wrong += 1;
    }
    if (report) absent = report;
  });
  for (auto& rank : ranks) rank.join();
  return wrong ? -1 : (int)absent;
}
"""


@pytest.fixture(scope="module")
def barrier(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Six ranks on three nodes that synchronize forty times, each rank a thread."""
    compiler = shutil.which("g++") or pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("barrier")
    nvshmem = headers.header("nvshmem.cuh")
    begin = nvshmem.index("#ifdef TILESCALE_SIBLINGS_CUH")
    groups = nvshmem[begin : nvshmem.index("#endif", begin) + len("#endif")]
    text = f"{HOST}\n{headers.header('siblings.cuh')}\nnamespace tilescale {{\n{groups}\n}}\n{RUN}"
    (folder / "barrier.cpp").write_text(text, encoding="utf-8")
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-o", "barrier.so", "barrier.cpp"]
    subprocess.run(command, check=True, cwd=folder, timeout=120)
    return ctypes.CDLL(str(folder / "barrier.so")).run


@pytest.mark.parametrize("by_node", [0, 1])
def test_a_barrier_of_two_levels_waits_for_all(by_node: int, barrier: Any):
    assert barrier(by_node, -1) == 0


def test_who_does_not_come_is_named(barrier: Any):
    """By its number relative to the first device of the waiting unit's node."""
    assert barrier(1, 3) - 100 in (3 - 0, 3 - 4), "its rail misses device 3"
    assert barrier(0, 3) > 0
