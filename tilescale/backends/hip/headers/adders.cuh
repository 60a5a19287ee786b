// SPDX-License-Identifier: MIT
// Atomic additions by type of element; their scope is the system. Needs memory.cuh.
#ifndef TILESCALE_ADDERS_CUH
#define TILESCALE_ADDERS_CUH

namespace tilescale {

enum Order { RELAXED, ACQUIRE, RELEASE, ACQ_REL };

constexpr int memory_order(int order) {
  return order == RELAXED   ? __ATOMIC_RELAXED
         : order == ACQUIRE ? __ATOMIC_ACQUIRE
         : order == RELEASE ? __ATOMIC_RELEASE
                            : __ATOMIC_ACQ_REL;
}

// A type of elements that the compiler adds; where memory cannot, it compares and swaps.
template <typename T>
struct Added {
  typedef T Bits;
  template <int ORDER>
  static __device__ __forceinline__ T fetch(void* p, T v) {
    return __hip_atomic_fetch_add(static_cast<T*>(p), v, memory_order(ORDER), __HIP_MEMORY_SCOPE_SYSTEM);
  }
  static __device__ __forceinline__ void add(void* p, T v) { fetch<RELAXED>(p, v); }
};

typedef Added<int> S32;
typedef Added<unsigned> U32;
typedef Added<u64> U64;
typedef Added<float> F32;
typedef Added<double> F64;

// 16 bits, without an instruction for them: compare-and-swap of the word around the element.
template <typename T>
struct AddedInWord {
  typedef unsigned short Bits;
  template <int ORDER>
  static __device__ __forceinline__ Bits fetch(void* p, Bits v) {
    unsigned* word = reinterpret_cast<unsigned*>(reinterpret_cast<u64>(p) & ~3ull);
    unsigned shift = (reinterpret_cast<u64>(p) & 2) * 8, before = *reinterpret_cast<volatile unsigned*>(word);
    unsigned after;
    do {
      Bits old = static_cast<Bits>(before >> shift);
      T sum = static_cast<T>(static_cast<float>(*reinterpret_cast<T*>(&old)) + static_cast<float>(*reinterpret_cast<T*>(&v)));
      unsigned bits = *reinterpret_cast<Bits*>(&sum);
      after = (before & ~(0xffffu << shift)) | bits << shift;
    } while (!__hip_atomic_compare_exchange_strong(word, &before, after, memory_order(ORDER), __ATOMIC_RELAXED,
                                                   __HIP_MEMORY_SCOPE_SYSTEM));
    return static_cast<Bits>(before >> shift);
  }
  static __device__ __forceinline__ void add(void* p, Bits v) { fetch<RELAXED>(p, v); }
};

typedef AddedInWord<_Float16> F16;
typedef AddedInWord<hip_bfloat16> BF16;

}  // namespace tilescale

#endif
