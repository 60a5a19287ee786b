// SPDX-License-Identifier: MIT
// All-to-all of unequal parts, by long messages. Parts are rows, one part after the other on both ends; a table has the
// row counts from each rank to each. Blocks take interleaved pieces of all parts, so that each has about the same share
// of a short part, too. Needs moved_messages.cuh.
#ifndef TILESCALE_ROW_MESSAGES_CUH
#define TILESCALE_ROW_MESSAGES_CUH

namespace tilescale {

// The units of a block's messages: `room` of every part, interleaved with other blocks.
struct InTurns {
  i64 first, last, step, room;
  __device__ __forceinline__ int messages() const {
    return last > first ? static_cast<int>((last - first + step - 1) / step) : 0;
  }
  __device__ __forceinline__ i64 begin(int message) const { return first + message * step; }
  __device__ __forceinline__ i64 end() const { return last; }
};

template <int RANKS>
struct Rows {
  const Exchange& x;

  __device__ __forceinline__ i64 count(int from, int to) const { return x.table[from * RANKS + to]; }
  __device__ __forceinline__ i64 size(int from, int to) const { return count(from, to) * x.bytes; }
  // Rows that this rank sends to the ranks before one; rows that it receives from the ranks before one.
  __device__ __forceinline__ i64 sent(int before) const {
    i64 rows = 0;
    for (int to = 0; to < before; ++to) rows += count(x.rank, to);
    return rows;
  }
  __device__ __forceinline__ i64 taken(int before) const {
    i64 rows = 0;
    for (int from = 0; from < before; ++from) rows += count(from, x.rank);
    return rows;
  }
  // The maximum of all parts between two ranks. All ranks compute the same.
  __device__ __forceinline__ i64 largest() const {
    i64 most = 0;
    for (int from = 0; from < RANKS; ++from)
      for (int to = 0; to < RANKS; ++to)
        if (from != to && size(from, to) > most) most = size(from, to);
    return most;
  }
  __device__ __forceinline__ InTurns pieces() const {
    const i64 units = (largest() + UNIT_BYTES - 1) / UNIT_BYTES, each = (units + gridDim.x - 1) / gridDim.x;
    // At least one unit for each thread: for few rows, few blocks send.
    const i64 slot = x.slot / UNIT_BYTES, least = each < blockDim.x ? blockDim.x : each, room = least < slot ? least : slot;
    return {room * blockIdx.x, units, room * gridDim.x, room};
  }
  // Whether this rank has the rows that it is to send, and capacity for those that it receives; else it is reported.
  // Negative numbers are reported by their sender alone, and all others ignore them.
  __device__ __forceinline__ bool fit() const {
    i64 rows[2] = {sent(RANKS), taken(RANKS)};
    const i64 room[2] = {x.source_step, x.target_step};
    bool counted = true;
    for (int from = 0; from < RANKS; ++from)
      for (int to = 0; to < RANKS; ++to)
        if (count(from, to) < 0) {
          counted = false;
          if (from == x.rank) rows[0] = count(from, to);
        }
    for (int side = 0; side < 2; ++side) {
      if (side == 1 && !counted) break;
      if (rows[side] >= 0 && rows[side] <= room[side]) continue;
      if (threadIdx.x == 0) fail(x.report, ROWS, x.site, side, room[side], rows[side]);
      return false;
    }
    return counted;
  }
};

template <int ELEMENT, int RANKS, bool ALIGNED>
__device__ __forceinline__ void move_rows_slots(const Exchange& x) {
  const Rows<RANKS> rows{x};
  if (!rows.fit()) return;
  const BySlots<RANKS, 1, InTurns> by(x, rows.pieces());
  const int messages = by.messages();
  const i64 kept = rows.size(x.rank, x.rank);
  const Share own((kept + UNIT_BYTES - 1) / UNIT_BYTES);
  const i64 each = (own.end - own.begin + messages) / (messages + 1);
  // Units of a message within a part of `size` bytes.
  auto units = [&](int message, i64 size) {
    i64 there = (size + UNIT_BYTES - 1) / UNIT_BYTES - by.begin(message), most = by.units(message);
    return static_cast<int>(there < 0 ? 0 : there < most ? there : most);
  };
  for (int iteration = 0; iteration < messages + LAG; ++iteration) {
    for (int i = 0; i < RANKS - 1 && iteration < messages; ++i) {
      const int peer = by.group.peer(i);
      const i64 at = by.begin(iteration) * UNIT_BYTES, size = rows.size(x.rank, peer);
      const char* from = x.source + rows.sent(peer) * x.bytes + at;
      by.template send<ELEMENT, ALIGNED>(from, size - at, 0, units(iteration, size), i, 1,
                                         [&](int receiver) { return by.slot(x.rank, receiver, iteration, 0); });
    }
    const i64 begin = own.begin + iteration * each, end = begin + each < own.end ? begin + each : own.end;
    keep<ELEMENT, ALIGNED>(x.source + rows.sent(x.rank) * x.bytes, x.target + rows.taken(x.rank) * x.bytes, kept, begin, end);
    if (iteration >= LAG) {
      if (!by.await_arrival(iteration - LAG, 0)) return;
      for (int i = 0; i < RANKS - 1; ++i) {
        const int peer = by.group.peer(i);
        const i64 at = by.begin(iteration - LAG) * UNIT_BYTES, size = rows.size(peer, x.rank);
        char* to = x.target + rows.taken(peer) * x.bytes + at;
        const Pack<UNIT_BYTES>* from = by.slot(peer, x.rank, iteration - LAG, 0);
        for (int unit = threadIdx.x; unit < units(iteration - LAG, size); unit += blockDim.x)
          write<UNIT_BYTES, ELEMENT, ALIGNED>(to + unit * UNIT_BYTES, size - at - unit * UNIT_BYTES, from[unit]);
      }
    }
    if (iteration < messages) by.notify(iteration);
  }
  if (x.received != nullptr && blockIdx.x == 0 && threadIdx.x < RANKS)
    x.received[threadIdx.x] = static_cast<int>(rows.count(threadIdx.x, x.rank));
  by.end();
}

}  // namespace tilescale

#endif
