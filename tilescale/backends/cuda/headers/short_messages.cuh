// SPDX-License-Identifier: MIT
// Collectives by messages of words: every thread sends its words to all peers, and polls for theirs. Stands after
// messages.cuh and sums.cuh.
#ifndef TILESCALE_SHORT_MESSAGES_CUH
#define TILESCALE_SHORT_MESSAGES_CUH

namespace tilescale {

enum { WORD_SLOTS = 2, WORD_BYTES = 8 };  // slots of a sender; bytes of data that a thread sends at once

template <int RANKS>
struct ByWords {
  const Exchange& x;
  const Group<RANKS> group;
  const Share share;
  const unsigned number;

  __device__ __forceinline__ explicit ByWords(const Exchange& exchange)
      : x(exchange),
        group{exchange},
        share((exchange.bytes + WORD_BYTES - 1) / WORD_BYTES),
        number(share.begin < share.end ? group.next() : 0) {}

  __device__ __forceinline__ Words* words(int sender, int receiver, int set, i64 unit) const {
    return reinterpret_cast<Words*>(group.message(sender, receiver, number, WORD_SLOTS, set)) + (unit - share.begin);
  }
  __device__ __forceinline__ void send(int peer, int set, i64 unit, Pack<WORD_BYTES> pack) const {
    store_words(words(x.rank, peer, set, unit), numbered(pack.words[0], pack.words[1], number));
  }
  // Every unit of the share, by one thread each.
  template <typename Body>
  __device__ __forceinline__ void each_unit(Body body) const {
    for (i64 unit = share.begin + threadIdx.x; unit < share.end; unit += blockDim.x) body(unit);
  }
  // The unit that each peer has sent, of those that `wanted(rank)`; other elements of `packs` stay. False: a wait failed.
  template <typename Wanted>
  __device__ __forceinline__ bool receive(int set, i64 unit, Wanted wanted, Pack<WORD_BYTES> (&packs)[RANKS]) const {
    Words found[RANKS];
    auto here = [&] {
      bool all = true;
#pragma unroll
      for (int r = 0; r < RANKS; ++r)
        if (r != x.rank && wanted(r)) found[r] = load_words(words(r, x.rank, set, unit));
#pragma unroll
      for (int r = 0; r < RANKS; ++r)
        if (r != x.rank && wanted(r)) all = all && have(found[r], number);
      return all;
    };
    Outcome outcome = await(here, 2 * x.limit, x.report);
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      if (r == x.rank || !wanted(r)) continue;
      if (outcome == LATE && !have(found[r], number))
        report_absent(x.report, x.site, r, number, static_cast<unsigned>(found[r].first >> 32));
      packs[r] = {{static_cast<unsigned>(found[r].first), static_cast<unsigned>(found[r].second)}};
    }
    return outcome == READY;
  }
  // All threads, last of all.
  __device__ __forceinline__ void end() const {
    __syncthreads();
    if (threadIdx.x == 0 && share.begin < share.end) x.counts[blockIdx.x] = number;
  }
  // Sends each peer its part, or the same to all.
  template <int ELEMENT, bool ALIGNED, bool SAME>
  __device__ __forceinline__ void send_parts() const {
    each_unit([&](i64 unit) {
      i64 at = unit * WORD_BYTES;
      Pack<WORD_BYTES> pack;
      if (SAME) pack = read<WORD_BYTES, ELEMENT, ALIGNED>(x.source + at, x.bytes - at);
#pragma unroll
      for (int i = 0; i < RANKS - 1; ++i) {
        int peer = group.peer(i);
        i64 left = group.size(peer) - at;
        if (!SAME) pack = read<WORD_BYTES, ELEMENT, ALIGNED>(x.source + peer * x.source_step + at, left);
        if (left > 0) send(peer, 0, unit, pack);
      }
    });
  }
};

// The target becomes the sum over all ranks: of their sources (SAME), or of their parts for this rank.
template <typename T, int OP, int RANKS, bool ALIGNED, bool SAME>
__device__ __forceinline__ void reduce_words(const Exchange& x) {
  const ByWords<RANKS> by(x);
  const char* own = x.source + x.rank * x.source_step;
  by.template send_parts<sizeof(T), ALIGNED, SAME>();
  by.each_unit([&](i64 unit) {
    i64 at = unit * WORD_BYTES, left = x.bytes - at;
    Pack<WORD_BYTES> packs[RANKS], mine = read<WORD_BYTES, sizeof(T), ALIGNED>(own + at, left);
    bool ready = by.receive(0, unit, [](int) { return true; }, packs);
    if (ready) write<WORD_BYTES, sizeof(T), ALIGNED>(x.target + at, left, reduced<T, OP>(packs, mine, x.rank));
  });
  by.end();
}

// The sum of all sources, part by part: each rank sums a part and sends it to all.
template <typename T, int OP, int RANKS, bool ALIGNED>
__device__ __forceinline__ void reduce_twice_words(const Exchange& x) {
  const ByWords<RANKS> by(x);
  const i64 own = x.rank * x.bytes;
  by.template send_parts<sizeof(T), ALIGNED, false>();
  by.each_unit([&](i64 unit) {
    i64 at = unit * WORD_BYTES, left = by.group.size(x.rank) - at;
    if (left <= 0) return;
    Pack<WORD_BYTES> packs[RANKS], mine = read<WORD_BYTES, sizeof(T), ALIGNED>(x.source + own + at, left);
    if (!by.receive(0, unit, [](int) { return true; }, packs)) return;
    Pack<WORD_BYTES> sum = reduced<T, OP>(packs, mine, x.rank);
#pragma unroll
    for (int i = 0; i < RANKS - 1; ++i) by.send(by.group.peer(i), 1, unit, sum);
    write<WORD_BYTES, sizeof(T), ALIGNED>(x.target + own + at, left, sum);
  });
  by.each_unit([&](i64 unit) {
    i64 at = unit * WORD_BYTES;
    Pack<WORD_BYTES> packs[RANKS];
    if (!by.receive(1, unit, [&](int r) { return by.group.size(r) > at; }, packs)) return;
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r != x.rank)
        write<WORD_BYTES, sizeof(T), ALIGNED>(x.target + r * x.bytes + at, by.group.size(r) - at, packs[r]);
  });
  by.end();
}

// Part r of the target becomes what rank r sends this one: its source (SAME), or its part for this rank.
template <int ELEMENT, int RANKS, bool ALIGNED, bool SAME>
__device__ __forceinline__ void move_words(const Exchange& x) {
  const ByWords<RANKS> by(x);
  const char* own = x.source + x.rank * x.source_step;
  by.template send_parts<ELEMENT, ALIGNED, SAME>();
  by.each_unit([&](i64 unit) {
    i64 at = unit * WORD_BYTES, left = x.bytes - at;
    Pack<WORD_BYTES> packs[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r == x.rank) packs[r] = read<WORD_BYTES, ELEMENT, ALIGNED>(own + at, left);
    if (!by.receive(0, unit, [](int) { return true; }, packs)) return;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) write<WORD_BYTES, ELEMENT, ALIGNED>(x.target + r * x.target_step + at, left, packs[r]);
  });
  by.end();
}

// The target becomes the root's source. The others send their first unit for nothing: so everybody hears of everybody.
template <int ELEMENT, int RANKS, bool ALIGNED>
__device__ __forceinline__ void broadcast_words(const Exchange& x) {
  const ByWords<RANKS> by(x);
  const bool root = x.rank == x.root;
  by.each_unit([&](i64 unit) {
    i64 at = unit * WORD_BYTES;
    if (!root && unit != by.share.begin) return;
    Pack<WORD_BYTES> pack = {};
    if (root) pack = read<WORD_BYTES, ELEMENT, ALIGNED>(x.source + at, x.bytes - at);
#pragma unroll
    for (int i = 0; i < RANKS - 1; ++i) by.send(by.group.peer(i), 0, unit, pack);
  });
  by.each_unit([&](i64 unit) {
    i64 at = unit * WORD_BYTES;
    Pack<WORD_BYTES> packs[RANKS];
    if (!by.receive(0, unit, [&](int r) { return r == x.root || unit == by.share.begin; }, packs) || root) return;
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r == x.root) write<WORD_BYTES, ELEMENT, ALIGNED>(x.target + at, x.bytes - at, packs[r]);
  });
  by.end();
}

}  // namespace tilescale

#endif
