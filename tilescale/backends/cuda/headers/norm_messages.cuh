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
  const int flags = static_cast<int>((x.bytes + Form::DATA - 1) / Form::DATA), units = flags * Form::THREADS;
  const Short<Form, RANKS> by(x, x.total / x.bytes * flags, flags);
  const i64 begin = by.share.begin / flags, end = by.share.end / flags;
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
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
      const Data data = read_row(x.source + row * x.bytes, unit);
      if (TWICE)
        by.send(root_of(row), 0, row * units + unit, data);
      else
        send_all(0, row * units + unit, data);
    }
  };
  if (begin < end) send_row(begin);
  bool here = true;
  for (i64 row = begin; row < end; ++row) {
    if (row + 1 < end) send_row(row + 1);
    const i64 at = row * x.bytes;
    const int root = root_of(row);
    const bool sums = !TWICE || root == x.rank;
    Data mine[UNITS], added[UNITS] = {}, weight[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int unit = u * blockDim.x + threadIdx.x;
      if (unit >= units || !sums) continue;
      mine[u] = read_row(x.source + at, unit);
      if (x.residual != nullptr) added[u] = read_row(x.residual + at, unit);
    }
    float squares = 0;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int unit = u * blockDim.x + threadIdx.x;
      if (unit >= units) continue;
      Data given[RANKS];
      // Threads whose peers do not come go on to the barrier with the others, and write nothing.
      if (sums) {
        here = by.receive(0, row * units + unit, [](int) { return true; }, given) && here;
        mine[u] = reduced<T, SUM>(given, mine[u], x.rank);
#pragma unroll
        for (int i = 0; i < In::COUNT; ++i) In::set(mine[u], i, In::at(mine[u], i) + In::at(added[u], i));
        if (TWICE && here) send_all(1, row * units + unit, mine[u]);
      } else {
        here = by.receive(1, row * units + unit, [&](int r) { return r == root; }, given) && here;
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
          if (r == root) mine[u] = given[r];
      }
      const int room = Place<Form>(unit).room;
#pragma unroll
      for (int i = 0; i < In::COUNT; ++i) {
        const float y = In::at(mine[u], i);
        if (i * static_cast<int>(sizeof(T)) < room) squares += y * y;
      }
      if (here) write_row(x.target + at, unit, mine[u]);
      weight[u] = read_row(x.weight, unit);  // comes while the block adds up
    }
    const float mean = sum_of_block(squares, static_cast<int>(row % 2)) / (x.bytes / sizeof(T));
    const float scale = rsqrtf(mean + x.eps);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int unit = u * blockDim.x + threadIdx.x;
      if (unit >= units || !here) continue;
#pragma unroll
      for (int i = 0; i < In::COUNT; ++i) In::set(mine[u], i, In::at(mine[u], i) * scale * In::at(weight[u], i));
      write_row(x.normed + at, unit, mine[u]);
    }
  }
  by.end();
}

}  // namespace tilescale

#endif
