// SPDX-License-Identifier: MIT
// Distributed shared memory of a cluster of thread blocks. Needs sync.cuh and combine.cuh.
//
// All blocks of a cluster run the same program, so a tile lies at the same offset, in the same layout, in each of them:
// the address of an element here, mapped to a peer, is the address of the same element there. Accesses are ordinary
// loads and stores on generic addresses; barriers of the cluster order them (PTX: barrier.cluster, acquire, release).
#ifndef TILESCALE_CLUSTER_CUH
#define TILESCALE_CLUSTER_CUH

namespace tilescale {

// The same address in the shared memory of block `rank` of this cluster.
template <typename T>
__device__ __forceinline__ T* at_peer(const T* p, int rank) {
  u64 there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
  return reinterpret_cast<T*>(there);
}

// All threads of all blocks of the cluster arrive. Their earlier writes, including bulk copies that they issued, are
// visible to all of them afterwards, also to bulk copies and matrix instructions. Each block orders the proxies of its
// own shared memory after the barrier: a fence for that of the whole cluster waits for all writes of the SM.
__device__ __forceinline__ void cluster_barrier() {
  complete_stores();
  acquired();
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  acquired();
}

// Keeps a tile alive here for the allocator of shared memory.
__device__ __forceinline__ void in_use(const void*) {}

template <int BYTES>
struct Word;
template <>
struct Word<1> { typedef unsigned char type; };
template <>
struct Word<2> { typedef unsigned short type; };
template <>
struct Word<4> { typedef unsigned type; };
template <>
struct Word<8> { typedef uint2 type; };
template <>
struct Word<16> { typedef uint4 type; };

// Words to or from a peer: all are read before the first is written, so that all are in flight at once.
template <int BYTES>
__device__ __forceinline__ void cluster_put(int) {}
template <int BYTES, typename... More>
__device__ __forceinline__ void cluster_put(int rank, const void* here, const void* there, bool active, More... more) {
  typedef typename Word<BYTES>::type W;
  W word;
  if (active) word = *static_cast<const W*>(here);
  cluster_put<BYTES>(rank, more...);
  if (active) *at_peer(static_cast<const W*>(there), rank) = word;
}

template <int BYTES>
__device__ __forceinline__ void cluster_get(int) {}
template <int BYTES, typename... More>
__device__ __forceinline__ void cluster_get(int rank, void* here, const void* there, bool active, More... more) {
  typedef typename Word<BYTES>::type W;
  W word;
  if (active) word = *at_peer(static_cast<const W*>(there), rank);
  cluster_get<BYTES>(rank, more...);
  if (active) *static_cast<W*>(here) = word;
}

template <typename T>
__device__ __forceinline__ T cluster_load(const T* there, int rank) {
  return *at_peer(there, rank);
}

template <typename T, typename V>
__device__ __forceinline__ void cluster_store(const T* there, int rank, V value) {
  *at_peer(there, rank) = static_cast<T>(value);
}

// N neighbouring elements, combined in type A over the blocks in the order of ranks; all blocks get the result.
template <int OP, typename A, int N, int BLOCKS, typename T>
__device__ __forceinline__ void cluster_allreduce(const T* p, bool active) {
  typedef typename Word<N * sizeof(T)>::type W;
  if (!active) return;
  A total[N];
#pragma unroll
  for (int rank = 0; rank < BLOCKS; ++rank) {
    W word = *at_peer(reinterpret_cast<const W*>(p), rank);
    const T* part = reinterpret_cast<const T*>(&word);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      A value = static_cast<A>(part[i]);
      total[i] = rank == 0 ? value : combined<OP, A>(total[i], value);
    }
  }
  W word;
  T* result = reinterpret_cast<T*>(&word);
#pragma unroll
  for (int i = 0; i < N; ++i) result[i] = static_cast<T>(total[i]);
#pragma unroll
  for (int rank = 0; rank < BLOCKS; ++rank) *at_peer(reinterpret_cast<const W*>(p), rank) = word;
}

}  // namespace tilescale

#endif
