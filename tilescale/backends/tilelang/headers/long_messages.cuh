// SPDX-License-Identifier: MIT
// Collectives by messages of a slot each. In every iteration a block stores a message to each peer, takes the messages
// that peers signalled in the previous iteration, and then signals its own, whose stores have had that time to arrive.
// This file has sums; moved_messages.cuh and row_messages.cuh have moves. Needs messages.cuh and sums.cuh.
#ifndef TILESCALE_LONG_MESSAGES_CUH
#define TILESCALE_LONG_MESSAGES_CUH

namespace tilescale {

enum { LAG = 1, LONG_SLOTS = 4, UNIT_BYTES = 16 };

// The units of a part in a block's messages: a share of the part, `room` units per message.
struct InShares {
  const Share share;
  const i64 room;  // units of a slot
  __device__ __forceinline__ explicit InShares(const Exchange& x)
      : share((x.bytes + UNIT_BYTES - 1) / UNIT_BYTES), room(x.slot / UNIT_BYTES) {}
  __device__ __forceinline__ int messages() const { return static_cast<int>((share.end - share.begin + room - 1) / room); }
  __device__ __forceinline__ i64 begin(int message) const { return share.begin + message * room; }
  __device__ __forceinline__ i64 end() const { return share.end; }
};

template <int RANKS, int SETS, typename Pieces = InShares>
struct BySlots {
  const Exchange& x;
  const Group<RANKS> group;
  const Pieces pieces;
  const unsigned before;

  __device__ __forceinline__ explicit BySlots(const Exchange& exchange) : BySlots(exchange, Pieces(exchange)) {}
  __device__ __forceinline__ BySlots(const Exchange& exchange, Pieces of_block)
      : x(exchange),
        group{exchange},
        pieces(of_block),
        before(*const_cast<const volatile unsigned*>(exchange.counts + blockIdx.x)) {}

  __device__ __forceinline__ int messages() const { return pieces.messages(); }
  __device__ __forceinline__ unsigned number(int message) const { return before + 1u + message; }
  __device__ __forceinline__ i64 begin(int message) const { return pieces.begin(message); }
  __device__ __forceinline__ int units(int message) const {
    i64 left = pieces.end() - begin(message);
    return static_cast<int>(left < pieces.room ? left : pieces.room);
  }
  __device__ __forceinline__ Pack<UNIT_BYTES>* slot(int sender, int receiver, int message, int set) const {
    return reinterpret_cast<Pack<UNIT_BYTES>*>(group.message(sender, receiver, number(message), LONG_SLOTS, set));
  }
  // All threads, at the end of an iteration: their stores in it are visible to the receivers. These are message
  // `iteration` of the first set, `iteration` - LAG of the second one, and so on.
  __device__ __forceinline__ void notify(int iteration) const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    order_stores();
    for (int set = 0, message = iteration; set < SETS; ++set, message -= LAG) {
      if (message < 0 || message >= messages()) continue;
      for (int i = 0; i < RANKS - 1; ++i) {
        unsigned* flag = group.flag(x.rank, group.peer(i), number(message), LONG_SLOTS, set, SETS);
        store_relaxed(reinterpret_cast<int*>(flag), static_cast<int>(number(message)));
      }
    }
  }
  // All threads, until the messages of all peers have arrived. False, for all: a wait failed.
  __device__ __forceinline__ bool await_arrival(int message, int set) const {
    bool ready = true;
    if (threadIdx.x < RANKS - 1) {
      int peer = group.peer(threadIdx.x);
      const unsigned* flag = group.flag(peer, x.rank, number(message), LONG_SLOTS, set, SETS);
      unsigned seen;
      auto here = [&] { return (seen = load_acquire(flag)) == number(message); };
      Outcome outcome = await(here, 2 * x.limit, x.report);
      if (outcome == LATE) report_absent(x.report, x.site, peer, number(message), seen);
      ready = outcome == READY;
    }
    return __syncthreads_and(ready);
  }
  // All threads, last of all.
  __device__ __forceinline__ void end() const { end(messages()); }
  __device__ __forceinline__ void end(int count) const {
    __syncthreads();
    if (threadIdx.x == 0) x.counts[blockIdx.x] = before + count;
  }
  // Stores a message to each peer: its part, or the same to all; namely the units from `first` to `end`.
  template <int ELEMENT, bool ALIGNED, bool SAME>
  __device__ __forceinline__ void send_parts(int message, int first = 0) const {
    send_parts<ELEMENT, ALIGNED, SAME>(message, first, units(message));
  }
  template <int ELEMENT, bool ALIGNED, bool SAME>
  __device__ __forceinline__ void send_parts(int message, int first, int end) const {
    for (int i = 0; i < (SAME ? 1 : RANKS - 1); ++i) {
      int peer = group.peer(i);
      i64 at = begin(message) * UNIT_BYTES, left = group.size(peer) - at;
      const char* from = x.source + (SAME ? 0 : peer * x.source_step) + at;
      send<ELEMENT, ALIGNED>(from, left, first, end, i, SAME ? RANKS - 1 : 1,
                             [&](int receiver) { return slot(x.rank, receiver, message, 0); });
    }
  }
  // Stores units of a buffer, of which `left` bytes remain, to `peers` peers from the i-th on.
  template <int ELEMENT, bool ALIGNED, typename To>
  __device__ __forceinline__ void send(const char* from, i64 left, int first, int end, int i, int peers, To to) const {
    enum { AT_ONCE = 4 };
    for (int unit = first + threadIdx.x; unit < end; unit += AT_ONCE * blockDim.x) {
      Pack<UNIT_BYTES> packs[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        i64 skipped = static_cast<i64>(unit + k * blockDim.x) * UNIT_BYTES;
        if (unit + k * blockDim.x < end)
          packs[k] = read<UNIT_BYTES, ELEMENT, ALIGNED>(from + skipped, left - skipped);
      }
      for (int j = 0; j < peers; ++j) {
        Pack<UNIT_BYTES>* there = to(group.peer(i + j));
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
          if (unit + k * blockDim.x < end) there[unit + k * blockDim.x] = packs[k];
      }
    }
  }
  // `take(unit of the part, packs)` for the units of a message, with the packs of all peers.
  template <typename Take>
  __device__ __forceinline__ void each_unit(int message, int set, int units, Take take) const {
    const Pack<UNIT_BYTES>* from[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r != x.rank) from[r] = slot(r, x.rank, message, set);
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
      Pack<UNIT_BYTES> packs[RANKS];
#pragma unroll
      for (int r = 0; r < RANKS; ++r)
        if (r != x.rank) packs[r] = from[r][unit];
      take(begin(message) + unit, packs);
    }
  }
};

// As in short_messages.cuh.
template <typename T, int OP, int RANKS, bool ALIGNED, bool SAME>
__device__ __forceinline__ void reduce_slots(const Exchange& x) {
  const BySlots<RANKS, 1> by(x);
  const char* own = x.source + x.rank * x.source_step;
  const int messages = by.messages();
  for (int iteration = 0; iteration < messages + LAG; ++iteration) {
    if (iteration < messages) by.template send_parts<sizeof(T), ALIGNED, SAME>(iteration);
    if (iteration >= LAG) {
      if (!by.await_arrival(iteration - LAG, 0)) return;
      by.each_unit(iteration - LAG, 0, by.units(iteration - LAG), [&](i64 unit, const Pack<UNIT_BYTES>(&packs)[RANKS]) {
        i64 at = unit * UNIT_BYTES, left = x.bytes - at;
        Pack<UNIT_BYTES> mine = read<UNIT_BYTES, sizeof(T), ALIGNED>(own + at, left);
        write<UNIT_BYTES, sizeof(T), ALIGNED>(x.target + at, left, reduced<T, OP>(packs, mine, x.rank));
      });
    }
    if (iteration < messages) by.notify(iteration);
  }
  by.end();
}

template <typename T, int OP, int RANKS, bool ALIGNED>
__device__ __forceinline__ void reduce_twice_slots(const Exchange& x) {
  const BySlots<RANKS, 2> by(x);
  const i64 own = x.rank * x.bytes;
  const int messages = by.messages();
  for (int iteration = 0; iteration < messages + 2 * LAG; ++iteration) {
    if (iteration < messages) by.template send_parts<sizeof(T), ALIGNED, false>(iteration);
    const int sums = iteration - LAG, results = iteration - 2 * LAG;
    if (sums >= 0 && sums < messages) {
      if (!by.await_arrival(sums, 0)) return;
      by.each_unit(sums, 0, by.units(sums), [&](i64 unit, const Pack<UNIT_BYTES>(&packs)[RANKS]) {
        i64 at = unit * UNIT_BYTES, left = by.group.size(x.rank) - at;
        Pack<UNIT_BYTES> mine = read<UNIT_BYTES, sizeof(T), ALIGNED>(x.source + own + at, left);
        Pack<UNIT_BYTES> sum = reduced<T, OP>(packs, mine, x.rank);
#pragma unroll
        for (int i = 0; i < RANKS - 1; ++i) by.slot(x.rank, by.group.peer(i), sums, 1)[unit - by.begin(sums)] = sum;
        write<UNIT_BYTES, sizeof(T), ALIGNED>(x.target + own + at, left, sum);
      });
    }
    if (results >= 0) {
      if (!by.await_arrival(results, 1)) return;
      by.each_unit(results, 1, by.units(results), [&](i64 unit, const Pack<UNIT_BYTES>(&packs)[RANKS]) {
        i64 at = unit * UNIT_BYTES;
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
          if (r != x.rank)
            write<UNIT_BYTES, sizeof(T), ALIGNED>(x.target + r * x.bytes + at, by.group.size(r) - at, packs[r]);
      });
    }
    if (sums < messages) by.notify(iteration);
  }
  by.end();
}

}  // namespace tilescale

#endif
