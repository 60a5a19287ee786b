// SPDX-License-Identifier: MIT
// Waits of a producer. Needs sync.cuh.
#ifndef TILESCALE_PRODUCER_CUH
#define TILESCALE_PRODUCER_CUH

namespace tilescale {

// A producer, for loads that one thread of its first warp issues: lane 0 waits, then every lane, bulk copies included,
// sees what it acquired. The other warps load nothing and do not wait: they see the mbarrier phases of the loop's
// stages by parity alone. A warp that comes from a wait a phase behind the loads would never catch up, and wait in the
// last iterations for a phase that has long passed (parity aliasing).
template <int C, typename V>
__device__ inline void wait_by_producer(const V* flags, i64 index, i64 extent, i64 wanted, i64 limit, i64* report,
                                        int site) {
  constexpr unsigned threads = 128, warp = 32;  // of a producer (tilelang_core/specialise.py)
  if (threadIdx.x % threads >= warp) return;
  if (threadIdx.x % warp == 0) wait<C, V>(flags, index, extent, wanted, limit, report, site);
  __syncwarp();
  acquired();
}

}  // namespace tilescale

#endif
