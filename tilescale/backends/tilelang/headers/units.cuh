// SPDX-License-Identifier: MIT
// Concurrent reductions across the warps of several units. TileLang gives all of them one pair of barriers; this
// specialization, declared before TileLang's template, gives every unit except the first its own.
// TILESCALE_UNIT_THREADS: threads of a unit. TILESCALE_UNIT_BARRIER: the barrier of the second unit; others count down.
#ifndef TILESCALE_UNITS_CUH
#define TILESCALE_UNITS_CUH

namespace tl {

template <int all_threads>
struct NamedBarrier;

template <int all_threads>
struct UnitBarrier {
  template <int phase = 1>
  static __device__ __forceinline__ void sync() {
    int unit = threadIdx.x / TILESCALE_UNIT_THREADS;
    int barrier = unit == 0 ? phase : TILESCALE_UNIT_BARRIER + 1 - unit;
    asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(all_threads) : "memory");
  }
};

template <>
struct NamedBarrier<32> : UnitBarrier<32> {};
template <>
struct NamedBarrier<64> : UnitBarrier<64> {};
template <>
struct NamedBarrier<96> : UnitBarrier<96> {};
template <>
struct NamedBarrier<128> : UnitBarrier<128> {};

}  // namespace tl

#endif
