# SPDX-License-Identifier: MIT
"""What checks of operators share: random inputs, references, workspaces full of NaN, ranks out of step."""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tilescale import ops  # noqa: E402
from tilescale.ops.group import team_of  # noqa: E402
from tilescale.ops.workspace import workspace_of  # noqa: E402

WORLD = tilescale.init()
RANK, SIZE, DEVICE = WORLD.rank, WORLD.size, WORLD.device
BEGIN = time.monotonic()
LATE_CYCLES = 2_000_000


def say(*what: Any) -> None:
    if RANK == 0:
        print(f"[{time.monotonic() - BEGIN:4.0f}]", *what, flush=True)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).mul_(0.1).to(dtype)


def everyones(x: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, (ranks, ...)."""
    out = torch.empty(SIZE, *x.shape, device=DEVICE, dtype=x.dtype)
    dist.all_gather_into_tensor(out.view(-1, *x.shape[1:]), x.contiguous())
    return out


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in float32."""
    x = x.to(torch.float32, copy=True)
    dist.all_reduce(x)
    return x


def compare(what: str, got: torch.Tensor, want: torch.Tensor, parts: torch.Tensor | None = None) -> None:
    """Raises ValueError if a result is further from the reference than roundings explain.

    Those of a sum's parts are relative to the parts, the largest of which are some five times the typical element;
    `parts` is how large they are, if that is known for each element.
    """
    error = (got.float() - want.float()).abs()
    bound = 2.0**-6 * (want.float() if parts is None else parts).abs() + 2.0**-5 * want.float().abs().mean() + 1e-6
    wrong = int((~(error <= bound)).sum())
    if wrong or got.shape != want.shape:
        raise ValueError(f"{what}: {wrong} of {error.numel()} elements wrong, by up to {float(error.max()):.3g}")


def poison() -> None:
    space = workspace_of(team_of(""))
    for memory in (*space._shared, *space._own):
        memory.fill_(0xFF)  # NaN, in every type
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def runs(what: str, call: Callable[[], Any], check: Callable[[Any], None]) -> None:
    """Eager, twice more, and in a graph, ranks out of step."""
    for turn in range(4):
        poison()
        if turn % SIZE == RANK:
            torch.cuda._sleep(LATE_CYCLES)
        check(call())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for turn in range(2):
        poison()
        if turn % SIZE == RANK:
            torch.cuda._sleep(LATE_CYCLES)
        graph.replay()
        check(result)
    say(f"PASS {what}")


def main(checks: dict[str, Callable[[slice], None]]) -> None:
    """Those that the words ask for, in order; a failing one does not keep the others from running."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", device_id=DEVICE)
    ops.workspace(8192, 8192)
    failed: list[str] = []
    part = re.fullmatch(r"(\d+)/(\d+)", " ".join(sys.argv[1:]))
    for word in list(checks)[int(part[1]) - 1 :: int(part[2])] if part else sys.argv[1:] or checks:
        name, _, number = word.partition(":")
        try:
            checks[name](slice(int(number), int(number) + 1) if number else slice(None))
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - the next check may say more
            traceback.print_exc()
            failed.append(name)
    say(f"{len(failed)} failed: {failed}")
    dist.destroy_process_group()
    sys.exit(bool(failed))
