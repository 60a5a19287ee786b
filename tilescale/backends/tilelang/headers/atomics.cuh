// SPDX-License-Identifier: MIT
// Additions to elements of other GPUs. Needs sync.cuh and adders.cuh.
#ifndef TILESCALE_ATOMICS_CUH
#define TILESCALE_ATOMICS_CUH

namespace tilescale {

template <typename T>
struct Exactly {
  typedef T type;
};

// Adds to element `index` of an instance that begins at `first`, and returns the old value. An out-of-bounds index is
// reported.
template <typename Kind, int ORDER, typename T>
__device__ __forceinline__ T fetch_add(T* first, i64 index, i64 extent, typename Exactly<T>::type value, i64* report,
                                       int site) {
  if (index < 0 || index >= extent) {
    fail(report, OUTSIDE, site, index, extent, 0);
    return T(0);
  }
  typedef typename Kind::Bits Bits;
  static_assert(sizeof(Bits) == sizeof(T), "a kind is that of its elements");
  Bits before = Kind::template fetch<ORDER>(first + index, *reinterpret_cast<const Bits*>(&value));
  return *reinterpret_cast<const T*>(&before);
}

// The same where the old value is unused, and no order is needed.
template <typename Kind, typename T>
__device__ __forceinline__ void add(T* first, i64 index, i64 extent, typename Exactly<T>::type value, i64* report,
                                    int site) {
  if (index < 0 || index >= extent) return fail(report, OUTSIDE, site, index, extent, 0);
  typedef typename Kind::Bits Bits;
  Kind::add(first + index, *reinterpret_cast<const Bits*>(&value));
}

}  // namespace tilescale

#endif
