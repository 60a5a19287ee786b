// SPDX-License-Identifier: MIT
// Atomic additions by type of element; their scope is the system. Needs memory.cuh.
#ifndef TILESCALE_ADDERS_CUH
#define TILESCALE_ADDERS_CUH

namespace tilescale {

enum Order { RELAXED, ACQUIRE, RELEASE, ACQ_REL };

#define TILESCALE_ATOM(ORDER, PTX, C)                                                                                   \
  asm volatile("atom." ORDER ".sys.global.add." PTX " %0, [%1], %2;" : "=" C(before) : "l"(p), C(v) : "memory")

// A type of elements: its bits in registers, and PTX's name.
#define TILESCALE_ADDED(NAME, BITS, PTX, C)                                                                             \
  struct NAME {                                                                                                         \
    typedef BITS Bits;                                                                                                  \
    template <int ORDER>                                                                                                \
    static __device__ __forceinline__ BITS fetch(void* p, BITS v) {                                                     \
      BITS before;                                                                                                      \
      if (ORDER == RELAXED) TILESCALE_ATOM("relaxed", PTX, C);                                                          \
      if (ORDER == ACQUIRE) TILESCALE_ATOM("acquire", PTX, C);                                                          \
      if (ORDER == RELEASE) TILESCALE_ATOM("release", PTX, C);                                                          \
      if (ORDER == ACQ_REL) TILESCALE_ATOM("acq_rel", PTX, C);                                                          \
      return before;                                                                                                    \
    }                                                                                                                   \
    static __device__ __forceinline__ void add(void* p, BITS v) {                                                       \
      asm volatile("red.relaxed.sys.global.add." PTX " [%0], %1;" ::"l"(p), C(v) : "memory");                           \
    }                                                                                                                   \
  }

TILESCALE_ADDED(S32, int, "s32", "r");
TILESCALE_ADDED(U32, unsigned, "u32", "r");
TILESCALE_ADDED(U64, u64, "u64", "l");
TILESCALE_ADDED(F32, float, "f32", "f");
TILESCALE_ADDED(F64, double, "f64", "d");
TILESCALE_ADDED(F16, unsigned short, "noftz.f16", "h");
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
TILESCALE_ADDED(BF16, unsigned short, "noftz.bf16", "h");
#else
// Without an instruction for the type: compare-and-swap of the word around the element.
struct BF16 {
  typedef unsigned short Bits;
  template <int ORDER>
  static __device__ __forceinline__ Bits fetch(void* p, Bits v) {
    unsigned* word = reinterpret_cast<unsigned*>(reinterpret_cast<u64>(p) & ~3ull);
    unsigned shift = (reinterpret_cast<u64>(p) & 2) * 8, seen = *reinterpret_cast<volatile unsigned*>(word), before;
    if (ORDER == RELEASE || ORDER == ACQ_REL) __threadfence_system();
    do {
      before = seen;
      float sum = __uint_as_float((before >> shift) << 16) + __uint_as_float(static_cast<unsigned>(v) << 16);
      unsigned bits = __float_as_uint(sum);
      unsigned rounded = sum != sum ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      seen = atomicCAS_system(word, before, (before & ~(0xffffu << shift)) | rounded << shift);
    } while (seen != before);
    if (ORDER == ACQUIRE || ORDER == ACQ_REL) __threadfence_system();
    return static_cast<Bits>(before >> shift);
  }
  static __device__ __forceinline__ void add(void* p, Bits v) { fetch<RELAXED>(p, v); }
};
#endif

#undef TILESCALE_ADDED
#undef TILESCALE_ATOM

}  // namespace tilescale

#endif
