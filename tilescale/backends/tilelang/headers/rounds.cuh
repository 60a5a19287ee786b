// SPDX-License-Identifier: MIT
// Any algorithm by its rounds, which are data: a table has this rank's sends, receives and combinations of each round.
// Needs messages.cuh, sums.cuh and long_messages.cuh.
//
// A tensor consists of pieces. Each block exchanges its share of every piece with the block of its number on other
// ranks, round after round, so blocks need not wait for each other. Each piece and round has a slot of its own for the
// data that a rank receives in a call; a rank that begins a call signals all others, so slots are free when they are
// written.
//
// The table, all ints: the number of rounds, the number of slots; then for each round
//   the number of sent pieces, and for each its receiver, its number, and its slot there;
//   the number of ranks to signal, and these ranks;
//   the number of ranks to wait for, and these ranks;
//   the number of combined pieces, and for each its number, its number of values, and for each value, in the order of
//   ranks, its slot, or -1 for the local one.
#ifndef TILESCALE_ROUNDS_CUH
#define TILESCALE_ROUNDS_CUH

namespace tilescale {

template <typename T, int RANKS, bool ALIGNED>
struct ByRounds {
  const Exchange& x;
  const Group<RANKS> group;
  const Share share;
  const unsigned number;

  __device__ __forceinline__ explicit ByRounds(const Exchange& exchange)
      : x(exchange),
        group{exchange},
        share((exchange.bytes + UNIT_BYTES - 1) / UNIT_BYTES),
        number(group.next()) {}

  __device__ __forceinline__ int rounds() const { return x.table[0]; }
  // Pieces have nearly equal lengths: tilescale/backends/emulator/operations/pieces.py cuts alike.
  __device__ __forceinline__ i64 begin(int piece) const {
    return x.total / static_cast<i64>(sizeof(T)) * piece / x.pieces * static_cast<i64>(sizeof(T)) + x.offset;
  }
  // Bytes of a piece from a unit on, within this call's part.
  __device__ __forceinline__ i64 left(int piece, i64 unit) const {
    i64 rest = begin(piece + 1) - begin(piece) - x.offset;
    return (rest < x.bytes ? rest : x.bytes) - unit * UNIT_BYTES;
  }
  // The address of a piece's units in a slot.
  __device__ __forceinline__ Pack<UNIT_BYTES>* slot(int receiver, int index) const {
    i64 place = static_cast<i64>(index) * x.blocks + blockIdx.x;
    return reinterpret_cast<Pack<UNIT_BYTES>*>(group.memory(receiver) + place * x.slot) - share.begin;
  }
  __device__ __forceinline__ unsigned* flag(int sender, int receiver, int round) const {
    i64 slots = static_cast<i64>(x.table[1]) * x.blocks;
    i64 place = (static_cast<i64>(round) * RANKS + sender) * x.blocks + blockIdx.x;
    return reinterpret_cast<unsigned*>(group.memory(receiver) + slots * x.slot) + place;
  }
  // All threads: their stores are visible to these ranks.
  template <typename Peer>
  __device__ __forceinline__ void notify(int round, int count, Peer peer) const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    order_stores();
    for (int i = 0; i < count; ++i)
      store_relaxed(reinterpret_cast<int*>(flag(x.rank, peer(i), round)), static_cast<int>(number));
  }
  // All threads, until these ranks have signalled. False, for all: a wait failed. A rank without senders, such as the
  // root of a broadcast, may have begun the next call already.
  template <typename Peer>
  __device__ __forceinline__ bool await_arrival(int round, int count, Peer peer) const {
    bool ready = true;
    for (int i = threadIdx.x; i < count && ready; i += blockDim.x) {
      const unsigned* at = flag(peer(i), x.rank, round);
      unsigned seen;
      auto here = [&] { return static_cast<int>((seen = load_acquire(at)) - number) >= 0; };
      Outcome outcome = await(here, 2 * x.limit, x.report);
      if (outcome == LATE) report_absent(x.report, x.site, peer(i), number, seen);
      ready = outcome == READY;
    }
    return __syncthreads_and(ready);
  }
  __device__ __forceinline__ void send(const int* entry) const {
    const int piece = entry[1];
    const char* from = x.source + begin(piece);
    Pack<UNIT_BYTES>* to = slot(entry[0], entry[2]);
    for (i64 unit = share.begin + threadIdx.x; unit < share.end; unit += blockDim.x)
      to[unit] = read<UNIT_BYTES, sizeof(T), ALIGNED>(from + unit * UNIT_BYTES, left(piece, unit));
  }
  template <int OP>
  __device__ __forceinline__ void take(int piece, int count, const int* slots) const {
    char* at = x.target + begin(piece);
    for (i64 unit = share.begin + threadIdx.x; unit < share.end; unit += blockDim.x) {
      auto value = [&](int i) {
        if (slots[i] >= 0) return slot(x.rank, slots[i])[unit];
        return read<UNIT_BYTES, sizeof(T), ALIGNED>(at + unit * UNIT_BYTES, left(piece, unit));
      };
      Pack<UNIT_BYTES> result = value(0);
      if (count > 1) result = combination<OP>(result, count, value);
      write<UNIT_BYTES, sizeof(T), ALIGNED>(at + unit * UNIT_BYTES, left(piece, unit), result);
    }
  }
  // Combines values in their order, rounded once.
  template <int OP, typename Value>
  static __device__ __forceinline__ Pack<UNIT_BYTES> combination(Pack<UNIT_BYTES> first, int count, Value value) {
    enum { ELEMENTS = UNIT_BYTES / sizeof(T) };
    decltype(wide(T())) total[ELEMENTS];
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) total[e] = wide(reinterpret_cast<const T*>(&first)[e]);
    for (int i = 1; i < count; ++i) {
      Pack<UNIT_BYTES> next = value(i);
#pragma unroll
      for (int e = 0; e < ELEMENTS; ++e)
        total[e] = combined<OP>(total[e], wide(reinterpret_cast<const T*>(&next)[e]));
    }
    return narrow<T, UNIT_BYTES>([&](int e) { return total[e]; });
  }
  // All threads, last of all.
  __device__ __forceinline__ void end() const {
    __syncthreads();
    if (threadIdx.x == 0) x.counts[blockIdx.x] = number;
  }
};

template <typename T, int OP, int RANKS, bool ALIGNED>
__device__ __forceinline__ void play_rounds(const Exchange& x) {
  const ByRounds<T, RANKS, ALIGNED> by(x);
  auto other = [&](int i) { return by.group.peer(i); };
  by.notify(0, RANKS - 1, other);
  if (!by.await_arrival(0, RANKS - 1, other)) return;
  const int* at = x.table + 2;
  for (int round = 1; round <= by.rounds(); ++round) {
    int sent = *at++;
    for (int i = 0; i < sent; ++i, at += 3) by.send(at);
    int count = *at++;
    by.notify(round, count, [at](int i) { return at[i]; });
    at += count;
    count = *at++;
    if (!by.await_arrival(round, count, [at](int i) { return at[i]; })) return;
    at += count;
    int taken = *at++;
    for (int i = 0; i < taken; ++i, at += 2 + at[1]) by.template take<OP>(at[0], at[1], at + 2);
  }
  by.end();
}

}  // namespace tilescale

#endif
