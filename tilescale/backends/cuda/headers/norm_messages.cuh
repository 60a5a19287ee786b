// SPDX-License-Identifier: MIT
// The all-reduce of rows with a residual and RMSNorm behind it, by short messages. A cluster of blocks has whole rows, each
// block the same part of all of them, and each of its threads UNITS units of a part in registers, from the sum to the norm.
// Stands after short_messages.cuh and cluster_sum.cuh.
#ifndef TILESCALE_NORM_MESSAGES_CUH
#define TILESCALE_NORM_MESSAGES_CUH

namespace tilescale {

template <typename T, int BYTES>
struct Elements {
  enum { COUNT = BYTES / static_cast<int>(sizeof(T)) };
  static __device__ __forceinline__ float at(const Pack<BYTES>& pack, int i) {
    return wide(reinterpret_cast<const T*>(&pack)[i]);
  }
  static __device__ __forceinline__ void set(Pack<BYTES>& pack, int i, float value) {
    reinterpret_cast<T*>(&pack)[i] = Narrow<T>::of(value);
  }
};

// The part of a row that a block has, in units.
template <typename Form>
struct RowPart {
  const int begin, bytes, units;
  __device__ __forceinline__ RowPart(const Exchange& x, int block)
      : begin(block * x.part),
        bytes(static_cast<int>(x.bytes) - begin < x.part ? static_cast<int>(x.bytes) - begin : x.part),
        units(bytes > 0 ? (bytes + Form::DATA - 1) / Form::DATA * Form::THREADS : 0) {}
  // The unit of this thread, of several; -1 if there is none.
  __device__ __forceinline__ int unit(int u) const {
    const int unit = u * blockDim.x + threadIdx.x;
    return unit < units ? unit : -1;
  }
};

// Each row of the target becomes the sum over all ranks plus the residual, and that of `normed` the same divided by its
// root mean square, times the weight. The sum is rounded, and so is what the residual is added to.
//
// In one step everybody sends each row to all. In two (TWICE) everybody sends it to one rank, another one for the next row,
// which sends all what it has made of it. All normalise all rows: so no more is sent than of the sum alone.
template <typename Form, typename T, int RANKS, bool ALIGNED, int UNITS, bool TWICE>
__device__ __forceinline__ void reduce_norm_short(const Exchange& x) {
  typedef Pack<Form::BYTES> Data;
  typedef Elements<T, Form::BYTES> In;
  // Units that are polled for at once: their words and those of all peers have registers.
  constexpr int MOST = RANKS == 2 ? 4 : RANKS <= 4 ? 2 : 1, AT_ONCE = UNITS < MOST ? UNITS : MOST;
  const Cluster own = own_cluster();
  const ClusterSum sum_of_cluster(own);
  const RowPart<Form> part(x, own.block);
  auto read_part = [&](const char* row, int unit) {
    return read_unit<Form, sizeof(T), ALIGNED>(row + part.begin, part.bytes, Place<Form>(unit));
  };
  auto write_part = [&](char* row, int unit, Data data) {
    write_unit<Form, sizeof(T), ALIGNED>(row + part.begin, part.bytes, Place<Form>(unit), data);
  };
  auto read_units = [&](const char* row, Data(&data)[UNITS]) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
      if (part.unit(u) >= 0) data[u] = read_part(row, part.unit(u));
  };
  follow_grid();
  Data brought[UNITS], weight[UNITS];
  if (own.cluster < x.rows) read_units(x.source + own.cluster * x.bytes, brought);
  const Short<Form, RANKS> by(x, Share(0, part.units));
  auto sums = [&](int row) { return !TWICE || row % RANKS == x.rank; };
  auto send_all = [&](int set, int unit, Data data) {
#pragma unroll
    for (int i = 0; i < RANKS - 1; ++i) by.send(by.group.peer(i), set, unit, data);
  };
  // What was brought of a row, which is one more of this cluster's.
  auto send_row = [&](int row, int turn) {
    if (TWICE && sums(row)) return;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (part.unit(u) < 0) continue;
      const int unit = turn * part.units + part.unit(u);
      if (TWICE)
        by.send(row % RANKS, 0, unit, brought[u]);
      else
        send_all(0, unit, brought[u]);
    }
  };
  if (own.cluster < x.rows) send_row(own.cluster, 0);
  read_units(x.weight, weight);  // while messages are on their way
  sum_of_cluster.ready();
  bool here = true;
  for (int row = own.cluster, turn = 0; row < x.rows; row += own.clusters, ++turn) {
    if (row + own.clusters < x.rows) {
      read_units(x.source + (row + own.clusters) * x.bytes, brought);
      send_row(row + own.clusters, turn + 1);
    }
    const i64 at = row * x.bytes;
    Data mine[UNITS], added[UNITS] = {};
    if (sums(row)) {
      read_units(x.source + at, mine);
      if (x.residual != nullptr) read_units(x.residual + at, added);
    }
    float squares = 0;
#pragma unroll
    for (int first = 0; first < UNITS; first += AT_ONCE) {
      auto message = [&](int i) {
        const int unit = first + i < UNITS ? part.unit(first + i) : -1;
        return unit < 0 ? -1 : turn * part.units + unit;
      };
      // Threads whose peers do not come go on to the sum with the others, and write nothing.
      if (sums(row)) {
        // Of the others, in order.
        Data given[AT_ONCE][RANKS - 1];
        here = by.receive_several(0, message, [&](int i) { return i < x.rank ? i : i + 1; }, given) && here;
#pragma unroll
        for (int i = 0; i < AT_ONCE && first + i < UNITS; ++i) {
          Data parts[RANKS], &sum = mine[first + i];
#pragma unroll
          for (int r = 0; r < RANKS; ++r)
            parts[r] = r < x.rank ? given[i][r < RANKS - 1 ? r : 0] : given[i][r > 0 ? r - 1 : 0];
          sum = reduced<T, SUM>(parts, sum, x.rank);
#pragma unroll
          for (int e = 0; e < In::COUNT; ++e) In::set(sum, e, In::at(sum, e) + In::at(added[first + i], e));
        }
      } else {
        Data given[AT_ONCE][1];
        here = by.receive_several(1, message, [&](int) { return row % RANKS; }, given) && here;
#pragma unroll
        for (int i = 0; i < AT_ONCE && first + i < UNITS; ++i) mine[first + i] = given[i][0];
      }
#pragma unroll
      for (int u = first; u < first + AT_ONCE && u < UNITS; ++u) {
        const int unit = part.unit(u);
        if (unit < 0) continue;
        if (TWICE && sums(row) && here) send_all(1, turn * part.units + unit, mine[u]);
        const int room = Place<Form>(unit).room;
#pragma unroll
        for (int e = 0; e < In::COUNT; ++e) {
          const float y = In::at(mine[u], e);
          if (e * static_cast<int>(sizeof(T)) < room) squares += y * y;
        }
        if (here) write_part(x.target + at, unit, mine[u]);
      }
    }
    const float mean = sum_of_cluster(squares, turn + 1) / static_cast<int>(x.bytes / sizeof(T));
    const float scale = rsqrtf(mean + x.eps);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (part.unit(u) < 0) continue;
#pragma unroll
      for (int e = 0; e < In::COUNT; ++e) In::set(mine[u], e, In::at(mine[u], e) * scale * In::at(weight[u], e));
      if (here) write_part(x.normed + at, part.unit(u), mine[u]);
    }
  }
  by.end();
}

}  // namespace tilescale

#endif
