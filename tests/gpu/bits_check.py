# SPDX-License-Identifier: MIT
"""Sums on GPUs have the bits of the emulator: `torchrun --nproc-per-node 4 tests/gpu/bits_check.py`.

Four ranks, which may share GPUs (TILESCALE_SHARE_GPUS=1): with two, the order of additions would not show. Every rank
makes the inputs of all, emulates the whole machine, and compares exactly, call after call, with ranks out of step.
Libraries are left out: their order of additions is unspecified. Prints PASS or FAIL for each check and rank, and ends
with exit code 1 if one fails.
"""

import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tests.collectives.programs import SHAPES, UNITS, arguments, program  # noqa: E402
from tilescale.backends.tilelang.lowering.implemented import BETWEEN, IMPLEMENTED  # noqa: E402
from tilescale.collectives import PROGRAMS, TENSORS, THREAD_GROUPS, records  # noqa: E402

LIMIT_S, CALLS = 200.0, 3


def check(operation: str, form: str, name: str, dtype: str) -> None:
    """Several calls with new inputs: no bit differs."""
    world = tilescale.init()
    func = program(operation, form, name, dtype)
    kernel = tilescale.compile(func)
    number = 0 if form in (PROGRAMS, THREAD_GROUPS) else world.rank
    kept = None
    for seed in range(CALLS):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn((UNITS, *SHAPES[operation][0]), generator=generator)
        sources = list(values.to(getattr(torch, dtype)))
        everyone = arguments(form, operation, sources)
        kept = kept or [tilescale.from_tensor(x.to("cuda")) for x in everyone[number]]
        for tensor, value in zip(kept, everyone[number], strict=True):
            tensor.copy_(value)
        torch.cuda.synchronize()
        world.barrier()
        time.sleep(random.random() * 0.01)
        kernel(*kept)
        kernel.synchronize()
        tilescale.emulate(func, everyone)
        found, expected = (x.view(torch.uint8) for x in (kept[-1].cpu(), everyone[number][-1]))
        assert torch.equal(found, expected), f"call {seed}: {int((found != expected).sum())} elements differ"


def main() -> int:
    """All sums that there is code for."""
    world = tilescale.init()
    torch.cuda.set_device(world.device)
    threading.Timer(LIMIT_S, lambda: (print("FAIL: out of time", flush=True), os._exit(2))).start()
    failed = 0
    for operation, form, name in sorted(IMPLEMENTED):
        if operation not in ("allreduce", "reduce_scatter") or not records()[name].in_order:
            continue
        if name == BETWEEN:
            continue  # between nodes alone
        if form not in (PROGRAMS, THREAD_GROUPS) and world.size != UNITS:
            print(f"rank {world.rank} {operation} of {form} by {name}: skipped, it takes {UNITS} ranks", flush=True)
            continue
        eight = ("float8_e4m3fn",) if form == TENSORS else ()
        for dtype in ("bfloat16", "float32", *eight):
            try:
                check(operation, form, name, dtype)
                verdict = "PASS"
            except Exception:  # noqa: BLE001 - reported, and the next check runs
                verdict, failed = f"FAIL {traceback.format_exc(limit=-3)}", 1
            print(f"rank {world.rank} {operation} of {form} by {name}, {dtype}: {verdict}", flush=True)
            failed = max(failed, int(any(world.all_gather(verdict != "PASS"))))
    print(f"rank {world.rank}: {'FAIL' if failed else 'PASS'} ALL", flush=True)
    os._exit(failed)


if __name__ == "__main__":
    main()
