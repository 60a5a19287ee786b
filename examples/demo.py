# SPDX-License-Identifier: MIT
"""The demo: all-gather + GEMM, in order and overlapped by the compiler, as one picture.

    C = A B     A: rows over the devices     B, C: columns over the devices

The program gathers A, then multiplies. The compiler makes another program of it: the copy queue sends A chunk
by chunk while the grid multiplies what has arrived. Both are emulated with data at a small size and compared with
float64, then without data at the size of a real layer for their execution time.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch

import tilescale
import tilescale.language as T
from tilescale.timing.draw import compare

ROWS, COLS, DEPTH = 128, 256, 64


def gather_then_multiply(devices: int, size: int):
    """Gather A on every device, then run a grid with a block for each tile of C."""
    cols = size // devices

    @T.prim_func
    def ag_gemm(
        A: T.Tensor((size, size), "bfloat16"),
        B: T.Tensor((size, size), "bfloat16"),
        C: T.Tensor((size, size), "bfloat16"),
    ):
        with T.Kernel(device=devices, block=(cols // COLS, size // ROWS), threads=256) as (column, row):
            whole = T.alloc((size, size), "bfloat16", level="l2")
            with T.Scale("device"):
                A_dev = T.view(A, layout=T.FullRow)
                B_dev = T.view(B, layout=T.FullCol)
                C_dev = T.view(C, layout=T.FullCol)
                T.all_gather(A_dev, whole)
            with T.Scale("block"):
                a = T.alloc((ROWS, DEPTH), "bfloat16", level="l1")
                b = T.alloc((DEPTH, COLS), "bfloat16", level="l1")
                c = T.alloc((ROWS, COLS), "float32", level="l0")
                T.clear(c)
                for k in T.Pipelined(size // DEPTH, num_stages=3):
                    T.copy(whole[row * ROWS, k * DEPTH], a)
                    T.copy(B_dev[k * DEPTH, column * COLS], b)
                    T.gemm(a, b, c)
                T.copy(c, C_dev[row * ROWS, column * COLS])

    return ag_gemm


def both(devices: int, size: int) -> dict[str, object]:
    """Return the program as it is written, and as the compiler overlaps it."""
    program = gather_then_multiply(devices, size)
    return {"in order": program, "overlapped": tilescale.compile(program).ir}


def check(devices: int, size: int) -> None:
    """Run both with data. Raises AssertionError where a result differs from float64 by more than rounding."""
    a, b = torch.randn(size, size).bfloat16(), torch.randn(size, size).bfloat16()
    want = (a.double() @ b.double()).chunk(devices, 1)
    for name, program in both(devices, size).items():
        parts = zip(a.chunk(devices), b.chunk(devices, 1), strict=True)
        tensors = [[x, y.contiguous(), torch.empty(size, size // devices).bfloat16()] for x, y in parts]
        tilescale.emulate(program, tensors)
        for (_, _, got), expected in zip(tensors, want, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=size**0.5 / 100)
        click.echo(f"{name}: right on {devices} devices, {size} x {size} x {size}")


@click.command(help=str(__doc__).partition("\n")[0])
@click.option("--devices", type=click.IntRange(2), default=4, show_default=True)
@click.option("--size", type=click.IntRange(1024), default=8192, show_default=True, help="Extent of the matrices.")
@click.option("--machine", default="h200-sxm-8", show_default=True)
@click.option("--to", type=click.Path(dir_okay=False, path_type=Path), default="demo.svg", help="The picture.")
def main(devices: int, size: int, machine: str, to: Path) -> None:
    """Check both programs, predict their times, draw one picture."""
    with tilescale.use_machine(machine):
        check(devices, COLS * devices)
        click.echo(f"\n{size} x {size} x {size}, bfloat16, on {devices} devices of {machine}: predicted execution time")
        timelines = {}
        for name, program in both(devices, size).items():
            report = tilescale.emulate(program, data=False)
            timelines[name] = report.timeline
            bound = report.timeline.bound
            assert bound is not None, "a product demands something of the machine"
            click.echo(f"  {name:<11}{report.time_us:6.0f} us, at least {bound.seconds * 1e6:.0f} us")
        compare(timelines, to)
        click.echo(f"its picture: {to}")


if __name__ == "__main__":
    main()
