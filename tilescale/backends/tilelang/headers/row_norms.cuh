// SPDX-License-Identifier: MIT
// All-reduce of many rows, followed by residual addition and RMSNorm, or of any number of rows with LayerNorm. As in
// norm_messages.cuh a cluster of blocks has whole rows, but a thread has several units of a row, and the next row is sent
// later. Few rows take less time there: the weights are read while messages are in flight. Needs norm_messages.cuh.
#ifndef TILESCALE_ROW_NORMS_CUH
#define TILESCALE_ROW_NORMS_CUH

namespace tilescale {

// The compiler widens the elements again where they are used next: wide ones would occupy twice the registers.
template <int BYTES>
__device__ __forceinline__ void keep_narrow(Pack<BYTES>& pack) {
#pragma unroll
  for (int i = 0; i < BYTES / 4; ++i) asm volatile("" : "+r"(pack.words[i]));
}

// The part of a row in a block: each thread has the units of `each` adjacent flags, so that their addresses differ by
// constants. ALIGNED: the part consists of whole pieces.
template <typename Form, int ELEMENT, bool ALIGNED>
struct ThreadUnits {
  typedef Pack<Form::BYTES> Data;
  const int begin, bytes, units, each, first;
  const Place<Form> place;
  __device__ __forceinline__ ThreadUnits(const Exchange& x, int block)
      : begin(block * x.part),
        bytes(static_cast<int>(x.bytes) - begin < x.part ? static_cast<int>(x.bytes) - begin : x.part),
        units(bytes > 0 ? (bytes + Form::DATA - 1) / Form::DATA * Form::THREADS : 0),
        each(x.each),
        first(threadIdx.x / Form::THREADS * each * Form::THREADS + threadIdx.x % Form::THREADS),
        place(first) {}
  // The u-th unit of this thread; -1 if there is none.
  __device__ __forceinline__ int unit(int u) const {
    const int unit = first + u * Form::THREADS;
    return u < each && unit < units ? unit : -1;
  }
  // Its position in the part.
  __device__ __forceinline__ int at(int u) const { return place.at + u * Form::DATA; }
  // Whether it has data at an offset.
  __device__ __forceinline__ bool has(int u, int offset) const {
    return u < each && offset < place.room && at(u) + offset < bytes;
  }
  __device__ __forceinline__ Data read(const char* row, int u) const {
    Data data = {};
#pragma unroll
    for (int i = 0; i < Form::BYTES; i += PIECE)
      if (has(u, i))
        reinterpret_cast<Pack<PIECE>*>(&data)[i / PIECE] =
            tilescale::read<PIECE, ELEMENT, ALIGNED>(row + begin + at(u) + i, left(u, i));
    return data;
  }
  __device__ __forceinline__ void write(char* row, int u, Data data) const {
#pragma unroll
    for (int i = 0; i < Form::BYTES; i += PIECE)
      if (has(u, i))
        tilescale::write<PIECE, ELEMENT, ALIGNED>(row + begin + at(u) + i, left(u, i),
                                                  reinterpret_cast<const Pack<PIECE>*>(&data)[i / PIECE]);
  }

 private:
  __device__ __forceinline__ i64 left(int u, int offset) const { return ALIGNED ? PIECE : bytes - at(u) - offset; }
};

// Each row of the target becomes the sum over all ranks plus the residual, and that of `normed` the same divided by its
// root mean square, times the weight; CENTERED: minus its mean, divided by its deviation, times the weight, plus the bias.
// One step or two (TWICE), and roundings, as in reduce_norm_short.
//
// A cluster sends its next row when it has the sum of a row: before that the stores would delay what follows the sum,
// while other clusters' rows occupy the network.
template <typename Form, typename T, int RANKS, bool ALIGNED, int UNITS, bool TWICE, bool CENTERED>
__device__ __forceinline__ void reduce_norm_rows_short(const Exchange& x) {
  typedef Pack<Form::BYTES> Data;
  typedef Elements<T, Form::BYTES> In;
  // Units that are polled at once: their words and those of all peers are in registers.
  constexpr int SIZE = sizeof(T), MOST = RANKS == 2 ? 4 : RANKS <= 4 ? 2 : 1, AT_ONCE = UNITS < MOST ? UNITS : MOST;
  const Cluster own = own_cluster();
  const OfCluster of_cluster(own);
  const int columns = static_cast<int>(x.bytes) / SIZE;
  const ThreadUnits<Form, SIZE, ALIGNED> part(x, own.block);
  auto read_units = [&](const char* row, Data(&data)[UNITS]) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) data[u] = part.read(row, u);
  };
  follow_grid();
  Data mine[UNITS], next[UNITS];
  if (own.cluster < x.rows) read_units(x.source + own.cluster * x.bytes, next);
  const Short<Form, RANKS> by(x, Share(0, part.units));
  auto sums = [&](int row) { return !TWICE || row % RANKS == x.rank; };
  auto send_all = [&](int set, int unit, Data data) {
#pragma unroll
    for (int i = 0; i < RANKS - 1; ++i) by.send(by.group.peer(i), set, unit, data);
  };
  // The local data of a row, number `turn` of this cluster.
  auto send_next = [&](int row, int turn) {
    if (row >= x.rows || (TWICE && sums(row))) return;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (part.unit(u) < 0) continue;
      const int unit = turn * part.units + part.unit(u);
      if (TWICE)
        by.send(row % RANKS, 0, unit, next[u]);
      else
        send_all(0, unit, next[u]);
    }
  };
  send_next(own.cluster, 0);
  of_cluster.ready();
  bool here = true;
  unsigned sums_made = 0;
  for (int row = own.cluster, turn = 0; row < x.rows; row += own.clusters, ++turn) {
    const i64 at = row * x.bytes;
    Data weight[UNITS];
    auto factor = [&](int u, int e) { return In::at(weight[u], e) + x.weight_offset; };
    Data added[UNITS] = {};
    if (sums(row) && x.residual != nullptr) read_units(x.residual + at, added);
    Statistics statistics = {0, 0};
#pragma unroll
    for (int u = 0; u < UNITS; ++u) mine[u] = next[u];
#pragma unroll
    for (int first = 0; first < UNITS; first += AT_ONCE) {
      auto message = [&](int i) {
        const int unit = first + i < UNITS ? part.unit(first + i) : -1;
        return unit < 0 ? -1 : turn * part.units + unit;
      };
      // Threads with missing peers continue to the sum with the others, and write nothing.
      if (sums(row)) {
        // Of the other ranks, in order.
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
#pragma unroll
        for (int e = 0; e < In::COUNT; ++e) {
          const float y = In::at(mine[u], e);
          if (!part.has(u, e * SIZE)) continue;
          statistics.sum += CENTERED ? y : y * y;
        }
        if (here) part.write(x.target + at, u, mine[u]);
        keep_narrow(mine[u]);
      }
    }
    if (row + own.clusters < x.rows) read_units(x.source + (row + own.clusters) * x.bytes, next);
    read_units(x.weight, weight);
    send_next(row + own.clusters, turn + 1);
    statistics = of_cluster.template all<false>(statistics, ++sums_made);
    float mean = 0;
    if constexpr (CENTERED) {
      mean = statistics.sum / columns;
      statistics.sum = 0;
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        added[u] = {};
#pragma unroll
        for (int e = 0; e < In::COUNT; ++e) {
          const float off = In::at(mine[u], e) - mean;
          if (part.has(u, e * SIZE)) statistics.sum += off * off;
        }
      }
      if (x.bias != nullptr) read_units(x.bias, added);
      statistics = of_cluster.template all<false>(statistics, ++sums_made);
    }
    const float scale = rsqrtf(statistics.sum / columns + x.eps);
    auto value = [&](int u, int e) {
      const float y = In::at(mine[u], e);
      return CENTERED ? (y - mean) * scale * factor(u, e) + In::at(added[u], e) : y * scale * factor(u, e);
    };
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      Data normed;
#pragma unroll
      for (int e = 0; e < In::COUNT; ++e) In::set(normed, e, value(u, e));
      if (here && x.normed != nullptr) part.write(x.normed + at, u, normed);
    }
  }
  by.end();
}

}  // namespace tilescale

#endif
