# SPDX-License-Identifier: MIT
"""Races between the blocks of a device and of a cluster: global memory, atomics, distributed shared memory."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import SEEDS, in_every_order, line_of, race, tensors
from tilescale.errors import DeadlockError

# -- global memory -----------------------------------------------------------------------------------------------------


def neighbours(order, blocks=4, devices=1):
    """Every block writes a row and reads the next one."""

    @T.prim_func
    def program(Y: T.Tensor((blocks, 32), "float32"), Z: T.Tensor((blocks, 32), "float32"), F: T.Tensor((8,), "int32")):
        with T.Kernel(device=devices, block=blocks, threads=32) as b:
            with T.Scale("block"):
                row = T.alloc((32,), "float32")
                T.fill(row, b)
                T.copy(row, Y[b, 0])  # own row
                if order == "barrier":
                    T.barrier()
                elif order == "grid barrier":
                    T.sync_grid()
                elif order == "flag":
                    T.signal(F[b])
                    T.wait(F[(b + 1) % blocks], ">=", 1)
                elif order == "own flag":
                    T.signal(F[b])
                    T.wait(F[b], ">=", 1)
                if order != "phase":
                    T.copy(Y[(b + 1) % blocks, 0], row)  # next row
                    T.copy(row, Z[b, 0])
            if order == "phase":
                with T.Scale("device"):
                    with T.Scale("block"):
                        row2 = T.alloc((32,), "float32")
                        T.copy(Y[(b + 1) % blocks, 0], row2)
                        T.copy(row2, Z[b, 0])

    return program


def rows(blocks=4, devices=1):
    return tensors(devices, (blocks, 32), (blocks, 32), (8,))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", [None, "own flag"])
def test_a_block_reads_what_another_one_writes(order, seed):
    error = race(neighbours(order), rows(), "own row", "next row", seed=seed)
    assert 'T.barrier() in T.Scale("block"), or a grid phase for each, by T.barrier() in T.Sc' in error.hint


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("order", ["barrier", "grid barrier", "flag", "phase"])
def test_blocks_in_order_are_silent(order, devices):
    in_every_order(neighbours(order, devices=devices), lambda: rows(devices=devices))


@pytest.mark.parametrize("blocks", [2, 7])
def test_blocks_that_write_the_same_place(blocks):
    def program(rows):
        @T.prim_func
        def program(Y: T.Tensor((64, 32), "float32")):
            with T.Kernel(blocks, threads=32) as b:
                T.clear(Y[b * 8 : b * 8 + rows, 0:32])  # clears

        return program

    error = race(program(9), tensors(1, (64, 32))[0], "clears")
    assert error.message.startswith("Y[8, 0:32] of device 0: device 0, block 0 writes it and device 0, block 1 writes")
    assert error.hint.startswith(f"order the accesses of line {line_of('clears')}: T.signal(flag[i]) after the one")
    assert error.hint.endswith("or T.atomic_add, if they are to add up")
    in_every_order(program(8), lambda: tensors(1, (64, 32))[0])


def test_a_view_of_another_type_is_the_same_memory():
    def program(shift):
        @T.prim_func
        def program(Y: T.Tensor((64, 4), "float32")):
            with T.Kernel(2, threads=32) as b:
                bytes_of = T.view(Y, (1024,), "int8")
                if b == 0:
                    T.clear(Y[0:32, 0:4])  # floats
                else:
                    for i in T.Parallel(64):
                        bytes_of[512 - shift + i] = 1  # bytes

        return program

    assert "Y[31, 3]" in race(program(1), tensors(1, (64, 4))[0], "floats", "bytes").message
    in_every_order(program(0), lambda: tensors(1, (64, 4))[0])


# -- atomics -----------------------------------------------------------------------------------------------------------


def histogram(mix):
    @T.prim_func
    def program(H: T.Tensor((32,), "int32"), S: T.Tensor((32,), "int32")):
        with T.Kernel(4, threads=32) as b:
            tx = T.get_thread_binding()
            if mix == "store" and b == 3:
                H[tx] = 0  # plain
            if mix == "read" and b == 3:
                S[tx] = H[tx]  # plain read
            T.atomic_add(H[tx], 1)  # atomic

    return program


def test_atomics_mixed_with_plain_accesses():
    args = tensors(1, (32,), (32,))[0]
    error = race(histogram("store"), args, "plain", "atomic")
    assert error.hint.endswith("; or make both atomic")
    race(histogram("read"), args, "plain read", "atomic")
    in_every_order(histogram(None), lambda: tensors(1, (32,), (32,))[0])


def message(store, load):
    """Block 0 writes a row and raises a flag by a stock atomic; block 1 spins on it and reads the row."""

    @T.prim_func
    def program(R: T.Tensor((32,), "int32"), F: T.Tensor((3,), "int32"), Y: T.Tensor((32,), "int32")):
        with T.Kernel(2, threads=32) as b:
            tx = T.get_thread_binding()
            seen = T.alloc_var("int32", init=0)
            if b == 0:
                R[tx] = tx  # the row
                T.sync_threads()
                if tx == 0:
                    T.atomic_store(F[2], 1, memory_order=store)
            else:
                while seen == 0:
                    seen = T.atomic_load(F[2], memory_order=load)
                Y[tx] = R[tx]  # passed on

    return program


@pytest.mark.parametrize(("store", "load"), [("relaxed", "acquire"), ("release", "relaxed"), ("relaxed", "relaxed")])
def test_relaxed_atomics_order_nothing(store, load):
    race(message(store, load), tensors(1, (32,), (3,), (32,))[0], "the row", "passed on")


@pytest.mark.parametrize(("store", "load"), [("release", "acquire"), ("seq_cst", "seq_cst"), ("release", "consume")])
def test_release_and_acquire_order(store, load):
    in_every_order(message(store, load), lambda: tensors(1, (32,), (3,), (32,))[0])


def tickets(order):
    """Every block writes a partial sum and draws a ticket; the last one adds them up."""

    @T.prim_func
    def program(P: T.Tensor((4,), "int32"), C: T.Tensor((1,), "int32"), Y: T.Tensor((1,), "int32")):
        with T.Kernel(4, threads=32) as b:
            tx = T.get_thread_binding()
            total = T.alloc_var("int32", init=0)
            if tx == 0:
                P[b] = b  # partial
                ticket = T.atomic_add(C[0], 1, return_prev=True, memory_order=order)
                if ticket == 3:
                    for i in T.serial(4):
                        total = total + P[i]  # adds up
                    Y[0] = total

    return program


@pytest.mark.parametrize("order", ["relaxed", "acquire", "release"])
def test_tickets_that_order_nothing(order):
    race(tickets(order), tensors(1, (4,), (1,), (1,))[0], "partial", "adds up")


def test_tickets_that_order():
    in_every_order(tickets("acq_rel"), lambda: tensors(1, (4,), (1,), (1,))[0])


# -- clusters ----------------------------------------------------------------------------------------------------------


def shared_ring(before, after):
    """Each block of a cluster puts its tile into the next one's shared memory, which it had read before."""

    @T.prim_func
    def program(X: T.Tensor((8, 32), "float32"), Y: T.Tensor((8, 32), "float32")):
        with T.Kernel(cta_cluster=4, block=8, threads=32) as b:
            with T.Scale("block") as (rank, size):
                mine = T.alloc((32,), "float32")
                box = T.alloc((32,), "float32")
                T.copy(X[b, 0], mine)
                T.clear(box)  # emptied
                if before:
                    T.barrier()
                T.copy(mine, box, dst=(rank + 1) % size)  # into the next
                if after:
                    T.barrier()
                T.copy(box, Y[b, 0])  # from the box

    return program


def test_distributed_shared_memory():
    args = tensors(1, (8, 32), (8, 32))[0]
    error = race(shared_ring(False, True), args, "emptied", "into the next")
    assert 'T.barrier() in T.Scale("block")' in error.hint
    assert error.message.startswith("box[0:32] of device 0, cta_cluster 0, block 1: ")
    race(shared_ring(True, False), args, "into the next", "from the box")
    in_every_order(shared_ring(True, True), lambda: tensors(1, (8, 32), (8, 32))[0])


def multicast(waits):
    """Stock TileLang: the copy arrives at a barrier of the receiver."""

    @T.prim_func
    def program(X: T.Tensor((4, 32), "float32"), Y: T.Tensor((4, 32), "float32")):
        with T.Kernel(4, threads=32, cluster_dims=4) as b:
            own = T.alloc_shared((32,), "float32")
            other = T.alloc_shared((32,), "float32")
            arrived = T.alloc_cluster_barrier([1])
            T.copy(X[b, 0], own)
            T.cluster_sync()
            T.copy_cluster(own, other, dst_block=(b + 1) % 4, remote_barrier=arrived[0])  # sent
            if waits:
                T.mbarrier_wait_parity(arrived[0], 0)
            T.copy(other, Y[b, 0])  # received
            T.cluster_sync()

    return program


def test_a_copy_in_a_cluster_and_its_barrier():
    race(multicast(False), tensors(1, (4, 32), (4, 32))[0], "sent", "received")
    in_every_order(multicast(True), lambda: tensors(1, (4, 32), (4, 32))[0])


# -- collectives and grids ---------------------------------------------------------------------------------------------


def reduced(devices, separate):
    """Block 0 of every device all-reduces a part of a workspace that block 1 writes as well."""

    @T.prim_func
    def program(X: T.Tensor((2, 32), "float32")):
        with T.Kernel(device=devices, block=2, threads=32) as b:
            with T.Scale("block"):
                if b == 1:
                    T.clear(X[1 if separate else 0, 0:32])  # overwrites
                else:
                    with T.Scale("device"):
                        T.allreduce(X[0, 0:32])  # sums

    return program


@pytest.mark.parametrize("devices", [2, 4])
def test_a_block_overwrites_what_a_collective_takes(devices):
    race(reduced(devices, False), tensors(devices, (2, 32)), "overwrites", "sums")
    in_every_order(reduced(devices, True), lambda: tensors(devices, (2, 32)))


@pytest.fixture
def small(tmp_path):
    """A machine whose devices hold eight blocks of 1024 threads."""
    path = tmp_path / "small.yaml"
    path.write_text("extends: h200-sxm-8\ntitle: four processors\nlevels: {block: {count: 4}}\n", encoding="utf-8")
    return path


def test_blocks_that_wait_for_blocks_that_do_not_fit(small):
    def program(blocks):
        @T.prim_func
        def program(F: T.Tensor((1,), "int32")):
            with T.Kernel(blocks, threads=1024):
                with T.Scale("block"):
                    T.signal(F[0])
                    T.wait(F[0], ">=", blocks)

        return program

    for seed in SEEDS:
        with pytest.raises(DeadlockError, match="launch at most 8 that wait for each other"):
            tilescale.emulate(program(9), [torch.zeros(1, dtype=torch.int32)], schedule_seed=seed, machine=small)
    in_every_order(program(8), lambda: [torch.zeros(1, dtype=torch.int32)], machine=small)


def test_a_program_that_is_right_in_one_order_only():
    """Without checks: the sum of what earlier blocks left is right as long as blocks run one after another."""

    @T.prim_func
    def program(Y: T.Tensor((1,), "int32")):
        with T.Kernel(8, threads=32):
            seen = T.alloc_var("int32")
            seen = Y[0]
            Y[0] = seen + 1

    y = torch.zeros(1, dtype=torch.int32)
    tilescale.emulate(program, [y], check="none")
    assert y.item() == 8
    wrong = 0
    for seed in range(12):
        found = []
        for _ in range(2):
            y.zero_()
            tilescale.emulate(program, [y], check="none", schedule_seed=seed)
            found.append(y.item())
        assert found[0] == found[1]  # a seed is one interleaving
        wrong += found[0] < 8
    assert wrong >= 4


@pytest.mark.parametrize("cluster", [1, 2])
def test_the_adversary_starts_the_last_programs_first(cluster, small):
    """Programs that wait for those before them, of which the machine does not hold all at once."""

    @T.prim_func
    def program(F: T.Tensor((1,), "int32")):
        with T.Kernel(cta_cluster=cluster, block=10, threads=1024) as b:
            T.wait(F[0], ">=", b)
            T.signal(F[0])

    tilescale.emulate(program, [torch.zeros(1, dtype=torch.int32)], machine=small)
    with pytest.raises(DeadlockError, match="device 0 holds 8 blocks at once; 2 of 10 have not started"):
        tilescale.emulate(program, [torch.zeros(1, dtype=torch.int32)], schedule_seed=0, machine=small)
