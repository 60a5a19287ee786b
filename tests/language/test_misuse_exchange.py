# SPDX-License-Identifier: MIT
"""Copies and signals used wrongly: found while tracing, with the user's line, the numbers and a hint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import tilescale
import tilescale.language as T
from tests.language.support import on_devices
from tilescale.errors import NoPathError, PeerOutOfRangeError, ShapeError, UsageError

# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", [4, -1, 7])
def test_a_constant_peer_out_of_range(mistake, peer: int):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(tile, X, dst=peer)  # <-

    with mistake(PeerOutOfRangeError, f"peer {peer} of level 'device'", "ranks 0 to 3", "(rank + 1) % size"):
        on_devices(wrong)


@pytest.mark.parametrize("peer", ["device 1", 1.0, (0, 1), lambda reals: reals[0]])
def test_a_peer_that_is_no_rank(mistake, peer):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(tile, X, dst=peer(reals) if callable(peer) else peer)  # <-

    with mistake(UsageError, "a peer is named by its rank", "(rank + 1) % size"):
        on_devices(wrong)


def test_a_peer_that_becomes_constant(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(X, tile, src=T.size("device"))  # <-

    with mistake(PeerOutOfRangeError, "peer 4"):
        on_devices(wrong)


def test_a_negative_peer_of_a_job_of_unknown_size(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(X, tile, src=-1)  # <-

    with mistake(PeerOutOfRangeError, "peer -1"):
        on_devices(wrong, devices=T.ALL)


def test_a_signal_to_a_peer_out_of_range(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.signal(flags[0], dst=4)  # <-

    with mistake(PeerOutOfRangeError, "peer 4"):
        on_devices(wrong)


def test_a_root_out_of_range(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.broadcast(tile, 4)  # <-

    with mistake(PeerOutOfRangeError, "peer 4"):
        on_devices(wrong)


def test_both_sides_far(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(tile, X, dst=1, src=2)  # <-

    with mistake(UsageError, "takes one far side", "here are 2", "one side of a copy is local"):
        on_devices(wrong)


@pytest.mark.parametrize("keywords", [{"impl": "tma"}, {"value": 1}, {"dst": None}])
def test_no_far_side(mistake, keywords: dict):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(tile, X, **keywords)  # <-

    with mistake(UsageError, "here are 0"):
        on_devices(wrong)


def test_a_signal_without_a_peer(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(tile, X, signal=flags[0])  # <-

    with mistake(UsageError, "T.copy(signal=)", "here are 0"):
        on_devices(wrong)


def test_a_signal_with_src(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(X, tile, src=1, signal=flags[0])  # <-

    with mistake(UsageError, "only a flag of the unit that data is sent to", "use T.signal"):
        on_devices(wrong)


def test_a_value_without_a_signal(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(tile, X, dst=1, value=2)  # <-

    with mistake(UsageError, "value="):
        on_devices(wrong)


def test_hints_of_tilelang_at_a_remote_copy(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(tile, X, dst=1, disable_tma=True)  # <-

    with mistake(UsageError, "takes no disable_tma", "it takes dst, src, signal"):
        on_devices(wrong)


def test_tiles_of_different_extents(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(tile[0:32, :], X[0:16, 0:64], dst=1)  # <-

    with mistake(ShapeError, "(32, 64) and (16, 64)"):
        on_devices(wrong)


@pytest.mark.parametrize("far", [{}, {"dst": 1}])
def test_whole_buffers_of_different_shapes(mistake, far: dict[str, int]):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(X, T.alloc((32, 64), "float32", level="l2"), **far)  # <-

    with mistake(ShapeError, "whole of 'X' (64, 64)", "(32, 64)", "T.copy(X[row, column], tile)"):
        on_devices(wrong)


def test_an_implementation_that_the_path_lacks(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(tile, X, dst=1, impl="rdma")  # <-

    with mistake(UsageError, "impl='rdma'", "nvlink", "tma, lsu, copy_engine"):
        on_devices(wrong)


def test_an_implementation_between_warps(mistake):
    with mistake(UsageError, "impl='tma'", "which no network carries"):

        @T.prim_func
        def f(X: T.Tensor((64, 64), "float32")):
            with T.Kernel(1, threads=64):
                with T.Scale("warp"):
                    tile = T.alloc((8, 8), "float32")
                    T.copy(tile, tile, dst=0, impl="tma")  # <-


def test_blocks_that_no_network_connects(mistake):
    with mistake(NoPathError, "no network of 'h200-sxm-8' connects units of level 'block'", "dsmem connects block"):

        @T.prim_func
        def f(X: T.Tensor((64, 64), "float32")):
            with T.Kernel(4, threads=64):
                tile = T.alloc((8, 8), "float32")
                with T.Scale("block"):
                    T.copy(tile, tile, dst=1)  # <-


def test_blocks_of_devices_that_no_network_connects(mistake):
    with mistake(NoPathError, "'block' within one 'device'"):

        @T.prim_func
        def f(X: T.Tensor((64, 64), "float32")):
            with T.Kernel(device=2, block=4, threads=64):
                tile = T.alloc((8, 8), "float32")
                with T.Scale("block"):
                    T.copy(tile, tile, dst=1)  # <-


@pytest.fixture
def separate_servers(tmp_path: Path) -> Iterator[None]:
    """Four servers of eight devices without a network."""
    description = tmp_path / "separate.yaml"
    description.write_text("extends: h200-sxm-8x4\ntitle: separate servers\nnetworks:\n  infiniband:\n")
    with tilescale.use_machine(str(description)):
        yield


@pytest.mark.parametrize(
    "call",
    [
        lambda X, tile, flags: T.copy(X, X, dst=1),
        lambda X, tile, flags: T.signal(flags[0], dst=1),
        lambda X, tile, flags: T.allreduce(tile),
        lambda X, tile, flags: T.barrier(),
    ],
    ids=["copy", "signal", "allreduce", "barrier"],
)
def test_devices_that_no_network_connects(mistake, separate_servers, call):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        call(X, tile, flags)  # <-

    on_devices(wrong, devices=8)
    with mistake(NoPathError, "no network of 'separate' connects units of level 'device'", "the launch has 16"):
        on_devices(wrong, devices=16)


def test_a_layer_that_the_network_does_not_reach(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(X, tile, dst=1)  # <-

    with mistake(NoPathError, "'tile' lies in layer 'l1' (shared memory)", "network 'nvlink'", "it reaches 'l2'"):
        on_devices(wrong)


def test_a_remote_copy_without_a_scale(mistake):
    with mistake(UsageError, "T.copy needs a T.Scale around it"):

        @T.prim_func
        def f(X: T.Tensor((64, 64), "float32")):
            with T.Kernel(device=2, block=4, threads=64):
                T.copy(X, X, dst=1)  # <-


# -- flags -------------------------------------------------------------------------------------------------------------


def test_a_flag_that_is_a_tensor(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.signal(flags)  # <-

    with mistake(UsageError, "one element of a tensor in device memory", "write flags[i]"):
        on_devices(wrong)


def test_a_flag_that_is_a_slice(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.signal(flags[0:2])  # <-

    with mistake(UsageError, "one element of a tensor in device memory"):
        on_devices(wrong)


def test_a_flag_that_is_a_number(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.wait(3, ">=", 1)  # <-

    with mistake(UsageError, "one element of a tensor in device memory, got 3"):
        on_devices(wrong)


def test_a_flag_that_is_real(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.signal(reals[0])  # <-

    with mistake(UsageError, "'reals' is float32"):
        on_devices(wrong)


def test_a_flag_in_shared_memory(mistake):
    with mistake(UsageError, "in device memory"):

        @T.prim_func
        def f(X: T.Tensor((64, 64), "float32")):
            with T.Kernel(1, threads=64):
                flags = T.alloc((8,), "int32", level="l1")
                T.signal(flags[0])  # <-


def test_a_flag_of_a_copy_that_is_real(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(tile, X, dst=1, signal=reals[0])  # <-

    with mistake(UsageError, "'reals' is float32"):
        on_devices(wrong)


@pytest.mark.parametrize("how", ["signal", "copy"])
def test_an_unknown_update(mistake, how: str):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        (T.signal(flags[0], op="max") if how == "signal" else T.copy(tile, X, dst=1, signal=flags[0], op="max"))  # <-

    with mistake(UsageError, "op='max'", "add, set"):
        on_devices(wrong)


@pytest.mark.parametrize("value", [1.5, "one", None, [1]])
@pytest.mark.parametrize(
    "call",
    [
        lambda flags, value: T.signal(flags[0], value),
        lambda flags, value: T.signal(flags[0], value, dst=1),
        lambda flags, value: T.wait(flags[0], ">=", value),
    ],
)
def test_a_value_that_is_no_integer(mistake, call, value):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        call(flags, value)  # <-

    with mistake(UsageError, f"the value of a flag is an integer, got {value!r}", "a // b is one"):
        on_devices(wrong)


def test_a_value_of_a_copy_that_is_no_integer(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.copy(tile, X, dst=1, signal=flags[0], value=reals[0])  # <-

    with mistake(UsageError, "the value of a flag is an integer, got reals[0]"):
        on_devices(wrong)


def test_an_unknown_comparison(mistake):
    @T.macro
    def wrong(X, tile, flags, reals, bx):
        T.wait(flags[0], "=>", 1)  # <-

    with mistake(UsageError, "'=>'", "==, !=, >=, >, <=, <"):
        on_devices(wrong)


def test_a_signal_to_a_peer_without_a_scale(mistake):
    with mistake(UsageError, "T.signal(dst=) needs a T.Scale around it"):

        @T.prim_func
        def f(flags: T.Tensor((8,), "int32")):
            with T.Kernel(device=2, block=4, threads=64):
                T.signal(flags[0], dst=1)  # <-


def test_wait_outside_a_launch(mistake):
    with mistake(UsageError, "T.wait needs a launch"):

        @T.prim_func
        def f(flags: T.Tensor((8,), "int32")):
            T.wait(flags[0], ">=", 1)  # <-


# -- places ------------------------------------------------------------------------------------------------------------


def test_errors_inside_macros_name_the_callers_too(mistake):
    @T.macro
    def inner(tile):
        with T.Scale("device"):
            T.copy(tile, tile, dst=9)  # <-

    @T.macro
    def outer(tile):
        T.clear(tile)
        inner(tile)

    with mistake(PeerOutOfRangeError, "inner(tile)", "outer(tile)", "(called here)"):

        @T.prim_func
        def f(X: T.Tensor((64,), "float32")):
            with T.Kernel(device=2, block=1, threads=32):
                tile = T.alloc((8,), "float32", level="l2")
                outer(tile)


def test_errors_after_a_macro_of_tilelang_name_the_users_line(mistake):
    with mistake(UsageError, "works on tiles"):

        @T.prim_func
        def f(X: T.Tensor((64,), "float32")):
            with T.Kernel(device=2, block=1, threads=32):
                tile = T.alloc((8, 8), "float32", level="l0")
                total = T.alloc((8,), "float32", level="l0")
                T.reduce_sum(tile, total, dim=1)
                with T.Scale("device"):
                    T.allreduce(None)  # <-


# -- threads that act together -----------------------------------------------------------------------------------------


def waits(X, Y, F, rank):
    T.wait(F[0], ">=", 1)


def signals(X, Y, F, rank):
    T.signal(F[0], dst=1 - rank)


def copies(X, Y, F, rank):
    T.copy(X, Y, dst=1 - rank, signal=F[0])


def by_threads(statement, condition):
    """A program in which the threads that a condition holds for execute a statement."""
    act = T.macro(statement)

    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32"), F: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("block"), T.Scale("device") as (rank, size):
                tx = T.get_thread_binding()
                if condition(tx, rank):
                    act(X, Y, F, rank)

    return f


@pytest.mark.parametrize("statement", [waits, signals, copies])
@pytest.mark.parametrize(
    ("condition", "count"),
    [
        (lambda tx, rank: tx == 0, 1),
        (lambda tx, rank: tx < 48, 48),
        (lambda tx, rank: tx % 2 == 1, 64),
        (lambda tx, rank: T.Not(tx // 16 > 0), 16),
    ],
)
def test_some_threads_of_a_warp(statement, condition, count):
    with pytest.raises(UsageError, match=f"that {count} of 128 threads take, which are not whole warps") as found:
        by_threads(statement, condition)
    assert found.value.where and "out of the condition" in found.value.hint


@pytest.mark.parametrize("statement", [waits, signals, copies])
@pytest.mark.parametrize(
    "condition",
    [lambda tx, rank: tx < 64, lambda tx, rank: tx // 32 == 1, lambda tx, rank: rank == 0, lambda tx, rank: tx >= 0],
)
def test_whole_warps(statement, condition):
    assert by_threads(statement, condition) is not None
