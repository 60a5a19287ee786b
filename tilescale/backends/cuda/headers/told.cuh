// SPDX-License-Identifier: MIT
// What one thread of a unit finds out, and all its threads take: a word of shared memory for each place in the program.
// Barriers before the one, between the two and before the next time are the caller's. Needs sync.cuh.
#ifndef TILESCALE_TOLD_CUH
#define TILESCALE_TOLD_CUH

namespace tilescale {

template <int PLACE>
__device__ __forceinline__ i64* told_place() {
  __shared__ i64 word;
  return &word;
}

template <int PLACE, typename T>
__device__ __forceinline__ void tell(T value) {
  *reinterpret_cast<volatile T*>(told_place<PLACE>()) = value;
}

template <int PLACE, typename T>
__device__ __forceinline__ T told() {
  return *reinterpret_cast<volatile T*>(told_place<PLACE>());
}

}  // namespace tilescale

#endif
