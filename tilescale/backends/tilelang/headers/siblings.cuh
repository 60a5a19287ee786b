// SPDX-License-Identifier: MIT
// Barriers of programs on the siblings of a level, where these are not all devices. Needs sync.cuh.
#ifndef TILESCALE_SIBLINGS_CUH
#define TILESCALE_SIBLINGS_CUH

namespace tilescale {

// Number j of `size` siblings is device first + j * step. Devices that share memory lie in `slots` slots, rotated.
struct Siblings {
  int rank, size, first, step, shift, slots;

  __device__ __forceinline__ i64 slot(int j) const { return (first + j * step + shift) % slots; }

  // Number j in reports: counted from the first device that shares memory with this one.
  __device__ __forceinline__ int reported(int j) const {
    return first + j * step - (first + rank * step) / slots * slots;
  }
};

__device__ __forceinline__ Siblings siblings(int rank, int size, int first, int step, int shift, int slots) {
  return {rank, size, first, step, shift, slots};
}

// One thread, directly after its drain(): signals siblings [begin, end), which share memory, this one's count of
// barriers.
__device__ __forceinline__ void notify_siblings(int* counters, i64 stride, const Siblings& s, int begin, int end,
                                              i64 index, unsigned epoch) {
  for (int j = begin; j < end; ++j)
    store_relaxed(counters + s.slot(j) * stride + index * s.size + s.rank, static_cast<int>(epoch));
}

// Until siblings begin, begin + by, ... have the same count; false if one does not arrive.
__device__ inline bool await_siblings(const int* words, const Siblings& s, int begin, int end, int by, unsigned epoch,
                                      i64 limit, i64* report, int site) {
  for (int j = begin; j < end; j += by) {
    if (j == s.rank) continue;
    unsigned seen;
    auto here = [&] {
      seen = static_cast<unsigned>(load_acquire(words + j));
      return static_cast<int>(seen - epoch) >= 0;
    };
    Outcome outcome = await(here, 2 * limit, report);
    if (outcome == LATE) fail(report, ABSENT, site, s.reported(j), epoch, seen);
    if (outcome != READY) return false;
  }
  return true;
}

// As barrier(), for siblings that all share memory. Counter `index` of an instance is a word for each of them.
__device__ inline void barrier_of_siblings(int* counters, i64 stride, Siblings s, i64 index, int* epochs, i64 limit,
                                           i64* report, int site) {
  i64 stop = stopped(report);
  unsigned epoch = static_cast<unsigned>(epochs[index]) + 1u;
  drain();
  if (stop) return notify_host(report);
  notify_siblings(counters, stride, s, 0, s.size, index, epoch);
  epochs[index] = static_cast<int>(epoch);
  await_siblings(counters + s.slot(s.rank) * stride + index * s.size, s, 0, s.size, 1, epoch, limit, report, site);
}

}  // namespace tilescale

#endif
