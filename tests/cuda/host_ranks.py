# SPDX-License-Identifier: MIT
"""All ranks of a collective in one process, their kernels compiled for the host: each of their threads is one here."""

from __future__ import annotations

import ctypes
import re
import subprocess
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilescale.backends.cuda.headers import header
from tilescale.backends.cuda.running.collectives import LAUNCHERS, exchanges, kernels
from tilescale.backends.cuda.running.collectives.setting import Operands, Stand
from tilescale.backends.cuda.running.collectives.workspaces import Workspaces
from tilescale.hda import Machine

HERE = Path(__file__).parent
STRIDE = 1 << 22
LIMIT_NS = 20 * 10**9
PROCESSORS, THREADS = 3, 4

HOST_HEADERS = kernels.HEADERS[2:]
"""Those that are no PTX: `host_blocks.h` stands for the first two."""


@cache
def library(text: str, folder: Path) -> ctypes.CDLL:
    """A kernel's text, compiled for the host."""
    entries = text[text.index('extern "C" __global__') :]
    functions = "".join(re.sub("#include <.*>", "", header(name)) + "\n" for name in HOST_HEADERS)
    run = (
        'extern "C" void run(void (**kernels)(tilescale::Exchange), const tilescale::Exchange* x, int ranks, '
        "int blocks, int threads) { on_all(kernels, x, ranks, blocks, threads); }\n"
    )
    source = folder / f"{abs(hash(text))}.cpp"
    source.write_text(f'#include "{HERE / "host_blocks.h"}"\n{functions}{entries}{run}', encoding="utf-8")
    made = source.with_suffix(".so")
    command = ["g++", "-std=c++20", "-O1", "-fno-strict-aliasing", "-w", "-shared", "-fPIC", "-pthread"]
    done = subprocess.run([*command, "-o", str(made), str(source)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(made))


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

    def peers(self, tensor: torch.Tensor) -> torch.Tensor:
        begin = tensor.storage_offset() % STRIDE
        return self._memory[:, begin : begin + tensor.numel()]


class Launch:
    """A recorded launch, which is none before all ranks have made theirs."""

    def __init__(self, function: Any, blocks: int, threads: int, exchange: kernels.Exchange, device: Any):
        self.function, self.blocks, self.threads, self.exchange = function, blocks, threads, exchange


class Ranks:
    """A job of several ranks on the host.

    Attributes:
        sizes: units of each launched level.
        reports: what each rank's failed waits leave.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, sizes: dict[str, int], shift: int = 1):
        self.sizes, self.size = tuple(sizes.items()), torch.Size(sizes.values()).numel()
        memory = torch.zeros(self.size, STRIDE, dtype=torch.uint8)
        self.reports = torch.zeros(self.size, 8, dtype=torch.int64)
        self.limit_ns = LIMIT_NS
        patch.setattr(exchanges, "THREADS", THREADS)
        patch.setattr(exchanges, "FEWEST_THREADS", 2)
        patch.setattr(exchanges, "SMALLEST_SLOT", 64)
        patch.setattr(exchanges, "LARGEST_SLOT", 256)
        patch.setattr(exchanges, "launch", Launch)
        patch.setattr(exchanges, "functions", lambda code, kernel, device: self._functions(code, kernel, folder))
        self.owners = [self._owner(rank, Heap(memory, rank, shift)) for rank in range(self.size)]

    def _functions(self, code: str, kernel: kernels.Kernel, folder: Path) -> dict[bool, Any]:
        loaded = library(code, folder)
        return {aligned: (loaded.run, getattr(loaded, kernel.name(aligned))) for aligned in (True, False)}

    def _owner(self, rank: int, heap: Heap) -> Any:
        described = Machine.load("h200-sxm-8")
        machine = SimpleNamespace(
            count=lambda one, other: PROCESSORS,
            program_level=described.program_level,
            tensor_level=described.tensor_level,
            network=described.network,
        )
        guard = SimpleNamespace(limit_ns=self.limit_ns, records=SimpleNamespace(device=self.reports[rank]))
        return SimpleNamespace(
            world=SimpleNamespace(rank=rank, size=self.size),
            device=torch.device("cpu"),
            heap=heap,
            sizes=self.sizes,
            target=SimpleNamespace(machine=machine),
            sites=[],
            guard=guard,
            exchanges=Workspaces(),
            rank=lambda level: self.rank_at(rank, level),
            device_code=lambda text: text,
        )

    def rank_at(self, rank: int, level: str) -> int:
        """A rank's rank at a level."""
        names = [name for name, _ in self.sizes]
        finer = torch.Size(size for _, size in self.sizes[names.index(level) + 1 :]).numel()
        return rank // finer % dict(self.sizes)[level]

    def collective(self, stand: Stand, algorithm: str) -> Any:
        """A collective as all ranks have it: a function of their operands."""
        bound = [LAUNCHERS[stand.made.name, algorithm](own, stand) for own in self.owners]
        return lambda operands, ranks=None: self._run(bound, operands, ranks)

    def _run(self, bound: list[Any], operands: list[Operands], ranks: list[int] | None) -> None:
        launches = [launch for bind, given in zip(bound, operands, strict=True) for launch in bind(given)]
        if not launches:
            return
        if not isinstance(launches[0], Launch):
            return [launch() for launch in launches] and None
        assert len({(x.blocks, x.threads) for x in launches}) == 1, "all ranks have the same grid"
        for launch in launches:
            launch.exchange.limit = self.limit_ns // 2
        here = launches if ranks is None else [launches[rank] for rank in ranks]
        run = here[0].function[0]
        addresses = [ctypes.cast(launch.function[1], ctypes.c_void_p).value for launch in here]
        packed = (kernels.Exchange * len(here))(*(launch.exchange for launch in here))
        run((ctypes.c_void_p * len(here))(*addresses), packed, len(here), here[0].blocks, here[0].threads)
