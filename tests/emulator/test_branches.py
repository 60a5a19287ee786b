# SPDX-License-Identifier: MIT
"""Divergent control flow: loops that threads leave, branches that wait for each other, roles."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import assert_same, blank
from tilescale.errors import DeadlockError


def ints(*shape, fill=-7):
    return torch.full(shape, fill, dtype=torch.int32)


def test_break_and_continue_of_some_threads():
    @T.prim_func
    def program(Y: T.Tensor((64, 2), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            total = T.alloc_var("int32")
            count = T.alloc_var("int32")
            total = 0
            count = 0
            for i in T.serial(10):
                if i == tx % 8:
                    continue
                if i > tx // 8:
                    break
                total = total + i
                count = count + 1
            Y[tx, 0] = total
            Y[tx, 1] = count

    args = [ints(64, 2)]
    tilescale.emulate(program, args)
    for t, found in enumerate(args[0].tolist()):
        taken = []
        for i in range(10):
            if i == t % 8:
                continue
            if i > t // 8:
                break
            taken.append(i)
        assert found == [sum(taken), len(taken)]


def test_break_inside_nested_loops_leaves_only_the_inner_one():
    @T.prim_func
    def program(Y: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            total = T.alloc_var("int32")
            total = 0
            for i in T.serial(4):
                for j in T.serial(6):
                    if j == tx % 5:
                        break
                    if i == 2:
                        continue
                    total = total + 10 * i + j
                total = total + 1000
            Y[tx] = total

    args = [ints(32)]
    tilescale.emulate(program, args)
    for t, found in enumerate(args[0].tolist()):
        expected = 0
        for i in range(4):
            for j in range(6):
                if j == t % 5:
                    break
                if i == 2:
                    continue
                expected += 10 * i + j
            expected += 1000
        assert found == expected


def test_a_while_loop_of_a_different_length_for_each_thread():
    @T.prim_func
    def program(Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            n = T.alloc_var("int32")
            steps = T.alloc_var("int32")
            n = tx + 1
            steps = 0
            while n != 1:
                if n % 2 == 0:
                    n = n // 2
                else:
                    n = 3 * n + 1
                steps = steps + 1
            Y[tx] = steps

    args = [ints(64)]
    tilescale.emulate(program, args)
    for t, found in enumerate(args[0].tolist()):
        n, steps = t + 1, 0
        while n != 1:
            n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
        assert found == steps


def test_loops_that_begin_and_end_elsewhere_on_each_thread():
    @T.prim_func
    def program(Y: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            total = T.alloc_var("int32")
            total = 0
            for i in T.serial(tx, 2 * tx):
                total = total + i
            Y[tx] = total

    args = [ints(32)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [sum(range(t, 2 * t)) for t in range(32)]


def test_the_two_sides_of_a_branch_wait_for_each_other():
    @T.prim_func
    def program(Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            box = T.alloc_shared((1,), "int32")
            filled = T.alloc_barrier(32)
            taken = T.alloc_barrier(32)
            for k in T.serial(3):
                if tx < 32:
                    box[0] = k * 10
                    T.barrier_arrive(filled)
                    T.barrier_wait(taken, k & 1)
                    Y[tx] = box[0]
                else:
                    T.barrier_wait(filled, k & 1)
                    Y[tx] = box[0]
                    box[0] = k + 5
                    T.barrier_arrive(taken)

    args = [ints(64)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [7] * 32 + [20] * 32


def test_a_side_that_waits_for_the_other_can_break_its_loop():
    """Producers leave the loop early; the consumers' side of the same branch goes on."""

    @T.prim_func
    def program(Y: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            ready = T.alloc_barrier(32)
            taken = T.alloc_barrier(32)
            count = T.alloc_var("int32")
            count = 0
            for k in T.serial(6):
                if tx < 32:
                    T.barrier_arrive(ready)
                    if k == 2:
                        break
                    T.barrier_wait(taken, k & 1)
                else:
                    if k < 3:
                        T.barrier_wait(ready, k & 1)
                        T.barrier_arrive(taken)
                count = count + 1
            Y[tx] = count

    args = [ints(64)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [2] * 32 + [6] * 32


def in_roles(shape, shared=True):
    """A program whose first role takes the output of the second one, later in the text; if `shared`, in a box."""

    @T.macro
    def take(Y, box, full, empty, k, tx):
        T.barrier_wait(full, k & 1)
        Y[k, tx] = box[0] if shared else k * 10
        T.barrier_arrive(empty)

    @T.macro
    def give(Y, box, full, empty, k, tx):
        T.barrier_wait(empty, (k & 1) ^ 1)
        if shared:
            box[0] = k * 10
        Y[k, tx] = -k
        T.barrier_arrive(full)

    @T.prim_func
    def by_ws(Y: T.Tensor((3, 256), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            box = T.alloc_shared((1,), "int32")
            full = T.alloc_barrier(128)
            empty = T.alloc_barrier(128)
            with T.ws(0):
                for k in T.serial(3):
                    take(Y, box, full, empty, k, tx)
            with T.ws(1):
                for k in T.serial(3):
                    give(Y, box, full, empty, k, tx)

    @T.prim_func
    def by_ifs(Y: T.Tensor((3, 256), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            box = T.alloc_shared((1,), "int32")
            full = T.alloc_barrier(128)
            empty = T.alloc_barrier(128)
            for k in T.serial(3):
                if tx < 128:
                    take(Y, box, full, empty, k, tx)
                if tx >= 128:
                    give(Y, box, full, empty, k, tx)

    @T.prim_func
    def by_else(Y: T.Tensor((3, 256), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            box = T.alloc_shared((1,), "int32")
            full = T.alloc_barrier(128)
            empty = T.alloc_barrier(128)
            if tx < 128:
                for k in T.serial(3):
                    take(Y, box, full, empty, k, tx)
            else:
                for k in T.serial(3):
                    give(Y, box, full, empty, k, tx)

    @T.prim_func
    def by_rank(Y: T.Tensor((3, 256), "int32")):
        with T.Kernel(device=1, block=1, threads=256):
            tx = T.get_thread_binding()
            box = T.alloc_shared((1,), "int32")
            full = T.alloc_barrier(128)
            empty = T.alloc_barrier(128)
            with T.Scale("warpgroup") as (wg, _):
                if wg == 0:
                    for k in T.serial(3):
                        take(Y, box, full, empty, k, tx)
                if wg == 1:
                    for k in T.serial(3):
                        give(Y, box, full, empty, k, tx)

    return {"T.ws": by_ws, "ifs": by_ifs, "else": by_else, "ranks": by_rank}[shape]


@pytest.mark.parametrize("shape", ["else", "ranks"])
def test_roles_wait_for_each_other(shape):
    args = [ints(3, 256)]
    tilescale.emulate(in_roles(shape), args)
    assert args[0].tolist() == [[k * 10] * 128 + [-k] * 128 for k in range(3)]


@pytest.mark.parametrize("shape", ["T.ws", "ifs"])
def test_roles_in_branches_that_share_memory_cannot_wait_for_each_other(shape):
    """TileLang puts a barrier of all threads between such branches: on a GPU the first one waits for ever."""
    with pytest.raises(DeadlockError, match="barrier of all threads that TileLang puts before this branch") as caught:
        tilescale.emulate(in_roles(shape), [ints(3, 256)])
    text = str(caught.value)
    assert "threads 128..255 waits" in text and "shares 'box' with the branch at line" in text
    assert "threads 0..127 waits for barrier full[0]" in text and "if/else" in text


@pytest.mark.parametrize("shape", ["T.ws", "ifs"])
def test_roles_in_branches_of_their_own_wait_for_each_other(shape):
    """The first role waits for the second, which comes later and has no else; they share barriers only."""
    args = [ints(3, 256)]
    tilescale.emulate(in_roles(shape, shared=False), args)
    assert args[0].tolist() == [[k * 10] * 128 + [-k] * 128 for k in range(3)]


def test_branches_with_threads_in_common_run_in_order():
    """Data of a role is visible to a branch of all, and to the same role's next one: TileLang synchronises them."""

    @T.prim_func
    def program(Y: T.Tensor((2, 32), "float32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((32,), "float32")
            with T.ws(0):
                T.fill(tile, 1)
            with T.ws(1):
                for i in T.Parallel(32):
                    tile[i] += i
            with T.ws(0):
                T.copy(tile, Y[0, 0])
                T.fill(tile, 7)
            if tx < 256:
                T.copy(tile, Y[1, 0])

    args = [blank(2, 32)]
    tilescale.emulate(program, args)
    assert_same(args[0], torch.stack([torch.arange(32) + 1, torch.full((32,), 7)]).double())


def test_plain_barriers_join_the_units_of_a_scale():
    """Under a condition on the rank only its threads synchronise, as TileLang compiles it."""

    @T.prim_func
    def program(Y: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            box = T.alloc_shared((2,), "int32")
            with T.Scale("warpgroup") as (wg, wgs):
                box[wg] = wg + 10
                if wg == 0:
                    T.sync_threads()
                T.sync_threads()
                Y[tx] = box[wgs - 1 - wg]

    args = [ints(256)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [11] * 128 + [10] * 128


def test_nested_branches_in_parallel_loops_with_private_values():
    @T.prim_func
    def program(X: T.Tensor((16, 8), "int32"), Y: T.Tensor((16, 8), "int32")):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((16, 8), "int32")
            T.copy(X, tile)
            for i, j in T.Parallel(16, 8):
                best = T.alloc_var("int32")
                best = -1000
                for k in T.serial(8):
                    if k <= j:
                        if tile[i, k] > best:
                            best = tile[i, k]
                        else:
                            if tile[i, k] == best:
                                best = best + 100
                if best % 2 == 0:
                    Y[i, j] = best
                else:
                    Y[i, j] = -best

    x = torch.randint(-5, 5, (16, 8), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    args = [x, ints(16, 8)]
    tilescale.emulate(program, args)
    for i in range(16):
        for j in range(8):
            best = -1000
            for k in range(j + 1):
                if x[i, k] > best:
                    best = int(x[i, k])
                elif x[i, k] == best:
                    best += 100
            assert args[1][i, j] == (best if best % 2 == 0 else -best)


def test_a_serial_loop_inside_a_branch_of_a_parallel_loop():
    @T.prim_func
    def program(Y: T.Tensor((4, 8), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                if i % 2 == 0:
                    for j in T.serial(8):
                        Y[i, j] = i * 10 + j
                else:
                    for j in T.serial(8):
                        Y[i, j] = -j

    args = [ints(4, 8)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [[i * 10 + j if i % 2 == 0 else -j for j in range(8)] for i in range(4)]
