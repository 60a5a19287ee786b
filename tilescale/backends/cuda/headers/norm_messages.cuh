// SPDX-License-Identifier: MIT
// The all-reduce of rows with a residual and RMSNorm behind it, by short messages. A block has whole rows, and each of its
// threads UNITS units of a row in registers, from the sum to the norm. Stands after short_messages.cuh and block_sum.cuh.
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
  const int flags = static_cast<int>((x.bytes + Form::DATA - 1) / Form::DATA), units = flags * Form::THREADS;
  const Share rows(x.total / x.bytes);
  const Short<Form, RANKS> by(x, Share(rows.begin * flags, rows.end * flags));
  auto unit_of = [&](int u) {
    const int unit = u * blockDim.x + threadIdx.x;
    return u < UNITS && unit < units ? unit : -1;
  };
  auto read_row = [&](const char* row, int unit) {
    return read_unit<Form, sizeof(T), ALIGNED>(row, x.bytes, Place<Form>(unit));
  };
  auto write_row = [&](char* row, int unit, Data data) {
    write_unit<Form, sizeof(T), ALIGNED>(row, x.bytes, Place<Form>(unit), data);
  };
  auto root_of = [&](i64 row) { return static_cast<int>(row % RANKS); };
  auto send_all = [&](int set, i64 unit, Data data) {
#pragma unroll
    for (int i = 0; i < RANKS - 1; ++i) by.send(by.group.peer(i), set, unit, data);
  };
  auto send_row = [&](i64 row) {
    if (TWICE && root_of(row) == x.rank) return;
    Data data[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
      if (unit_of(u) >= 0) data[u] = read_row(x.source + row * x.bytes, unit_of(u));
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (unit_of(u) < 0) continue;
      if (TWICE)
        by.send(root_of(row), 0, row * units + unit_of(u), data[u]);
      else
        send_all(0, row * units + unit_of(u), data[u]);
    }
  };
  if (rows.begin < rows.end) send_row(rows.begin);
  bool here = true;
  for (i64 row = rows.begin; row < rows.end; ++row) {
    if (row + 1 < rows.end) send_row(row + 1);
    const i64 at = row * x.bytes;
    const int root = root_of(row);
    const bool sums = !TWICE || root == x.rank;
    Data mine[UNITS], added[UNITS] = {}, weight[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (unit_of(u) < 0 || !sums) continue;
      mine[u] = read_row(x.source + at, unit_of(u));
      if (x.residual != nullptr) added[u] = read_row(x.residual + at, unit_of(u));
    }
    float squares = 0;
#pragma unroll
    for (int first = 0; first < UNITS; first += AT_ONCE) {
      auto message = [&](int i) { return unit_of(first + i) < 0 ? -1 : row * units + unit_of(first + i); };
      // Threads whose peers do not come go on to the barrier with the others, and write nothing.
      if (sums) {
        Data given[AT_ONCE][RANKS];
        here = by.receive_several(0, message, [&](int r) { return r == x.rank ? -1 : r; }, given) && here;
#pragma unroll
        for (int i = 0; i < AT_ONCE && first + i < UNITS; ++i) {
          Data& sum = mine[first + i];
          sum = reduced<T, SUM>(given[i], sum, x.rank);
#pragma unroll
          for (int e = 0; e < In::COUNT; ++e) In::set(sum, e, In::at(sum, e) + In::at(added[first + i], e));
        }
      } else {
        Data given[AT_ONCE][1];
        here = by.receive_several(1, message, [&](int) { return root; }, given) && here;
#pragma unroll
        for (int i = 0; i < AT_ONCE && first + i < UNITS; ++i) mine[first + i] = given[i][0];
      }
#pragma unroll
      for (int u = first; u < first + AT_ONCE && u < UNITS; ++u) {
        const int unit = unit_of(u);
        if (unit < 0) continue;
        if (TWICE && sums && here) send_all(1, row * units + unit, mine[u]);
        const int room = Place<Form>(unit).room;
#pragma unroll
        for (int e = 0; e < In::COUNT; ++e) {
          const float y = In::at(mine[u], e);
          if (e * static_cast<int>(sizeof(T)) < room) squares += y * y;
        }
        if (here) write_row(x.target + at, unit, mine[u]);
        weight[u] = read_row(x.weight, unit);  // comes while the block adds up
      }
    }
    const float mean = sum_of_block(squares, static_cast<int>(row % 2)) / (x.bytes / sizeof(T));
    const float scale = rsqrtf(mean + x.eps);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (unit_of(u) < 0 || !here) continue;
#pragma unroll
      for (int e = 0; e < In::COUNT; ++e) In::set(mine[u], e, In::at(mine[u], e) * scale * In::at(weight[u], e));
      write_row(x.normed + at, unit_of(u), mine[u]);
    }
  }
  by.end();
}

}  // namespace tilescale

#endif
