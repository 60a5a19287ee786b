# SPDX-License-Identifier: MIT
"""Cost of calls: puts of large tensors, small kernels that synchronize with peers, and the host's time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import programs
import torch
import torch.distributed as dist
import trials
from trials import Case, checked, ours

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

PUT_BLOCKS = 132
SMALL = (1, 16, 64)
"""Blocks, rows, columns of a small put: 4 KiB."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Plain calls on one GPU; puts and all-reduces on several."""
    if gpus == 1:
        yield _plain()
        return
    yield SmallPut().heat("host")
    yield AllReduce(64).heat("host")
    yield Put(8 if quick else 128).heat()
    yield SmallPut().heat("graph")
    yield AllReduce(64).heat("graph")


def _calls(mode: str) -> int:
    """Calls in a group: a graph holds several."""
    return 50 if mode == "host" else 8


def _plain() -> Heat:
    """Host time of a program without a level above its grid, compared with TileLang's kernel."""
    elements = 4096

    def draw(seed: int) -> Case:
        (x,) = trials.randoms(seed, torch.float32, (elements,))
        return Case((x,), 2 * x, torch.zeros_like(x))

    def runner(kernel: Any) -> Runner:
        x, y = (trials.nothing(elements, dtype=torch.float32) for _ in range(2))
        return checked(draw, x.copy_, trials.returning(y, kernel, x, y), [y])

    def stock() -> Runner:
        import tilelang

        return runner(tilelang.compile(programs.double(elements), target="cuda", execution_backend="tvm_ffi"))

    entries = [
        Contender("stock tilelang", stock),
        ours("tilescale", lambda: programs.double(elements), runner),
        Contender("torch", lambda: runner(lambda x, y: torch.mul(x, 2, out=y))),
    ]
    return Heat("plain_call", (elements,), "float32", 1, "host", "stock tilelang", entries, calls=_calls("host"))


def _from_before(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    """Random data, and that of the previous device."""
    world = tilescale.init()
    (x,) = trials.randoms(seed, dtype, shape)
    everywhere = torch.empty(world.size * shape[0], *shape[1:], dtype=dtype, device=x.device)
    dist.all_gather_into_tensor(everywhere, x)
    want = everywhere.chunk(world.size)[world.rank - 1].float()
    return Case((x,), want, torch.zeros_like(want))


class Put:
    """Put from every GPU into the memory of the next one."""

    def __init__(self, mib: int):
        self.world, self.shape = tilescale.init(), (mib * 512, 1024)

    def heat(self) -> Heat:
        """Puts by copy engine, and by two kinds of kernels."""
        shape, nbytes = (self.world.size, *self.shape, PUT_BLOCKS), self.shape[0] * self.shape[1] * 2
        entries = [
            Contender("copy engine", self.copies),
            ours("tilescale tma", lambda: programs.put(*shape, "tma"), self.own),
            ours("tilescale stores", lambda: programs.put(*shape, "lsu"), self.own),
        ]
        size = self.world.size
        return Heat("put", self.shape, "bfloat16", size, "eager", "copy engine", entries, bytes=nbytes)

    def draw(self, seed: int) -> Case:
        """This rank's tensor, and the expected one of the previous rank."""
        return _from_before(seed, self.shape, torch.bfloat16)

    def copies(self) -> Runner:
        """PyTorch's copy to the peer's tensor. It is not ordered: the check synchronizes all devices around it."""
        from tilescale.comm import default_heap

        x, y, heap = trials.nothing(*self.shape), trials.symmetric(*self.shape), default_heap()
        far = heap.peers(y)[heap.addresses.slot((self.world.rank + 1) % self.world.size)]

        def load(given: torch.Tensor) -> None:
            x.copy_(given)
            y.fill_(torch.nan)
            _all_idle()

        return checked(self.draw, load, trials.returning(y, far.copy_, x), (), _all_idle)

    def own(self, kernel: Any) -> Runner:
        x, y = trials.nothing(*self.shape), trials.symmetric(*self.shape)
        return checked(self.draw, x.copy_, trials.returning(y, kernel, x, y), [y], kernel.synchronize)


def _all_idle() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


class SmallPut:
    """One kernel that puts a tile, and waits for that of the previous device: afterwards both sides may continue."""

    def __init__(self) -> None:
        self.world = tilescale.init()

    def heat(self, mode: str) -> Heat:
        """TileScale's program, NCCL's exchange, and a copy with PyTorch's signals."""
        program = lambda: programs.put_and_wait(self.world.size, *SMALL)  # noqa: E731
        own, symm_mem = ours("tilescale", program, self.own), Contender("symm_mem", self.symm_mem)
        entries, size = [Contender("nccl", self.nccl), own, symm_mem], self.world.size
        return Heat("small_put", SMALL, "float32", size, mode, "nccl", entries, calls=_calls(mode))

    def draw(self, seed: int) -> Case:
        """This rank's tile, and the expected one of the previous rank."""
        return _from_before(seed, SMALL, torch.float32)

    def own(self, kernel: Any) -> Runner:
        x, y = trials.nothing(*SMALL, dtype=torch.float32), trials.symmetric(*SMALL, dtype=torch.float32)
        return checked(self.draw, x.copy_, trials.returning(y, kernel, x, y), [y], kernel.synchronize)

    def nccl(self) -> Runner:
        """A send and a receive in one group."""
        x, y = trials.nothing(*SMALL, dtype=torch.float32), trials.nothing(*SMALL, dtype=torch.float32)
        after, before = (self.world.rank + 1) % self.world.size, (self.world.rank - 1) % self.world.size

        def call() -> torch.Tensor:
            both = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            return y

        return checked(self.draw, x.copy_, call, [y])

    def symm_mem(self) -> Runner:
        """Three kernels: a copy, a signal, a wait."""
        import torch.distributed._symmetric_memory as symm

        x, y = (symm.empty(*SMALL, dtype=torch.float32, device=trials.device()) for _ in range(2))
        handle = symm.rendezvous(y, dist.group.WORLD)
        after, before = (self.world.rank + 1) % self.world.size, (self.world.rank - 1) % self.world.size
        far = handle.get_buffer(after, SMALL, torch.float32)

        def call() -> torch.Tensor:
            far.copy_(x)
            handle.put_signal(after)
            handle.wait_signal(before)
            return y

        return checked(self.draw, x.copy_, call)


class AllReduce:
    """Sum of a tensor over all GPUs."""

    def __init__(self, kib: int):
        self.world, self.elements = tilescale.init(), kib * 256

    def heat(self, mode: str) -> Heat:
        """NCCL, PyTorch's one-shot kernel, TileScale."""
        program = lambda: programs.allreduce(self.world.size, self.elements)  # noqa: E731
        entries = [
            Contender("nccl", self.nccl),
            Contender("symm_mem", self.symm_mem),
            ours("tilescale", program, self.own),
        ]
        shape, size = (self.elements,), self.world.size
        return Heat("allreduce", shape, "float32", size, mode, "nccl", entries, calls=_calls(mode))

    def draw(self, seed: int) -> Case:
        (x,) = trials.randoms(seed, torch.float32, (self.elements,))
        sums = torch.stack([x, x.abs()])
        dist.all_reduce(sums)
        return Case((x,), sums[0], self.world.size * 2.0**-23 * sums[1])

    def nccl(self) -> Runner:
        x = trials.nothing(self.elements, dtype=torch.float32)
        return checked(self.draw, x.copy_, trials.returning(x, dist.all_reduce, x))

    def symm_mem(self) -> Runner:
        """PyTorch's one-shot all-reduce in symmetric memory."""
        import torch.distributed._symmetric_memory as symm

        x = symm.empty(self.elements, dtype=torch.float32, device=trials.device())
        symm.rendezvous(x, dist.group.WORLD)
        reduce, group = torch.ops.symm_mem.one_shot_all_reduce, dist.group.WORLD.group_name
        return checked(self.draw, x.copy_, lambda: reduce(x, "sum", group))

    def own(self, kernel: Any) -> Runner:
        """A program of ours, in place."""
        x = trials.symmetric(self.elements, dtype=torch.float32)
        return checked(self.draw, x.copy_, trials.returning(x, kernel, x), (), kernel.synchronize)
