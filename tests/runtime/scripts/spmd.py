# SPDX-License-Identifier: MIT
"""Kernel calls from the ranks of a job. Every `check_` function runs on every rank, one after the other."""

import warnings
from collections.abc import Callable

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import tilescale
import tilescale.language as T
from tests.runtime import programs
from tilescale.errors import ArgumentError, DeadlockError, LaunchError, RankMismatchError, UnsupportedError

WORLD = tilescale.init()
RANK, SIZE = WORLD.rank, WORLD.size
EVERYONE = torch.stack([torch.full((64,), float(rank + 1)) for rank in range(SIZE)])


def raised(expected: type[Exception], call: Callable[[], object]) -> str:
    """The text of the error that `call` raises on this rank."""
    try:
        call()
    except expected as error:
        return str(error)
    raise AssertionError(f"rank {RANK}: no {expected.__name__}")


def check_repeated_calls():
    kernel = tilescale.compile(programs.total(SIZE))
    for factor in (1, 3):
        x, y = factor * EVERYONE[RANK], torch.full((64,), torch.nan)
        assert kernel(x, y) is None
        assert torch.equal(y, factor * EVERYONE.sum(0))


def check_plain_tensors_that_peers_reach_are_told_of_once():
    @T.prim_func
    def send(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(device=SIZE, block=1, threads=32):
            with T.Scale("device") as (rank, size):
                T.copy(X, Y, dst=(rank + 1) % size)

    kernel = tilescale.compile(send)
    for inbox, names in ((tilescale.zeros((8,)), []), (torch.zeros(8), ["'Y'"]), (torch.zeros(8), [])):
        if names:
            kernel = tilescale.compile(send)  # one without an earlier warning
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernel(EVERYONE[RANK][:8].clone(), inbox)
        found = [str(each.message) for each in caught if "symmetric" in str(each.message)]
        assert len(found) == len(names) and all(name in text for name, text in zip(names, found, strict=True))


def check_all_devices_of_the_job():
    y = torch.zeros(64)
    tilescale.compile(programs.total(T.ALL))(EVERYONE[RANK], y)
    assert torch.equal(y, EVERYONE.sum(0))


def check_shards_outputs_and_layouts_in_memory():
    rng = torch.Generator().manual_seed(4)
    a, b = (torch.randint(-4, 5, shape, generator=rng).float() for shape in ((32, 64), (64, 32)))
    kernel = tilescale.compile(programs.matmul(SIZE), out_idx=2)
    shard = a.chunk(SIZE, 1)[RANK]
    assert not shard.is_contiguous()
    assert torch.equal(kernel(shard, b.chunk(SIZE)[RANK]), a @ b)
    into = torch.full((32, 64), torch.nan)
    tilescale.compile(programs.matmul(SIZE))(shard.requires_grad_(), b.chunk(SIZE)[RANK], into[:, ::2])
    assert torch.equal(into[:, ::2], a @ b)
    assert into[:, 1::2].isnan().all()


def check_only_what_is_written_comes_back():
    x, y = EVERYONE[RANK].clone(), torch.zeros(64)
    before = x._version, y._version
    tilescale.compile(programs.total(SIZE))(x, y)
    assert x._version == before[0] and y._version > before[1]


def check_the_report_is_where_the_emulation_ran():
    kernel = tilescale.compile(programs.total(SIZE))
    kernel(EVERYONE[RANK], torch.zeros(64))
    assert (kernel.report is not None) == (RANK == 0)


def check_plain_programs_are_each_ranks_own():
    for _ in range(RANK):  # another number of calls on each rank: no rank waits for another
        x = torch.randn(40)
        assert torch.equal(programs.doubled(40)(x), 2 * x)
        assert torch.equal(programs.scaled(x), 3 * x)


def check_another_number_of_devices():
    kernel = tilescale.compile(programs.total(SIZE // 2))
    text = raised(LaunchError, lambda: kernel(torch.zeros(64), torch.zeros(64)))
    assert f"launches {SIZE // 2} device" in text and f"the job has {SIZE} ranks" in text


def check_one_wrong_shape_is_everyones_error():
    kernel = tilescale.compile(programs.total(SIZE))
    wrong = torch.zeros(63 if RANK == 2 else 64)
    assert "device 2: 'Y' has shape (63,)" in raised(ArgumentError, lambda: kernel(torch.zeros(64), wrong))


def check_one_tensor_that_cannot_be_written_is_everyones_error():
    kernel = tilescale.compile(programs.total(SIZE))
    wrong = torch.zeros(1).expand(64) if RANK == SIZE - 1 else torch.zeros(64)
    assert "'Y' is written and expanded" in raised(ArgumentError, lambda: kernel(torch.zeros(64), wrong))
    assert not wrong.any()


def check_views_of_one_memory():
    """A later phase reads through one parameter what an earlier one wrote through another."""
    kernel, memory = tilescale.compile(programs.total(SIZE)), torch.full((65,), float(RANK + 1))
    kernel(memory[:64], memory[:64])
    assert torch.equal(memory[:64], EVERYONE.sum(0)) and memory[64] == RANK + 1
    kernel, memory = tilescale.compile(programs.in_turn(SIZE)), torch.zeros(64)
    seen = torch.zeros(64)
    kernel(memory, memory.view(8, 8), seen)
    assert torch.equal(seen, torch.full((64,), RANK + 1.0))


def check_different_programs():
    kernel = tilescale.compile(programs.total(SIZE, 64) if RANK != 1 else programs.total(SIZE, 32))
    tensors = torch.zeros(64 if RANK != 1 else 32), torch.zeros(64 if RANK != 1 else 32)
    text = raised(RankMismatchError, lambda: kernel(*tensors))
    assert "'total_program' of rank 0 and of rank 1 differ in their shapes, constants or statements: `" in text
    assert text.count("at " + __file__) == 2, "a line of each"


def check_different_extents():
    kernel = tilescale.compile(programs.grow(SIZE))
    x = torch.zeros(50)
    kernel(x)
    assert torch.equal(x, torch.full((50,), float(SIZE)))
    text = raised(RankMismatchError, lambda: kernel(torch.zeros(40 if RANK == 3 else 50)))
    assert "n = 50 on rank 0 and 40 on rank 3" in text


def check_an_error_inside_the_emulation():
    kernel = tilescale.compile(programs.stuck(SIZE))
    flags = torch.zeros(1, dtype=torch.int32)
    text = raised(DeadlockError, lambda: kernel(flags))
    assert "flags[0] >= 2" in text and "programs.py" in text
    assert flags.item() == 0, "of a call that fails nothing arrives, on no rank"


def check_addresses_of_other_processes():
    kernel, x = tilescale.compile(programs.pointed(SIZE)), torch.zeros(8)
    text = raised(UnsupportedError, lambda: kernel(torch.tensor([x.data_ptr()])))
    assert "'pointed_program' makes tensors of addresses" in text


def check_dtensors():
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (SIZE,))
    rng = torch.Generator().manual_seed(5)
    a, b = (torch.randint(-4, 5, shape, generator=rng).float() for shape in ((32, 64), (64, 32)))
    c = distribute_tensor(torch.zeros(32, 32), mesh, [Replicate()])
    a_dist, b_dist = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    kernel = tilescale.compile(programs.matmul(SIZE))
    kernel(a_dist, b_dist, c)
    assert torch.equal(c.full_tensor(), a @ b)
    text = raised(ArgumentError, lambda: kernel(distribute_tensor(a, mesh, [Shard(0)]), b_dist, c))
    assert "'A' is a DTensor placed (S(0)), the program lays it out as (S(1)) over device" in text
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    checks = [value for name, value in list(globals().items()) if name.startswith("check_")]
    for check in checks:
        check()
        WORLD.barrier()
        if RANK == 0:
            print("passed", check.__name__, flush=True)
