// SPDX-License-Identifier: MIT
// Combination of two elements, by the name of the reduction: one rule for collectives of all levels. Self-contained.
#ifndef TILESCALE_COMBINE_CUH
#define TILESCALE_COMBINE_CUH

namespace tilescale {

enum { SUM, PROD, MAX, MIN };

// Maximum and minimum propagate NaN, as in PyTorch; fmaxf and fminf would drop it.
template <int OP, typename W>
__device__ __forceinline__ W combined(W a, W b) {
  if (OP == SUM) return static_cast<W>(a + b);
  if (OP == PROD) return static_cast<W>(a * b);
  bool first = OP == MAX ? a > b : a < b;
  return first || a != a ? a : b;
}

}  // namespace tilescale

#endif
