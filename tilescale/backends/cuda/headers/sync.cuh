// SPDX-License-Identifier: MIT
// Signals, waits and barriers between GPUs. Self-contained: it stands before any other text of a kernel.
//
// Ordering follows the PTX memory model: a writer completes its bulk copies and orders them before generic-proxy writes
// (drain), then releases at system scope; a reader acquires at system scope and orders its bulk copies after that.
// Every wait is bounded: after `limit` nanoseconds it writes a record, and from then on no wait of the launch blocks.
#ifndef TILESCALE_SYNC_CUH
#define TILESCALE_SYNC_CUH

namespace tilescale {

// What int64_t and uint64_t are in CUDA on 64-bit Linux.
typedef long i64;
typedef unsigned long u64;

// What the first wait that ran out of time leaves; the host reads it (see timeouts.py, which names the fields).
struct Record {
  i64 state;  // 0 nothing, 1 being written, 2 complete
  i64 site, program, index, expected, seen, reserved0, reserved1;
};

__device__ __forceinline__ i64 now_ns() {
  i64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ int program_number() {
  return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}

// Complete the bulk copies that this thread issued and order them with what follows. Every thread calls it.
__device__ __forceinline__ void drain() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
  __threadfence_system();
}

// Order bulk copies after an acquire by another thread of this program.
__device__ __forceinline__ void acquired() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

__device__ __forceinline__ int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
  unsigned v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ i64 load_acquire(const i64* p) {
  i64 v;
  asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u64 load_acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void add_release(int* p, int v) {
  asm volatile("red.release.sys.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void add_release(unsigned* p, unsigned v) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void add_release(i64* p, i64 v) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void add_release(u64* p, u64 v) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ void store_release(int* p, int v) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_release(unsigned* p, unsigned v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_release(i64* p, i64 v) {
  asm volatile("st.release.sys.global.s64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void store_release(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

enum Compare { EQ, NE, GE, GT, LE, LT };

template <int C, typename V>
__device__ __forceinline__ bool holds(V a, V b) {
  return C == EQ ? a == b : C == NE ? a != b : C == GE ? a >= b : C == GT ? a > b : C == LE ? a <= b : a < b;
}

__device__ inline void leave_record(i64* where, int site, i64 index, i64 expected, i64 seen) {
  Record* record = reinterpret_cast<Record*>(where);
  if (atomicCAS(reinterpret_cast<unsigned long long*>(&record->state), 0ull, 1ull) == 0ull) {
    record->site = site;
    record->program = program_number();
    record->index = index;
    record->expected = expected;
    record->seen = seen;
    __threadfence_system();
    *reinterpret_cast<volatile i64*>(&record->state) = 2;
  }
}

// One thread: block until `flags[index] C value`. An index outside the flags is recorded like a timeout.
template <int C, typename V>
__device__ inline void wait(const V* flags, i64 index, i64 extent, i64 wanted, i64 limit, i64* where, int site) {
  V value = static_cast<V>(wanted);
  if (index < 0 || index >= extent) {
    leave_record(where, site, index, wanted, -1);
    return;
  }
  V seen = load_acquire(flags + index);
  if (holds<C>(seen, value)) return;
  i64 begin = now_ns();
  while (!holds<C>(seen = load_acquire(flags + index), value)) {
    if (now_ns() - begin > limit || *reinterpret_cast<volatile i64*>(where) != 0) {
      leave_record(where, site, index, wanted, static_cast<i64>(seen));
      return;
    }
    __nanosleep(32);
  }
}

// One thread, after drain() by all and a barrier: update a flag, `flags` being the first one of the instance meant.
template <int SET, typename V>
__device__ inline void signal(V* flags, i64 index, i64 extent, i64 value, i64* where, int site) {
  if (index < 0 || index >= extent) {
    leave_record(where, site, index, value, -1);
    return;
  }
  if (SET)
    store_release(flags + index, static_cast<V>(value));
  else
    add_release(flags + index, static_cast<V>(value));
}

// One thread, after drain() by all and a barrier: all `ranks` instances of counter `index` are told, then this one's is
// awaited. `epochs` counts this rank's calls in device memory, so a captured launch can be replayed.
__device__ inline void barrier(int* counters, i64 stride, int own, int ranks, i64 index, int* epochs, i64 limit,
                               i64* where, int site) {
  int epoch = ++epochs[index];
  for (int p = 0; p < ranks; ++p) add_release(counters + p * stride + index, 1);
  i64 all = static_cast<i64>(epoch) * ranks;
  wait<GE, int>(counters + own * stride, index, index + 1, all, limit, where, site);
}

}  // namespace tilescale

#endif
