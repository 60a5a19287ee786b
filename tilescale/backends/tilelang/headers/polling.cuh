// SPDX-License-Identifier: MIT
// Waiting loops: polls of flags, and bounds of the loops around them. Needs sync.cuh.
//
// A thread keeps a few words for each loop. An iteration is idle if all polled values, and the inputs of its condition,
// are as in the previous one, and it did nothing else. A loop that is idle for as long as the limit of a wait ends, and
// reports what it polled last; every loop ends once a wait of the program has failed anywhere.
#ifndef TILESCALE_POLLING_CUH
#define TILESCALE_POLLING_CUH

namespace tilescale {

enum Polling { POLLED, BEFORE, IDLE, COUNT, SINCE, PLACE, ELEMENT, VALUE, POLLING_WORDS };
enum Iteration { LEFT, GOES_ON, GIVEN_UP };

__device__ __forceinline__ void begins(i64* loop) {
#pragma unroll
  for (int w = 0; w < POLLING_WORDS; ++w) loop[w] = 0;
}

// The bits of a value, mixed with others.
template <typename V>
__device__ __forceinline__ i64 mixed(i64 others, V value) {
  i64 bits = 0;
  memcpy(&bits, &value, sizeof(V));
  return others * 6364136223846793005 + bits + 1442695040888963407;
}

// A loaded value, recorded for the loop around it.
template <typename V>
__device__ __forceinline__ V noted(V value, i64 index, i64* loop, int site) {
  loop[POLLED] = mixed(loop[POLLED], value);
  loop[PLACE] = site;
  loop[ELEMENT] = index;
  loop[VALUE] = static_cast<i64>(value);
  return value;
}

// An acquire load of an element of device memory, at system scope. An out-of-bounds index is reported.
template <typename V>
__device__ __forceinline__ V look(const V* elements, i64 index, i64 extent, i64* report, int site) {
  if (index >= 0 && index < extent) return load_acquire(elements + index);
  fail(report, OUTSIDE, site, index, extent, 0);
  return V();
}

// Begins an iteration; `goes_on` is its condition and `decides` the inputs of the condition.
template <int POLLS>
__device__ inline int iteration(i64* loop, bool goes_on, i64 decides, i64 limit, i64* report) {
  if (!goes_on) return LEFT;
  constexpr int patience = 64;  // iterations that poll memory alone
  bool looks = ++loop[COUNT] % patience == 0;
  if (POLLS) {
    i64 seen = loop[POLLED] + decides;
    loop[IDLE] = seen == loop[BEFORE] ? loop[IDLE] + 1 : 0;
    loop[BEFORE] = seen;
    loop[POLLED] = 0;
    looks = looks || loop[IDLE] >= patience;
  }
  if (!looks) return GOES_ON;
  if (stopped(report)) {
    notify_host(report);
    return GIVEN_UP;
  }
  if (POLLS && loop[IDLE] >= patience) {
    if (loop[IDLE] == patience) loop[SINCE] = now_ns();
    if (now_ns() - loop[SINCE] > limit) {
      fail(report, POLL, static_cast<int>(loop[PLACE]), loop[ELEMENT], 0, loop[VALUE]);
      return GIVEN_UP;
    }
    pause_ns(64);
  }
  return GOES_ON;
}

}  // namespace tilescale

#endif
