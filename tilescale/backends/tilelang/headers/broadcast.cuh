// SPDX-License-Identifier: MIT
// Broadcast of a value from one thread of a unit to all its threads: a word of shared memory for each call site. The
// caller provides barriers before the store, between store and load, and before the next use. Needs sync.cuh.
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
