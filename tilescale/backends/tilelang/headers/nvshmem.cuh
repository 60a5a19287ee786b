// SPDX-License-Identifier: MIT
// Tiles between GPUs by NVSHMEM, started by the program. Needs sync.cuh.
//
// All threads of a program make these calls together. On return, sources may be overwritten, and the result of a get is
// complete; a put is complete before anything that the program signals afterwards. NVSHMEM's own functions are inlined
// and large, so the calls themselves are not.
#ifndef TILESCALE_NVSHMEM_CUH
#define TILESCALE_NVSHMEM_CUH

#include <nvshmem.h>
#include <nvshmemx.h>

namespace tilescale {

// A tile's location in a plane of a tensor: the plane's first element, bytes of an element, elements from row to row,
// and along both axes the begin of the tile and the extent of the plane.
struct Place {
  char* plane;
  i64 size, step, row, rows, column, columns;

  __device__ __forceinline__ char* at(i64 i, i64 j) const { return plane + ((row + i) * step + column + j) * size; }
};

template <typename T>
__device__ __forceinline__ Place place(const T* tensor, i64 offset, i64 step, i64 row, i64 rows, i64 column,
                                       i64 columns) {
  return {(char*)(tensor + offset), sizeof(T), step, row, rows, column, columns};
}

// Rows and columns of a tile, relative to its begin.
struct Part {
  i64 row, rows_end, column, columns_end;

  __device__ __forceinline__ bool operator==(const Part&) const = default;
};

// The part of a tile inside its plane.
__device__ __forceinline__ Part inside(const Place& p, i64 rows, i64 columns) {
  return {max(-p.row, i64(0)), min(p.rows - p.row, rows), max(-p.column, i64(0)), min(p.columns - p.column, columns)};
}

__device__ __forceinline__ Part common(const Part& a, const Part& b) {
  return {max(a.row, b.row), min(a.rows_end, b.rows_end), max(a.column, b.column), min(a.columns_end, b.columns_end)};
}

__device__ __forceinline__ int threads() { return blockDim.x * blockDim.y * blockDim.z; }

__device__ __forceinline__ int thread_number() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

// Moves the rows of a part: each by a warp, or by all threads if there is only one.
template <typename Warp, typename Block>
__device__ __forceinline__ void each_row(const Part& part, Warp by_warp, Block by_block) {
  if (part.column >= part.columns_end) return;
  if (part.rows_end - part.row > 1 && threads() % 32 == 0) {
    for (i64 i = part.row + thread_number() / 32; i < part.rows_end; i += threads() / 32) by_warp(i);
  } else {
    for (i64 i = part.row; i < part.rows_end; ++i) by_block(i);
  }
}

// Completes all transfers that the program has started, for all of its threads.
__device__ __forceinline__ void complete() {
  __syncthreads();
  if (thread_number() == 0) nvshmem_quiet();
  __syncthreads();
}

// Starts to write a tile to `to` on PE `pe`, except the parts outside of either tensor.
static __device__ __noinline__ void start_put(Place from, Place to, i64 rows, i64 columns, int pe) {
  Part part = common(inside(from, rows, columns), inside(to, rows, columns));
  i64 j = part.column, bytes = (part.columns_end - j) * to.size;
  drain();
  __syncthreads();
  each_row(
      part, [&](i64 i) { nvshmemx_putmem_nbi_warp(to.at(i, j), from.at(i, j), bytes, pe); },
      [&](i64 i) { nvshmemx_putmem_nbi_block(to.at(i, j), from.at(i, j), bytes, pe); });
}

// The same, until it has arrived.
__device__ inline void put(Place from, Place to, i64 rows, i64 columns, int pe) {
  start_put(from, to, rows, columns, pe);
  complete();
}

// Reads a tile from `from` on PE `pe`; elements outside of the tensor there are 0.
static __device__ __noinline__ void get(Place from, Place to, i64 rows, i64 columns, int pe) {
  Part wanted = inside(to, rows, columns), part = common(wanted, inside(from, rows, columns));
  i64 j = part.column, bytes = (part.columns_end - j) * to.size;
  drain();
  __syncthreads();
  if (!(part == wanted)) {
    i64 all = (wanted.columns_end - wanted.column) * to.size;
    for (i64 i = wanted.row; i < wanted.rows_end; ++i)
      for (i64 b = thread_number(); b < all; b += threads()) to.at(i, wanted.column)[b] = 0;
    drain();
    __syncthreads();
  }
  each_row(
      part, [&](i64 i) { nvshmemx_getmem_nbi_warp(to.at(i, j), from.at(i, j), bytes, pe); },
      [&](i64 i) { nvshmemx_getmem_nbi_block(to.at(i, j), from.at(i, j), bytes, pe); });
  complete();
  acquired();
}

// One thread: updates a flag of PE `pe`, `flags` being the first one of this device's instance; until the update has
// arrived, as a later call may zero the flag.
template <int SET, typename V>
__device__ inline void update_flag(V* flags, i64 index, i64 extent, i64 value, int pe, i64* report, int site) {
  if (index < 0 || index >= extent) return fail(report, OUTSIDE, site, index, extent, 0);
  if constexpr (sizeof(V) == sizeof(uint64_t)) {
    int op = SET ? NVSHMEM_SIGNAL_SET : NVSHMEM_SIGNAL_ADD;
    nvshmemx_signal_op(reinterpret_cast<uint64_t*>(flags + index), static_cast<uint64_t>(value), op, pe);
  } else {
    // NVSHMEM's signals have 64 bits.
    unsigned* flag = reinterpret_cast<unsigned*>(flags + index);
    if (SET)
      nvshmem_uint_atomic_set(flag, static_cast<unsigned>(value), pe);
    else
      nvshmem_uint_atomic_add(flag, static_cast<unsigned>(value), pe);
  }
  nvshmem_quiet();
}

// After put() by all.
template <int SET, typename V>
__device__ inline void put_flag(V* flags, i64 index, i64 extent, i64 value, int pe, i64* report, int site) {
  if (thread_number() == 0) update_flag<SET>(flags, index, extent, value, pe, report, site);
}

// One thread, after a barrier, and complete_stores() by all others that issued bulk copies: as signal(), of PE `pe`.
template <int SET, typename V>
__device__ inline void signal_pe(V* flags, i64 index, i64 extent, i64 value, int pe, i64* report, int site) {
  drain();
  update_flag<SET>(flags, index, extent, value, pe, report, site);
}

// put(), then the flag: one operation if the tile is one piece and the flag has 64 bits.
template <int SET, typename V>
static __device__ __noinline__ void put_signal(Place from, Place to, i64 rows, i64 columns, int pe, V* flags, i64 index,
                                               i64 extent, i64 value, i64* report, int site) {
  if constexpr (sizeof(V) == sizeof(uint64_t)) {
    Part part = common(inside(from, rows, columns), inside(to, rows, columns));
    i64 i = part.row, j = part.column;
    if (part.rows_end - i == 1 && j < part.columns_end && index >= 0 && index < extent) {
      drain();
      __syncthreads();
      nvshmemx_putmem_signal_nbi_block(to.at(i, j), from.at(i, j), (part.columns_end - j) * to.size,
                                       reinterpret_cast<uint64_t*>(flags + index), static_cast<uint64_t>(value),
                                       SET ? NVSHMEM_SIGNAL_SET : NVSHMEM_SIGNAL_ADD, pe);
      return complete();
    }
  }
  put(from, to, rows, columns, pe);
  put_flag<SET>(flags, index, extent, value, pe, report, site);
}

#ifdef TILESCALE_SIBLINGS_CUH
// As barrier_of_siblings(), for siblings of which `inside` consecutive ones share memory: these synchronize first, then
// those of one position in each such group, by NVSHMEM. A signal from another group implies all its ranks: its sender
// has passed the barrier of its own group before.
__device__ inline void barrier_of_groups(int* counters, i64 stride, Siblings s, int inside, i64 index, int* epochs,
                                         i64 limit, i64* report, int site) {
  i64 stop = stopped(report);
  unsigned epoch = static_cast<unsigned>(epochs[index]) + 1u;
  int begin = s.rank / inside * inside;
  drain();
  if (stop) return notify_host(report);
  notify_siblings(counters, stride, s, begin, begin + inside, index, epoch);
  epochs[index] = static_cast<int>(epoch);
  int* words = counters + s.slot(s.rank) * stride + index * s.size;
  if (!await_siblings(words, s, begin, begin + inside, 1, epoch, limit, report, site)) return;
  drain();
  for (int j = s.rank % inside; j < s.size; j += inside)
    if (j != s.rank) nvshmem_uint_atomic_set(reinterpret_cast<unsigned*>(words + s.rank), epoch, s.first + j * s.step);
  nvshmem_quiet();
  await_siblings(words, s, s.rank % inside, s.size, inside, epoch, limit, report, site);
}
#endif

}  // namespace tilescale

#endif
