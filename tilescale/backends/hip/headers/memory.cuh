// SPDX-License-Identifier: MIT
// What signals, waits and barriers need of the instruction set: clock, order of memory, accesses of known scope.
// Self-contained: it precedes any other text of a kernel.
//
// Ordering follows LLVM's memory model for AMDGPU: a release at system scope covers the stores of all threads that a
// barrier of the workgroup ordered before it, an acquire at system scope the loads of all threads behind one. Memory that
// peers access must be fine-grained. There are no bulk copies, so nothing else is to be completed or ordered.
#ifndef TILESCALE_MEMORY_CUH
#define TILESCALE_MEMORY_CUH

namespace tilescale {

// int64_t and uint64_t of HIP on 64-bit Linux.
typedef long i64;
typedef unsigned long u64;

// -- time --------------------------------------------------------------------------------------------------------------

// The counter runs at 100 MHz on CDNA 3 (hipDeviceAttributeWallClockRate).
__device__ __forceinline__ i64 now_ns() { return static_cast<i64>(wall_clock64()) * 10; }

// In units of 64 clocks.
__device__ __forceinline__ void pause_ns(unsigned ns) {
  for (unsigned units = ns / 32; units != 0; --units) __builtin_amdgcn_s_sleep(1);
}

// -- ordering ----------------------------------------------------------------------------------------------------------

// Orders all accesses of this thread, and those of threads that it synchronized with, for the system.
__device__ __forceinline__ void fence() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, ""); }

template <int LEFT = 0>
__device__ __forceinline__ void complete_stores() {}

__device__ __forceinline__ void drain() { fence(); }

__device__ __forceinline__ void acquired() {}

// Accesses of flags in order with others: for all threads of the system, or for those of this device.
enum Scope { SYSTEM = __HIP_MEMORY_SCOPE_SYSTEM, DEVICE = __HIP_MEMORY_SCOPE_AGENT };

template <Scope S = SYSTEM, typename V>
__device__ __forceinline__ V load_acquire(const V* p) {
  return __hip_atomic_load(p, __ATOMIC_ACQUIRE, S);
}

template <typename V>
__device__ __forceinline__ void store_relaxed(V* p, V v) {
  __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
template <Scope S = SYSTEM, typename V>
__device__ __forceinline__ void store_release(V* p, V v) {
  __hip_atomic_store(p, v, __ATOMIC_RELEASE, S);
}

__device__ __forceinline__ void add_relaxed(i64* p, i64 v) {
  __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
template <Scope S = SYSTEM, typename V>
__device__ __forceinline__ void add_release(V* p, V v) {
  __hip_atomic_fetch_add(p, v, __ATOMIC_RELEASE, S);
}

// Adds one to a counter of this device, in order with the accesses of all threads that do; returns the value before.
__device__ __forceinline__ unsigned count_of_device(int* p) {
  return __hip_atomic_fetch_add(reinterpret_cast<unsigned*>(p), 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}

}  // namespace tilescale

#endif
