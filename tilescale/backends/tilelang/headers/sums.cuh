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

template <typename T>
struct Narrow {
  template <typename W>
  static __device__ __forceinline__ T of(W value) { return static_cast<T>(value); }
};
template <>
struct Narrow<__half> {
  static __device__ __forceinline__ __half of(float value) { return __float2half_rn(value); }
};
template <>
struct Narrow<__nv_bfloat16> {
  static __device__ __forceinline__ __nv_bfloat16 of(float value) { return __float2bfloat16_rn(value); }
};

// The combination of all ranks' packs: `packs`, with this one's, `mine`.
template <typename T, int OP, int RANKS, int BYTES>
__device__ __forceinline__ Pack<BYTES> reduced(const Pack<BYTES> (&packs)[RANKS], const Pack<BYTES>& mine, int rank) {
  Pack<BYTES> result;
#pragma unroll
  for (int i = 0; i < BYTES / static_cast<int>(sizeof(T)); ++i) {
    auto of = [&](int r) {
      Pack<BYTES> pack = r == rank ? mine : packs[r];
      return wide(reinterpret_cast<const T*>(&pack)[i]);
    };
    auto total = of(0);
#pragma unroll
    for (int r = 1; r < RANKS; ++r) total = combined<OP>(total, of(r));
    reinterpret_cast<T*>(&result)[i] = Narrow<T>::of(total);
  }
  return result;
}

}  // namespace tilescale

#endif
