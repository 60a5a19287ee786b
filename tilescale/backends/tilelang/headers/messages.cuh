// SPDX-License-Identifier: MIT
// Messages between the blocks of one number on all devices of a group, through symmetric memory. Needs words.cuh.
//
// Each block has its own slots on every device, several for each sender, used as a ring: message n is in slot n %
// SLOTS. The number of sent messages is counted in device memory, alike on all ranks, so a captured launch can be
// replayed. In every call in which a block takes part it sends a message to each peer and waits for one of each. That
// is why no check for a free slot is needed: the sender of message n has received all messages n - 1 - LAG, which peers
// signalled after they had read those LAG before, so 2 * LAG + 1 slots are enough; without a LAG, two. A power of two
// lets numbers wrap. (tests/cuda/test_message_protocol.py tries orders in which ranks may run.)
//
// Short messages are words or lines with their number inside (words.cuh). Long ones are plain stores, then a fence,
// then a flag: no bytes but the data, and two steps more.
#ifndef TILESCALE_MESSAGES_CUH
#define TILESCALE_MESSAGES_CUH

namespace tilescale {

// A kernel's argument; running/collectives/kernels.py packs it in this order.
struct Exchange {
  const char* source;
  char* target;
  i64 bytes;  // bytes of a part
  i64 total;  // bytes of all parts: the last ones may be shorter
  i64 source_step, target_step;  // bytes from a part to the next one
  char* workspace;  // workspace of the device in the first slot of the heap
  i64 stride;  // bytes from a device's memory to the next one's
  i64 slot;                      // bytes of a slot
  unsigned* counts;  // number of messages, for each block
  i64* report;
  i64 limit;
  int rank, root;
  int first, step, shift, devices;  // rank r of the group is device first + r * step, in slot (device + shift) % devices
  int blocks;  // blocks for which the workspace has slots
  int site;
  // For algorithms by rounds (rounds.cuh), where `bytes` is the maximum of a piece, and `total` the whole tensor's.
  const int* table;
  i64 offset;  // offset in each piece
  int pieces;
  // For unequal parts (row_messages.cuh), where `bytes` is a row's, the steps are the row counts of source and target,
  // and the table has the counts from each rank to each.
  int* received;
  // For direct stores (moved_messages.cuh): the target's offset from the workspace of its device, in units; 0 if peers
  // cannot store into it.
  i64 behind;
  // For an all-reduce with a norm (norm_messages.cuh), where `bytes` is a row's.
  const char* residual;  // nullable
  const char* weight;
  char* normed;  // nullable
  char* quantized;
  float* scales;
  float eps, weight_offset;
  int rows, part;  // bytes of a row per block
  int each;        // units of a row per thread
  const char* bias;  // nullable
  i64 packed;        // words of packed scales from a group of columns to the next; 0: scales are float32
};

// Bytes in the form in which they are loaded and stored.
template <int BYTES>
struct alignas(BYTES) Pack {
  unsigned words[BYTES / 4];
};

template <int ELEMENT>
struct Unit;
template <>
struct Unit<1> {
  typedef unsigned char type;
};
template <>
struct Unit<2> {
  typedef unsigned short type;
};
template <>
struct Unit<4> {
  typedef unsigned type;
};
template <>
struct Unit<8> {
  typedef u64 type;
};

// The bytes at an address, of which `left` are valid. ALIGNED: the address is a multiple of 16 bytes.
template <int BYTES, int ELEMENT, bool ALIGNED>
__device__ __forceinline__ Pack<BYTES> read(const char* at, i64 left) {
  typedef typename Unit<ELEMENT>::type U;
  if (ALIGNED && left >= BYTES) return *reinterpret_cast<const Pack<BYTES>*>(at);
  Pack<BYTES> pack = {};
#pragma unroll
  for (int i = 0; i < BYTES / ELEMENT; ++i)
    if (i * ELEMENT < left) reinterpret_cast<U*>(&pack)[i] = reinterpret_cast<const U*>(at)[i];
  return pack;
}

template <int BYTES, int ELEMENT, bool ALIGNED>
__device__ __forceinline__ void write(char* at, i64 left, Pack<BYTES> pack) {
  typedef typename Unit<ELEMENT>::type U;
  if (ALIGNED && left >= BYTES) {
    *reinterpret_cast<Pack<BYTES>*>(at) = pack;
    return;
  }
#pragma unroll
  for (int i = 0; i < BYTES / ELEMENT; ++i)
    if (i * ELEMENT < left) reinterpret_cast<U*>(at)[i] = reinterpret_cast<const U*>(&pack)[i];
}

// The number after another one. It is never 0, the initial content of memory; odd and even ones alternate all the same.
__device__ __forceinline__ unsigned following(unsigned number) { return number + 1u != 0 ? number + 1u : 2u; }

// The share of this block of `units`: contiguous, and the same on all ranks.
struct Share {
  i64 begin, end;
  __device__ __forceinline__ Share(i64 first, i64 last) : begin(first), end(last) {}
  __device__ __forceinline__ explicit Share(i64 units) {
    i64 each = (units + gridDim.x - 1) / gridDim.x;
    begin = each * blockIdx.x < units ? each * blockIdx.x : units;
    end = begin + each < units ? begin + each : units;
  }
};

// A message did not arrive in time. Not inlined: it is called in many places, but only on failure.
__device__ __noinline__ void report_absent(i64* report, int site, int peer, unsigned number, unsigned seen) {
  fail(report, ABSENT, site, peer, number, seen);
}

template <int RANKS>
struct Group {
  const Exchange& x;
  int block = blockIdx.x;  // that the messages are of

  // The i-th peer: every rank begins with the next one, so that no two send to the same one.
  __device__ __forceinline__ int peer(int i) const {
    int rank = x.rank + 1 + i;
    return rank < RANKS ? rank : rank - RANKS;
  }
  // The address of message `number` of this block from `sender` on `receiver`. A workspace may have several sets of
  // slots, after each other.
  __device__ __forceinline__ char* message(int sender, int receiver, unsigned number, int slots, int set) const {
    return memory(receiver) + place(sender, receiver, number, slots, set) * static_cast<u64>(static_cast<unsigned>(x.slot));
  }
  // Its flag: after the slots of all sets.
  __device__ __forceinline__ unsigned* flag(int sender, int receiver, unsigned number, int slots, int set,
                                            int sets) const {
    i64 messages = static_cast<i64>(sets) * slots * (RANKS - 1) * x.blocks;
    return reinterpret_cast<unsigned*>(memory(receiver) + messages * x.slot) +
           place(sender, receiver, number, slots, set);
  }
  __device__ __forceinline__ char* memory(int rank) const {
    int device = x.first + rank * x.step + x.shift;
    return x.workspace + (device < x.devices ? device : device - x.devices) * x.stride;
  }
  __device__ __forceinline__ unsigned place(int sender, int receiver, unsigned number, int slots, int set) const {
    int row = sender > receiver ? sender - receiver - 1 : sender - receiver - 1 + RANKS;
    return ((set * slots + number % slots) * (RANKS - 1) + row) * x.blocks + block;
  }
  // The number of the next message.
  __device__ __forceinline__ unsigned next() const {
    return following(*const_cast<const volatile unsigned*>(x.counts + block));
  }
  // Bytes of a part.
  __device__ __forceinline__ i64 size(int part) const {
    i64 rest = x.total - part * x.bytes;
    return rest < x.bytes ? rest : x.bytes;
  }
};

}  // namespace tilescale

#endif
