// SPDX-License-Identifier: MIT
// What signals, waits and barriers need of the instruction set: clock, order of memory, accesses of known scope.
// Self-contained: it precedes any other text of a kernel.
//
// Ordering follows the PTX memory model: a writer completes its bulk copies and orders them before generic-proxy writes
// (complete_stores), then releases at system scope; a reader acquires at system scope and orders its bulk copies after
// that.
#ifndef TILESCALE_MEMORY_CUH
#define TILESCALE_MEMORY_CUH

namespace tilescale {

// int64_t and uint64_t of CUDA on 64-bit Linux.
typedef long i64;
typedef unsigned long u64;

// -- time --------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ i64 now_ns() {
  i64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ void pause_ns(unsigned ns) { __nanosleep(ns); }

// -- grids that overlap ------------------------------------------------------------------------------------------------

// Every thread of a kernel that may be launched before the preceding one has ended (CUDA C++ Programming Guide,
// programmatic dependent launch), before it reads or writes shared data: all writes of the preceding kernel are visible
// then. When all blocks have called this the next kernel may begin, where SMs have capacity.
__device__ __forceinline__ void follow_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// -- ordering ----------------------------------------------------------------------------------------------------------

// Orders all accesses of this thread, and those of threads that it synchronized with, for the system.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// All bulk copies that this thread issued, but the last LEFT groups, are complete, and its release, or that of a thread
// that it synchronizes with before, covers them: releases are cumulative (PTX ISA, memory consistency model, causality
// order). Fences between proxies name their state space: one for all of them waits for all writes of the SM.
template <int LEFT = 0>
__device__ __forceinline__ void complete_stores() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(LEFT) : "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// The same for all bulk copies, with the release: relaxed writes may follow. A fence of the system takes as long as the
// slowest store of the SM, so code that releases anyway does without.
__device__ __forceinline__ void drain() {
  complete_stores();
  fence();
}

// Orders bulk copies, and reads of matrix instructions, after an acquire by another thread of this program.
__device__ __forceinline__ void acquired() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Flags of 4 or 8 bytes, in order with other accesses: for all threads of the system, or for those of this device, which
// takes less time.
enum Scope { SYSTEM, DEVICE };

template <Scope S = SYSTEM, typename V>
__device__ __forceinline__ V load_acquire(const V* p) {
  if (sizeof(V) == 4) {
    unsigned v;
    if (S == SYSTEM)
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    else
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return static_cast<V>(v);
  }
  u64 v;
  if (S == SYSTEM)
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  else
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return static_cast<V>(v);
}

template <Scope S = SYSTEM, typename V>
__device__ __forceinline__ void store_release(V* p, V v) {
  if (sizeof(V) == 4 && S == SYSTEM)
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(static_cast<unsigned>(v)) : "memory");
  else if (sizeof(V) == 4)
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(static_cast<unsigned>(v)) : "memory");
  else if (S == SYSTEM)
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(static_cast<u64>(v)) : "memory");
  else
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(static_cast<u64>(v)) : "memory");
}

template <Scope S = SYSTEM, typename V>
__device__ __forceinline__ void add_release(V* p, V v) {
  if (sizeof(V) == 4 && S == SYSTEM)
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(static_cast<unsigned>(v)) : "memory");
  else if (sizeof(V) == 4)
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(static_cast<unsigned>(v)) : "memory");
  else if (S == SYSTEM)
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(static_cast<u64>(v)) : "memory");
  else
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(static_cast<u64>(v)) : "memory");
}

__device__ __forceinline__ void store_relaxed(int* p, int v) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_relaxed(i64* p, i64 v) {
  asm volatile("st.relaxed.sys.global.s64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void add_relaxed(i64* p, i64 v) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Adds one to a counter of this device, in order with the accesses of all threads that do; returns the value before.
__device__ __forceinline__ unsigned count_of_device(int* p) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
  return before;
}

// -- stores ------------------------------------------------------------------------------------------------------------

// 8 or 16 bytes into device memory by one instruction, where nvcc would split them (text_rewrites.py).
template <typename V>
__device__ __forceinline__ void store_whole(V* p, V v) {
  const unsigned* w = reinterpret_cast<const unsigned*>(&v);
  if (sizeof(V) == 16)
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[sizeof(V) / 8]),
                 "r"(w[sizeof(V) / 4 - 1])
                 : "memory");
  else
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
}

}  // namespace tilescale

#endif
