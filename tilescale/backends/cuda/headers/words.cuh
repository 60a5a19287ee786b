// SPDX-License-Identifier: MIT
// Words that carry their own flag: 32 bits of data below, the number of the message above. Stands after sync.cuh.
//
// A store of 64 bits is one memory operation, also as an element of a vector, so who sees the number sees the data that
// came with it: neither side needs a fence or a release, and nothing is waited for but the data. (NCCL's LL protocol.)
#ifndef TILESCALE_WORDS_CUH
#define TILESCALE_WORDS_CUH

namespace tilescale {

// Two of them, stored and loaded by one instruction.
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

// One thread, after a barrier of its block: what the block stored is ordered before what this thread stores next.
__device__ __forceinline__ void order_stores() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

}  // namespace tilescale

#endif
