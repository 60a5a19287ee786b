# SPDX-License-Identifier: MIT
"""Warpgroups and warps: lowered text is equivalent to the program, separates units, and compiles.

Lowered text is plain TileLang, which the emulator interprets: equal results show that shares, copies, ranks and
exchanges are right, though not their order on a GPU (tests/gpu/thread_groups_check.py does).
"""

import re
from collections.abc import Sequence
from functools import cache
from operator import eq, ge, gt, le, lt
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilescale
import tilescale.language as T
from tests.cuda import thread_group_programs
from tests.cuda.support import bodies, lowered, program, source
from tests.cuda.thread_group_exchanges import large_sum
from tests.cuda.thread_group_programs import CASES
from tests.ladder import NUMBERED, load
from tests.language import programs as reference
from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering import arguments as arg
from tilescale.backends.tilelang.lowering.groups.ranges import _Ranges
from tilescale.backends.tilelang.lowering.kernel import LoweredKernel
from tilescale.backends.tilelang.lowering.phase import ThreadGroups
from tilescale.errors import UnsupportedError


@tilescale.stand_in("tilescale::combined<tilescale::MAX>")
def greater(a: float, b: float) -> float:
    """Combination of two numbers by headers/combine.cuh: NaN stays."""
    return a if a > b or a != a else b


@tilescale.stand_in("tilescale::combined<tilescale::MIN>")
def less(a: float, b: float) -> float:
    """The same of the minimum."""
    return a if a < b or a != a else b


def kernel(func: Any, devices: int = 1) -> LoweredKernel:
    """The first kernel of a program."""
    return lowered(func, devices=devices).kernels[0]


def plain(lowered: LoweredKernel) -> Any:
    """The plain TileLang function that a kernel is, without its fences."""

    def without_fences(node: Any) -> Any:
        is_fence = ir.op_name(getattr(node, "value", None)) == "tirx.call_extern"
        return tir.sequence([]) if is_fence and "tilescale::acquired" in str(node.value) else None

    return lowered.func.with_body(tir.rewrite(lowered.func.body, enter=without_fences))


def interpret(func: Any, values: Sequence[torch.Tensor]) -> None:
    """Run the first kernel of a single-device program as the plain TileLang function that it is."""
    lowered = kernel(func)
    passed = [
        values[a.position] if isinstance(a, arg.CallerArgument) else torch.zeros(a.shape) for a in lowered.arguments
    ]
    tilescale.emulate(plain(lowered), passed, time=False)


def interpret_on_all(func: Any, per_device: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The same on all devices, one after another; returns each parameter's instances side by side."""
    lowered = kernel(func, len(per_device))
    instances = [torch.stack(column) for column in zip(*per_device, strict=True)]

    def value(argument: Any, rank: int) -> Any:
        if isinstance(argument, arg.CallerArgument):
            return instances[argument.position][rank]
        if isinstance(argument, arg.PeerInstances):
            return instances[argument.position]
        return rank if isinstance(argument, arg.DeviceRank) else 0

    for rank in range(len(per_device)):
        tilescale.emulate(plain(lowered), [value(argument, rank) for argument in lowered.arguments], time=False)
    return instances


def text(func: Any) -> str:
    """The first kernel's function as TileLang prints it, without the device functions."""
    script = kernel(func, 4).func.script()
    return script[: script.index("T.sblock_attr(")] + script[script.index("T.sblock_alloc_buffer(") :]


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_lowered_text_means_the_program(name: str):
    case = CASES[name]
    func = case.make()
    expected, found = case.arguments(1), case.arguments(1)
    tilescale.emulate(func, expected, time=False)
    interpret(func, found)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=False)


@pytest.mark.parametrize("exchange", [reference.gathered, reference.exchanged])
def test_attention_over_two_warpgroups(exchange: Any):
    batch, heads, seq, dim, pe = 2, 16, 128, 64, 32
    func = reference.context_parallel_mla(1, batch, heads, seq, dim, pe, 16, 64, exchange)
    torch.manual_seed(3)
    q, q_pe = torch.randn(batch, heads, dim).half(), torch.randn(batch, heads, pe).half()
    kv, k_pe = torch.randn(batch, seq, 1, dim).half(), torch.randn(batch, seq, 1, pe).half()
    found = torch.full((batch, heads, dim), float("nan"))
    interpret(func, [q, q_pe, kv, k_pe, found])
    keys, values = torch.cat([kv, k_pe], 3)[:, :, 0].double(), kv[:, :, 0].double()
    scores = torch.einsum("bhd,bsd->bhs", torch.cat([q, q_pe], 2).double(), keys) / (dim + pe) ** 0.5
    expected = torch.einsum("bhs,bsd->bhd", scores.softmax(-1), values)
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)


def test_split_product_over_two_warpgroups():
    a, b = torch.randn(64, 128).bfloat16(), torch.randn(128, 128).bfloat16()
    found = torch.full((64, 128), float("nan"))
    interpret(reference.tensor_parallel_gemm(1, 64, 128, 128), [a, b, found])
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.nightly), 3])
def test_roles_that_reach_other_devices(devices: int, monkeypatch: pytest.MonkeyPatch):
    """No block waits for another device, but in barriers, which are left out here: one device runs after another."""
    monkeypatch.setattr("tilescale.backends.tilelang.lowering.program.small_grid", lambda *_: None)
    m, n, k = 96 * devices, 160, 128 * devices
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    wanted = a.double() @ b.double()
    shares = zip(a.chunk(devices), b.chunk(devices), strict=True)
    pulled = load(NUMBERED[11]).loader_and_workers(devices, m, n, k)
    *_, c = interpret_on_all(pulled, [[x, y, torch.full((m // devices, n), float("nan"))] for x, y in shares])
    torch.testing.assert_close(c.double().reshape(m, n), wanted, rtol=1e-4, atol=1e-4)
    pushed = load(NUMBERED[12]).worker_and_sender(devices, m, n, k, blocks=3)
    whole = torch.full((devices, m // devices, n), float("nan"))
    *_, c = interpret_on_all(pushed, [[x, b, whole] for x in a.chunk(devices)])
    for instance in c:
        torch.testing.assert_close(instance.double().reshape(m, n), wanted, rtol=1e-4, atol=1e-4)


# -- text --------------------------------------------------------------------------------------------------------------


def test_a_role_has_fragments_of_its_own_and_no_branch_on_the_rank():
    found = text(thread_group_programs.roles())
    allocated = set(re.findall(r"(\w+) = T.sblock_alloc_buffer\(.*local.fragment", found))
    roles = {f"{tile}_warpgroup{n}" for tile in ("values", "sums", "total") for n in (1, 2)}
    assert allocated == roles
    conditions = re.findall(r"if (.*):", found)
    assert conditions == ["tx < 128", "tx < 256"]


def test_units_synchronise_their_own_threads_with_barriers_that_stock_does_not_use():
    found = source(thread_group_programs.couriers(4))
    numbers = {int(n): int(count) for n, count in re.findall(r"__sync_thread_partial\((\d+), (\d+)\)", found)}
    assert numbers == {15: 128, 14: 128, 3: 128}
    first, second = found.index("tilescale::signal<0"), found.index("tilescale::wait<tilescale::GE, int>((&")
    assert "threadIdx.x) == 0) {" in found[first - 120 : first]
    assert "threadIdx.x) == 128) {" in found[second - 120 : second]


def test_units_of_all_devices_synchronize_apart_and_no_counter_is_restricted():
    found = source(thread_group_programs.namesakes(4))
    head = re.search(r"void __launch_bounds__.*", found)[0]
    assert "__restrict__" not in head
    assert len(re.findall(r"barrier_counters_peers_?\b", head)) == 2


def test_concurrent_reductions_have_barriers_of_their_own():
    found = source(thread_group_programs.reductions())
    assert "#define TILESCALE_UNIT_BARRIER 15\n" in found and "NamedBarrier<128>" in found
    assert "TILESCALE_UNIT_BARRIER" not in source(thread_group_programs.copies())


def test_what_a_role_stored_is_there_for_bulk_operations_of_another():
    """GEMMs and bulk copies see stores of other threads after a fence in between: here, before the arrival."""
    lines = [line.strip() for line in bodies(source(thread_group_programs.roles())).splitlines()]
    arrivals = [number for number, line in enumerate(lines) if line.endswith("[0].arrive();")]
    assert len(arrivals) == 3 and all(lines[number - 1] == "tilescale::acquired();" for number in arrivals)


def test_room_for_all_tiles_side_by_side_is_not_asked_for():
    assert "slots = T.sblock_alloc_buffer((1, 128, 64)" in text(large_sum())
    assert "slots = T.sblock_alloc_buffer((2, 32, 32)" in text(thread_group_programs.copies())


def test_a_private_tile_of_a_thread_is_a_local_array():
    @T.prim_func
    def run(Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            with T.Scale("thread") as (t, _):
                own = T.alloc((2,), "float32", level="l0")
                own[0] = t
                own[1] = own[0] * 2
                Y[t] = own[1]

    assert re.search(r"\bfloat own\[2\];", source(run))


# -- what has no lowering, or would be dropped in silence --------------------------------------------------------------


def misuse(body: Any, threads: Any = 256) -> UnsupportedError:
    """The error of lowering a program with this body, a macro of two tensors."""

    @T.prim_func
    def run(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=threads):
            body(X, Y)
            with T.Scale("warp") as (w, _):
                Y[0, w] = 0

    with pytest.raises(UnsupportedError) as caught:
        kernel(run)
    return caught.value


@T.macro
def _fragment_in_a_branch(X, Y):
    tx = T.get_thread_binding()
    part = T.alloc_fragment((64, 64), "float32")
    T.copy(X, part)
    if tx < 128:
        T.copy(part, Y)


def test_a_fragment_of_two_ranges_names_the_tile_and_both_lines():
    error = misuse(_fragment_in_a_branch)
    assert "'part' is used by threads 0 to 255 and by threads 0 to 127" in error.message
    lines = [place.line for place in error.where]
    assert len(lines) == 2 and lines[1] == lines[0] + 2


@T.macro
def _condition_that_is_no_interval(X, Y):
    tx = T.get_thread_binding()
    tile = T.alloc_shared((64, 64), "float32")
    if tx // 128 == 1:
        T.copy(X, tile)


@T.macro
def _condition_through_a_name(X, Y):
    role = T.rank("warpgroup")
    tile = T.alloc_shared((64, 64), "float32")
    if role == 1:
        T.copy(X, tile)


@T.macro
def _write_without_a_view(X, Y):
    part = T.alloc_fragment((64, 64), "float32")
    T.copy(X, part)
    with T.Scale("warpgroup"):
        T.fill(part, 1)
    T.copy(part, Y)


@T.macro
def _view_of_a_part(X, Y):
    part = T.alloc_fragment((64, 64), "float32")
    with T.Scale("warpgroup"):
        T.fill(T.view(part[0:32, 0:64], layout=T.FullRow), 1)


@T.macro
def _views_that_disagree(X, Y):
    part = T.alloc_fragment((64, 64), "float32")
    with T.Scale("warpgroup"):
        T.fill(T.view(part, layout=T.FullRow), 1)
        T.fill(T.view(part, layout=T.FullCol), 1)


@T.macro
def _whole_before_it_is_gathered(X, Y):
    part = T.alloc_fragment((64, 64), "float32")
    with T.Scale("warpgroup"):
        T.fill(T.view(part, layout=T.FullRow), 1)
        T.copy(part, Y)


@T.macro
def _split_dimension_in_a_serial_loop(X, Y):
    part = T.alloc_fragment((64, 64), "float32")
    with T.Scale("warpgroup"):
        T.fill(T.view(part, layout=T.FullRow), 1)
    for i in T.serial(64):
        for j in T.Parallel(64):
            part[i, j] = part[i, j] * 2


@T.macro
def _product_over_shares(X, Y):
    a = T.alloc_fragment((64, 64), "float16")
    b = T.alloc_shared((64, 64), "float16")
    c = T.alloc_fragment((64, 64), "float32")
    with T.Scale("warpgroup"):
        T.fill(T.view(a, layout=T.FullCol), 1)
    T.gemm(a, b, c)


@T.macro
def _registers_of_a_sibling_in_a_role(X, Y):
    with T.Scale("warpgroup") as (wg, _):
        a = T.alloc((64,), "float32", level="l0")
        b = T.alloc((64,), "float32", level="l0")
        T.clear(a)
        T.clear(b)
        if wg == 0:
            T.copy(a, b, dst=1)


@T.macro
def _scale_under_a_condition(X, Y):
    tx = T.get_thread_binding()
    if tx < 128:
        with T.Scale("warp") as (w, _):
            Y[1, w] = w


@T.macro
def _unit_leaves_the_loop(X, Y):
    for k in T.serial(4):
        with T.Scale("warp") as (w, _):
            if w == k:
                T.loop_break()
            Y[k, w] = 1


@T.macro
def _tile_on_a_thread(X, Y):
    with T.Scale("thread"):
        own = T.alloc((4,), "float32", level="l0")
        T.clear(own)


@T.macro
def _block_cyclic(X, Y):
    tile = T.alloc_shared((64, 64), "float32")
    with T.Scale("warpgroup"):
        part = T.view(tile, layout=T.Shard(0, block=4))
        for i, j in T.Parallel(32, 64):
            part[i, j] = 1


@T.macro
def _product_too_small(X, Y):
    a = T.alloc_shared((16, 64), "float16")
    b = T.alloc_shared((64, 16), "float16")
    c = T.alloc_fragment((16, 16), "float32")
    with T.Scale("warpgroup"):
        T.gemm(a, b, T.view(c, layout=T.Replica))


@T.macro
def _shared_and_apart(X, Y):
    static = T.alloc_shared((64, 64), "float32", scope="shared")
    dynamic = T.alloc_shared((64, 64), "float32")
    with T.Scale("warpgroup"):
        T.copy(static, dynamic)


@T.macro
def _nothing(X, Y):
    T.sync_threads()


MISUSES = {
    "no interval": (_condition_that_is_no_interval, "'X' under a condition on the thread index that is no interval"),
    "through a name": (_condition_through_a_name, "under a condition on the thread index that is no interval"),
    "write": (_write_without_a_view, "warpgroups write the fragment 'part' without a view"),
    "part": (_view_of_a_part, "a view that splits a part of the fragment 'part'"),
    "disagree": (_views_that_disagree, "'part' is held by warpgroups as shares along dimension"),
    "not gathered": (_whole_before_it_is_gathered, "names all of 'part', which is held by warpgroups as shares"),
    "serial": (_split_dimension_in_a_serial_loop, "of that dimension is not one whole T.Parallel loop"),
    "inner": (_product_over_shares, "a product into 'c' of a fragment that units split"),
    "role": (_registers_of_a_sibling_in_a_role, "to or from the registers of a sibling that only some units reach"),
    "condition": (_scale_under_a_condition, "units of level 'warp' under a condition on the thread index"),
    "break": (_unit_leaves_the_loop, "one unit leaves a loop around the scale"),
    "thread": (_tile_on_a_thread, "a tile operation on single threads"),
    "block-cyclic": (_block_cyclic, "a block-cyclic view of 'tile'"),
    "product": (_product_too_small, "a product of 16 x 16 on a warpgroup: each of 4 warps takes 16 x 8 at least"),
    "scopes": (_shared_and_apart, "use shared tiles of static and of dynamic size"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_what_has_no_lowering_is_an_error_with_its_line(name: str):
    body, message = MISUSES[name]
    error = misuse(body)
    assert message in error.message
    assert error.where and error.where[0].file == __file__


def test_more_ranges_than_barriers():
    @T.prim_func
    def run(X: T.Tensor((16, 64), "float32"), Y: T.Tensor((16, 64), "float32")):
        with T.Kernel(1, threads=512):
            with T.Scale("warp") as (w, _):
                tile = T.alloc((64,), "float32", level="l1")
                T.copy(X[w, 0], tile)
                T.copy(tile, Y[w, 0])

    with pytest.raises(UnsupportedError, match="they need 1[78] of the 16 that a program has"):
        kernel(run)


def test_threads_in_two_dimensions():
    assert "in a launch of 2-D threads" in misuse(_nothing, (32, 8)).message


# -- ranges ------------------------------------------------------------------------------------------------------------

COMPARISONS = {ir.LT: lt, ir.LE: le, ir.GT: gt, ir.GE: ge, ir.EQ: eq}


launch_of_64_threads = cache(lambda: program(thread_group_programs.single_threads()).launches[0])


@given(
    st.lists(st.tuples(st.sampled_from(list(COMPARISONS)), st.integers(-8, 72), st.booleans()), min_size=1, max_size=3)
)
def test_an_interval_that_is_claimed_is_who_takes_the_branch(conditions: list[tuple[Any, int, bool]]):
    launch = launch_of_64_threads()
    tx = launch.thread_vars[0][0]
    condition: Any = None
    for kind, number, mirrored in conditions:
        sides = (ir.IntImm("int32", number), tx) if mirrored else (tx, ir.IntImm("int32", number))
        test = kind(*sides)
        condition = test if condition is None else ir.And(condition, test)
    found = _Ranges(launch, ThreadGroups(), 0, are_loaded=False)._split(condition, (0, 64))

    def holds(t: int) -> bool:
        return all(COMPARISONS[k](n, t) if m else COMPARISONS[k](t, n) for k, n, m in conditions)

    taken = {t for t in range(64) if holds(t)}
    for interval, expected in zip(found, (taken, set(range(64)) - taken), strict=True):
        if interval is not None:
            assert set(range(*interval)) == expected
