# SPDX-License-Identifier: MIT
"""Programs as one launch on GPUs: `torchrun --nproc-per-node N tests/gpu/persistent_check.py [names]`.

Random chains of phases of `tests/persistent` leave what the emulator computes, with delays for their warps, ranks out
of step, call after call on fresh inputs and then replayed from a CUDA graph. Prints PASS or FAIL for each chain and
rank.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tests.fuzz.program import Fuzzed  # noqa: E402
from tests.gpu import named_checks  # noqa: E402
from tests.gpu.fuzz_check import delay_warps  # noqa: E402
from tests.persistent.chains import Chain, arguments  # noqa: E402

LIMIT_S = 80.0
WAIT_S = 2.0
SEEDS = range(2)
LAUNCHES, REPLAYS = 4, 4
LATE_CYCLES = 400_000
BOUND = 2.0**-5
"""Of the error's norm, relative to the values': each of some phases rounds to bfloat16, and adds in some order."""


@dataclass
class Check:
    """A chain, as one launch, on this rank."""

    chain: Fuzzed

    @cached_property
    def kernel(self) -> Any:
        return tilescale.compile(self.chain.trace(), schedule="persistent", wait_s=WAIT_S)

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """This rank's tensors: the same ones in each call, as graphs need."""
        first = arguments(self.chain)[0]
        return [tilescale.empty(tuple(x.shape), dtype=x.dtype) for x in first]

    def run(self) -> None:
        """Calls, then replays of a captured one."""
        for launch in range(LAUNCHES):
            self.agrees(launch, lambda: self.kernel(*self.tensors))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.kernel(*self.tensors)
        for launch in range(LAUNCHES, LAUNCHES + REPLAYS):
            self.agrees(launch, graph.replay)

    def agrees(self, launch: int, call: Any) -> None:
        """One call, some rank late; all tensors are compared with the emulator's."""
        world = tilescale.init()
        given = arguments(self.chain, launch)
        for tensor, value in zip(self.tensors, given[world.rank], strict=True):
            tensor.copy_(value)
        torch.cuda.synchronize()
        world.barrier()
        if launch % world.size == world.rank:
            torch.cuda._sleep(LATE_CYCLES)
        call()
        self.kernel.synchronize()
        torch.cuda.synchronize()
        tilescale.emulate(self.kernel.ir, given, machine=self.kernel.machine, check="none", time=False)
        for parameter, found, want in zip(self.chain.parameters, self.tensors, given[world.rank], strict=True):
            error = (found.cpu().double() - want.double()).norm() / want.double().norm()
            if not error < BOUND:
                raise AssertionError(f"call {launch}: {parameter.name} has an error of {error:.2g}")


def checks() -> Iterator[tuple[str, Any]]:
    """A check for each chain of this number of devices."""
    devices = tilescale.init().size
    for seed in SEEDS:
        yield f"chain_{devices}_{seed}", Check(Chain(seed, devices).program()).run
        yield f"loop_{devices}_{seed}", Check(Chain(seed, devices, looped=True).program()).run


if __name__ == "__main__":
    delay_warps(None)
    named_checks.run(checks(), LIMIT_S)
