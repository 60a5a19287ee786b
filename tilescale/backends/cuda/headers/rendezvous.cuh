// SPDX-License-Identifier: MIT
// All ranks meet, when a call begins and when it ends. Stands after sync.cuh.
//
// An instance of the words has one for each rank: how often it has met in the upper half, and below what it came for,
// which must be the same on all ranks (barrier_kernel.py says what). The counts are of this device alone: how often it
// has met, and how many blocks of the kernel that runs have ended. They are on the device so that a captured launch can
// be replayed.
#ifndef TILESCALE_RENDEZVOUS_CUH
#define TILESCALE_RENDEZVOUS_CUH

namespace tilescale {

// One thread: everybody learns that this rank has come for the `epoch`th time, and that what it did before is done.
__device__ inline void tell_ranks(i64* words, i64 stride, int rank, int ranks, unsigned epoch, int purpose) {
  i64 word = static_cast<i64>(static_cast<u64>(epoch) << 32 | static_cast<unsigned>(purpose));
  for (int s = 0; s < ranks; ++s) store_release(words + s * stride + rank, word);
}

// One thread: until all ranks have come as often, for the same.
__device__ inline void await_ranks(const i64* words, i64 stride, int slot, int ranks, unsigned epoch, int purpose,
                                   i64 limit, i64* report, int site) {
  for (int r = 0; r < ranks; ++r) {
    u64 seen;
    auto here = [&] {
      seen = static_cast<u64>(load_acquire(words + slot * stride + r));
      return static_cast<int>(static_cast<unsigned>(seen >> 32) - epoch) >= 0;
    };
    Outcome outcome = await(here, limit, report);
    if (outcome == LATE) fail(report, ABSENT, site, r, epoch, static_cast<i64>(seen >> 32));
    if (outcome != READY) return;
    // A rank whose count is ahead has compared this one's word with its own before it went on.
    if (static_cast<unsigned>(seen >> 32) == epoch && static_cast<unsigned>(seen) != static_cast<unsigned>(purpose))
      return fail(report, DIFFERENT, site, r, static_cast<unsigned>(purpose), static_cast<unsigned>(seen));
  }
}

// A kernel of one thread.
__device__ inline void barrier_of_ranks(i64* words, i64 stride, int slot, int rank, int ranks, int* counts, int purpose,
                                        i64 limit, i64* report, int site) {
  if (!stopped(report)) {
    unsigned epoch = static_cast<unsigned>(counts[0]) + 1u;
    counts[0] = static_cast<int>(epoch);
    tell_ranks(words, stride, rank, ranks, epoch, purpose);
    await_ranks(words, stride, slot, ranks, epoch, purpose, limit, report, site);
  }
  tell_host(report);
}

// How often this device has met when its kernel begins. It stays so until the last block leaves: all of them know it.
__device__ __forceinline__ unsigned met_before(const int* counts) {
  return static_cast<unsigned>(*const_cast<const volatile int*>(counts));
}

// One thread of each block, first of all: the first block tells that this rank has come.
__device__ inline void come(i64* words, i64 stride, int rank, int ranks, const int* counts, int purpose,
                            const i64* report) {
  if (blockIdx.x != 0 || blockIdx.y != 0 || blockIdx.z != 0 || stopped(report)) return;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  tell_ranks(words, stride, rank, ranks, met_before(counts) + 1u, purpose);
}

// One thread of each block, before the block touches another device.
__device__ inline void enter(const i64* words, i64 stride, int slot, int ranks, const int* counts, int purpose,
                             i64 limit, i64* report, int site) {
  if (stopped(report)) return tell_host(report);
  await_ranks(words, stride, slot, ranks, met_before(counts) + 1u, purpose, limit, report, site);
}

// One thread of each block, after drain() by all and a barrier: the last block counts, and if `MEETS` tells and waits.
template <int MEETS>
__device__ inline void leave(i64* words, i64 stride, int slot, int rank, int ranks, int* counts, int purpose, i64 limit,
                             i64* report, int site) {
  unsigned ended;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(ended) : "l"(counts + 1) : "memory");
  if (ended + 1 != gridDim.x * gridDim.y * gridDim.z) return;
  unsigned epoch = static_cast<unsigned>(counts[0]) + 1u + MEETS;
  counts[0] = static_cast<int>(epoch);
  counts[1] = 0;
  if (MEETS && !stopped(report)) {
    tell_ranks(words, stride, rank, ranks, epoch, purpose);
    await_ranks(words, stride, slot, ranks, epoch, purpose, limit, report, site);
  }
  tell_host(report);
}

}  // namespace tilescale

#endif
