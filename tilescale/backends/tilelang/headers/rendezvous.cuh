// SPDX-License-Identifier: MIT
// Barriers of all ranks at the begin and end of a call. Needs sync.cuh.
//
// An instance of the words has two for each rank. The first: its count of arrivals in the upper half, and the purpose
// of the last one in the lower half, which must be the same on all ranks (see barrier_kernel.py). The second: the
// number of blocks of its grids that have left. The counts are local to this device: its arrivals, the number of blocks
// of each rank that had left before, and the number of blocks of the running grid that have ended. They are on the
// device so that a captured launch can be replayed.
#ifndef TILESCALE_RENDEZVOUS_CUH
#define TILESCALE_RENDEZVOUS_CUH

namespace tilescale {

// The word of a rank that arrives for the `epoch`th time.
__device__ __forceinline__ i64 standing(unsigned epoch, int purpose) {
  return static_cast<i64>(static_cast<u64>(epoch) << 32 | static_cast<unsigned>(purpose));
}

// One thread: until all other ranks have arrived as often, with the same purpose.
__device__ inline void await_ranks(const i64* words, i64 stride, int slot, int rank, int ranks, unsigned epoch,
                                   int purpose, i64 limit, i64* report, int site) {
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    u64 seen;
    auto here = [&] {
      seen = static_cast<u64>(load_acquire(words + slot * stride + r));
      return static_cast<int>(static_cast<unsigned>(seen >> 32) - epoch) >= 0;
    };
    Outcome outcome = await(here, limit, report);
    if (outcome == LATE) fail(report, ABSENT, site, r, epoch, static_cast<i64>(seen >> 32));
    if (outcome != READY) return;
    // A rank whose count is ahead has compared this one's word with its own before it continued.
    if (static_cast<unsigned>(seen >> 32) == epoch && static_cast<unsigned>(seen) != static_cast<unsigned>(purpose))
      return fail(report, DIFFERENT, site, r, static_cast<unsigned>(purpose), static_cast<unsigned>(seen));
  }
}

// A kernel of one thread.
__device__ inline void barrier_of_ranks(i64* words, i64 stride, int slot, int rank, int ranks, int* counts, int purpose,
                                        i64 limit, i64* report, int site) {
  i64 stop = stopped(report);
  unsigned epoch = static_cast<unsigned>(counts[0]) + 1u;
  drain();
  if (stop) return notify_host(report);
  notify_ranks(words, stride, rank, ranks, standing(epoch, purpose));
  counts[0] = static_cast<int>(epoch);
  await_ranks(words, stride, slot, rank, ranks, epoch, purpose, limit, report, site);
}

// Number of this device's arrivals when its kernel begins. It is constant until the last block leaves, so all blocks
// read the same.
__device__ __forceinline__ unsigned came_before(const int* counts) {
  return static_cast<unsigned>(*const_cast<const volatile int*>(counts));
}

// One thread, when no thread accesses a device's flags any more in this call: zeroes them for the next one. This is in
// time: peers signal in the next call only after this device has signalled its arrival there, in a kernel after this
// one (tilescale/program/rendezvous_need.py).
__device__ __forceinline__ void clear() {}
template <typename V, typename... Others>
__device__ __forceinline__ void clear(V* flags, i64 extent, Others... others) {
  for (i64 i = 0; i < extent; ++i) *const_cast<volatile V*>(flags + i) = 0;
  clear(others...);
}

// One thread of each block, first of all: the first block signals this rank's arrival.
__device__ inline void come(i64* words, i64 stride, int rank, int ranks, const int* counts, int purpose,
                            const i64* report) {
  if (blockIdx.x != 0 || blockIdx.y != 0 || blockIdx.z != 0) return;
  i64 stop = stopped(report);
  unsigned epoch = came_before(counts) + 1u;
  fence();
  if (!stop) notify_ranks(words, stride, rank, ranks, standing(epoch, purpose));
}

// One thread of each block, before the block accesses another device.
__device__ inline void enter(const i64* words, i64 stride, int slot, int rank, int ranks, const int* counts,
                             int purpose, i64 limit, i64* report, int site) {
  i64 stop = stopped(report);
  unsigned epoch = came_before(counts) + 1u;
  if (stop) return notify_host(report);
  note(site, WAITS);
  await_ranks(words, stride, slot, rank, ranks, epoch, purpose, limit, report, site);
  note(site, WAITED);
}

// One thread of each block, after a barrier, and complete_stores() by all others that issued bulk copies: its block is
// done with the memory of all ranks, and signals them. The first block waits until all blocks of all ranks are, counts,
// and clears `flags`: each a pointer and a number.
template <typename... Flags>
__device__ inline void leave(i64* words, i64 stride, int slot, int rank, int ranks, int* counts, int purpose, i64 limit,
                             i64* report, int site, Flags... flags) {
  // Read while stores drain.
  i64 stop = stopped(report);
  unsigned epoch = came_before(counts) + 2u, done = came_before(counts + 1) + gridDim.x * gridDim.y * gridDim.z;
  drain();
  if (stop) return notify_host(report);
  for (int s = 0; s < ranks; ++s) add_relaxed(words + s * stride + ranks + rank, 1);
  if (blockIdx.x != 0 || blockIdx.y != 0 || blockIdx.z != 0) return;
  notify_ranks(words, stride, rank, ranks, standing(epoch, purpose));
  const i64* blocks = words + slot * stride + ranks;
  for (int i = 0; i < ranks; ++i) {
    // This rank's blocks first: they are local, while the peers' signals are still in flight.
    int r = rank + i < ranks ? rank + i : rank + i - ranks;
    unsigned seen;
    auto gone = [&] {
      seen = static_cast<unsigned>(load_acquire(blocks + r));
      return static_cast<int>(seen - done) >= 0;
    };
    Outcome outcome = await(gone, limit, report);
    if (outcome == LATE) fail(report, ABSENT, site, r, epoch, seen);
    if (outcome != READY) return;
  }
  counts[0] = static_cast<int>(epoch);
  counts[1] = static_cast<int>(done);
  clear(flags...);
}

// The same for a grid whose last block ends when no block accesses another device any more: that block counts and
// clears. Its acquire orders its clearing after all accesses of other blocks. A single block needs none, because of
// program order and the barrier before.
template <typename... Flags>
__device__ inline void count(int* counts, const i64* report, Flags... flags) {
  i64 stop = stopped(report);
  unsigned epoch = came_before(counts) + 1u, blocks = gridDim.x * gridDim.y * gridDim.z;
  if (blocks > 1) {
    if (count_of_device(counts + 2) + 1 != blocks) return;
    counts[2] = 0;
  }
  counts[0] = static_cast<int>(epoch);
  clear(flags...);
  if (stop) notify_host(report);
}

}  // namespace tilescale

#endif
