# SPDX-License-Identifier: MIT
"""The order of statements within a block on real GPUs: `torchrun --nproc-per-node N tests/gpu/order_check.py [names]`.

Every program is compiled with delays for its warps, called several times with poisoned outputs, and compared with the
emulator. Prints PASS or FAIL for each program and rank.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from tilelang.utils.language import PrimFunc

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tests.cuda import ordered_programs, register_programs  # noqa: E402
from tests.fuzz.skew import skewed  # noqa: E402
from tests.gpu import named_checks  # noqa: E402
from tilescale.backends.cuda.running import execute  # noqa: E402
from tilescale.runtime.ahead import NeededKernels, compile_all  # noqa: E402
from tilescale.runtime.kernel import Kernel  # noqa: E402

LIMIT_S = 250.0
CALLS = 20


def check(func: PrimFunc, kernel: Kernel) -> None:
    """Several calls of a program's kernel against the emulator."""
    rank = tilescale.init().rank
    x, z = (p for p in func.buffer_map.values())
    shape, dtype = tuple(map(int, x.shape)), getattr(torch, str(x.dtype))
    for call in range(CALLS):
        given = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(100 * call + rank)).to(dtype)
        expected, found = (torch.full(shape, float("nan")) for _ in range(2))
        tilescale.emulate(func, [given.clone(), expected])
        mine = found.cuda()
        kernel(given.cuda(), mine)
        torch.cuda.synchronize()
        torch.testing.assert_close(mine.cpu(), expected, rtol=0, atol=0, msg=partial("call {}: {}".format, call))


if __name__ == "__main__":
    execute.REWRITES = (*execute.REWRITES, skewed)
    every = ordered_programs.PROGRAMS | register_programs.PROGRAMS
    programs = {name: make() for name, make in every.items() if any(part in name for part in sys.argv[1:] or [""])}
    kernels = {name: tilescale.compile(func) for name, func in programs.items()}
    needed = NeededKernels()
    for each in kernels.values():
        needed.add(each)
    compile_all(needed)
    named_checks.run(((name, partial(check, programs[name], kernel)) for name, kernel in kernels.items()), LIMIT_S)
