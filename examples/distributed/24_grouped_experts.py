# SPDX-License-Identifier: MIT
"""Experts in phases: exchange, GEMMs, exchange; the compiler overlaps them.

    y = f(x Up[e]) Down[e]      f(v) = max(v, 0)^2      e: the expert that a token goes to

`with_capacity`: each device has `capacity` rows for every expert. Two grids multiply between two all-to-alls, and no
tile sends, unlike in number 18. A tile has rows of one device for one expert: it waits for one chunk, and a chunk of
results is sent when its tiles are complete:

    device 1:   own rows, expert by expert | those of device 0 | those of 3 ...     each tile waits for its chunk
                results for 2 ............ | for 3 ........... | ... own ones       each chunk leaves when it is made

`by_offsets`: every device has some columns of all experts, and an all-gather brings the rows of all devices. They are
sorted by expert; the offsets are known only at run time. Tiles load it, and wait for its chunks.

The idea: a tile waits for the rows that it reads, also where a tensor selects them. `tilescale.compile(program).python`
shows the rewritten program, `.moves` lists the overlapped transfers, and the reasons against others.

Things to try: a `capacity` that is not a multiple of a tile; a list of rows in place of offsets.
"""

import common
import torch

import tilescale.language as T

TILE = TILE_M, TILE_N, TILE_K = 32, 32, 32


@T.macro
def products(x, w, y, place, grid, tile, stages, squares):
    """Multiply tiles of a source's rows for an expert by the expert's weights; as many tiles as there are for each
    block.
    """
    source, expert, row = place[2] // w.shape[0], place[2] % w.shape[0], place[1] * tile[0]
    a = T.alloc((tile[0], tile[2]), "bfloat16", level="l1")
    b = T.alloc((tile[2], tile[1]), "bfloat16", level="l1")
    c = T.alloc((tile[0], tile[1]), "float32", level="l0")
    for iteration in T.serial(T.ceildiv(w.shape[2], tile[1] * grid[0])):
        column = (place[0] + iteration * grid[0]) * tile[1]
        T.clear(c)
        for k in T.Pipelined(T.ceildiv(w.shape[1], tile[2]), num_stages=stages):
            T.copy(x[source, expert, row, k * tile[2]], a)
            T.copy(w[expert, k * tile[2], column], b)
            T.gemm(a, b, c)
        if squares:
            for i, j in T.Parallel(tile[0], tile[1]):
                c[i, j] = T.max(c[i, j], 0) * T.max(c[i, j], 0)
        T.copy(c, y[source, expert, row, column])


def with_capacity(devices: int, local: int, capacity: int, width: int, hidden: int, tile=TILE, stages=2, threads=128):
    """A layer of `devices` x `local` experts. There is a block for each tile of the smaller result."""
    rows = (devices, local, capacity)
    grid = (-(-min(width, hidden) // tile[1]), -(-capacity // tile[0]), devices * local)

    @T.prim_func
    def experts(
        X: T.Tensor((*rows, width), "bfloat16"),  # for each expert of each device
        Up: T.Tensor((local, width, hidden), "bfloat16"),
        Down: T.Tensor((local, hidden, width), "bfloat16"),
        Y: T.Tensor((*rows, width), "bfloat16"),
    ):
        with T.Kernel(device=devices, block=grid, threads=threads) as (bx, by, bz):
            tokens = T.alloc((*rows, width), "bfloat16", level="l2")  # of each device, for each expert here
            inner = T.alloc((*rows, hidden), "bfloat16", level="l2")
            results = T.alloc((*rows, width), "bfloat16", level="l2")
            with T.Scale("device"):
                T.all_to_all(X, tokens)
            with T.Scale("block"):
                products(tokens, Up, inner, (bx, by, bz), grid, tile, stages, True)
            with T.Scale("device"), T.Scale("block"):
                products(inner, Down, results, (bx, by, bz), grid, tile, stages, False)
            with T.Scale("device"):
                T.all_to_all(results, Y)

    return experts


def by_offsets(devices: int, experts: int, tokens: int, width: int, hidden: int):
    """Compute the layer's first GEMM, of columns of each expert, over the tokens of all devices."""

    @T.prim_func
    def gathered_experts(
        X: T.Tensor((tokens, width), "bfloat16"),  # sorted by expert
        begins: T.Tensor((1, experts + 1), "int32"),  # of each expert's tokens, and the end
        Up: T.Tensor((experts, width, hidden), "bfloat16"),
        Y: T.Tensor((devices, tokens, hidden), "float32"),
    ):
        with T.Kernel(device=devices, block=(T.ceildiv(hidden, TILE_N), devices * experts), threads=128) as (bx, by):
            gathered = T.alloc((devices * tokens, width), "bfloat16", level="l2")
            all_begins = T.alloc((devices, experts + 1), "int32", level="l2")
            with T.Scale("device"):
                T.all_gather(begins, all_begins)
                T.all_gather(X, gathered)
            with T.Scale("block"):
                a = T.alloc((TILE_M, TILE_K), "bfloat16", level="l1")
                b = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                c = T.alloc((TILE_M, TILE_N), "float32", level="l0")
                source, expert = by // experts, by % experts
                end = all_begins[source, expert + 1]
                for iteration in T.serial(T.ceildiv(end - all_begins[source, expert], TILE_M)):
                    row = all_begins[source, expert] + iteration * TILE_M
                    T.clear(c)
                    for k in T.Pipelined(T.ceildiv(width, TILE_K), num_stages=2):
                        T.copy(gathered[source * tokens + row, k * TILE_K], a)
                        T.copy(Up[expert, k * TILE_K, bx * TILE_N], b)
                        T.gemm(a, b, c)
                    for i, j in T.Parallel(TILE_M, TILE_N):
                        if row + i < end:
                            Y[source, row + i, bx * TILE_N + j] = c[i, j]

    return gathered_experts


@common.options(size=64)
def main(devices: int, size: int, seed: int) -> None:
    """Run two experts on each device over `size` rows of `size` features; then over sorted tokens."""
    rng, local = torch.Generator().manual_seed(seed), 2
    x = torch.randn(devices, devices, local, size, size, generator=rng).bfloat16()  # source, owner
    up, down = ((torch.randn(devices, local, size, size, generator=rng) / 8).bfloat16() for _ in range(2))
    y = torch.full(x.shape, torch.nan).bfloat16()
    common.run(with_capacity(devices, local, size, size, size), list(zip(x, up, down, y, strict=True)))
    want, bound = reference(x.transpose(0, 1), up, down)
    common.compare("with_capacity", list(y), list(want.transpose(0, 1)), list(bound.transpose(0, 1)))
    begins = torch.randint(0, size + 1, (devices, 1, local + 1), generator=rng).sort().values.int()
    begins[:, :, 0], begins[:, :, -1] = 0, size
    y = torch.full((devices, devices, size, size), torch.nan)
    common.run(by_offsets(devices, local, size, size, size), list(zip(x[:, 0, 0], begins, up, y, strict=True)))
    owner = torch.searchsorted(begins[:, 0, 1:].contiguous(), torch.arange(size).repeat(devices, 1), right=True)
    rows, weights, own = x[None, :, 0, :1].double(), up.double()[:, None], owner[None, :, None, :, None]
    products = (rows @ weights, rows.abs() @ weights.abs())  # of each row with all experts of a device
    want, magnitudes = (each.take_along_dim(own, 2)[:, :, 0] for each in products)
    common.compare("by_offsets", list(y), list(want), list(common.rounding(size, magnitudes)))


def reference(x, up, down):
    """Compute float64 results and error bounds: sums in float32, the inner rows and the results in bfloat16."""
    x, up, down = x.double(), up.double()[:, None], down.double()[:, None]
    first, size = (x @ up).clamp_min(0), x.shape[-1]
    off = 2 * first * common.rounding(size, x.abs() @ up.abs()) + 2.0**-8 * first**2
    want = first**2 @ down
    bound = off @ down.abs() + common.rounding(size, first**2 @ down.abs()) + 2.0**-8 * want.abs()
    return want, 1.01 * bound


if __name__ == "__main__":
    main()
