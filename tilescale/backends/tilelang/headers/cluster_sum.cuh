// SPDX-License-Identifier: MIT
// Sums and maxima over the threads of a cluster of blocks, each of whole warps. Needs words.cuh. Before compute
// capability 9.0 each block is a cluster.
//
// Every warp stores its part into the shared memory of every block, as words with the number of the sum inside: a
// reader that sees the number sees the part. A barrier of the cluster would wait for all stores of its threads, to
// other GPUs too.
#ifndef TILESCALE_CLUSTER_SUM_CUH
#define TILESCALE_CLUSTER_SUM_CUH

namespace tilescale {

enum { MOST_BLOCKS = 8, MOST_WARPS = 16, MOST_PARTS = MOST_BLOCKS * MOST_WARPS, MOST_GROUPS = 128, ADJACENT = 8 };

// The blocks of this cluster, and this one's rank; the clusters of the grid, and this one's rank.
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

struct Statistics {
  float sum, most;
};

// Maximum of nonnegative numbers; a NaN is larger than all others.
__device__ __forceinline__ float larger(float a, float b) {
  return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
}

// Maximum of one and of another number's magnitude, with the same order.
__device__ __forceinline__ float larger_magnitude(float most, float value) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(most), "f"(fabsf(value)));
  return result;
}

// All lanes of a warp together get the same bits.
template <bool MOST>
__device__ __forceinline__ Statistics all_of_warp(Statistics mine) {
#pragma unroll
  for (int step = WARP_LANES / 2; step > 0; step /= 2) mine.sum += __shfl_xor_sync(~0u, mine.sum, step);
  if (MOST) mine.most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(mine.most)));
  return mine;
}

// A block that still reads the parts of one sum has not stored its part of the next one, and no block reaches the sum
// after that without it: so two sums are buffered.
class OfCluster {
 public:
  // All threads of the block. The cluster's other blocks may start later, until ready().
  __device__ __forceinline__ explicit OfCluster(Cluster own) : own_(own) {
    for (int i = threadIdx.x; i < MOST_PARTS; i += blockDim.x) parts_of(0)[i] = parts_of(1)[i] = {0, 0};
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
  // All threads, with numbers from 1 on: gives the sum, and the maximum of nonnegative numbers if requested (MOST).
  template <bool MOST>
  __device__ __forceinline__ void give(Statistics mine, unsigned number) const {
    const int lane = threadIdx.x % WARP_LANES, warps = blockDim.x / WARP_LANES;
    mine = all_of_warp<MOST>(mine);
    if (lane < own_.blocks)
      store(parts_of(number % 2) + own_.block * warps + threadIdx.x / WARP_LANES, lane,
            numbered(__float_as_uint(mine.sum), __float_as_uint(mine.most), number));
  }
  // Thereafter, those of all threads, which get the same bits.
  template <bool MOST>
  __device__ __forceinline__ Statistics take(unsigned number) const {
    const int lane = threadIdx.x % WARP_LANES, warps = blockDim.x / WARP_LANES;
    const Words* parts = parts_of(number % 2);
    Statistics found = {0, 0};
    for (int i = lane; i < own_.blocks * warps; i += WARP_LANES) {
      Words part;
      do part = load(parts + i);
      while (!have(part, number));
      found.sum += __uint_as_float(static_cast<unsigned>(part.first));
      if (MOST) found.most = larger(found.most, __uint_as_float(static_cast<unsigned>(part.second)));
    }
    return all_of_warp<MOST>(found);
  }

 private:
  static __device__ __forceinline__ unsigned shared(const Words* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
  }
  // Stores to the memory of a block of the cluster.
  static __device__ __forceinline__ void store(Words* at, int block, Words part) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared(at)), "r"(block));
    asm volatile("st.relaxed.cluster.shared::cluster.v2.u64 [%0], {%1, %2};" ::"r"(there), "l"(part.first),
                 "l"(part.second)
                 : "memory");
#else
    reinterpret_cast<volatile u64*>(at)[0] = part.first;
    reinterpret_cast<volatile u64*>(at)[1] = part.second;
#endif
  }
  static __device__ __forceinline__ Words load(const Words* at) {
    Words part;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("ld.relaxed.cluster.shared.v2.u64 {%0, %1}, [%2];"
                 : "=l"(part.first), "=l"(part.second)
                 : "r"(shared(at))
                 : "memory");
#else
    part.first = reinterpret_cast<const volatile u64*>(at)[0];
    part.second = reinterpret_cast<const volatile u64*>(at)[1];
#endif
    return part;
  }
  static __device__ __forceinline__ Words* parts_of(int iteration) {
    __shared__ Words both[2][MOST_PARTS];
    return both[iteration];
  }
  const Cluster own_;
};

// The maximum of nonnegative numbers, for groups of a block. Three rows are buffered: in the iteration of a row, ahead of
// its barrier, some warps may still read the maxima of the row before, others clear those of the row after it.
class OfGroups {
 public:
  // All threads, before a barrier.
  __device__ __forceinline__ void clear(int row) const {
    for (int i = threadIdx.x; i < MOST_GROUPS; i += blockDim.x) largest(row, i) = 0;
  }
  // All lanes of a warp together, each with numbers of a group and of the next one, 0 for none. ADJACENT lanes have no more
  // than two groups, the first one in the first lane.
  __device__ __forceinline__ void add(int row, int group, float value, float next) const {
    const int first = __shfl_sync(~0u, group, 0, ADJACENT);
    unsigned of_first = __float_as_uint(group == first ? value : 0), of_second = __float_as_uint(group == first ? next : value);
#pragma unroll
    for (int step = ADJACENT / 2; step > 0; step /= 2) {
      of_first = max(of_first, __shfl_xor_sync(~0u, of_first, step));
      of_second = max(of_second, __shfl_xor_sync(~0u, of_second, step));
    }
    if (threadIdx.x % ADJACENT != 0) return;
    if (of_first != 0) atomicMax(&largest(row, first), of_first);
    if (of_second != 0) atomicMax(&largest(row, first + 1), of_second);
  }
  __device__ __forceinline__ float of(int row, int group) const { return __uint_as_float(largest(row, group)); }

 private:
  static __device__ __forceinline__ unsigned& largest(int row, int group) {
    __shared__ unsigned rows[3][MOST_GROUPS];
    return rows[row % 3][group];
  }
};

}  // namespace tilescale

#endif
