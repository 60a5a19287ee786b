# SPDX-License-Identifier: MIT
"""Two nodes: an all-reduce over a cluster of servers that sends each number between them only once.

                 node 0                              node 1
    device 0   device 1   ...           device 0   device 1   ...
       \\__ adds up share 0 of the node      \\__ adds up share 0 of its node
                  \\__ adds up share 1                   \\__ adds up share 1          inside a node: NVLink
            share 0  <------------------------->  share 0
                        share 1  <------------------------->  share 1                between nodes: InfiniBand

Inside a node a device has far more bandwidth than to another node. So the devices of a node first add up their tensors,
each a share; only these sums cross to the other nodes, each through its device's own adapter; the results are gathered
inside the node again. With n devices in a node, a device sends 1/n-th of its tensor to each other node. In one ring
over all devices two whole tensors would have to pass through one adapter.

The idea: two scales that name ranks. `T.Scale("device")` is for the devices of this node and the network inside it,
`T.Scale("node")` of the device with the same number in the other nodes and of the network between them. The machine
description names these networks and their mechanisms.

1. phases     reduce-scatter over devices, all-reduce over nodes, all-gather over devices: three lines.
2. by_hand    the same tile by tile, as two_shot of 04 with one more hop. A barrier of the devices of each node, then
              one of the nodes: after both, all have arrived everywhere.

When it wins: in phases. Simulated on two nodes of four H200, 128 x 128 takes 24.7 us in phases and 31.8 us by hand,
4096 x 512 takes 101 and 110 us. By hand is for programs that use a tile as soon as its sum is there.

Things to try: `--nodes 4 --devices 32`; all-reduce over nodes first, and what then crosses between them; a machine file
with a slower network between nodes.
"""

import click
import common
import forms
import torch

import tilescale.language as T

TILE = 32


def phases(nodes: int, devices: int, rows: int, cols: int):
    """Run three collectives, each on the network of its level."""

    @T.prim_func
    def hierarchical(X: T.Tensor((rows, cols), "float32")):
        with T.Kernel(node=nodes, device=devices):
            share = T.alloc((rows // devices, cols), "float32", level="l2")
            with T.Scale("device"):
                T.reduce_scatter(X, share)
            with T.Scale("node"):
                T.allreduce(share)
            with T.Scale("device"):
                T.all_gather(share, X)

    return hierarchical


def by_hand(nodes: int, devices: int, rows: int, cols: int):
    """Add up tile b on device b % devices of each node."""
    blocks = -(-rows // TILE)

    @T.prim_func
    def tile_by_tile(X: T.Tensor((rows, cols), "float32")):
        with T.Kernel(node=nodes, device=devices, block=blocks, threads=128) as b:
            inside = T.alloc((devices, rows, cols), "float32", level="l2")  # from the devices of this node
            across = T.alloc((nodes, rows, cols), "float32", level="l2")  # sums of the nodes
            arrived = T.alloc((blocks,), "int32", level="l2")
            crossed = T.alloc((blocks,), "int32", level="l2")
            reduced = T.alloc((blocks,), "int32", level="l2")
            with T.Scale("device"):
                T.clear(arrived)
                T.clear(crossed)
                T.clear(reduced)
                T.barrier()
            with T.Scale("node"):
                T.barrier()  # every workspace of every node is free, every flag is cleared
            with T.Scale("block"):
                tile = T.alloc((TILE, cols), "float32", level="l1")
                total = T.alloc((TILE, cols), "float32", level="l0")
                T.copy(X[b * TILE, 0], tile)
                with T.Scale("device") as (rank, size):
                    T.copy(tile, inside[rank, b * TILE, 0], dst=b % size, signal=arrived[b])
                    if rank == b % size:
                        T.wait(arrived[b], ">=", size)
                        T.clear(total)
                        for r in T.serial(size):
                            T.copy(inside[r, b * TILE, 0], tile)
                            for i, j in T.Parallel(TILE, cols):
                                total[i, j] += tile[i, j]
                        T.copy(total, tile)
                        with T.Scale("node") as (node, all_nodes):
                            for step in T.serial(all_nodes):
                                peer = (node + step) % all_nodes
                                T.copy(tile, across[node, b * TILE, 0], dst=peer, signal=crossed[b])
                        T.wait(crossed[b], ">=", nodes)
                        T.clear(total)
                        for n in T.serial(nodes):  # in the order of the nodes: all get the same bits
                            T.copy(across[n, b * TILE, 0], tile)
                            for i, j in T.Parallel(TILE, cols):
                                total[i, j] += tile[i, j]
                        T.copy(total, tile)
                        for step in T.serial(size):
                            T.copy(tile, X[b * TILE, 0], dst=(rank + step) % size, signal=reduced[b])
                T.wait(reduced[b], ">=", 1)

    return tile_by_tile


@click.option("--nodes", type=click.IntRange(min=1), default=2, show_default=True, help="Nodes among the devices.")
@common.options(size=128, devices=8, machine="h200-sxm-8x4")
def main(devices: int, size: int, seed: int, nodes: int = 2) -> None:
    """Add up (size, size) tensors of all devices of all nodes, in place."""
    if devices % nodes:
        raise click.UsageError(f"{devices} devices do not divide among {nodes} nodes: give a multiple of {nodes}")
    rng = torch.Generator().manual_seed(seed)
    size = common.divided(size, devices // nodes)
    for program in phases, by_hand:
        tensors = [torch.randn(size, size, generator=rng) for _ in range(devices)]
        stacked = torch.stack(tensors).double()
        common.run(program(nodes, devices // nodes, size, size), [[x] for x in tensors])
        bound = common.rounding(devices, stacked.abs().sum(0))
        common.compare(program.__name__, tensors, [stacked.sum(0)] * devices, [bound] * devices)
    forms.times((phases, by_hand), nodes, devices // nodes, common.divided(4096, devices // nodes), 512)


if __name__ == "__main__":
    main()
