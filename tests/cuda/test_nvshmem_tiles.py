# SPDX-License-Identifier: MIT
"""Elements that a copy by NVSHMEM moves: the generated calls, run by the header itself, compiled for the host."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang import headers
from tilescale.backends.tilelang.lowering.copies import nvshmem
from tilescale.backends.tilelang.lowering.copies.nvshmem import SignalUpdate, StridedTile

HEADER = Path(headers.__file__).with_name("nvshmem.cuh")
SLACK, PES, PE = 3, 2, 1
FLAG, VALUE = 2, 5

CALLS = """
using namespace tilescale;
struct Numbers { i64 at, offset, step, row, rows, column, columns; };
static Place where(char* memory, const Numbers& n) {
  return place((float*)(memory + n.at), n.offset, n.step, n.row, n.rows, n.column, n.columns);
}
template <int SET, typename V>
static void signal(int call, const Place& a, const Place& b, i64 rows, i64 columns, int pe, V* flags, i64* report) {
  if (call == 2) put_signal<SET>(a, b, rows, columns, pe, flags, 1, 2, 5, report, 7);
  if (call == 3) put_flag<SET>(flags, 1, 2, 5, pe, report, 7);
}
extern "C" void run(int call, char* all, i64 bytes, Numbers* from, Numbers* to, i64 rows, i64 columns, int pe,
                    i64 flags, int wide, int set) {
  i64 report;
  heaps = heap = all;
  heap_bytes = bytes;
  Place a = where(all, *from), b = where(all, *to);
  i64* f = (i64*)(all + flags);
  if (call == 0) put(a, b, rows, columns, pe);
  if (call == 1) get(a, b, rows, columns, pe);
  if (wide && set) signal<1>(call, a, b, rows, columns, pe, f, &report);
  if (wide && !set) signal<0>(call, a, b, rows, columns, pe, f, &report);
  if (!wide && set) signal<1>(call, a, b, rows, columns, pe, (int*)f, &report);
  if (!wide && !set) signal<0>(call, a, b, rows, columns, pe, (int*)f, &report);
}
"""

CALL = {"tilescale::put": 0, "tilescale::get": 1, "tilescale::put_signal<x>": 2, "tilescale::put_flag<x>": 3}


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The header's functions on the host."""
    compiler = shutil.which("g++") or pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("host")
    for name in ("nvshmem.h", "nvshmemx.h"):
        (folder / name).write_text("")
    stub = Path(__file__).with_name("nvshmem_host.h")
    (folder / "calls.cpp").write_text(f'#include "{stub}"\n#include "{HEADER}"\n{CALLS}')
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-I{folder}", "calls.cpp", "-o", "calls.so"]
    subprocess.run(command, cwd=folder, check=True)
    found = ctypes.CDLL(str(folder / "calls.so")).run
    integer, long, pointer = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
    found.argtypes = [integer, pointer, long, pointer, pointer, long, long, integer, long, integer, integer]
    return found


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[list[int], list[int], list[int]], ...]:
    """(shape, begins, extents) of both sides of a copy: the same extents but for those of 1, anywhere or beyond."""
    extents = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))

    def side() -> tuple[list[int], list[int], list[int]]:
        mine = [n for n in extents if n != 1]
        for _ in range(draw(st.integers(0, 2))):
            mine.insert(draw(st.integers(0, len(mine))), 1)
        mine = mine or [1]
        whole = draw(st.booleans())
        shape = [n if whole else draw(st.integers(1, 6)) for n in mine]
        begins = [0 if whole else draw(st.integers(-2, 4)) for _ in mine]
        return shape, begins, mine

    return side(), side()


def calls(stmt: ir.Stmt) -> list[ir.Call]:
    """The calls that a statement makes, its loops unrolled."""
    if isinstance(stmt, ir.For):
        values = (ir.IntImm("int32", i) for i in range(ir.constant(stmt.extent)))
        return [c for i in values for c in calls(ir.substitute(stmt.body, {stmt.loop_var: i}))]
    return [stmt.value]


def numbers(place: ir.Call, at: int) -> Any:
    """The arguments of a call of `place`, as the host takes them."""
    return (ctypes.c_long * 7)(at, *(ir.constant(ir.simplify(n, {})) for n in place.args[2:]))


class Memory:
    """Memory of each device: the tensors of both sides and two flags, with margins that must not be written."""

    def __init__(self, shapes: list[list[int]]):
        sizes = [int(np.prod(shape)) for shape in shapes]
        here, there = SLACK, 2 * SLACK + sizes[0]
        self.flags = (there + sizes[1] + SLACK + 1) // 2 * 2
        self.at, self.shapes = (here, there), shapes
        self.words = np.random.default_rng(0).standard_normal((PES, self.flags + 4 + SLACK + 1)).astype(np.float32)
        self.words = np.ascontiguousarray(self.words[:, : self.words.shape[1] // 2 * 2])
        self.words[:, self.flags : self.flags + 4] = 0

    def tensor(self, pe: int, side: int) -> np.ndarray:
        """One side's tensor on a device."""
        begin, shape = self.at[side], self.shapes[side]
        return self.words[pe, begin : begin + int(np.prod(shape))].reshape(shape)

    def flag(self, wide: bool) -> np.ndarray:
        """The flags of the peer."""
        return self.words[PE, self.flags : self.flags + 4].view(np.int64 if wide else np.int32)

    def run(self, device: Any, call: ir.Call, to_peer: bool, wide: bool, is_set: bool) -> None:
        """One generated call, by device 0."""
        kind, arguments = CALL[call.args[0].value], list(call.args[1:])
        places, extents = [(ctypes.c_long * 7)()] * 2, [0, 0]
        if kind != 3:
            order = self.at if to_peer else self.at[::-1]
            places = [numbers(place, 4 * at) for place, at in zip(arguments[:2], order, strict=True)]
            extents = [ir.constant(n) for n in arguments[2:4]]
        memory, nbytes = self.words.ctypes.data, self.words.strides[0]
        device(kind, memory, nbytes, *places, *extents, PE, 4 * self.flags, wide, is_set)


def reference(source: np.ndarray, target: np.ndarray, a: Any, b: Any, zeros: bool) -> None:
    """One element after the other."""
    dims = [[axis for axis, n in enumerate(side[2]) if n != 1] for side in (a, b)]
    for index in np.ndindex(*[a[2][axis] for axis in dims[0]]):
        i, j = list(a[1]), list(b[1])
        for number, (s, t) in zip(index, zip(*dims, strict=True), strict=True):
            i[s] += number
            j[t] += number
        there = all(0 <= n < size for n, size in zip(i, source.shape, strict=True))
        if all(0 <= n < size for n, size in zip(j, target.shape, strict=True)) and (there or zeros):
            target[tuple(j)] = source[tuple(i)] if there else 0


@settings(max_examples=150, deadline=None)
@given(sides=regions(), to_peer=st.booleans(), wide=st.booleans(), is_set=st.booleans(), signals=st.booleans())
def test_elements_that_move(device: Any, sides: Any, to_peer: bool, wide: bool, is_set: bool, signals: bool):
    tiles = [
        StridedTile.of(tir.parameter_buffer(name, shape, "float32")[1], begins, extents)
        for name, (shape, begins, extents) in zip(("here", "there"), sides, strict=True)
    ]
    signals = signals and to_peer
    told = SignalUpdate("x", (0, 1, 2), VALUE, (0, 0)) if signals else None
    memory, expected = Memory([shape for shape, _, _ in sides]), Memory([shape for shape, _, _ in sides])
    for one in (memory, expected):
        one.flag(wide)[1] = FLAG
    near, far = expected.tensor(0, 0), expected.tensor(PE, 1)
    if to_peer:
        reference(near, far, *sides, zeros=False)
    else:
        reference(far, near, *reversed(sides), zeros=True)
    if signals:
        expected.flag(wide)[1] = VALUE if is_set else FLAG + VALUE

    for move in nvshmem._moves(*tiles, to_peer, ir.IntImm("int32", PE), told):
        for call in calls(move):
            memory.run(device, call, to_peer, wide, is_set)
    np.testing.assert_array_equal(memory.words.view(np.uint32), expected.words.view(np.uint32))
