// SPDX-License-Identifier: MIT
// Sums over the threads of a cluster of blocks, each of whole warps. Stands after words.cuh. Before compute capability 9.0
// each block is a cluster.
//
// Every warp stores its part into the shared memory of every block, as words with the number of the sum inside: who sees the
// number sees the part. A barrier of the cluster would wait for all that its threads have stored, to other GPUs too.
#ifndef TILESCALE_CLUSTER_SUM_CUH
#define TILESCALE_CLUSTER_SUM_CUH

namespace tilescale {

enum { WARP_LANES = 32, MOST_BLOCKS = 8, MOST_WARPS = 16, MOST_PARTS = MOST_BLOCKS * MOST_WARPS };

// The blocks of this cluster, which of them this one is; the clusters of the grid, and which of them this is.
struct Cluster {
  int blocks, block, clusters, cluster;
};
__device__ __forceinline__ Cluster own_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  Cluster own;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(own.blocks));
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(own.block));
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(own.clusters));
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(own.cluster));
  return own;
#else
  return {1, 0, static_cast<int>(gridDim.x), static_cast<int>(blockIdx.x)};
#endif
}

// All lanes of a warp, together: the same bits for each of them.
__device__ __forceinline__ float sum_of_warp(float mine) {
#pragma unroll
  for (int step = WARP_LANES / 2; step > 0; step /= 2) mine += __shfl_xor_sync(~0u, mine, step);
  return mine;
}

// Who still reads the parts of one sum has not stored its own of the next one, without which nobody comes to the one after that:
// so two sums have room.
class ClusterSum {
 public:
  // All threads of the block. Meanwhile, until ready(), the others of the cluster may begin.
  __device__ __forceinline__ explicit ClusterSum(Cluster own) : own_(own) {
    for (int i = threadIdx.x; i < MOST_PARTS; i += blockDim.x) parts(0)[i] = parts(1)[i] = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
  }
  // All threads, before the first sum.
  __device__ __forceinline__ void ready() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
    __syncthreads();
#endif
  }
  // All threads, with numbers from 1 on: the same bits for each of them.
  __device__ __forceinline__ float operator()(float mine, unsigned number) const {
    const int lane = threadIdx.x % WARP_LANES, warps = blockDim.x / WARP_LANES;
    u64* all = parts(number % 2);
    mine = sum_of_warp(mine);
    if (lane < own_.blocks)
      store(all + own_.block * warps + threadIdx.x / WARP_LANES, lane,
            static_cast<u64>(number) << 32 | __float_as_uint(mine));
    float total = 0;
    for (int i = lane; i < own_.blocks * warps; i += WARP_LANES) {
      u64 part;
      do part = load(all + i);
      while (part >> 32 != number);
      total += __uint_as_float(static_cast<unsigned>(part));
    }
    return sum_of_warp(total);
  }

 private:
  static __device__ __forceinline__ unsigned shared(const u64* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
  }
  // Into the memory of a block of the cluster.
  static __device__ __forceinline__ void store(u64* at, int block, u64 part) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared(at)), "r"(block));
    asm volatile("st.relaxed.cluster.shared::cluster.u64 [%0], %1;" ::"r"(there), "l"(part) : "memory");
#else
    *reinterpret_cast<volatile u64*>(at) = part;
#endif
  }
  static __device__ __forceinline__ u64 load(const u64* at) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    u64 part;
    asm volatile("ld.relaxed.cluster.shared.u64 %0, [%1];" : "=l"(part) : "r"(shared(at)) : "memory");
    return part;
#else
    return *reinterpret_cast<const volatile u64*>(at);
#endif
  }
  static __device__ __forceinline__ u64* parts(int turn) {
    __shared__ u64 both[2][MOST_PARTS];
    return both[turn];
  }
  const Cluster own_;
};

}  // namespace tilescale

#endif
