// SPDX-License-Identifier: MIT
// Bounded waits for the phases of mbarriers. Needs sync.cuh.
//
// Nothing outside of a cluster completes its phases, so one that stays incomplete is a fault of the program or of a
// compiler. Threads can neither use tiles that did not arrive nor continue alone: the grid ends with an error. Nothing
// on the device can be read after that, so the report goes to the host.
#ifndef TILESCALE_PHASES_CUH
#define TILESCALE_PHASES_CUH

namespace tilescale {

// Passes the limit, the report and the kernel's number to its waits, by text_rewrites.py.
__device__ __forceinline__ void bound_phases(i64, const i64*, int) {}

// The clock in units of some 2^20 ns, for one register.
__device__ __forceinline__ unsigned now_ms() { return static_cast<unsigned>(now_ns() >> 20); }

// Eight characters of a name as a word, from one of them on.
__device__ __forceinline__ i64 word_of(const char* name, int begin) {
  u64 word = 0;
  bool ends = false;
#pragma unroll
  for (int i = 0; i < begin + 8; ++i) {
    ends = ends || name[i] == 0;
    if (i >= begin && !ends) word |= static_cast<u64>(name[i]) << 8 * (i - begin);
  }
  return static_cast<i64>(word);
}

// TileLang's mbarrier with a bound.
template <typename B>
struct Bounded : B {
  // Until the phase of a parity is complete: the first attempt is all that a wait costs in time. The limit is twice that
  // of a wait, for which the thread that completes the phase may wait itself. The thread that reports ends the grid, the
  // others leave it a second. No way leads from there to the loop: what the kernel has in registers would be kept for it.
  __device__ __forceinline__ void wait(unsigned parity, i64 limit, const i64* record, int kernel, const char* name,
                                       int index) const {
    unsigned begin = 0;
    while (!sees_phase(this, parity)) {
      if (begin == 0) begin = now_ms();
      if (now_ms() - begin <= static_cast<unsigned>(limit >> 19)) continue;
      i64* report = const_cast<i64*>(record);  // TileLang does not see that it is written
      if (is_first(report)) {
        volatile i64* host = reinterpret_cast<volatile i64*>(report[MIRROR]);
        host[KIND] = PHASE;
        host[SITE] = kernel;
        host[BLOCK] = block_coordinates();
        host[INDEX] = 2 * index + (parity & 1);
        host[EXPECTED] = word_of(name, 0);
        host[SEEN] = word_of(name, 8);
        __threadfence_system();
        host[STATE] = report[RANK] + 1;
        __threadfence_system();
      } else {
#pragma unroll 1
        for (int pauses = 0; pauses < 1000; ++pauses) pause_ns(1000000);
      }
      end_grid();
    }
  }
};

}  // namespace tilescale

#endif
