# SPDX-License-Identifier: MIT
"""Ring attention: keys and values travel round the devices while each device works on the share that it has.

    Q, K, V, Out: tokens over the devices      Out = softmax(Q K^T) V over all tokens (Liu et al., 2023)

    step 0    device r:  Q[r] with K, V [r]         sends K, V [r] to r + 1
    step 1    device r:  Q[r] with K, V [r - 1]     sends K, V [r - 1] to r + 1
    ...       after n steps all queries are done with all keys, and no device has held more than two shares of them

The idea: double buffering between devices. Every device has two slots for a share: it works on one while its left
neighbour fills the other; after each step they swap. Softmax is online, so shares may come in any order. In a block one
warpgroup forwards tiles and the other computes: they share nothing but the flags, so neither waits for the other.

The flags, tile by tile; all blocks of a head read its tiles of keys, and one block forwards each:

    arrived[h, t]        the left neighbour has put tile t of the next share here: it may be read, and sent on
    free[slot, h, t]     one more reader of the right neighbour is done with tile t in a slot: when all are, the next
                         tile may be put there

`arrived` is raised by one sender, once a step, so waiting for `step` is exact. `free` is raised by many, and some may
be a step ahead of others: fast readers would complete one count for both slots while a slow one still reads. Hence a
flag for each slot.

Things to try: the same `free` for both slots; a causal mask (which devices then have nothing to do, and when?); one
warpgroup that does both, sending before it works.
"""

import attention
import common
import torch

import tilescale.language as T

HEADS, DIM, TILE = 2, 64, 64


def ring_attention(devices: int, heads: int, tokens: int, dim: int):
    """Compute tile i of the queries of head h in block (i, h), which also forwards tile i of its keys and values.

    `tokens` is a multiple of devices * TILE.
    """
    common.whole("tokens", tokens, devices * TILE)
    rows, tiles = tokens // devices, tokens // devices // TILE
    readers = tiles + 1
    scale = attention.scale(dim)

    @T.macro
    def send(places, arrived, free, i, h, rank, size):
        """Forward tile i of every share but the last to the right neighbour."""
        tile = T.alloc((TILE, dim), "float16", level="l1")
        for step in T.serial(size - 1):
            here, there = step % 2, (step + 1) % 2
            T.wait(arrived[h, i], ">=", step)
            T.wait(free[there, h, i], ">=", (step + 1) // 2 * readers)
            for which in T.serial(2):
                T.copy(places[here, which, h, i * TILE, 0], tile)
                T.copy(tile, places[there, which, h, i * TILE, 0], dst=(rank + 1) % size)
            T.signal(arrived[h, i], dst=(rank + 1) % size)
            T.signal(free[here, h, i], dst=(rank + size - 1) % size)

    @T.macro
    def work(places, arrived, free, Q_dev, Out_dev, i, h, rank, size):
        """Compute attention of tile i of the queries to the tiles of all shares, in the order of arrival."""
        q = T.alloc((TILE, dim), "float16", level="l1")
        k = T.alloc((TILE, dim), "float16", level="l1")
        v = T.alloc((TILE, dim), "float16", level="l1")
        scores = T.alloc((TILE, TILE), "float32", level="l0")
        weights = T.alloc((TILE, TILE), "float16", level="l1")
        acc = T.alloc((TILE, dim), "float32", level="l0")
        top = T.alloc((TILE,), "float32", level="l0")
        total = T.alloc((TILE,), "float32", level="l0")
        T.copy(Q_dev[h, i * TILE, 0], q)
        T.clear(acc)
        T.clear(total)
        T.fill(top, -1e30)
        for step in T.serial(size):
            for t in T.serial(tiles):
                T.wait(arrived[h, t], ">=", step)
                T.copy(places[step % 2, 0, h, t * TILE, 0], k)
                T.copy(places[step % 2, 1, h, t * TILE, 0], v)
                T.signal(free[step % 2, h, t], dst=(rank + size - 1) % size)
                T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
                attention.softmax_step(scores, top, total, acc, scale)
                T.copy(scores, weights)
                T.gemm(weights, v, acc)
        for r, j in T.Parallel(TILE, dim):
            acc[r, j] = acc[r, j] / total[r]
        T.copy(acc, Out_dev[h, i * TILE, 0])

    @T.prim_func
    def attention_on_a_ring(
        Q: T.Tensor((heads, tokens, dim), "float16"),
        KV: T.Tensor((2, heads, tokens, dim), "float16"),
        Out: T.Tensor((heads, tokens, dim), "float32"),
    ):
        with T.Kernel(device=devices, block=(tiles, heads), threads=256) as (i, h):
            places = T.alloc((2, 2, heads, rows, dim), "float16", level="l2")
            arrived = T.alloc((heads, tiles), "int32", level="l2")
            free = T.alloc((2, heads, tiles), "int32", level="l2")
            with T.Scale("device"):
                Q_dev = T.view(Q, layout=T.Shard(1))
                KV_dev = T.view(KV, layout=T.Shard(2))
                Out_dev = T.view(Out, layout=T.Shard(1))
                T.clear(arrived)
                T.clear(free)
                T.copy(KV_dev, places[0, :, :, :, :])
                T.barrier()  # every second slot is free, every flag cleared
            with T.Scale("warpgroup") as (wg, _), T.Scale("device") as (rank, size):
                if wg == 0:
                    send(places, arrived, free, i, h, rank, size)
                else:
                    work(places, arrived, free, Q_dev, Out_dev, i, h, rank, size)
            with T.Scale("device"):
                T.barrier()  # the last signals, for which no device waits, must not arrive during the next launch

    return attention_on_a_ring


@common.options(size=1024)
def main(devices: int, size: int, seed: int) -> None:
    """Compute attention of about `size` tokens, a whole number of tiles on every device."""
    rng = torch.Generator().manual_seed(seed)
    size = -(-size // (devices * TILE)) * devices * TILE
    q, k, v = (torch.randn(HEADS, size, DIM, generator=rng).half() for _ in range(3))
    results = [torch.full((HEADS, size // devices, DIM), torch.nan) for _ in range(devices)]
    shares = zip(q.chunk(devices, 1), torch.stack([k, v]).chunk(devices, 2), results, strict=True)
    args = [[x.contiguous(), kv.contiguous(), out] for x, kv, out in shares]
    common.run(ring_attention(devices, HEADS, size, DIM), args)
    want, bound = attention.reference(q, k, v)
    common.compare("ring attention", results, want.chunk(devices, 1), bound.chunk(devices, 1))


if __name__ == "__main__":
    main()
