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
};

// The compiler widens the elements again where they are used next: wide ones would occupy twice the registers.
template <int BYTES>
__device__ __forceinline__ void keep_narrow(Pack<BYTES>& pack) {
#pragma unroll
  for (int i = 0; i < BYTES / 4; ++i) asm volatile("" : "+r"(pack.words[i]));
}

enum { GROUP = 128 };  // columns that may share a scale

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
  // The offset of the first one.
  __device__ __forceinline__ i64 offset(i64 row) const { return row + begin + place.at; }
  // The group of a piece of it.
  __device__ __forceinline__ int group(int u, int piece) const { return (at(u) + piece * PIECE) / ELEMENT / GROUP; }
  // Whether it has data at an offset.
  __device__ __forceinline__ bool has(int u, int offset) const {
    return u < each && offset < place.room && at(u) + offset < bytes;
  }
  // Of a row that begins at an offset of a tensor. (Addresses of all tensors have a common offset.)
  __device__ __forceinline__ Data read(const char* tensor, i64 row, int u) const {
    Data data = {};
#pragma unroll
    for (int i = 0; i < Form::BYTES; i += PIECE)
      if (has(u, i))
        reinterpret_cast<Pack<PIECE>*>(&data)[i / PIECE] =
            tilescale::read<PIECE, ELEMENT, ALIGNED>(tensor + offset(row) + u * Form::DATA + i, left(u, i));
    return data;
  }
  // The same without what lies beyond its data.
  __device__ __forceinline__ Data within(int u, Data data) const {
#pragma unroll
    for (int i = 0; i < Form::BYTES; i += PIECE)
      if (!has(u, i)) reinterpret_cast<Pack<PIECE>*>(&data)[i / PIECE] = {};
    return data;
  }
  __device__ __forceinline__ void write(char* tensor, i64 row, int u, Data data) const {
#pragma unroll
    for (int i = 0; i < Form::BYTES; i += PIECE)
      if (has(u, i))
        tilescale::write<PIECE, ELEMENT, ALIGNED>(tensor + offset(row) + u * Form::DATA + i, left(u, i),
                                                  reinterpret_cast<const Pack<PIECE>*>(&data)[i / PIECE]);
  }

 private:
  __device__ __forceinline__ i64 left(int u, int offset) const { return ALIGNED ? PIECE : bytes - at(u) - offset; }
};

// Elements of the normalized rows that share a scale, where they are quantized: all of them, by a given one; a row;
// GROUP columns of a row. For the latter two the largest magnitude becomes LARGEST.
enum Scaling { NOT_QUANTIZED, TENSOR, ROW, GROUPS };
#define TILESCALE_LARGEST 448.f  // of float8_e4m3
#define TILESCALE_LEAST 1e-12f  // lower bound of the largest magnitude

// The scale of elements, from their largest magnitude; POWER: the next power of two.
template <bool POWER>
__device__ __forceinline__ float scale_of(float most) {
  const float scale = (most < TILESCALE_LEAST ? TILESCALE_LEAST : most) * (1 / TILESCALE_LARGEST);
  const unsigned fraction = 0x7fffff;
  return POWER && scale == scale ? __uint_as_float((__float_as_uint(scale) + fraction) & ~fraction) : scale;
}

// The factor that replaces `scale` where elements are also divided by their own scale; `most` is the largest magnitude of the
// elements. The inverse of a power of two has the opposite exponent. Other divisions do not wait for `scale`.
template <bool POWER>
__device__ __forceinline__ float over_scale(float most, float scale) {
  if (POWER) return scale * __uint_as_float(0x7f000000 - __float_as_uint(scale_of<true>(scale * most)));
  return fminf(__fdividef(TILESCALE_LARGEST, most), scale * (TILESCALE_LARGEST / TILESCALE_LEAST));
}

// The scales of a row's groups from `first` on, of which this block has `columns` columns: as float32, or as exponents
// (UE8M0), four groups in a word, where words of adjacent rows are adjacent. Zeros complete the last word of a row.
template <typename T, typename Scale>
__device__ __forceinline__ void write_scales(const Exchange& x, int row, int first, int columns, Scale scale) {
  const int all = static_cast<int>(x.bytes / sizeof(T) + GROUP - 1) / GROUP, end = first + (columns + GROUP - 1) / GROUP;
  if (x.packed == 0) {
#pragma unroll 1
    for (int g = first + threadIdx.x; g < end; g += blockDim.x) x.scales[row * all + g] = scale(g - first);
  } else {
    unsigned char* exponents = reinterpret_cast<unsigned char*>(x.scales) + 4 * row;
#pragma unroll 1
    for (int g = first + threadIdx.x; g < (end < all ? end : (all + 3) / 4 * 4); g += blockDim.x)
      exponents[4 * x.packed * (g / 4) + g % 4] = g < end ? __float_as_uint(scale(g - first)) >> 23 : 0;
  }
}

// Float8 elements; `value(i)` is one.
template <int COUNT, typename Value>
__device__ __forceinline__ Pack<COUNT> float8s(Value value) {
  auto two = [&](int i) -> unsigned {
    return __nv_cvt_float2_to_fp8x2(make_float2(value(i), value(i + 1)), __NV_SATFINITE, __NV_E4M3);
  };
  Pack<COUNT> pack;
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) pack.words[i / 4] = two(i) | two(i + 2) << 16;
  return pack;
}

// Each row of the target becomes the sum over all ranks plus the residual, and that of `normed` the same divided by its
// root mean square, times the weight; CENTERED: minus its mean, divided by its deviation, times the weight, plus the bias.
// The sum is rounded before the addition of the residual, and so is the result.
//
// In one step every rank sends each row to all. In two (TWICE) every rank sends it to one rank, another one for the
// next row, which sends its sum to all. All ranks normalize all rows: so no more is sent than the sum alone.
//
// Few rows, of one unit per thread: the next row is sent before the sum of a row. Many rows: it is sent when the sum is
// there, while the blocks of the cluster exchange their statistics. Before that the stores would delay what follows the sum,
// while other clusters' rows occupy the network.
//
// The normalized rows are quantized from their values before rounding. Their elements times the weight are kept in float32
// until their scale is known, so that little follows the exchange of statistics.
template <typename Form, typename T, int RANKS, bool ALIGNED, int UNITS, bool TWICE, bool CENTERED, int SCALING,
          bool POWER>
__device__ __forceinline__ void reduce_norm_short(const Exchange& x) {
  typedef Pack<Form::BYTES> Data;
  typedef Elements<T, Form::BYTES> In;
  // Units that are polled at once: their words and those of all peers are in registers.
  constexpr int SIZE = sizeof(T), MOST = RANKS == 2 ? 4 : RANKS <= 4 ? 2 : 1, AT_ONCE = UNITS < MOST ? UNITS : MOST;
  constexpr bool FEW = UNITS == 1;
  constexpr int PIECES = Form::BYTES / PIECE, IN_PIECE = PIECE / SIZE;  // of a unit; elements
  static_assert(!CENTERED || SCALING == NOT_QUANTIZED, "float8 has no LayerNorm");
  const Cluster own = own_cluster();
  const OfGroups of_groups;
  if (SCALING == GROUPS) of_groups.clear(0);
  const OfCluster of_cluster(own);  // the others' maxima follow its barrier
  const int columns = static_cast<int>(x.bytes) / SIZE;
  const float per_column = 1.f / columns;
  const ThreadUnits<Form, SIZE, ALIGNED> part(x, own.block);
  auto read_units = [&](const char* tensor, i64 row, Data(&data)[UNITS]) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u) data[u] = part.read(tensor, row, u);
  };
  follow_grid();
  const float given_inverse = SCALING == TENSOR ? 1 / *x.scales : 0;
  Data mine[UNITS], next[UNITS], weight[UNITS];
  auto read_next = [&](int row) {
    if (row < x.rows) read_units(x.source, row * x.bytes, next);
  };
  read_next(own.cluster);
  const Short<Form, RANKS> by(x, Share(0, part.units));
  auto sums = [&](int row) { return !TWICE || row % RANKS == x.rank; };
  auto send_all = [&](int set, int unit, Data data) {
#pragma unroll
    for (int i = 0; i < RANKS - 1; ++i) by.send(by.group.peer(i), set, unit, data);
  };
  auto message = [&](int step, int u) { return u < UNITS && part.unit(u) >= 0 ? step * part.units + part.unit(u) : -1; };
  // The local data of a row, number `step` of this cluster.
  auto send_next = [&](int row, int step) {
    if (row >= x.rows || (TWICE && sums(row))) return;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int unit = message(step, u);
      if (TWICE)
        by.send(row % RANKS, 0, unit, next[u]);
      else
        send_all(0, unit, next[u]);
    }
  };
  auto factor = [&](int u, int e) { return In::at(weight[u], e) + x.weight_offset; };
  send_next(own.cluster, 0);
  read_units(x.weight, 0, weight);
  of_cluster.ready();
  bool here = true;
  unsigned sums_made = 0;
  for (int row = own.cluster, step = 0; row < x.rows; row += own.clusters, ++step) {
    const i64 at = row * x.bytes;
    const int following = row + own.clusters;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      mine[u] = next[u];
      if (!FEW) keep_narrow(weight[u]);
    }
    if (FEW) {
      read_next(following);
      send_next(following, step + 1);
    }
    Data added[UNITS] = {};
    if (sums(row) && x.residual != nullptr) read_units(x.residual, at, added);
    Statistics statistics = {0, 0};
#pragma unroll
    for (int first = 0; first < UNITS; first += AT_ONCE) {
      auto unit_of = [&](int i) { return message(step, first + i); };
      // Threads with missing peers continue to the sum with the others, and write nothing.
      if (sums(row)) {
        // Of the other ranks, in order.
        Data given[AT_ONCE][RANKS - 1];
        here = by.receive_several(0, unit_of, [&](int i) { return i < x.rank ? i : i + 1; }, given) && here;
#pragma unroll
        for (int i = 0; i < AT_ONCE && first + i < UNITS; ++i) {
          Data parts[RANKS], &sum = mine[first + i];
#pragma unroll
          for (int r = 0; r < RANKS; ++r)
            parts[r] = r < x.rank ? given[i][r < RANKS - 1 ? r : 0] : given[i][r > 0 ? r - 1 : 0];
          sum = part.within(first + i, Adder<T>::sum(reduced<T, SUM>(parts, sum, x.rank), added[first + i]));
        }
      } else {
        Data given[AT_ONCE][1];
        here = by.receive_several(1, unit_of, [&](int) { return row % RANKS; }, given) && here;
#pragma unroll
        for (int i = 0; i < AT_ONCE && first + i < UNITS; ++i) mine[first + i] = part.within(first + i, given[i][0]);
      }
#pragma unroll
      for (int u = first; u < first + AT_ONCE && u < UNITS; ++u) {
        if (TWICE && sums(row)) send_all(1, here ? message(step, u) : -1, mine[u]);
        if (here) part.write(x.target, at, u, mine[u]);
        if (!FEW) keep_narrow(mine[u]);
        float sum[PIECES] = {};
#pragma unroll
        for (int e = 0; e < In::COUNT; ++e) {
          const float y = In::at(mine[u], e);  // 0 beyond the row
          sum[e / IN_PIECE] += CENTERED ? y : y * y;
        }
        statistics.sum += PIECES == 1 ? sum[0] : sum[0] + sum[PIECES - 1];
      }
    }
    if (!FEW) read_next(following);
    auto give = [&] { of_cluster.template give<SCALING == ROW>(statistics, ++sums_made); };
    if (SCALING != ROW) give();
    // Normalized elements, times the root mean square.
    float weighted[UNITS][In::COUNT];
    if constexpr (SCALING != NOT_QUANTIZED) {
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        float most[PIECES] = {};  // a piece is in one group
#pragma unroll
        for (int e = 0; e < In::COUNT; ++e) {
          weighted[u][e] = In::at(mine[u], e) * factor(u, e);
          most[e / IN_PIECE] = larger_magnitude(most[e / IN_PIECE], weighted[u][e]);
        }
        const int group = part.group(u, 0);
        const bool same = group == part.group(u, PIECES - 1);
        const float first = larger(most[0], SCALING == ROW || same ? most[PIECES - 1] : 0);
        if (SCALING == ROW) statistics.most = larger(statistics.most, first);
        if (SCALING == GROUPS) of_groups.add(step, group, first, same ? 0 : most[PIECES - 1]);
      }
    }
    if (SCALING == ROW) give();
    if (!FEW) send_next(following, step + 1);
    float largest[UNITS][PIECES] = {};  // of a piece's group
    if constexpr (SCALING == GROUPS) {
      of_groups.clear(step + 1);
      __syncthreads();
#pragma unroll
      for (int u = 0; u < UNITS; ++u)
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
          if (part.has(u, p * PIECE)) largest[u][p] = of_groups.of(step, part.group(u, p));
    }
    statistics = of_cluster.template take<SCALING == ROW>(sums_made);
    float mean = 0;
    if constexpr (CENTERED) {
      mean = statistics.sum * per_column;
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
      if (x.bias != nullptr) read_units(x.bias, 0, added);
      of_cluster.template give<false>(statistics, ++sums_made);
      statistics = of_cluster.template take<false>(sums_made);
    }
    const float scale = rsqrtf(statistics.sum * per_column + x.eps);
    if (SCALING == NOT_QUANTIZED || x.normed != nullptr) {
      auto value = [&](int u, int e) {
        if constexpr (SCALING != NOT_QUANTIZED) return weighted[u][e] * scale;
        return CENTERED ? (In::at(mine[u], e) - mean) * scale * factor(u, e) + In::at(added[u], e)
                        : In::at(mine[u], e) * scale * factor(u, e);
      };
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        const Data normed = narrow<T, Form::BYTES>([&](int e) { return value(u, e); });
        if (here) part.write(x.normed, at, u, normed);
      }
    }
    if constexpr (SCALING != NOT_QUANTIZED) {
      const float by_row = SCALING == TENSOR ? scale * given_inverse : over_scale<POWER>(statistics.most, scale);
      char* quantized = x.quantized + part.offset(at) / SIZE;
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
          const bool has = here && part.has(u, p * PIECE);
          const float by = SCALING == GROUPS ? over_scale<POWER>(largest[u][p], scale) : by_row;
          const auto pack = float8s<IN_PIECE>([&](int e) { return weighted[u][p * IN_PIECE + e] * by; });
          const int left = ALIGNED ? IN_PIECE : (part.bytes - part.at(u)) / SIZE - p * IN_PIECE;
          if (has) write<IN_PIECE, 1, ALIGNED>(quantized + u * (Form::DATA / SIZE) + p * IN_PIECE, left, pack);
        }
      }
      auto scale_of_group = [&](int group) { return scale_of<POWER>(scale * of_groups.of(step, group)); };
      if (SCALING == ROW && here && own.block == 0 && threadIdx.x == 0)
        x.scales[row] = scale_of<POWER>(scale * statistics.most);
      if (SCALING == GROUPS && here)
        write_scales<T>(x, row, part.begin / SIZE / GROUP, part.bytes / SIZE, scale_of_group);
    }
  }
  by.end();
}

}  // namespace tilescale

#endif
