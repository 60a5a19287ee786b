// SPDX-License-Identifier: MIT
// Collectives that send floats as float8 (e4m3): a line (words.cuh) has LINE_FLOATS of them, their scale, a power of two,
// and the message's number. Needs messages.cuh and sums.cuh.
//
// Each warp of the grid exchanges messages of a few lines with the same warp of every peer, independently of other warps.
// In every iteration it sends a message, and then takes the messages of the previous iteration, which have had that time
// to arrive.
#ifndef TILESCALE_FLOAT8_MESSAGES_CUH
#define TILESCALE_FLOAT8_MESSAGES_CUH

namespace tilescale {

enum { FLOAT8_SLOTS = 4, EIGHT = 8, LINE_FLOATS = EIGHT * (2 * LINE_THREADS - 1), MESSAGE_LINES = WARP_LANES / LINE_THREADS };

// The bits of 1.75 times the largest power of two of a type: a larger number, with its scale, could be rounded to the next
// power, which the type does not have.
template <typename T>
struct Last {
  enum : unsigned { BITS = 0x7f600000 };
};
template <>
struct Last<__half> {
  enum : unsigned { BITS = 0x47600000 };
};

// This thread's floats of a line: two times eight adjacent ones, of which the line's last thread has the first eight only.
struct Floats {
  float at[2 * EIGHT];
};

// The same in their type.
template <typename T>
struct Loaded {
  enum { PACKS = EIGHT * static_cast<int>(sizeof(T)) / UNIT_BYTES, OF_PACK = EIGHT / PACKS };  // for eight; elements
  Pack<UNIT_BYTES> packs[2 * PACKS];
  __device__ __forceinline__ Floats floats() const {
    Floats x;
#pragma unroll
    for (int i = 0; i < 2 * EIGHT; ++i) x.at[i] = wide(reinterpret_cast<const T*>(&packs[i / OF_PACK])[i % OF_PACK]);
    return x;
  }
};

// The bytes of a thread in a line, of which the last thread's second word is the scale and the number.
struct Line {
  Words words;
  float scale;
};

__device__ __forceinline__ unsigned float8_pair(float x, float y) {
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
}

// All threads of a warp, here and in the following functions: floats over the least power of two by which all of the line
// fit float8. A line with an infinity or a NaN has the scale NaN.
template <typename T>
__device__ __forceinline__ Line narrowed(Floats x) {
  float top = 0;
#pragma unroll
  for (int i = 0; i < 2 * EIGHT; ++i) top = larger_magnitude(top, x.at[i]);
#pragma unroll
  for (int step = LINE_THREADS / 2; step > 0; step /= 2) top = larger(top, __shfl_xor_sync(~0u, top, step));
  const int least = (127 - 117) << 23, most = 0x43e00000;  // 2^-117, so that scales are normal numbers; 448
  const int bits = static_cast<int>(__float_as_uint(top)), exponent = (((bits > least ? bits : least) - most - 1) >> 23) + 1;
  const float scale = __uint_as_float((127 + exponent) << 23), inverse = __uint_as_float((127 - exponent) << 23);
  if (bits > static_cast<int>(Last<T>::BITS)) {
#pragma unroll
    for (int i = 0; i < 2 * EIGHT; ++i) x.at[i] = fmaxf(fminf(x.at[i], 240 * scale), -240 * scale);
  }
  unsigned packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    auto value = [&](int j) { return x.at[4 * i + j] * inverse; };
    packed[i] = float8_pair(value(0), value(1)) | float8_pair(value(2), value(3)) << 16;
  }
  auto word = [&](int i) { return packed[i] | static_cast<u64>(packed[i + 1]) << 32; };
  return {{word(0), word(2)}, bits < 0x7f800000 ? scale : __uint_as_float(0x7fc00000)};
}

__device__ __forceinline__ Floats widened(const Line& line) {
  Floats x;
#pragma unroll
  for (int i = 0; i < EIGHT; ++i) {
    const u64 word = i < EIGHT / 2 ? line.words.first : line.words.second;
    const unsigned short pair = static_cast<unsigned short>(word >> i % (EIGHT / 2) * 16);
    const float2 wide = __half22float2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3));
    x.at[2 * i] = wide.x * line.scale, x.at[2 * i + 1] = wide.y * line.scale;
  }
  return x;
}

template <typename T, int RANKS, bool ALIGNED>
struct Float8Messages {
  enum { PACKS = Loaded<T>::PACKS, SIZE = static_cast<int>(sizeof(T)) };
  const Exchange& x;
  const int warp, warps, lane;
  const Group<RANKS> group;
  const unsigned before;
  const int messages;

  __device__ __forceinline__ explicit Float8Messages(const Exchange& exchange)
      : x(exchange),
        warp((blockIdx.x * blockDim.x + threadIdx.x) / WARP_LANES),
        warps(gridDim.x * blockDim.x / WARP_LANES),
        lane(threadIdx.x % LINE_THREADS),
        group{exchange, warp},
        before(*const_cast<const volatile unsigned*>(exchange.counts + warp)),
        messages(count(exchange.bytes)) {}

  // This thread's line of a message.
  __device__ __forceinline__ i64 line(int message) const {
    return (static_cast<i64>(message) * warps + warp) * MESSAGE_LINES + threadIdx.x % WARP_LANES / LINE_THREADS;
  }
  __device__ __forceinline__ bool exists(int message) const { return line(message) * LINE_FLOATS * SIZE < x.bytes; }
  // Bytes from the begin of a part to this thread's first or second eight floats.
  __device__ __forceinline__ i64 place(int message, int second) const {
    return (line(message) * LINE_FLOATS + (second * LINE_THREADS + lane) * EIGHT) * SIZE;
  }
  __device__ __forceinline__ bool has(int second) const { return second == 0 || lane < LINE_THREADS - 1; }
  __device__ __forceinline__ Loaded<T> read(const char* part, i64 bytes, int message) const {
    Loaded<T> loaded = {};
#pragma unroll
    for (int p = 0; p < 2 * PACKS; ++p) {
      const i64 at = place(message, p / PACKS) + p % PACKS * UNIT_BYTES;
      if (has(p / PACKS)) loaded.packs[p] = tilescale::read<UNIT_BYTES, SIZE, ALIGNED>(part + at, bytes - at);
    }
    return loaded;
  }
  __device__ __forceinline__ void write(char* part, i64 bytes, int message, const Floats& floats) const {
#pragma unroll
    for (int p = 0; p < 2 * PACKS; ++p) {
      const i64 at = place(message, p / PACKS) + p % PACKS * UNIT_BYTES;
      const auto pack = narrow<T, UNIT_BYTES>([&](int i) { return floats.at[p * Loaded<T>::OF_PACK + i]; });
      if (has(p / PACKS)) tilescale::write<UNIT_BYTES, SIZE, ALIGNED>(part + at, bytes - at, pack);
    }
  }
  __device__ __forceinline__ void send(int peer, int set, int message, const Line& line) const {
    const u64 end = static_cast<u64>(__float_as_uint(line.scale)) << 32 | number(message);
    store_line(slot(x.rank, peer, set, message), line.words, end, exists(message));
  }
  __device__ __forceinline__ void send_all(int set, int message, const Line& line) const {
#pragma unroll
    for (int i = 0; i < RANKS - 1; ++i) send(group.peer(i), set, message, line);
  }
  // The i-th peer in the order of ranks.
  __device__ __forceinline__ int peer(int i) const { return i < x.rank ? i : i + 1; }
  // The lines of all peers in that order. False: a wait failed.
  __device__ __forceinline__ bool receive(int set, int message, Line (&lines)[RANKS - 1]) const {
    auto here = [&] {
      bool missing = false;
#pragma unroll
      for (int i = 0; i < RANKS - 1; ++i) lines[i].words = load_line(slot(peer(i), x.rank, set, message), exists(message));
#pragma unroll
      for (int i = 0; i < RANKS - 1; ++i)
        missing = (number_of_line(lines[i].words) != number(message) && exists(message)) || missing;
      return !any_of_warp(missing);
    };
    // Sums have a longer limit: the rank that misses a part must fail first, and name the sender.
    const Outcome outcome = await(here, 2 * (1 + set) * x.limit, x.report, InLines::Any());
#pragma unroll
    for (int i = 0; i < RANKS - 1; ++i) {
      const unsigned seen = number_of_line(lines[i].words);
      if (outcome == LATE && exists(message) && seen != number(message))
        report_absent(x.report, x.site, peer(i), number(message), seen);
      lines[i].scale = scale_of_line(lines[i].words);
      if (lane == LINE_THREADS - 1) lines[i].words.second = 0;
    }
    return outcome == READY;
  }
  // The sum of the ranks' parts in their order, this one's exact.
  __device__ __forceinline__ Floats sum(const Floats& mine, const Line (&lines)[RANKS - 1]) const {
    Floats total = {};
    auto add = [&](const Floats& part) {
#pragma unroll
      for (int i = 0; i < 2 * EIGHT; ++i) total.at[i] += part.at[i];
    };
#pragma unroll
    for (int i = 0; i < RANKS - 1; ++i) {
      if (i == x.rank) add(mine);
      add(widened(lines[i]));
    }
    if (x.rank == RANKS - 1) add(mine);
    return total;
  }
  // Last of all.
  __device__ __forceinline__ void end() const {
    __syncwarp();
    if (threadIdx.x % WARP_LANES == 0 && messages) x.counts[warp] = before + messages;
  }

 private:
  // Messages of this warp for parts of some bytes, each with a line at least.
  __device__ __forceinline__ int count(i64 bytes) const {
    const i64 line_bytes = LINE_FLOATS * SIZE, lines = (bytes + line_bytes - 1) / line_bytes;
    const i64 sets = (lines + MESSAGE_LINES - 1) / MESSAGE_LINES;
    return static_cast<int>((sets - warp + warps - 1) / warps);
  }
  __device__ __forceinline__ unsigned number(int message) const { return before + 1u + message; }
  __device__ __forceinline__ Words* slot(int sender, int receiver, int set, int message) const {
    return reinterpret_cast<Words*>(group.message(sender, receiver, number(message), FLOAT8_SLOTS, set)) +
           threadIdx.x % WARP_LANES;
  }
};

// Part r of the target becomes rank r's source, rounded for all ranks alike.
template <typename T, int RANKS, bool ALIGNED>
__device__ __forceinline__ void gather_float8(const Exchange& x) {
  follow_grid();
  const Float8Messages<T, RANKS, ALIGNED> by(x);
  Loaded<T> next = by.read(x.source, x.bytes, 0);
  for (int iteration = 0; iteration <= by.messages && by.messages > 0; ++iteration) {
    if (iteration < by.messages) {
      const Line line = narrowed<T>(next.floats());
      by.send_all(0, iteration, line);
      if (iteration + 1 < by.messages) next = by.read(x.source, x.bytes, iteration + 1);
      by.write(x.target + x.rank * x.target_step, x.bytes, iteration, widened(line));
    }
    if (iteration > 0) {
      Line lines[RANKS - 1];
      if (!by.receive(0, iteration - 1, lines)) return;
#pragma unroll
      for (int i = 0; i < RANKS - 1; ++i)
        by.write(x.target + by.peer(i) * x.target_step, x.bytes, iteration - 1, widened(lines[i]));
    }
  }
  by.end();
}

// The target becomes the sum of all ranks' parts for this rank.
template <typename T, int RANKS, bool ALIGNED>
__device__ __forceinline__ void scatter_float8(const Exchange& x) {
  follow_grid();
  const Float8Messages<T, RANKS, ALIGNED> by(x);
  auto part = [&](int i, int message) {
    return by.read(x.source + by.group.peer(i) * x.source_step, x.bytes, message);
  };
  Loaded<T> next = part(0, 0);
  for (int iteration = 0; iteration <= by.messages && by.messages > 0; ++iteration) {
    if (iteration < by.messages) {
      for (int i = 0; i < RANKS - 1; ++i)
        by.send(by.group.peer(i), 0, iteration, narrowed<T>((i == 0 ? next : part(i, iteration)).floats()));
      if (iteration + 1 < by.messages) next = part(0, iteration + 1);
    }
    if (iteration > 0) {
      Line lines[RANKS - 1];
      const Loaded<T> mine = by.read(x.source + x.rank * x.source_step, x.bytes, iteration - 1);
      if (!by.receive(0, iteration - 1, lines)) return;
      by.write(x.target, x.bytes, iteration - 1, by.sum(mine.floats(), lines));
    }
  }
  by.end();
}

// The target becomes the sum of all sources, part by part: each rank sums a part and sends it to all.
template <typename T, int RANKS, bool ALIGNED>
__device__ __forceinline__ void reduce_float8(const Exchange& x) {
  follow_grid();
  const Float8Messages<T, RANKS, ALIGNED> by(x);
  auto size = [&](int part) { return by.group.size(part); };
  auto part = [&](int i, int message) {
    const int peer = by.group.peer(i);
    return by.read(x.source + peer * x.source_step, size(peer), message);
  };
  Loaded<T> next = part(0, 0);
  for (int iteration = 0; iteration <= by.messages + 1 && by.messages > 0; ++iteration) {
    if (iteration < by.messages) {
      for (int i = 0; i < RANKS - 1; ++i)
        by.send(by.group.peer(i), 0, iteration, narrowed<T>((i == 0 ? next : part(i, iteration)).floats()));
      if (iteration + 1 < by.messages) next = part(0, iteration + 1);
    }
    if (iteration > 0 && iteration <= by.messages) {
      Line lines[RANKS - 1];
      const Loaded<T> mine = by.read(x.source + x.rank * x.source_step, size(x.rank), iteration - 1);
      if (!by.receive(0, iteration - 1, lines)) return;
      Floats total = by.sum(mine.floats(), lines);
#pragma unroll
      for (int i = 0; i < 2 * EIGHT; ++i) total.at[i] = rounded<T>(total.at[i]);  // may overflow to an infinity
      const Line line = narrowed<T>(total);
      by.send_all(1, iteration - 1, line);
      by.write(x.target + x.rank * x.target_step, size(x.rank), iteration - 1, widened(line));
    }
    if (iteration > 1) {
      Line lines[RANKS - 1];
      if (!by.receive(1, iteration - 2, lines)) return;
#pragma unroll
      for (int i = 0; i < RANKS - 1; ++i)
        by.write(x.target + by.peer(i) * x.target_step, size(by.peer(i)), iteration - 2, widened(lines[i]));
    }
  }
  by.end();
}

}  // namespace tilescale

#endif
