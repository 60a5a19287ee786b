// SPDX-License-Identifier: MIT
// Broadcast of a value from one thread of a unit to all its threads: a word of shared memory for each call site. The
// caller provides barriers before the store, between store and load, and before the next use. Needs sync.cuh.
#ifndef TILESCALE_BROADCAST_CUH
#define TILESCALE_BROADCAST_CUH

namespace tilescale {

template <int PLACE>
__device__ __forceinline__ i64* broadcast_word() {
  __shared__ i64 word;
  return &word;
}

template <int PLACE, typename T>
__device__ __forceinline__ void broadcast(T value) {
  *reinterpret_cast<volatile T*>(broadcast_word<PLACE>()) = value;
}

template <int PLACE, typename T>
__device__ __forceinline__ T broadcast_value() {
  return *reinterpret_cast<volatile T*>(broadcast_word<PLACE>());
}

}  // namespace tilescale

#endif
