// SPDX-License-Identifier: MIT
// The sum over the threads of a block of whole warps. Self-contained.
#ifndef TILESCALE_BLOCK_SUM_CUH
#define TILESCALE_BLOCK_SUM_CUH

namespace tilescale {

enum { WARP_LANES = 32, MOST_WARPS = 32 };

// All lanes of a warp, together: the same bits for each of them.
__device__ __forceinline__ float sum_of_warp(float mine) {
#pragma unroll
  for (int step = WARP_LANES / 2; step > 0; step /= 2) mine += __shfl_xor_sync(~0u, mine, step);
  return mine;
}

// All threads, with `turn` 0 and 1 in alternation: who is still reading the sums of one call is through before the barrier of
// the next one, so they are written again in the one after that.
__device__ __forceinline__ float sum_of_block(float mine, int turn) {
  __shared__ float sums[2][MOST_WARPS];
  const int lane = threadIdx.x % WARP_LANES, warps = blockDim.x / WARP_LANES;
  mine = sum_of_warp(mine);
  if (lane == 0) sums[turn][threadIdx.x / WARP_LANES] = mine;
  __syncthreads();
  return sum_of_warp(lane < warps ? sums[turn][lane] : 0);
}

}  // namespace tilescale

#endif
