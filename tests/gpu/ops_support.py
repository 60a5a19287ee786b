# SPDX-License-Identifier: MIT
"""Common parts of the checks of operators: random inputs, references, workspaces full of NaN, ranks out of step."""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu import ranks  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, barrier  # noqa: E402
from tilescale import ops  # noqa: E402
from tilescale.ops.group import team_of  # noqa: E402
from tilescale.ops.workspace import workspace_of  # noqa: E402

BEGIN = time.monotonic()
LATE_CYCLES = 2_000_000

ERROR, LARGEST = 0.012, 0.06
"""Error bounds relative to a result's norm, and to its largest element: roundings to bfloat16."""


def say(*what: Any) -> None:
    """Print by the first rank, with the seconds since the start."""
    ranks.say(f"[{time.monotonic() - BEGIN:4.0f}]", *what)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).mul_(0.1).to(dtype)


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


def leaf(x: torch.Tensor) -> torch.Tensor:
    """A copy that is a leaf of the autograd graph.

    A clone of a tensor with gradients would be a node of the current stream, for which a captured backward must not
    wait.
    """
    return x.detach().clone().requires_grad_()


def near(what: str, got: torch.Tensor, want: torch.Tensor, parts: float = 0.0) -> None:
    """Raises ValueError if a result is further from the reference than roundings explain.

    `parts`: the norm that sums have whose parts do not cancel, for results of few elements, which may all cancel.
    """
    if got.shape != want.shape:
        raise ValueError(f"{what}: of shape {tuple(got.shape)}, not {tuple(want.shape)}")
    if not want.numel():
        return
    error, want = got.float() - want.float(), want.float()
    norm, largest = max(float(want.norm()), parts), max(float(want.abs().max()), parts / want.numel() ** 0.5)
    if not float(error.norm()) <= ERROR * norm + 1e-6:
        raise ValueError(f"{what}: {float(error.norm()):.3g} of a norm of {norm:.3g}")
    if not float(error.abs().max()) <= LARGEST * largest + 1e-6:
        raise ValueError(f"{what}: off by {float(error.abs().max()):.3g}, the largest is {largest:.3g}")


def late(turn: int) -> None:
    """Delay the device of one rank, another rank each time."""
    if turn % SIZE == RANK:
        torch.cuda._sleep(LATE_CYCLES)


def poison() -> None:
    space = workspace_of(team_of(""))
    for memory in (*space._symmetric._made, *space._own._made):
        memory.fill_(0xFF)  # NaN, in every type
    barrier()


def runs(what: str, call: Callable[[], Any], check: Callable[[Any], None]) -> None:
    """Eager, twice more, and in a graph, ranks out of step."""
    for turn in range(4):
        poison()
        late(turn)
        check(call())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for turn in range(2):
        poison()
        late(turn)
        graph.replay()
        check(result)
    say(f"PASS {what}")


def routings(tokens: int, local: int, choices: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Adversarial choices among `local` experts of each rank: what makes (tokens, choices) of each kind."""
    return {
        "all to one": lambda: torch.full((tokens, choices), local * SIZE - 1, device=DEVICE),
        "none to the last rank": lambda: torch.rand(tokens, local, device=DEVICE).topk(choices).indices,
        "ties": lambda: torch.zeros(tokens, local * SIZE, device=DEVICE).topk(choices).indices,
        "nobody": lambda: torch.full((tokens, choices), -1, device=DEVICE),
        "some": lambda: torch.randint(-2, local * SIZE + 2, (tokens, choices), device=DEVICE),
    }


def main(checks: dict[str, Callable[[slice], None]]) -> None:
    """Those that the words ask for, in order; a failing one does not keep the others from running."""
    ranks.join()
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
    torch.distributed.destroy_process_group()
    sys.exit(bool(failed))
