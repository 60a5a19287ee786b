# SPDX-License-Identifier: MIT
"""Mixture of experts: every token goes to the experts that it chose, on any device, and comes back weighted.

    y[t] = sum over the choices j of t:  share[t, j] * x[t] W[chosen[t, j]]      n devices with `local` experts each

    device s, dispatch             device d, experts                  device s, combine
      tokens for expert e  ------>   inbox[e, s]   x W[e]   ------>     results[e]  -- weighted -->  Y
      their number         ------>   arrived[e, s]                      returned[e]

How many tokens an expert gets is known only when the program runs: any number, also zero. An inbox has `capacity` slots
for each source and expert; further tokens are dropped (Switch Transformer; Fedus and others, 2022). A block collects
the tokens for one expert in tiles, pads the last one, and sends them.

The idea: a flag that carries a number. The signal itself carries the number of tokens, `T.signal(..., count + 1,
op="set")`: zero means that nothing is known yet, one that no tokens come. A unit that has waited for it knows how many
rows of the slots are new; later rows may be of the previous launch and are not read.

The three steps are grid phases: each waits only for signals of an earlier phase, and a phase that only sends always
ends. So it cannot deadlock.

Things to try: `--capacity 0.5` and how many choices are dropped; count the bytes for tokens that stay on their device;
send bfloat16 back; let all choose one expert.
"""

import click
import common
import torch

import tilescale.language as T

TILE, TILE_N, TILE_K = 32, 64, 32
COUNT, PART = click.IntRange(min=1), click.FloatRange(min=0)


def moe(devices: int, tokens: int, width: int, hidden: int, experts: int, top_k: int, capacity: int):
    """Run one block for each expert: dispatch to that expert, then compute one source's tokens for a local expert."""
    local = experts // devices

    @T.prim_func
    def moe_layer(
        X: T.Tensor((tokens, width), "bfloat16"),
        chosen: T.Tensor((tokens, top_k), "int32"),
        share: T.Tensor((tokens, top_k), "float32"),
        W: T.Tensor((experts, width, hidden), "bfloat16"),
        Y: T.Tensor((tokens, hidden), "float32"),
    ):
        with T.Kernel(device=devices, block=experts, threads=128) as block:
            inbox = T.alloc((local, devices, capacity, width), "bfloat16", level="l2")
            results = T.alloc((experts, capacity, hidden), "float32", level="l2")
            slot = T.alloc((tokens, top_k), "int32", level="l2")  # of a token at its expert; -1 if dropped
            arrived = T.alloc((local, devices), "int32", level="l2")
            returned = T.alloc((experts,), "int32", level="l2")
            with T.Scale("device"):
                W_dev = T.view(W, layout=T.FullRow)
                T.clear(arrived)
                T.clear(returned)
                T.barrier()  # all inboxes and results are free, all flags are cleared
            with T.Scale("block"):  # dispatch
                order = T.alloc((capacity,), "int32", level="l1")
                rows = T.alloc((TILE, width), "bfloat16", level="l1")
                count = T.alloc_var("int32", init=0)
                for t, j in T.grid(tokens, top_k):
                    if chosen[t, j] == block:
                        slot[t, j] = T.if_then_else(count < capacity, count, -1)
                        if count < capacity:
                            order[count] = t
                            count = count + 1
                with T.Scale("device") as (rank, size):
                    for tile in T.serial(T.ceildiv(count, TILE)):
                        for i, j in T.Parallel(TILE, width):
                            if tile * TILE + i < count:
                                rows[i, j] = X[order[tile * TILE + i], j]
                            else:
                                rows[i, j] = 0
                        T.copy(rows, inbox[block % local, rank, tile * TILE, 0], dst=block // local)
                    T.signal(arrived[block % local, rank], count + 1, op="set", dst=block // local)
            with T.Scale("device") as (rank, size):
                with T.Scale("block"):  # experts
                    a = T.alloc((TILE, TILE_K), "bfloat16", level="l1")
                    w = T.alloc((TILE_K, TILE_N), "bfloat16", level="l1")
                    c = T.alloc((TILE, TILE_N), "float32", level="l0")
                    result = T.alloc((TILE, TILE_N), "float32", level="l1")
                    with T.Scale("device"):
                        expert = block % local
                        source = (rank + block // local) % size
                        T.wait(arrived[expert, source], ">=", 1)
                        for m, n in T.grid(T.ceildiv(arrived[expert, source] - 1, TILE), T.ceildiv(hidden, TILE_N)):
                            T.clear(c)
                            for k in T.Pipelined(T.ceildiv(width, TILE_K), num_stages=2):
                                T.copy(inbox[expert, source, m * TILE, k * TILE_K], a)
                                T.copy(W_dev[expert, k * TILE_K, n * TILE_N], w)
                                T.gemm(a, w, c)
                            T.copy(c, result)
                            T.copy(result, results[rank * local + expert, m * TILE, n * TILE_N], dst=source)
                        T.signal(returned[rank * local + expert], dst=source)
            with T.Scale("device"):
                with T.Scale("block"):  # combine
                    for e in T.serial(experts):
                        T.wait(returned[e], ">=", 1)
                    y = T.alloc((hidden,), "float32", level="l0")
                    for iteration in T.serial(T.ceildiv(tokens - block, experts)):
                        t = block + iteration * experts
                        T.clear(y)
                        for j in T.serial(top_k):
                            if slot[t, j] >= 0:
                                for i in T.Parallel(hidden):
                                    y[i] += share[t, j] * results[chosen[t, j], slot[t, j], i]
                        T.copy(y, Y[t, 0:hidden])

    return moe_layer


def reference(tokens, chosen, share, weights, capacity: int):
    """Compute in float64: the results, the sums of their magnitudes, and the number of dropped choices."""
    hot = torch.nn.functional.one_hot(chosen.long().flatten(), len(weights))
    slot = (hot.cumsum(0) * hot).sum(1).reshape(chosen.shape) - 1  # a token's number among those of its expert
    kept = share.double() * (slot < capacity)
    x, w = tokens.double(), weights.double()[chosen.long()]
    want = torch.einsum("tj,tk,tjkn->tn", kept, x, w)
    return want, torch.einsum("tj,tk,tjkn->tn", kept, x.abs(), w.abs()), int((slot >= capacity).sum())


@click.option("--experts", type=COUNT, default=2, show_default=True, help="Experts on each device.")
@click.option("--top-k", type=COUNT, default=2, show_default=True, help="Experts that a token chooses.")
@click.option("--capacity", type=PART, default=1.5, show_default=True, help="Slots; 1 is an even share of all choices.")
@common.options(size=128)
def main(devices: int, size: int, seed: int, experts: int = 2, top_k: int = 2, capacity: float = 1.5) -> None:
    """Run a layer of experts over `size` tokens of `size` features on each device."""
    rng, experts = torch.Generator().manual_seed(seed), experts * devices
    if top_k > experts:
        raise click.UsageError(f"a token cannot choose {top_k} of {experts} experts: lower --top-k or raise --experts")
    slots = int(capacity * size * top_k / experts) + 1
    weights = torch.randn(experts, size, size, generator=rng).bfloat16()
    liked = torch.randn(experts, generator=rng)
    liked[experts - 1] = -torch.inf if experts > top_k else 0  # no token chooses the last one
    args, wanted = [], []
    for shard in weights.chunk(devices):
        x = torch.randn(size, size, generator=rng).bfloat16()
        share, chosen = (torch.randn(size, experts, generator=rng) + liked).softmax(1).topk(top_k)
        args.append([x, chosen.int(), share, shard, torch.full((size, size), torch.nan)])
        wanted.append(reference(x, chosen, share, weights, slots))
    common.run(moe(devices, size, size, size, experts, top_k, slots), args)
    bound = [common.rounding(size * top_k, magnitude) for _, magnitude, _ in wanted]
    common.compare("moe", [y for *_, y in args], [want for want, _, _ in wanted], bound)
    print(f"{slots} slots for each source and expert; choices dropped by each device: {[n for *_, n in wanted]}")


if __name__ == "__main__":
    main()
