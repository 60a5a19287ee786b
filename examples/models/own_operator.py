# SPDX-License-Identifier: MIT
"""A kernel of your own as an operator of PyTorch: with a gradient, and in compiled models.

    tilescale run -n 2 examples/models/own_operator.py       # also without GPUs, emulated

    rank 0       rank 1       rank 2                      y of rank r is x of the previous rank;
      x --.        x --.        x --> (to rank 0)         its gradient goes in the opposite direction
      y    `-->    y    `-->    y

The idea: `torch.library` takes any function. PyTorch needs the shape of its result, and its gradient, here the same
program in the opposite direction. Each shape has a kernel and the memory that peers write into. That memory is
symmetric, so no copies in and out are needed.

Results and gradients are compared with those of a plain exchange.

Things to try: another distance; a gradient that adds up those of two neighbours; `torch.library.opcheck`.
"""

from functools import cache
from typing import Any

import click
import torch

import tilescale
import tilescale.language as T
from tilescale import ops

TILE = 64


def shift(devices: int, rows: int, columns: int, by: int) -> Any:
    """Copy X of each device into Y of the device `by` further on."""

    @T.prim_func
    def shifted(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(device=devices, block=(T.ceildiv(columns, TILE), T.ceildiv(rows, TILE)), threads=128) as (n, m):
            with T.Scale("device"):
                T.barrier()  # every Y is free
            with T.Scale("block"):
                tile = T.alloc((TILE, TILE), "float32", level="l1")
                T.copy(X[m * TILE, n * TILE], tile)
                with T.Scale("device") as (rank, size):
                    T.copy(tile, Y[m * TILE, n * TILE], dst=(rank + by) % size)
            with T.Scale("device"):
                T.barrier()  # every Y is complete

    return shifted


@cache
def kernel(rows: int, columns: int, by: int) -> tuple[tilescale.Kernel, torch.Tensor]:
    """Return the kernel for a shape, and the memory that it writes into. Collective."""
    size = tilescale.init().size
    return tilescale.compile(shift(size, rows, columns, by % size)), tilescale.zeros((rows, columns))


@torch.library.custom_op("example::shifted", mutates_args=())
def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Return the tensor of the rank `by` before this one. Collective."""
    run, inbox = kernel(*x.shape, by)
    run(x, inbox)
    return inbox.clone()


@shifted.register_fake
def _(x: torch.Tensor, by: int) -> torch.Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save the inputs of the gradient."""
    _, ctx.by = inputs


def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Send the gradient back to the source of the tensor."""
    return shifted(grad.contiguous(), -ctx.by), None


shifted.register_autograd(backward, setup_context=keep)


@click.command()
@click.option("--size", default=96, show_default=True, help="Rows and columns of each rank.")
def main(size: int) -> None:
    """Run the operator forward and backward, eager and compiled, and compare."""
    world = tilescale.init()
    x, scale = (torch.randn(size, size, generator=torch.Generator().manual_seed(s)).to(world.device) for s in (1, 2))
    x, scale = x + world.rank, scale * (world.rank + 1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (shifted(x, 1) * scale).sum()

    everyones_x, everyones_scale = (ops.all_gather(t).view(world.size, size, size) for t in (x, scale))
    before, behind = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    for run in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        given = x.clone().requires_grad_()
        got = run(given)
        got.backward()
        torch.testing.assert_close(got, (everyones_x[before] * scale).sum())
        assert torch.equal(given.grad, everyones_scale[behind])
    print(f"rank {world.rank}: right")


if __name__ == "__main__":
    main()
