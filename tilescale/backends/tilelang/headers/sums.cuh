// SPDX-License-Identifier: MIT
// Element-wise combination of the ranks' values, in the order of ranks, so that all get the same bits. Floats of 16 and
// 8 bits are combined in float32; those of 8 bits saturate. Needs messages.cuh and combine.cuh.
#ifndef TILESCALE_SUMS_CUH
#define TILESCALE_SUMS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace tilescale {

__device__ __forceinline__ float wide(__half value) { return __half2float(value); }
__device__ __forceinline__ float wide(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float wide(__nv_fp8_e4m3 value) { return static_cast<float>(value); }
__device__ __forceinline__ float wide(__nv_fp8_e5m2 value) { return static_cast<float>(value); }
template <typename T>
__device__ __forceinline__ T wide(T value) {
  return value;
}

// Two adjacent elements, rounded: one instruction for types of 16 bits, where one element takes as long.
template <typename T>
struct Narrow {
  template <typename W>
  static __device__ __forceinline__ void pair(T* into, W first, W second) {
    into[0] = static_cast<T>(first), into[1] = static_cast<T>(second);
  }
};
template <>
struct Narrow<__half> {
  static __device__ __forceinline__ void pair(__half* into, float first, float second) {
    *reinterpret_cast<__half2*>(into) = __floats2half2_rn(first, second);
  }
};
template <>
struct Narrow<__nv_bfloat16> {
  static __device__ __forceinline__ void pair(__nv_bfloat16* into, float first, float second) {
    *reinterpret_cast<__nv_bfloat162*>(into) = __floats2bfloat162_rn(first, second);
  }
};

// Elements, rounded; `value(i)` is one.
template <typename T, int BYTES, typename Value>
__device__ __forceinline__ Pack<BYTES> narrow(Value value) {
  constexpr int COUNT = BYTES / static_cast<int>(sizeof(T));
  Pack<BYTES> pack;
  T* into = reinterpret_cast<T*>(&pack);
  if constexpr (COUNT == 1) *into = static_cast<T>(value(0));
#pragma unroll
  for (int i = 0; i + 1 < COUNT; i += 2) Narrow<T>::pair(into + i, value(i), value(i + 1));
  return pack;
}

// Elements of two packs, added and rounded. Those of 16 bits are added in pairs: float32 has at least twice as many digits
// and two more, so that a sum in it, rounded again, has the same bits.
template <typename T>
struct Adder {
  template <int BYTES>
  static __device__ __forceinline__ Pack<BYTES> sum(const Pack<BYTES>& a, const Pack<BYTES>& b) {
    auto at = [](const Pack<BYTES>& pack, int i) { return wide(reinterpret_cast<const T*>(&pack)[i]); };
    return narrow<T, BYTES>([&](int i) { return combined<SUM>(at(a, i), at(b, i)); });
  }
};
template <typename Pair>
struct PairAdder {
  template <int BYTES>
  static __device__ __forceinline__ Pack<BYTES> sum(const Pack<BYTES>& a, const Pack<BYTES>& b) {
    Pack<BYTES> total;
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i)
      reinterpret_cast<Pair&>(total.words[i]) =
          __hadd2(reinterpret_cast<const Pair&>(a.words[i]), reinterpret_cast<const Pair&>(b.words[i]));
    return total;
  }
};
template <>
struct Adder<__half> : PairAdder<__half2> {};
template <>
struct Adder<__nv_bfloat16> : PairAdder<__nv_bfloat162> {};

// A value as an element has it.
template <typename T>
__device__ __forceinline__ float rounded(float value) {
  alignas(2 * sizeof(T)) T pair[2];
  Narrow<T>::pair(pair, value, value);
  return wide(pair[0]);
}

// The combination of all ranks' packs: `packs`, with this one's, `mine`.
template <typename T, int OP, int RANKS, int BYTES>
__device__ __forceinline__ Pack<BYTES> reduced(const Pack<BYTES> (&packs)[RANKS], const Pack<BYTES>& mine, int rank) {
  if constexpr (OP == SUM && RANKS == 2) {
    Pack<BYTES> other = packs[0];
    if (rank == 0) other = packs[1];
    return Adder<T>::sum(mine, other);
  }
  return narrow<T, BYTES>([&](int i) {
    auto of = [&](int r) {
      Pack<BYTES> pack = r == rank ? mine : packs[r];
      return wide(reinterpret_cast<const T*>(&pack)[i]);
    };
    auto total = of(0);
#pragma unroll
    for (int r = 1; r < RANKS; ++r) total = combined<OP>(total, of(r));
    return total;
  });
}

}  // namespace tilescale

#endif
