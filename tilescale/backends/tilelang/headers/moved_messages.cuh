// SPDX-License-Identifier: MIT
// Collectives that move data without a combination, by long messages. Needs long_messages.cuh.
//
// Each of several messages is copied from its slot into the target, and arrives late because of its fence and flag. So
// where more than one would be needed, ranks first announce to each other whether their targets are symmetric, and
// their addresses: a peer that has announced its target has reached this call, and no longer needs the target's old
// content. While the announcements are in flight, the first units are stored into slots. If all targets are symmetric,
// the remaining units are stored directly into them, with one flag at the end; else they are sent by messages. A rank
// whose own target is not symmetric knows the outcome: it announces that, and sends messages at once, by a kernel
// without direct stores.
#ifndef TILESCALE_MOVED_MESSAGES_CUH
#define TILESCALE_MOVED_MESSAGES_CUH

namespace tilescale {

// Addresses of targets: a word for each sender and block after the flags of the slots, with the number of the call's
// first message in the upper half, and the offset of the sender's target from its workspace, in units, in the lower
// half.
template <int RANKS>
struct Targets {
  enum { BITS = 40 };
  enum Answer { FAILED, BY_MESSAGES, STRAIGHT };
  const BySlots<RANKS, 1>& by;

  __device__ __forceinline__ i64* word(int from, int to) const {
    const i64 slots = static_cast<i64>(LONG_SLOTS) * (RANKS - 1) * by.x.blocks;
    char* words = by.group.memory(to) + slots * (by.x.slot + static_cast<i64>(sizeof(unsigned)));
    return reinterpret_cast<i64*>(words) + by.group.place(from, to, 0, 1, 0);
  }
  // Units of the first message that are stored before all ranks have announced their targets: one a thread.
  __device__ __forceinline__ int early() const {
    return by.units(0) < static_cast<int>(blockDim.x) ? by.units(0) : blockDim.x;
  }
  __device__ __forceinline__ u64 number() const { return static_cast<u64>(by.number(0)) << BITS; }
  // Called first: the kernels before this one are done with the target, if there is one.
  __device__ __forceinline__ void announce() const {
    if (threadIdx.x >= RANKS - 1) return;
    if (by.x.behind != 0) order_stores();
    const u64 behind = static_cast<u64>(by.x.behind) & ((1ull << BITS) - 1);
    store_relaxed(word(by.x.rank, by.group.peer(threadIdx.x)), static_cast<i64>(number() | behind));
  }
  // All threads, until all ranks have announced their targets.
  __device__ __forceinline__ Answer answer() const {
    bool ready = true, symmetric = true;
    if (threadIdx.x < RANKS - 1) {
      const int peer = by.group.peer(threadIdx.x);
      u64 seen;
      auto here = [&] {
        seen = static_cast<u64>(load_acquire(word(peer, by.x.rank)));
        return seen >> BITS == number() >> BITS;
      };
      Outcome outcome = await(here, 2 * by.x.limit, by.x.report);
      if (outcome == LATE) report_absent(by.x.report, by.x.site, peer, by.number(0), static_cast<unsigned>(seen >> BITS));
      ready = outcome == READY;
      symmetric = symmetric && behind(seen) != 0;
    }
    if (!__syncthreads_and(ready)) return FAILED;
    return __syncthreads_and(symmetric) ? STRAIGHT : BY_MESSAGES;
  }
  __device__ __forceinline__ static i64 behind(u64 word) { return static_cast<i64>(word << (64 - BITS)) >> (64 - BITS); }
  __device__ __forceinline__ char* of(int peer) const {
    return by.group.memory(peer) + behind(static_cast<u64>(load_acquire(word(peer, by.x.rank)))) * UNIT_BYTES;
  }
};

// Some units of the local part.
template <int ELEMENT, bool ALIGNED>
__device__ __forceinline__ void keep(const char* from, char* to, i64 bytes, i64 begin, i64 end) {
  for (i64 unit = begin + threadIdx.x; unit < end; unit += blockDim.x) {
    i64 at = unit * UNIT_BYTES;
    write<UNIT_BYTES, ELEMENT, ALIGNED>(to + at, bytes - at, read<UNIT_BYTES, ELEMENT, ALIGNED>(from + at, bytes - at));
  }
}

// All threads: the units of a block after the first ones are stored directly into the targets, `offset` bytes after
// their begin; `keep(first, end)` does the concurrent local work.
template <int ELEMENT, bool ALIGNED, bool SAME, int RANKS, typename Keep>
__device__ __forceinline__ void store_straight(const BySlots<RANKS, 1>& by, int early, i64 offset, Keep keep) {
  const Targets<RANKS> targets{by};
  const Exchange& x = by.x;
  char* places[RANKS - 1];  // of the peers in order
#pragma unroll
  for (int i = 0; i < RANKS - 1; ++i) places[i] = targets.of(by.group.peer(i)) + offset;
  const i64 begin = by.pieces.begin(0), end = by.pieces.end(), room = by.pieces.room;
  for (i64 at = begin; at < end; at += room) {
    const int units = static_cast<int>(end - at < room ? end - at : room);
#pragma unroll
    for (int i = 0; i < (SAME ? 1 : RANKS - 1); ++i) {
      const int peer = by.group.peer(i);
      const char* from = x.source + (SAME ? 0 : peer * x.source_step) + at * UNIT_BYTES;
      by.template send<ELEMENT, ALIGNED>(from, by.group.size(peer) - at * UNIT_BYTES, at == begin ? early : 0, units, i,
                                         SAME ? RANKS - 1 : 1, [&](int receiver) {
                                           const int offset = receiver - x.rank - 1;
                                           return reinterpret_cast<Pack<UNIT_BYTES>*>(
                                                      places[SAME ? (offset < 0 ? offset + RANKS : offset) : i]) + at;
                                         });
    }
    keep(at, at + units);
  }
}

// The peers' data become parts of the target, in addition to this rank's own part.
template <int ELEMENT, int RANKS, bool ALIGNED>
__device__ __forceinline__ void take_parts(const BySlots<RANKS, 1>& by, int message, int units) {
  const Exchange& x = by.x;
  const char* own = x.source + x.rank * x.source_step;
  char* there = x.target + x.rank * x.target_step;
  by.each_unit(message, 0, units, [&](i64 unit, const Pack<UNIT_BYTES>(&packs)[RANKS]) {
    i64 at = unit * UNIT_BYTES, left = x.bytes - at;
    Pack<UNIT_BYTES> mine = read<UNIT_BYTES, ELEMENT, ALIGNED>(own + at, left);
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r != x.rank) write<UNIT_BYTES, ELEMENT, ALIGNED>(x.target + r * x.target_step + at, left, packs[r]);
    write<UNIT_BYTES, ELEMENT, ALIGNED>(there + at, left, mine);
  });
}

// The root's data become the tensor of all others.
template <int ELEMENT, int RANKS, bool ALIGNED>
__device__ __forceinline__ void take_tensor(const BySlots<RANKS, 1>& by, int message, int units) {
  const Exchange& x = by.x;
  const Pack<UNIT_BYTES>* from = by.slot(x.root, x.rank, message, 0);
  const i64 first = by.begin(message) * UNIT_BYTES;
  for (int unit = threadIdx.x; unit < units && x.rank != x.root; unit += blockDim.x) {
    i64 at = first + unit * UNIT_BYTES;
    write<UNIT_BYTES, ELEMENT, ALIGNED>(x.target + at, x.bytes - at, from[unit]);
  }
}

// By messages; `early` units of the first one are stored already.
template <int ELEMENT, int RANKS, bool ALIGNED, bool SAME>
__device__ __forceinline__ void move_by_messages(const Exchange& x, int early) {
  const BySlots<RANKS, 1> by(x);
  const int messages = by.messages();
  for (int iteration = 0; iteration < messages + LAG; ++iteration) {
    if (iteration < messages) by.template send_parts<ELEMENT, ALIGNED, SAME>(iteration, iteration ? 0 : early);
    if (iteration >= LAG) {
      if (!by.await_arrival(iteration - LAG, 0)) return;
      take_parts<ELEMENT, RANKS, ALIGNED>(by, iteration - LAG, by.units(iteration - LAG));
    }
    if (iteration < messages) by.notify(iteration);
  }
  by.end();
}

// The same, not inlined: combined with direct stores it would have too few registers.
template <int ELEMENT, int RANKS, bool ALIGNED, bool SAME>
__device__ __noinline__ void move_else(const Exchange& x, int early) {
  move_by_messages<ELEMENT, RANKS, ALIGNED, SAME>(x, early);
}

template <int ELEMENT, int RANKS, bool ALIGNED, bool SAME>
__device__ __forceinline__ void move_slots(const Exchange& x) {
  const BySlots<RANKS, 1> by(x);
  if (!by.messages()) return;  // the number of an unsent message is another call's, too
  Targets<RANKS>{by}.announce();
  move_by_messages<ELEMENT, RANKS, ALIGNED, SAME>(x, 0);
}

template <int ELEMENT, int RANKS, bool ALIGNED>
__device__ __forceinline__ void broadcast_slots(const Exchange& x) {
  const BySlots<RANKS, 1> by(x);
  const int messages = by.messages();
  for (int iteration = 0; iteration < messages + LAG; ++iteration) {
    if (iteration < messages && x.rank == x.root) by.template send_parts<ELEMENT, ALIGNED, true>(iteration);
    if (iteration >= LAG) {
      if (!by.await_arrival(iteration - LAG, 0)) return;
      take_tensor<ELEMENT, RANKS, ALIGNED>(by, iteration - LAG, by.units(iteration - LAG));
    }
    if (iteration < messages) by.notify(iteration);
  }
  by.end();
}

template <int ELEMENT, int RANKS, bool ALIGNED, bool SAME>
__device__ __forceinline__ void move_straight(const Exchange& x) {
  const BySlots<RANKS, 1> by(x);
  if (!by.messages()) return;
  const Targets<RANKS> targets{by};
  const int early = targets.early();
  targets.announce();
  by.template send_parts<ELEMENT, ALIGNED, SAME>(0, 0, early);
  const auto answer = targets.answer();
  if (answer == Targets<RANKS>::FAILED) return;
  if (answer == Targets<RANKS>::BY_MESSAGES) return move_else<ELEMENT, RANKS, ALIGNED, SAME>(x, early);
  store_straight<ELEMENT, ALIGNED, SAME>(by, early, x.rank * x.target_step, [&](i64 first, i64 end) {
    keep<ELEMENT, ALIGNED>(x.source + x.rank * x.source_step, x.target + x.rank * x.target_step, x.bytes, first, end);
  });
  by.notify(0);
  if (!by.await_arrival(0, 0)) return;
  take_parts<ELEMENT, RANKS, ALIGNED>(by, 0, early);
  by.end(1);
}

}  // namespace tilescale

#endif
