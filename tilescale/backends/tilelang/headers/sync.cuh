// SPDX-License-Identifier: MIT
// Signals, waits and barriers between GPUs. Needs memory.cuh.
//
// A writer completes its bulk copies (complete_stores), then releases at system scope; a reader acquires at system scope
// and orders its bulk copies after that (acquired). Every wait is bounded. The first one that times out leaves a report on all devices, and from then on no wait of
// the program blocks, on any of them; barriers no longer arrive, so later data never counts as complete.
#ifndef TILESCALE_SYNC_CUH
#define TILESCALE_SYNC_CUH

namespace tilescale {

// -- reports -----------------------------------------------------------------------------------------------------------
// A symmetric array of 64-bit words: this head, then one row for each rank (timeouts.py reads both).

enum Head { STOP, MIRROR, SLOT, STRIDE, RANKS, RANK, MOMENTS, HEAD_WORDS = 8 };
enum Row { STATE, KIND, SITE, BLOCK, INDEX, EXPECTED, SEEN, ROW_WORDS = 8 };
enum Kind { TIMEOUT, OUTSIDE, ABSENT, DIFFERENT, ROWS, POLL };
enum State { EMPTY, BEING_WRITTEN, COMPLETE };

// 31 bits of x, 16 of y, 16 of z: the maximum of a grid.
__device__ __forceinline__ i64 block_coordinates() {
  return static_cast<i64>(blockIdx.x) | static_cast<i64>(blockIdx.y) << 31 | static_cast<i64>(blockIdx.z) << 47;
}

__device__ __forceinline__ i64 stopped(const i64* report) {
  return *reinterpret_cast<const volatile i64*>(report + STOP);
}

// The host reads one word of its own memory: the rank of the first failed wait as seen here, plus one.
__device__ inline void notify_host(const i64* report) {
  i64 stop = stopped(report);
  if (stop != 0) *reinterpret_cast<volatile i64*>(report[MIRROR]) = stop;
}

// The first failure of this rank: reported on all ranks, then all are stopped. Later ones are not reported. A launch of
// many tasks has a wait for each, and does not fit in the instruction cache with a copy of this at each.
#ifdef TILESCALE_TASKS
#define TILESCALE_FAILURE __noinline__
#else
#define TILESCALE_FAILURE inline
#endif
__device__ TILESCALE_FAILURE void fail(i64* report, Kind kind, int site, i64 index, i64 expected, i64 seen) {
  i64 rank = report[RANK], slot = report[SLOT], stride = report[STRIDE], ranks = report[RANKS];
  i64* row = report + HEAD_WORDS + rank * ROW_WORDS;
  if (atomicCAS(reinterpret_cast<unsigned long long*>(row), EMPTY + 0ull, BEING_WRITTEN + 0ull) != EMPTY) return;
  const i64 words[ROW_WORDS] = {COMPLETE, kind, site, block_coordinates(), index, expected, seen, 0};
  for (i64 s = 0; s < ranks; ++s)
    for (int w = ROW_WORDS - 1; w > STATE; --w)
      *reinterpret_cast<volatile i64*>(row + (s - slot) * stride + w) = words[w];
  __threadfence_system();
  for (i64 s = 0; s < ranks; ++s) *reinterpret_cast<volatile i64*>(row + (s - slot) * stride) = COMPLETE;
  __threadfence_system();
  for (i64 s = 0; s < ranks; ++s)
    *reinterpret_cast<volatile i64*>(report + STOP + (s - slot) * stride) = rank + 1;
  __threadfence_system();
  notify_host(report);
}

// -- moments -----------------------------------------------------------------------------------------------------------
// When waits and signals of a block begin and end, for the first TILESCALE_MOMENTS of them: two words each, the time, then
// the SM's clock, the site and the kind (moments.py reads them). Nothing without the macro.

enum Moment { WAITS, WAITED, SIGNALS, SIGNALLED };

#ifdef TILESCALE_MOMENTS
struct Moments {
  i64* words;
  int count;
};

__device__ __forceinline__ Moments& moments() {
  static __shared__ Moments kept;
  return kept;
}

// One thread, first of all.
__device__ inline void begin_moments(const i64* report) {
  i64 block = blockIdx.x + gridDim.x * (blockIdx.y + static_cast<i64>(gridDim.y) * blockIdx.z);
  moments() = Moments{reinterpret_cast<i64*>(report[MOMENTS]) + 2 * TILESCALE_MOMENTS * block, 0};
}

__device__ inline void note(int site, Moment moment) {
  int n = atomicAdd(&moments().count, 1);
  if (n >= TILESCALE_MOMENTS) return;
  i64* words = moments().words + 2 * n;
  words[0] = now_ns();
  words[1] = clock64() << 16 | site << 2 | moment;
}
#else
__device__ __forceinline__ void note(int, Moment) {}
#endif

// -- waits -------------------------------------------------------------------------------------------------------------

enum Outcome { READY, LATE, STOPPED };

// A thread that waits for itself.
struct Alone {
  __device__ __forceinline__ bool operator()(bool mine) const { return mine; }
};

// Until `ready()`, the timeout, or a failed wait anywhere. Devices in step arrive within microseconds: during this time
// only the awaited word is polled, as each read of the clock or the report delays the next poll. Threads that wait
// together are ready together, and give up together: when `any(mine)` for one of them.
template <typename Ready, typename Any = Alone>
__device__ inline Outcome await(Ready ready, i64 limit, const i64* report, Any any = {}) {
#pragma unroll 1
  for (int iteration = 0; iteration < 64; ++iteration)
    if (ready()) return READY;
  i64 begin = now_ns();
  for (unsigned pause = 32;; pause = pause < 256 ? 2 * pause : pause) {
    if (ready()) return READY;
    if (any(stopped(report))) {
      notify_host(report);
      return STOPPED;
    }
    if (any(now_ns() - begin > limit)) return LATE;
    pause_ns(pause);
  }
}

enum Compare { EQ, NE, GE, GT, LE, LT };

template <int C, typename V>
__device__ __forceinline__ bool holds(V a, V b) {
  return C == EQ ? a == b : C == NE ? a != b : C == GE ? a >= b : C == GT ? a > b : C == LE ? a <= b : a < b;
}

// One thread: blocks until `flags[index] C value`. An out-of-bounds index is reported instead. The scope of flags that
// only this device signals is the device.
template <int C, typename V, Scope S = SYSTEM>
__device__ inline void wait(const V* flags, i64 index, i64 extent, i64 wanted, i64 limit, i64* report, int site) {
  if (index < 0 || index >= extent) return fail(report, OUTSIDE, site, index, extent, 0);
  V value = static_cast<V>(wanted), seen;
  auto ready = [&] { return holds<C, V>(seen = load_acquire<S>(flags + index), value); };
  note(site, WAITS);
  if (await(ready, limit, report) == LATE) fail(report, TIMEOUT, site, index, wanted, static_cast<i64>(seen));
  note(site, WAITED);
}

// One thread: blocks until `flag C value` for any of `count` flags, `stride` apart; returns its number.
template <int C, typename V>
__device__ inline int wait_any(const V* flags, i64 index, i64 stride, i64 count, i64 extent, i64 wanted, i64 limit,
                               i64* report, int site) {
  i64 last = index + (count - 1) * stride;
  if (index < 0 || last >= extent) {
    fail(report, OUTSIDE, site, index < 0 ? index : last, extent, 0);
    return 0;
  }
  V value = static_cast<V>(wanted), seen;
  int found = 0;
  auto ready = [&] {
    for (i64 i = 0; i < count; ++i) {
      if (holds<C, V>(seen = load_acquire(flags + index + i * stride), value)) {
        found = static_cast<int>(i);
        return true;
      }
    }
    return false;
  };
  if (await(ready, limit, report) == LATE) fail(report, TIMEOUT, site, index, wanted, static_cast<i64>(seen));
  return found;
}

// A thread that is a unit of its own: it alone acquires.
template <int C, typename V, Scope S = SYSTEM>
__device__ inline void wait_by_thread(const V* flags, i64 index, i64 extent, i64 wanted, i64 limit, i64* report,
                                      int site) {
  wait<C, V, S>(flags, index, extent, wanted, limit, report, site);
  acquired();
}

template <int C, typename V>
__device__ inline int wait_any_by_thread(const V* flags, i64 index, i64 stride, i64 count, i64 extent, i64 wanted,
                                         i64 limit, i64* report, int site) {
  int found = wait_any<C, V>(flags, index, stride, count, extent, wanted, limit, report, site);
  acquired();
  return found;
}

// One thread, after complete_stores() by all and a barrier (or the other way round, if it alone issued bulk copies):
// updates a flag; `flags` is the first one of its instance.
template <int SET, typename V, Scope S = SYSTEM>
__device__ inline void signal(V* flags, i64 index, i64 extent, i64 value, i64* report, int site) {
  if (index < 0 || index >= extent) return fail(report, OUTSIDE, site, index, extent, 0);
  note(site, SIGNALS);
  if (SET)
    store_release<S>(flags + index, static_cast<V>(value));
  else
    add_release<S>(flags + index, static_cast<V>(value));
  note(site, SIGNALLED);
}

// A thread that is a unit of its own: it publishes its own writes.
template <int SET, typename V, Scope S = SYSTEM>
__device__ inline void signal_by_thread(V* flags, i64 index, i64 extent, i64 value, i64* report, int site) {
  complete_stores();
  signal<SET, V, S>(flags, index, extent, value, report, site);
}

// A signal in two halves, for a deferred one: the address of its flag (0: an out-of-bounds index, reported) ...
template <typename V>
__device__ inline i64 address(V* flags, i64 index, i64 extent, i64* report, int site) {
  if (index >= 0 && index < extent) return reinterpret_cast<i64>(flags + index);
  fail(report, OUTSIDE, site, index, extent, 0);
  return 0;
}

// ... and, as for signal(), the update; nothing if none was deferred.
template <int SET, typename V>
__device__ inline void release(i64 address, i64 value) {
  V* flag = reinterpret_cast<V*>(address);
  if (flag == nullptr) return;
  if (SET)
    store_release(flag, static_cast<V>(value));
  else
    add_release(flag, static_cast<V>(value));
}

// One thread, directly after its drain(), which releases the stores here: signals this one's word to all `ranks`. A
// release for each would wait until the one before has arrived.
template <typename V>
__device__ __forceinline__ void notify_ranks(V* words, i64 stride, int rank, int ranks, V word) {
  for (int s = 0; s < ranks; ++s) store_relaxed(words + s * stride + rank, word);
}

// One thread, after a barrier, and complete_stores() by all others that issued bulk copies: signals all `ranks` this
// one's count of barriers, then awaits the same of each. Counter `index` of an instance is a word for each rank;
// `epochs` counts in device memory, so that a captured launch can be replayed. Differences are taken modulo 2^32: the
// count may wrap. It waits twice as long as a wait: if a peer is late because it waits itself, that wait must fail
// first, and report the cause.
__device__ inline void barrier(int* counters, i64 stride, int slot, int rank, int ranks, i64 index, int* epochs,
                               i64 limit, i64* report, int site) {
  // Both are read while stores drain.
  i64 stop = stopped(report);
  unsigned epoch = static_cast<unsigned>(epochs[index]) + 1u;
  note(site, WAITS);
  drain();
  if (stop) return notify_host(report);
  counters += index * ranks;
  notify_ranks(counters, stride, rank, ranks, static_cast<int>(epoch));
  epochs[index] = static_cast<int>(epoch);
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    unsigned seen;
    auto here = [&] {
      seen = static_cast<unsigned>(load_acquire(counters + slot * stride + r));
      return static_cast<int>(seen - epoch) >= 0;
    };
    Outcome outcome = await(here, 2 * limit, report);
    if (outcome == LATE) fail(report, ABSENT, site, r, epoch, seen);
    if (outcome != READY) return;
  }
  note(site, WAITED);
}

}  // namespace tilescale

#endif
