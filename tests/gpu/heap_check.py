# SPDX-License-Identifier: MIT
"""The symmetric heap on real GPUs: `torchrun --nproc-per-node N tests/gpu/heap_check.py [cuda_vmm|nvshmem]`.

Prints a PASS or FAIL line for each check, and ends with exit code 1 if one fails. With one rank it runs what one rank
can. The checks are functions of a heap, which the tests call too.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tilescale.comm import SymmetricHeap, heap_of  # noqa: E402
from tilescale.errors import HeapExhaustedError, NotSymmetricError, RankMismatchError, TileScaleError  # noqa: E402

LIMIT_S = 100.0
MIB = 1 << 20


def barrier(heap: SymmetricHeap) -> None:
    """All work of all ranks is done."""
    torch.cuda.synchronize(heap.device)
    heap.team.barrier()


def beside(heap: SymmetricHeap) -> torch.device:
    """The GPU of another rank, if there is one."""
    return torch.device("cuda", (heap.device.index + 1) % torch.cuda.device_count())


def data(heap: SymmetricHeap, rank: int, round_: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Random numbers that every rank can make for every other."""
    generator = torch.Generator(device=heap.device).manual_seed(1000 * round_ + rank)
    return torch.randn(shape, generator=generator, device=heap.device)


def expect(error: type[TileScaleError], call: Callable[[], object], text: str = "") -> str:
    """The text of the error that a call must raise."""
    try:
        call()
    except error as found:
        assert text in str(found), str(found)
        return str(found)
    raise AssertionError(f"no {error.__name__}")


def check_addresses(heap: SymmetricHeap) -> None:
    """Every rank's memory is at the map's address, and the slots are a rotation that a kernel can compute."""
    view, x = heap.addresses, heap.empty(16)
    assert x.data_ptr() == view.address(heap.team.rank, heap.offset(x)) and x.device == heap.device
    assert all((peer + view.shift) % view.ranks == view.slot(peer) for peer in range(view.ranks))
    assert view.base % 512 == 0 and view.stride % 512 == 0 and x.data_ptr() % 512 == 0
    offsets = heap.team.all_gather(heap.offset(x))
    assert set(offsets) == {offsets[0]}


def check_read_and_write(heap: SymmetricHeap) -> None:
    """Peers read what a rank wrote, and write what it reads: fresh numbers in every round."""
    team, view = heap.team, heap.addresses
    x, inbox = heap.empty((257, 130)), heap.zeros((team.size, 100))
    everywhere, inboxes = heap.peers(x), heap.peers(inbox)
    for round_ in range(4):
        x.copy_(data(heap, team.rank, round_, (257, 130)))
        barrier(heap)
        for peer in range(team.size):
            expected = data(heap, peer, round_, (257, 130))
            assert torch.equal(everywhere[view.slot(peer)], expected), f"reading rank {peer}"
            assert torch.equal(heap.peers(x[3:9, 1::2])[view.slot(peer)], expected[3:9, 1::2])
            inboxes[view.slot(peer), team.rank].copy_(data(heap, team.rank, 50 + round_, (100,)) + peer)
        barrier(heap)
        for peer in range(team.size):
            assert torch.equal(inbox[peer], data(heap, peer, 50 + round_, (100,)) + team.rank), f"from rank {peer}"
        barrier(heap)


def check_growth(heap: SymmetricHeap) -> None:
    """Tensors beyond the first chunk, and over the border of two; what was there stays."""
    team, view = heap.team, heap.addresses
    first = heap.from_tensor(data(heap, team.rank, 7, (1000,)))
    before = heap.usage().mapped
    large = [heap.empty(200 * MIB, torch.uint8) for _ in range(2)] + [heap.empty(600 * MIB, torch.uint8)]
    assert heap.usage().mapped > before
    for number, x in enumerate(large):
        x.fill_(10 * number + team.rank)
    barrier(heap)
    for peer in range(team.size):
        for number, x in enumerate(large):
            there = heap.peers(x)[view.slot(peer)]
            assert (there.view(torch.int64) == int(f"{10 * number + peer:02x}" * 8, 16)).all(), f"tensor {number}"
        assert torch.equal(heap.peers(first)[view.slot(peer)], data(heap, peer, 7, (1000,)))
    barrier(heap)


def check_release_in_any_order(heap: SymmetricHeap) -> None:
    """Ranks release in different orders, with kernels in flight; memory in use is never overwritten."""
    team = heap.team
    sizes, order = random.Random(5), random.Random(100 + team.rank)
    live: dict[int, torch.Tensor] = {}
    for number in range(40):
        x = heap.empty(sizes.randrange(1, 3 * MIB), torch.int32)
        for _ in range(3):
            x.fill_(number * 16 + team.rank)
        live[number] = x[len(x) // 2 :]
        for old in order.sample(sorted(live), k=min(len(live), order.randrange(4))):
            assert (live.pop(old) == old * 16 + team.rank).all(), f"tensor {old}"
        del x
    live.clear()
    gc.collect()
    used = heap.usage().used
    barrier(heap)
    heap.zeros(1)
    assert heap.usage().used < used


def check_reuse(heap: SymmetricHeap) -> None:
    """A block is free when the last rank has released it, not earlier; no block is leaked."""
    size, rank = heap.team.size, heap.team.rank
    heap.zeros(1)
    gc.collect()
    heap.zeros(1)  # settles what earlier checks released
    a = heap.empty(1000)
    offset, kept = heap.offset(a), a if rank == size - 1 else None
    del a
    b = heap.empty(1000)
    assert heap.offset(b) != offset
    del kept, b
    heap.empty(1)
    c = heap.empty(1000)
    assert heap.offset(c) == min(heap.team.all_gather(heap.offset(c)))
    assert heap.usage().used <= 3 * 4096, heap.usage()


def check_fills(heap: SymmetricHeap) -> None:
    """zeros and from_tensor are complete on all ranks when they return, for every kind of tensor."""
    view = heap.addresses
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool):
        marked = heap.from_tensor(torch.ones(7, 5).t().to("cpu" if dtype == torch.bool else beside(heap), dtype))
        zero = heap.zeros((5, 7), dtype)
        for peer in range(view.ranks):
            assert heap.peers(marked)[view.slot(peer)].float().eq(1).all() and marked.shape == (5, 7)
            assert heap.peers(zero)[view.slot(peer)].float().eq(0).all()
        barrier(heap)


def check_errors(heap: SymmetricHeap) -> None:
    """Mistakes are errors on all ranks, and the heap works afterwards."""
    rank, size = heap.team.rank, heap.team.size
    if size > 1:
        text = expect(RankMismatchError, lambda: heap.empty((4, 8 + (rank == 1))))
        assert "(4, 8)" in text and "(4, 9)" in text
    expect(NotSymmetricError, lambda: heap.peers(torch.zeros(4, device=heap.device)), "tilescale.from_tensor")
    expect(HeapExhaustedError, lambda: heap.empty(1 << 50, torch.uint8), "TILESCALE_HEAP_BYTES")
    x = heap.zeros(4)
    assert heap_of(x) is heap
    with SymmetricHeap(heap.team, heap.device, provider="cuda_vmm", capacity=64 * MIB) as other:
        expect(NotSymmetricError, lambda: heap_of(x, other.zeros(4)), "same heap")
        expect(HeapExhaustedError, lambda: other.empty(65 * MIB, torch.uint8), "65 MiB")


def check_device_memory_exhausted(heap: SymmetricHeap) -> None:
    """More than the device has, within the capacity: all ranks say which device has how much."""
    total = torch.cuda.get_device_properties(heap.device).total_memory
    with SymmetricHeap(heap.team, heap.device, provider="cuda_vmm", capacity=2 * total) as other:
        expect(HeapExhaustedError, lambda: other.empty(total + MIB, torch.uint8), "free")
        assert other.zeros(4).sum() == 0


def check_flags(heap: SymmetricHeap) -> None:
    """Counters in symmetric memory that only ever grow: each rank raises its own on all peers."""
    team, view = heap.team, heap.addresses
    flags = heap.zeros(team.size, torch.int32)
    everywhere = heap.peers(flags)
    for epoch in range(1, 6):
        everywhere[:, team.rank] += 1
        barrier(heap)
        assert (flags == epoch).all() and (everywhere[view.slot((team.rank + 1) % team.size)] == epoch).all()
        barrier(heap)


CHECKS = [
    check_addresses,
    check_read_and_write,
    check_fills,
    check_flags,
    check_growth,
    check_release_in_any_order,
    check_reuse,
    check_errors,
    check_device_memory_exhausted,
]


def report(rank: int, name: str, start: float) -> None:
    if rank == 0:
        print(f"PASS {name} ({time.monotonic() - start:.2f} s)", flush=True)


def watch() -> None:
    """End this process if it hangs: without it a lost wait would take the whole machine time."""

    def end() -> None:
        print(f"FAIL still running after {LIMIT_S:g} s", flush=True)
        os._exit(3)

    timer = threading.Timer(LIMIT_S, end)
    timer.daemon = True
    timer.start()


def main(provider: str) -> None:
    """All checks with one provider, and the memory that is left before and after."""
    watch()
    world = tilescale.init(timeout_s=25)
    device = world.device
    torch.cuda.set_device(device)
    torch.cuda.synchronize()
    with SymmetricHeap(world, device, provider="cuda_vmm") as warm:  # memory that CUDA allocates once and keeps
        check_fills(warm)
    torch.cuda.empty_cache()
    world.barrier()
    before = torch.cuda.mem_get_info(device)[0]
    start = time.monotonic()
    heap = SymmetricHeap(world, device, provider=provider)
    report(world.rank, f"{provider} open, {world.size} ranks: {heap.addresses}", start)
    for check in CHECKS:
        start, name = time.monotonic(), f"{provider} {check.__name__.removeprefix('check_')}"
        try:
            check(heap)
            barrier(heap)
        except BaseException:
            print(f"FAIL {name} on rank {world.rank}\n{traceback.format_exc()}", flush=True)
            raise SystemExit(1) from None
        report(world.rank, name, start)
    start = time.monotonic()
    gc.collect()
    heap.close()
    torch.cuda.empty_cache()
    world.barrier()
    lost = before - torch.cuda.mem_get_info(device)[0]
    allowed = 0 if provider == "cuda_vmm" else 512 * MIB  # NVSHMEM's own buffers, which it frees when the process ends
    worst = max(world.all_gather(lost))
    if worst > allowed + 32 * MIB:
        print(f"FAIL {provider} leak: {worst / MIB:.0f} MiB on some rank", flush=True)
        raise SystemExit(1)
    report(world.rank, f"{provider} close, {worst / MIB:.0f} MiB not given back", start)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda_vmm")
