# SPDX-License-Identifier: MIT
"""All ranks of a collective in one process, their kernels compiled for the host: each of their threads is one here."""

from __future__ import annotations

import ctypes
import itertools
import queue
import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilescale.backends.cuda.headers import header
from tilescale.backends.cuda.running.collectives import (
    LAUNCHERS,
    exchanges,
    float8_lines,
    kernels,
    normalised,
    rounds,
    unequal,
)
from tilescale.backends.cuda.running.collectives.setting import Operands, PlacedCollective
from tilescale.backends.cuda.running.collectives.workspaces import MessageWorkspaces
from tilescale.backends.cuda.running.steps import StreamWork, run
from tilescale.backends.cuda.running.transports import TensorMessage
from tilescale.hda import Machine
from tilescale.program.mesh import Mesh

HERE = Path(__file__).parent
STRIDE = 1 << 22
LIMIT_NS = 20 * 10**9
PROCESSORS, THREADS, CLUSTER = 3, 4, 2

HOST_HEADERS = kernels.HEADERS[4:]
"""Headers without PTX: `host_blocks.h` replaces the first four."""


@dataclass(frozen=True)
class Launch:
    """A rank's launch of a kernel."""

    function: int
    blocks: int
    threads: int
    exchange: kernels.ExchangeArgument
    cluster: int = 1


class Library:
    """Kernels, compiled for the host together."""

    def __init__(self, made: Sequence[kernels.HeaderKernel], folder: Path):
        self._numbers = {kernel: number for number, kernel in enumerate(made)}
        functions = "".join(re.sub("#include <.*>", "", header(name)) + "\n" for name in HOST_HEADERS)
        parts = [f'#include "{HERE / "host_blocks.h"}"\n', functions, *map(self._entries, made)]
        parts.append(
            'extern "C" void run(void (**kernels)(tilescale::Exchange), const tilescale::Exchange* x, int ranks, '
            "int blocks, int threads, int cluster) { on_all(kernels, x, ranks, blocks, threads, cluster); }\n"
        )
        source = folder / "kernels.cpp"
        source.write_text("".join(parts), encoding="utf-8")
        command = ["g++", "-std=c++20", "-O0", "-fno-exceptions", "-fno-asynchronous-unwind-tables"]
        command += ["-fno-strict-aliasing", "-w", "-shared", "-fPIC", "-pthread"]
        shared = source.with_suffix(".so")
        done = subprocess.run([*command, "-o", str(shared), str(source)], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[:4000]
        self._loaded = ctypes.CDLL(str(shared))

    def _entries(self, kernel: kernels.HeaderKernel) -> str:
        """The kernels of a text under names of their own."""
        entries = kernel.text[kernel.text.index('extern "C" __global__') :]
        for aligned in (True, False):
            entries = entries.replace(f"{kernel.name(aligned)}(", f"{self._name(kernel, aligned)}(")
        return entries

    def _name(self, kernel: kernels.HeaderKernel, aligned: bool) -> str:
        return f"kernel_{self._numbers[kernel]}_{int(aligned)}"

    def functions(self, kernel: kernels.HeaderKernel) -> dict[bool, Any]:
        """The addresses of a kernel, by whether tensors are aligned."""
        return {a: ctypes.cast(self._loaded[self._name(kernel, a)], ctypes.c_void_p).value for a in (True, False)}

    def run(self, launches: Sequence[Launch]) -> None:
        """Each launch on a rank of its own, all at once."""
        count = len(launches)
        addresses = (ctypes.c_void_p * count)(*(launch.function for launch in launches))
        packed = (kernels.ExchangeArgument * count)(*(launch.exchange for launch in launches))
        first = launches[0]
        self._loaded.run(addresses, packed, count, first.blocks, first.threads, first.cluster)


def shorten(patch: pytest.MonkeyPatch, form: str, nbytes: int) -> None:
    """Parts of this size are still sent as short messages, of a form."""
    patch.setattr(exchanges, "short", lambda context, placed, ranks: [exchanges.ShortForm(form, nbytes)])
    patch.setitem(exchanges.SHARING, "lines", 2)  # as in host_blocks.h


class Together:
    """Launches of ranks, each in a thread of its own, which run when all have come."""

    def __init__(self, library: Library, ranks: int):
        self._library, self._launches = library, []
        self._barrier = threading.Barrier(ranks, timeout=60)

    def launch(self, launch: Launch) -> None:
        """Returns when it has run."""
        self._launches.append(launch)
        if self._barrier.wait() == 0:
            grids = {(x.blocks, x.threads, x.cluster, x.exchange.slot) for x in self._launches}
            assert len(grids) == 1, "they agree on the grid"
            self._library.run(self._launches)
            self._launches.clear()
        self._barrier.wait()


class Heap:
    """One rank's view of memory that all ranks have, `STRIDE` bytes apart; rank r lies in slot (r + shift) % ranks."""

    def __init__(self, memory: torch.Tensor, rank: int, shift: int):
        ranks = memory.shape[0]
        self.device = torch.device("cpu")
        self._memory, self._rank, self._used = memory, rank, 0
        self.addresses = SimpleNamespace(stride=STRIDE, slot=lambda peer: (peer + shift) % ranks)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        (nbytes,) = shape
        begin, self._used = self._used, self._used + -(-nbytes // 256) * 256
        assert self._used <= STRIDE and dtype == torch.uint8
        return self._memory[self.addresses.slot(self._rank), begin : begin + nbytes]

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def offset(self, tensor: torch.Tensor) -> int:
        return tensor.storage_offset() * tensor.itemsize % STRIDE

    def peers(self, tensor: torch.Tensor) -> torch.Tensor:
        begin = self.offset(tensor)
        return self._memory[:, begin : begin + tensor.nbytes].view(tensor.dtype).unflatten(1, tensor.shape)


class Post:
    """Messages between ranks that are threads: see `Transport`."""

    def __init__(self, ranks: int):
        self._boxes = {pair: queue.Queue() for pair in itertools.product(range(ranks), repeat=2)}

    def of(self, rank: int) -> Any:
        """The transport of a rank."""
        return SimpleNamespace(exchange=partial(self._exchange, rank))

    def _exchange(
        self, rank: int, sends: Sequence[TensorMessage], receives: Sequence[TensorMessage]
    ) -> Callable[[], None]:
        for message in sends:
            assert message.tensor.is_contiguous() and message.device != rank
            self._boxes[rank, message.device].put(message.tensor.clone())

        def wait() -> None:
            for message in receives:
                assert message.tensor.is_contiguous()
                arrived = self._boxes[message.device, rank].get(timeout=60)
                assert (arrived.shape, arrived.dtype) == (message.tensor.shape, message.tensor.dtype)
                message.tensor.copy_(arrived)

        return wait


class Ranks:
    """A job of several ranks on the host.

    Attributes:
        sizes: units of each launched level; `near` devices of consecutive numbers share memory.
        reports: what each rank's failed waits leave.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, library: Library, sizes: dict[str, int], shift: int = 1, group_size: int = 0
    ):
        self._library = library
        self.sizes, self.size = tuple(sizes.items()), torch.Size(sizes.values()).numel()
        self.group_size = group_size or self.size
        self._post = Post(self.size)
        memory = torch.zeros(self.size, STRIDE, dtype=torch.uint8)
        self.reports = torch.zeros(self.size, 8, dtype=torch.int64)
        self.limit_ns = LIMIT_NS
        for module in (exchanges, float8_lines, rounds, unequal):
            patch.setattr(module, "THREADS", THREADS)
        for module in (exchanges, float8_lines, rounds, unequal, normalised):
            patch.setattr(module, "launch", self._launch)
            patch.setattr(module, "functions", lambda code, kernel, device: library.functions(kernel))
        patch.setattr(rounds, "shape_of", lambda machine, level, units, sizes: (len(units),))
        patch.setattr(exchanges, "most_threads", lambda form, ranks: THREADS)
        patch.setattr(exchanges, "FEWEST_THREADS", 2)
        patch.setattr(exchanges, "ROW_THREADS", THREADS)
        patch.setattr(exchanges, "ROW_UNITS", {2: 2, 3: 2})
        patch.setattr(normalised, "WHOLE", 4)
        for module in (exchanges, float8_lines):
            patch.setattr(module, "WARP", 2)
        patch.setattr(exchanges, "SMALLEST_SLOT", 64)
        patch.setattr(exchanges, "LARGEST_SLOT", 256)
        self.owners = [self._owner(rank, Heap(memory, rank, shift)) for rank in range(self.size)]

    def _owner(self, rank: int, heap: Heap) -> Any:
        described = Machine.load("h200-sxm-8")
        machine = SimpleNamespace(
            program_units=PROCESSORS,
            tensor_level=described.tensor_level,
            network=described.network,
            levels=[SimpleNamespace(kind="cluster", max_size=CLUSTER)],
        )
        guard = SimpleNamespace(limit_ns=self.limit_ns, records=SimpleNamespace(device=self.reports[rank]))
        return SimpleNamespace(
            world=SimpleNamespace(rank=rank, size=self.size),
            team=SimpleNamespace(rank=rank, size=self.size),
            device=torch.device("cpu"),
            heap=heap,
            peer_group=SimpleNamespace(
                heap=heap, stride=STRIDE, shift=heap.addresses.slot(0), first=0, size=self.size,
                everywhere=heap.peers, slot=heap.addresses.slot,
            ),
            sizes=self.sizes,
            target=SimpleNamespace(
                machine=machine, sizes=self.sizes, mesh=Mesh(self.sizes), devices=self.size, group_size=self.group_size
            ),
            transport=self._post.of(rank),
            sites=[],
            guard=guard,
            exchanges=MessageWorkspaces(),
            rank=lambda level: self.rank_at(rank, level),
            device_code=lambda text: text,
            barrier=lambda site: lambda: self._barrier.wait(),
        )

    def rank_at(self, rank: int, level: str) -> int:
        """A rank's rank at a level."""
        names = [name for name, _ in self.sizes]
        finer = torch.Size(size for _, size in self.sizes[names.index(level) + 1 :]).numel()
        return rank // finer % dict(self.sizes)[level]

    def collective(self, placed: PlacedCollective, algorithm: str) -> Callable[..., None]:
        """A collective as all ranks have it: a function of their operands, and of the ranks that call it if not all."""
        bound = [LAUNCHERS[placed.made.name, algorithm](own, placed) for own in self.owners]

        def call(operands: Sequence[Operands], ranks: Sequence[int] | None = None) -> None:
            called = range(self.size) if ranks is None else ranks
            works = [bound[rank](operands[rank]) for rank in called]
            self._together = Together(self._library, len(works))
            self._barrier = threading.Barrier(len(works), timeout=60)
            with ThreadPoolExecutor(len(works)) as pool:
                for done in [pool.submit(run, work) for work in works]:
                    done.result(timeout=60)

        return call

    def _launch(
        self,
        function: Any,
        blocks: int,
        threads: int,
        exchange: kernels.ExchangeArgument,
        device: Any,
        follows: bool = False,
        cluster: int | None = None,
    ) -> StreamWork:
        return lambda: self._together.launch(Launch(function, blocks, threads, exchange, cluster or 1))
