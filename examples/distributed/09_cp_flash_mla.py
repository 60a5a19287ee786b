# SPDX-License-Identifier: MIT
"""Context-parallel FlashMLA decode: one new token attends to a long sequence whose keys lie over the devices.

    Out = softmax(Q KV^T + Q_pe K_pe^T) KV      one latent key-value head for all query heads (DeepSeek-V2, 2024)

    device       its share of the keys             partial output and log-sum     all-reduce with fn=merge (NVLink)
    block          a tile of heads x a tile of keys, one after the other (online softmax)
    warpgroup        scores: half of the keys each           weights of both halves       exchange through l1 (shared)
                     output: half of the columns each

The idea: an all-reduce with a user-defined combination. Softmax over a part of the keys gives a weighted mean of their
values and the logarithm of the sum of weights; `merge` makes one such pair of two, in any order over any number of
devices: `T.allreduce(output, logsum, fn=merge)` is all that they exchange.

Inside a block the two warpgroups split two GEMMs differently: of Q KV^T each computes half of the keys, of weights x KV
half of the latent dimensions, but that one needs the weights of all keys. So they exchange halves in between, in two
spellings: `gathered` is a collective, `exchanged` names sender and receiver. Where a device has more SMs than tiles,
the blocks of a cluster share the keys of a tile (`splits`) and merge their partial results through l1.

Things to try: a `merge` that returns the mean of the outputs; `exchanged` without its barrier, and what the emulator
says of it; `--size 4096` on `--machine gb200-nvl72 --devices 64`.
"""

import attention
import common
import torch

import tilescale.language as T

TILE_H, KEYS, SENT = 64, 128, "float16"  # of a tile, at most: all that fits in l1; the type in which parts of it travel
HEADS, DIM, PE_DIM = 64, 512, 64  # as in DeepSeek-V3, with half of its heads


def merge(a, b):
    """Merge two partial softmax means, each with the log2 of its sum of weights."""
    (out_a, sum_a), (out_b, sum_b) = a, b
    top = T.max(sum_a, sum_b)
    weight_a, weight_b = T.exp2(sum_a - top), T.exp2(sum_b - top)
    total = weight_a + weight_b
    return out_a * (weight_a / total) + out_b * (weight_b / total), top + T.log2(total)


@T.macro
def gathered(scores, kv, acc):
    """Gather the weights of both warpgroups; each adds the weighted values to its columns of the accumulator."""
    weights = T.alloc(scores.shape, kv.dtype, level="l1")
    with T.Scale("warpgroup"):
        half = T.view(weights, layout=T.FullCol)
        T.copy(T.view(scores, layout=T.FullCol), half)
        T.all_gather(half)
        T.gemm(weights, T.view(kv, layout=T.FullCol), T.view(acc, layout=T.FullCol))


@T.macro
def exchanged(scores, kv, acc):
    """Exchange the weights by hand: each warpgroup keeps its half and sends it to the other."""
    with T.Scale("warpgroup") as (wg, wgs):
        rows, keys, peer = scores.shape[0], scores.shape[1] // wgs, (wg + 1) % wgs
        half, other = (T.alloc((rows, keys), kv.dtype, level="l1") for _ in range(2))
        T.copy(T.view(scores, layout=T.FullCol), half)
        T.copy(half, other, dst=peer)
        T.barrier()  # the peer's half has arrived
        values, mine = T.view(kv, layout=T.FullCol), T.view(acc, layout=T.FullCol)
        T.gemm(half, values[wg * keys : (wg + 1) * keys, :], mine)
        T.gemm(other, values[peer * keys : (peer + 1) * keys, :], mine)
    # The end of the scale is a barrier too: both have read the other half, the next may be sent.


def cp_mla(devices, batch, heads, seq, dim, pe_dim, tile_h=TILE_H, tile_n=None, exchange=gathered, splits=1, sent=SENT):
    """The devices split the keys, the two warpgroups of a block a tile's scores; `exchange` joins their weights.

    `seq` is a multiple of devices * splits * tile_n, `heads` of tile_h, which `splits` divides: each block of a cluster
    has a part of a device's keys, and combines partial results of type `sent` for some heads.
    """
    tile_n = tile_n or (KEYS // 2 if exchange is exchanged else KEYS)  # staging of weights takes shared memory
    common.whole("seq", seq, devices * splits * tile_n)
    common.whole("heads", heads, tile_h)
    common.whole("tile_h", tile_h, splits)
    keys, rows = seq // (devices * splits), tile_h // splits
    scale = attention.scale(dim + pe_dim)

    @T.prim_func
    def cp_flash_mla(
        Q: T.Tensor((batch, heads, dim), "float16"),
        Q_pe: T.Tensor((batch, heads, pe_dim), "float16"),
        KV: T.Tensor((batch, seq, 1, dim), "float16"),
        K_pe: T.Tensor((batch, seq, 1, pe_dim), "float16"),
        Output: T.Tensor((batch, heads, dim), "float32"),
    ):
        grid = {**({"cta_cluster": splits} if splits > 1 else {}), "block": (splits, heads // tile_h, batch)}
        with T.Kernel(device=devices, **grid, threads=256) as (part, by, bx):
            with T.Scale("device"):
                Q_dev, Q_pe_dev, output = (T.view(x, layout=T.Replica) for x in (Q, Q_pe, Output))
                KV_dev, K_pe_dev = (T.view(x, layout=lambda b, s, h, d: s // (seq // devices)) for x in (KV, K_pe))
                logsum = T.alloc((batch, heads), "float32", level="l2")
            with T.Scale("block"):
                q = T.alloc((tile_h, dim), "float16", level="l1")
                q_pe = T.alloc((tile_h, pe_dim), "float16", level="l0")  # l1 is full
                kv, k_pe = (T.alloc((tile_n, n), "float16", level="l1") for n in (dim, pe_dim))
                scores, acc = (T.alloc((tile_h, n), "float32", level="l0") for n in (tile_n, dim))
                top, total = (T.alloc((tile_h,), "float32", level="l0") for _ in range(2))
                T.copy(Q_dev[bx, by * tile_h, 0], q)
                T.copy(Q_pe_dev[bx, by * tile_h, 0], q_pe)
                attention.begin(top, total, acc)
                for k in T.Pipelined(keys // tile_n, num_stages=min(KEYS // tile_n, 2)):
                    first = part * keys + k * tile_n
                    T.copy(KV_dev[bx, first : first + tile_n, 0, :], kv)
                    T.copy(K_pe_dev[bx, first : first + tile_n, 0, :], k_pe)
                    with T.Scale("warpgroup"):  # each warpgroup scores its half of the keys
                        mine = T.view(scores, layout=T.FullCol)
                        T.gemm(q, T.view(kv, layout=T.FullRow), mine, transpose_B=True, clear_accum=True)
                        T.gemm(q_pe, T.view(k_pe, layout=T.FullRow), mine, transpose_B=True)
                    attention.softmax_step(scores, top, total, acc, scale, attention.sums_apart)
                    exchange(scores, kv, acc)
                attention.finish_apart(acc, top, total, scale)
                if splits == 1:
                    T.copy(acc, output[bx, by * tile_h, 0])
                    T.copy(total, logsum[bx, by * tile_h])
                else:
                    whole, log = T.alloc((rows, dim), sent, level="l0"), T.alloc((rows,), "float32", level="l0")
                    attention.merge_splits(acc, total, whole, log, splits, merge)
                    with T.Scale("device"):
                        T.allreduce(whole, log, fn=merge)
                    T.copy(whole, output[bx, by * tile_h + part * rows, 0])
            if splits == 1:
                with T.Scale("device"):
                    T.allreduce(output, logsum, fn=merge)

    return cp_flash_mla


@common.options(size=512)
def main(devices: int, size: int, seed: int) -> None:
    """Decode one token for each of two sequences of about `size` keys, a whole number of tiles on every device."""
    rng = torch.Generator().manual_seed(seed)
    batch, seq = 2, -(-size // (devices * KEYS)) * devices * KEYS
    for name, exchange in ("all_gather", gathered), ("copy", exchanged):
        given = [(batch, HEADS, DIM), (batch, HEADS, PE_DIM), (batch, seq, 1, DIM), (batch, seq, 1, PE_DIM)]
        q, q_pe, kv, k_pe = (torch.randn(shape, generator=rng).half() for shape in given)
        outputs = [torch.full((batch, HEADS, DIM), torch.nan) for _ in range(devices)]
        shards = zip(kv.chunk(devices, 1), k_pe.chunk(devices, 1), outputs, strict=True)
        args = [[q, q_pe, k.contiguous(), pe.contiguous(), output] for k, pe, output in shards]
        common.run(cp_mla(devices, batch, HEADS, seq, DIM, PE_DIM, exchange=exchange), args)
        want, bound = attention.reference(torch.cat([q, q_pe], -1), torch.cat([kv, k_pe], -1)[:, :, 0], kv[:, :, 0])
        common.compare(name, outputs, [want] * devices, [bound] * devices)


if __name__ == "__main__":
    main()
