# SPDX-License-Identifier: MIT
"""Exchange between the lanes of a warp and between the warps of a block: shuffles, reductions, votes."""

import torch

from .base import PlainKernel, f64, poison, randint, randn


def warp_shuffles(T):
    """A butterfly sum, a shift up, a shift down and a broadcast, in two warps."""

    @T.prim_func
    def main(x: T.Tensor((64,), T.float32), out: T.Tensor((4, 64), T.float32)):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            total = T.alloc_var(T.float32)
            total = x[tx]
            for step in T.unroll(5):
                total = total + T.shfl_xor(total, 16 >> step)
            out[0, tx] = total
            out[1, tx] = T.shfl_up(x[tx], 1)
            out[2, tx] = T.shfl_down(x[tx], 2)
            out[3, tx] = T.shfl_sync(x[tx], 5)

    return main


def warp_reductions(T):
    @T.prim_func
    def main(x: T.Tensor((64,), T.float32), bits: T.Tensor((64,), T.int32), out: T.Tensor((5, 64), T.float32)):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            out[0, tx] = T.warp_reduce_sum(x[tx])
            out[1, tx] = T.warp_reduce_max(x[tx])
            out[2, tx] = T.warp_reduce_min(x[tx])
            out[3, tx] = T.cast(T.warp_reduce_bitand(bits[tx]), T.float32)
            out[4, tx] = T.cast(T.warp_reduce_bitor(bits[tx]), T.float32)

    return main


def votes(T):
    """Warp votes, block votes, and the lane and warp numbers."""

    @T.prim_func
    def main(x: T.Tensor((64,), T.int32), out: T.Tensor((9, 64), T.int32)):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            out[0, tx] = T.any_sync(x[tx] > 90)
            out[1, tx] = T.all_sync(x[tx] > 5)
            out[2, tx] = T.cast(T.popcount(T.ballot(x[tx] % 2 == 1)), T.int32)
            out[3, tx] = T.syncthreads_count(x[tx] > 50)
            out[4, tx] = T.syncthreads_and(x[tx] > 5)
            out[5, tx] = T.syncthreads_or(x[tx] > 90)
            out[6, tx] = T.get_lane_idx()
            out[7, tx] = T.get_warp_idx_sync()
            out[8, tx] = T.cast(T.popcount(T.match_any_sync(x[tx] % 4)), T.int32)

    return main


def _warps(tensor):
    return tensor.reshape(2, 32)


def _over_warps(values):
    return values.reshape(2, 1).expand(2, 32).reshape(64)


def _shuffle_reference(args):
    x = _warps(f64(args[0]))
    up = torch.cat([x[:, :1], x[:, :-1]], 1)
    down = torch.cat([x[:, 2:], x[:, -2:]], 1)
    return {1: torch.stack([_over_warps(x.sum(1)), up.reshape(64), down.reshape(64), _over_warps(x[:, 5])])}


def _warp_reduction_reference(args):
    x, bits = _warps(f64(args[0])), _warps(args[1])
    both, either = bits[:, 0].clone(), bits[:, 0].clone()
    for lane in range(1, 32):
        both, either = both & bits[:, lane], either | bits[:, lane]
    planes = [x.sum(1), x.amax(1), x.amin(1), f64(both), f64(either)]
    return {2: torch.stack([_over_warps(plane) for plane in planes])}


def _votes_reference(args):
    x = args[0].to(torch.int64)
    warps, everywhere = _warps(x), torch.ones(64, dtype=torch.int64)
    same = (warps[:, :, None] % 4 == warps[:, None, :] % 4).sum(2).reshape(64)
    planes = [
        _over_warps((warps > 90).any(1)),
        _over_warps((warps > 5).all(1)),
        _over_warps((warps % 2 == 1).sum(1)),
        everywhere * (x > 50).sum(),
        everywhere * (x > 5).all(),
        everywhere * (x > 90).any(),
        torch.arange(64) % 32,
        torch.arange(64) // 32,
        same,
    ]
    return {1: torch.stack([plane.to(torch.int64) for plane in planes])}


def _votes_inputs(rng):
    x = randint(rng, 0, 90, 64)
    x[:32] = x[:32].clamp(min=6)
    x[40] = 95
    x[50] = 0
    return [x, poison(9, 64, dtype=torch.int32)]


_F32 = torch.float32
_EXACT = {"rtol": 0.0, "atol": 0.0}

KERNELS = (
    PlainKernel(
        name="warp_shuffles",
        build=warp_shuffles,
        inputs=lambda rng: [randn(rng, 64, dtype=_F32), poison(4, 64)],
        reference=_shuffle_reference,
        covers=("shfl_xor", "shfl_up", "shfl_down", "shfl_sync", "alloc_var"),
        atol=1e-4,
    ),
    PlainKernel(
        name="warp_reductions",
        build=warp_reductions,
        inputs=lambda rng: [randn(rng, 64, dtype=_F32), randint(rng, 0, 2**20, 64) | 9, poison(5, 64)],
        reference=_warp_reduction_reference,
        covers=("warp_reduce_sum", "warp_reduce_max", "warp_reduce_min", "warp_reduce_bitand", "warp_reduce_bitor"),
        atol=1e-4,
    ),
    PlainKernel(
        name="votes",
        build=votes,
        inputs=_votes_inputs,
        reference=_votes_reference,
        covers=("any_sync", "all_sync", "ballot", "syncthreads_count", "popcount", "get_lane_idx", "match_any_sync"),
        **_EXACT,
    ),
)
