// SPDX-License-Identifier: MIT
// All-reduce of rows, followed by residual addition and RMSNorm, by short messages. A cluster of blocks has whole rows,
// each block the same part of all of them, and each of its threads UNITS units of a part in registers, from the sum to
// the norm. Needs short_messages.cuh and cluster_sum.cuh.
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

// The part of a row in a block, in units.
template <typename Form>
struct RowPart {
  const int begin, bytes, units;
  __device__ __forceinline__ RowPart(const Exchange& x, int block)
      : begin(block * x.part),
        bytes(static_cast<int>(x.bytes) - begin < x.part ? static_cast<int>(x.bytes) - begin : x.part),
        units(bytes > 0 ? (bytes + Form::DATA - 1) / Form::DATA * Form::THREADS : 0) {}
  // The unit of this thread, among several; -1 if there is none.
  __device__ __forceinline__ int unit(int u) const {
    const int unit = u * blockDim.x + threadIdx.x;
    return unit < units ? unit : -1;
  }
};

// Elements of the normalized rows that share a scale, where they are quantized: all of them, by a given one; a row;
// GROUP columns of a row. For the latter two the largest magnitude becomes LARGEST.
enum Scaling { NOT_QUANTIZED, TENSOR, ROW, GROUPS };
enum { GROUP = 128 };
#define TILESCALE_LARGEST 448.f  // of float8_e4m3
#define TILESCALE_LEAST 1e-12f  // lower bound of the largest magnitude

__device__ __forceinline__ float scale_of(float most, bool power) {
  const float scale = (most < TILESCALE_LEAST ? TILESCALE_LEAST : most) / TILESCALE_LARGEST;
  const unsigned fraction = 0x7fffff;
  return power && scale == scale ? __uint_as_float((__float_as_uint(scale) + fraction) & ~fraction) : scale;
}

// The largest magnitudes of a row, where `value(u, e)` is an element of a unit. All threads: a warp reads PIECE bytes
// of each at once, which are in one group.
template <typename Form, typename T, int UNITS, typename Value>
__device__ __forceinline__ void add_largest(const OfGroups& of_groups, int row, const RowPart<Form>& part, Value value) {
  enum { SIZE = sizeof(T), AT_ONCE = PIECE / SIZE };
#pragma unroll
  for (int u = 0; u < UNITS; ++u) {
    const Place<Form> place(part.unit(u) < 0 ? 0 : part.unit(u));
#pragma unroll
    for (int first = 0; first < Form::BYTES / SIZE; first += AT_ONCE) {
      const bool has = part.unit(u) >= 0 && first * SIZE < place.room;
      float most = 0;
#pragma unroll
      for (int e = 0; e < AT_ONCE; ++e)
        if (has) most = larger(most, fabsf(value(u, first + e)));
      of_groups.add(row, has ? (place.at / SIZE + first) / GROUP : -1, most);
    }
  }
}

// The rows of a block's part divided by their scales, as float8: `value(u, e)` is an element of a unit, `scale(group)`
// that of GROUP columns.
template <typename Form, typename T, bool ALIGNED, int UNITS, typename Value, typename Scale>
__device__ __forceinline__ void write_quantized(char* row, const RowPart<Form>& part, Value value, Scale scale) {
  enum { SIZE = sizeof(T), AT_ONCE = PIECE / SIZE };
#pragma unroll
  for (int u = 0; u < UNITS; ++u) {
    if (part.unit(u) < 0) continue;
    const Place<Form> place(part.unit(u));
#pragma unroll
    for (int first = 0; first < Form::BYTES / SIZE; first += AT_ONCE) {
      if (first * SIZE >= place.room) continue;
      const int column = place.at / SIZE + first;
      const float factor = 1 / scale(column / GROUP);
      Pack<AT_ONCE> pack;
#pragma unroll
      for (int e = 0; e < AT_ONCE; ++e) Elements<__nv_fp8_e4m3, AT_ONCE>::set(pack, e, value(u, first + e) * factor);
      write<AT_ONCE, 1, ALIGNED>(row + part.begin / SIZE + column, part.bytes / SIZE - column, pack);
    }
  }
}

// Each row of the target becomes the sum over all ranks plus the residual, and that of `normed` the same divided by its
// root mean square, times the weight. The sum is rounded before the addition of the residual, and so is the result.
//
// In one step every rank sends each row to all. In two (TWICE) every rank sends it to one rank, another one for the
// next row, which sends its sum to all. All ranks normalize all rows: so no more is sent than the sum alone.
//
// The normalized rows are quantized from their values before rounding.
template <typename Form, typename T, int RANKS, bool ALIGNED, int UNITS, bool TWICE, int SCALING>
__device__ __forceinline__ void reduce_norm_short(const Exchange& x) {
  typedef Pack<Form::BYTES> Data;
  typedef Elements<T, Form::BYTES> In;
  // Units that are polled at once: their words and those of all peers are in registers.
  constexpr int SIZE = sizeof(T), MOST = RANKS == 2 ? 4 : RANKS <= 4 ? 2 : 1, AT_ONCE = UNITS < MOST ? UNITS : MOST;
  const Cluster own = own_cluster();
  const OfCluster of_cluster(own);
  const OfGroups of_groups;
  const int columns = static_cast<int>(x.bytes) / SIZE;
  if (SCALING == GROUPS) of_groups.clear(0);
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
  // The local data of a row, which is one more of this cluster's.
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
  auto factor = [&](int u, int e) { return In::at(weight[u], e) + x.weight_offset; };
  if (own.cluster < x.rows) send_row(own.cluster, 0);
  read_units(x.weight, weight);  // while messages are in flight
  of_cluster.ready();
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
    Statistics statistics = {0, 0};
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
        const int room = Place<Form>(unit).room;
#pragma unroll
        for (int e = 0; e < In::COUNT; ++e) {
          const float y = In::at(mine[u], e);
          if (e * SIZE >= room) continue;
          statistics.sum += y * y;
          if (SCALING == ROW) statistics.most = larger(statistics.most, fabsf(y * factor(u, e)));
        }
        if (here) write_part(x.target + at, unit, mine[u]);
      }
    }
    statistics = of_cluster.template all<SCALING == ROW>(statistics, turn + 1);
    const float scale = rsqrtf(statistics.sum / columns + x.eps);
    auto value = [&](int u, int e) { return In::at(mine[u], e) * scale * factor(u, e); };
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (part.unit(u) < 0) continue;
      Data normed;
#pragma unroll
      for (int e = 0; e < In::COUNT; ++e) In::set(normed, e, value(u, e));
      if (here && x.normed != nullptr) write_part(x.normed + at, part.unit(u), normed);
    }
    if constexpr (SCALING != NOT_QUANTIZED) {
      int first = row, count = own.block == 0;  // of the scales that this block writes
      if (SCALING == GROUPS) {
        first = row * ((columns + GROUP - 1) / GROUP) + part.begin / SIZE / GROUP;
        count = (part.bytes / SIZE + GROUP - 1) / GROUP;
        of_groups.clear(turn + 1);
        add_largest<Form, T, UNITS>(of_groups, turn, part, value);
        __syncthreads();
      }
      auto scale_at = [&](int group) {
        if (SCALING == TENSOR) return *x.scales;
        return scale_of(SCALING == ROW ? statistics.most * scale : of_groups.of(turn, group), x.power);
      };
      if (SCALING != TENSOR && here)
        for (int i = threadIdx.x; i < count; i += blockDim.x) x.scales[first + i] = scale_at(i);
      char* quantized = x.quantized + row * static_cast<i64>(columns);
      if (here) write_quantized<Form, T, ALIGNED, UNITS>(quantized, part, value, scale_at);
    }
  }
  by.end();
}

}  // namespace tilescale

#endif
