// SPDX-License-Identifier: MIT
// Data with an inline flag, the number of their message. Needs sync.cuh.
//
// Words: 32 bits of data in the lower half, the number in the upper. A store of 64 bits is one memory operation, also
// as an element of a vector, so a reader that sees the number sees its data: neither side needs a fence or a release,
// and only the data themselves are awaited. (NCCL's LL protocol.)
//
// Lines: the words of LINE_THREADS threads, 128 bytes, of which the last 8 end with the number. They require networks that
// deliver a warp's store of a line atomically, as NVLink does. (NCCL's LL128 protocol.)
#ifndef TILESCALE_WORDS_CUH
#define TILESCALE_WORDS_CUH

namespace tilescale {

// Two words, stored and loaded by one instruction.
struct alignas(16) Words {
  u64 first, second;
};

__device__ __forceinline__ void store_words(Words* at, Words words) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(words.first), "l"(words.second)
               : "memory");
}

__device__ __forceinline__ Words load_words(const Words* at) {
  Words words;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words.first), "=l"(words.second)
               : "l"(at)
               : "memory");
  return words;
}

__device__ __forceinline__ Words numbered(unsigned first, unsigned second, unsigned number) {
  u64 above = static_cast<u64>(number) << 32;
  return {above | first, above | second};
}

__device__ __forceinline__ bool have(Words words, unsigned number) {
  return static_cast<unsigned>(words.first >> 32) == number && static_cast<unsigned>(words.second >> 32) == number;
}

enum { WARP_LANES = 32, LINE_THREADS = 8 };  // threads of a warp; some of them, in order, whose words are a line

// All threads of a warp, together, here and in the following functions: synchronization of a part of a warp takes many
// times as long. Lines that do not exist are not accessed.
__device__ __forceinline__ void store_line(Words* at, Words words, u64 end, bool exists) {
  if (threadIdx.x % LINE_THREADS == LINE_THREADS - 1) words.second = end;
  __syncwarp();  // one instruction for all
  if (exists) store_words(at, words);
}

__device__ __forceinline__ Words load_line(const Words* at, bool exists) {
  __syncwarp();
  return exists ? load_words(at) : Words{0, 0};
}

// The number of the line that the threads have loaded.
__device__ __forceinline__ unsigned number_of_line(Words words) {
  return __shfl_sync(~0u, static_cast<unsigned>(words.second), LINE_THREADS - 1, LINE_THREADS);
}

// The upper half of its last word.
__device__ __forceinline__ float scale_of_line(Words words) {
  return __shfl_sync(~0u, __uint_as_float(static_cast<unsigned>(words.second >> 32)), LINE_THREADS - 1, LINE_THREADS);
}

// Whether it is true for one of them.
__device__ __forceinline__ bool any_of_warp(bool mine) { return __any_sync(~0u, mine); }

// One thread, after a barrier of its block: orders the block's stores before this thread's next stores.
__device__ __forceinline__ void order_stores() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

}  // namespace tilescale

#endif
