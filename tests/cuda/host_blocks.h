// SPDX-License-Identifier: MIT
// Blocks of several devices as threads of this process: host versions of the needs of headers/messages.cuh.
#include <pthread.h>
#include <sched.h>
#include <math.h>
#include <string.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dim {
  unsigned x, y, z;
};
static thread_local Dim threadIdx, blockIdx, blockDim, gridDim;

enum { LINE_THREADS_HERE = 2 };  // of a line, here all of a warp: blocks have few threads
enum { GROUPS_HERE = 4 };        // of columns that a block has at most

struct Line {
  std::barrier<> together{LINE_THREADS_HERE};
  std::atomic<bool> any{false};
  std::atomic<unsigned long> number{0};
  float values[LINE_THREADS_HERE];
};
struct Block {
  std::barrier<> together;
  std::atomic<bool> all{true};
  std::vector<Line> lines;
  explicit Block(int threads) : together(threads), lines(threads / LINE_THREADS_HERE) {}
};
static thread_local Block* block;

struct Statistics {
  float sum, most;
};

// Blocks, with the parts of all their threads by the number of a sum, and the largest numbers of groups of each.
struct Blocks {
  std::barrier<> together;
  std::vector<Statistics> parts[2];
  std::vector<std::atomic<unsigned>> largest[3];
  const int size, number;
  Blocks(int blocks, int threads, int number)
      : together(blocks * threads), size(blocks), number(number) {
    for (auto& turn : parts) turn.resize(blocks * threads);
    for (auto& turn : largest) turn = std::vector<std::atomic<unsigned>>(blocks * GROUPS_HERE);
  }
};
static thread_local Blocks* blocks_together;

inline void __syncthreads() { block->together.arrive_and_wait(); }
inline int __syncthreads_and(int mine) {
  if (!mine) block->all = false;
  __syncthreads();
  bool result = block->all;
  __syncthreads();
  if (threadIdx.x == 0) block->all = true;
  __syncthreads();
  return result;
}

inline float rsqrtf(float value) { return 1 / sqrtf(value); }

typedef _Float16 __half;
struct __nv_bfloat16 {
  unsigned short bits;
};
inline float __half2float(__half value) { return value; }
inline __half __float2half_rn(float value) { return static_cast<__half>(value); }
inline float __bfloat162float(__nv_bfloat16 value) {
  unsigned bits = static_cast<unsigned>(value.bits) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
struct __half2 {
  __half x, y;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline __half2 __hadd2(__half2 a, __half2 b) { return __floats2half2_rn(float(a.x) + b.x, float(a.y) + b.y); }
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) {
  auto sum = [](__nv_bfloat16 x, __nv_bfloat16 y) { return __bfloat162float(x) + __bfloat162float(y); };
  return __floats2bfloat162_rn(sum(a.x, b.x), sum(a.y, b.y));
}
inline float __fdividef(float x, float y) { return x / y; }

// A float of 8 bits: the nearest one, the even one of two, the largest one for what is larger (cuda_fp8.h, SATFINITE).
template <int MANTISSA, int BIAS, unsigned LARGEST>
struct Float8 {
  unsigned char bits;
  Float8() = default;
  explicit Float8(float value) {
    unsigned best = 0;
    for (unsigned code = 1; code <= LARGEST; ++code) {
      float here = fabsf(magnitude(code) - fabsf(value)), there = fabsf(magnitude(best) - fabsf(value));
      if (here < there || (here == there && code % 2 == 0)) best = code;
    }
    bits = value != value ? 0x7f : best | (signbit(value) ? 0x80 : 0);
  }
  explicit operator float() const { return bits & 0x80 ? -magnitude(bits & 0x7f) : magnitude(bits); }
  static float magnitude(unsigned code) {
    if (code > LARGEST) return NAN;
    int exponent = code >> MANTISSA, fraction = code & ((1 << MANTISSA) - 1);
    return ldexpf(exponent ? fraction + (1 << MANTISSA) : fraction, (exponent ? exponent : 1) - BIAS - MANTISSA);
  }
};
typedef Float8<3, 7, 0x7e> __nv_fp8_e4m3;
typedef Float8<2, 15, 0x7b> __nv_fp8_e5m2;
struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
enum { __NV_SATFINITE, __NV_E4M3 };
inline unsigned short __nv_cvt_float2_to_fp8x2(float2 pair, int, int) {
  return __nv_fp8_e4m3(pair.x).bits | __nv_fp8_e4m3(pair.y).bits << 8;
}

inline __half2 __nv_cvt_fp8x2_to_halfraw2(unsigned short pair, int) {
  __nv_fp8_e4m3 x, y;
  x.bits = pair & 0xff, y.bits = pair >> 8;
  return {static_cast<__half>(static_cast<float>(x)), static_cast<__half>(static_cast<float>(y))};
}
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }

namespace tilescale {

typedef long i64;
typedef unsigned long u64;
enum Kind { TIMEOUT, OUTSIDE, ABSENT, DIFFERENT, ROWS };
enum Outcome { READY, LATE, STOPPED };

// Word 0: whether all waits are stopped; then the first failure.
inline void fail(i64* report, Kind kind, int site, i64 index, i64 expected, i64 seen) {
  i64 none = 0;
  if (!__atomic_compare_exchange_n(report + 1, &none, 1 + kind, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return;
  report[2] = site, report[3] = index, report[4] = expected, report[5] = seen;
  __atomic_store_n(report, 1, __ATOMIC_SEQ_CST);
}
struct Alone {
  bool operator()(bool mine) const { return mine; }
};
template <typename Ready, typename Any = Alone>
inline Outcome await(Ready ready, i64 limit, const i64* report, Any any = {}) {
  auto begin = std::chrono::steady_clock::now();
  for (;; sched_yield()) {
    if (ready()) return READY;
    if (any(__atomic_load_n(report, __ATOMIC_SEQ_CST))) return STOPPED;
    if (any(std::chrono::steady_clock::now() - begin > std::chrono::nanoseconds(limit))) return LATE;
  }
}
inline unsigned load_acquire(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline i64 load_acquire(const i64* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void store_relaxed(int* at, int value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
inline void store_relaxed(i64* at, i64 value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }

struct alignas(16) Words {
  u64 first, second;
};
inline void store_words(Words* at, Words words) {
  // In either order, as elements of a vector are.
  if (threadIdx.x % 2) __atomic_store_n(&at->first, words.first, __ATOMIC_RELAXED);
  __atomic_store_n(&at->second, words.second, __ATOMIC_RELAXED);
  __atomic_store_n(&at->first, words.first, __ATOMIC_RELAXED);
}
inline Words load_words(const Words* at) {
  return {__atomic_load_n(&at->first, __ATOMIC_RELAXED), __atomic_load_n(&at->second, __ATOMIC_RELAXED)};
}
inline Words numbered(unsigned first, unsigned second, unsigned number) {
  u64 above = static_cast<u64>(number) << 32;
  return {above | first, above | second};
}
inline bool have(Words words, unsigned number) { return words.first >> 32 == number && words.second >> 32 == number; }
enum { WARP_LANES = LINE_THREADS_HERE, LINE_THREADS = LINE_THREADS_HERE };
inline Line& own_line() { return block->lines[threadIdx.x / LINE_THREADS]; }
inline bool any_of_warp(bool mine) {
  Line& line = own_line();
  if (mine) line.any = true;
  line.together.arrive_and_wait();
  bool result = line.any;
  line.together.arrive_and_wait();
  line.any = false;
  line.together.arrive_and_wait();
  return result;
}
// Atomically: a reader of the number sees all of it.
inline void store_line(Words* at, Words words, u64 end, bool exists) {
  const bool last = threadIdx.x % LINE_THREADS == LINE_THREADS - 1;
  if (exists) __atomic_store_n(&at->first, words.first, __ATOMIC_RELAXED);
  if (exists && !last) __atomic_store_n(&at->second, words.second, __ATOMIC_RELAXED);
  own_line().together.arrive_and_wait();
  if (exists && last) __atomic_store_n(&at->second, end, __ATOMIC_RELEASE);
}
inline Words load_line(const Words* at, bool exists) {
  Words words = {0, 0};
  const bool last = exists && threadIdx.x % LINE_THREADS == LINE_THREADS - 1;
  if (last) words = {__atomic_load_n(&at->first, __ATOMIC_RELAXED), __atomic_load_n(&at->second, __ATOMIC_ACQUIRE)};
  own_line().together.arrive_and_wait();
  if (last) words.first = __atomic_load_n(&at->first, __ATOMIC_RELAXED);
  return last || !exists ? words : load_words(at);
}
inline u64 end_of_line(Words words) {
  Line& line = own_line();
  if (threadIdx.x % LINE_THREADS == LINE_THREADS - 1) line.number = words.second;
  line.together.arrive_and_wait();
  u64 result = line.number;
  line.together.arrive_and_wait();
  return result;
}
inline unsigned number_of_line(Words words) { return end_of_line(words); }
struct Cluster {
  int blocks, block, clusters, cluster;
};
inline Cluster own_cluster() {
  const int size = blocks_together->size;
  return {size, static_cast<int>(blockIdx.x) % size, static_cast<int>(gridDim.x) / size, blocks_together->number};
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline float scale_of_line(Words words) { return __uint_as_float(end_of_line(words) >> 32); }
inline void __syncwarp() { own_line().together.arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float value, int step) {
  Line& line = own_line();
  line.values[threadIdx.x % LINE_THREADS] = value;
  line.together.arrive_and_wait();
  float result = line.values[threadIdx.x % LINE_THREADS ^ step];
  line.together.arrive_and_wait();
  return result;
}
using ::Statistics;
inline float larger_magnitude(float most, float value) {
  return value != value || most != most ? NAN : fabsf(value) > most ? fabsf(value) : most;
}
inline float larger(float a, float b) { return __float_as_uint(a) > __float_as_uint(b) ? a : b; }
// As on a GPU, a thread with a sum has all its parts, and may be ahead of threads that still read them.
class OfCluster {
 public:
  explicit OfCluster(Cluster own) : own_(own) {}
  void ready() const { blocks_together->together.arrive_and_wait(); }
  template <bool MOST>
  void give(Statistics mine, unsigned number) const {
    blocks_together->parts[number % 2][own_.block * blockDim.x + threadIdx.x] = mine;
  }
  template <bool MOST>
  Statistics take(unsigned number) const {
    const std::vector<Statistics>& parts = blocks_together->parts[number % 2];
    blocks_together->together.arrive_and_wait();
    Statistics found = {0, 0};
    for (Statistics part : parts) found = {found.sum + part.sum, MOST ? larger(found.most, part.most) : 0};
    return found;
  }

 private:
  const Cluster own_;
};
class OfGroups {
 public:
  void clear(int row) const {
    for (int i = threadIdx.x; i < GROUPS_HERE; i += blockDim.x) largest(row, i) = 0;
  }
  void add(int row, int group, float value, float next) const {
    raise(row, group, value);
    if (next != 0) raise(row, group + 1, next);
  }
  float of(int row, int group) const { return __uint_as_float(largest(row, group)); }

 private:
  static void raise(int row, int group, float value) {
    unsigned bits = __float_as_uint(value), seen = largest(row, group);
    while (seen < bits && !largest(row, group).compare_exchange_weak(seen, bits)) {}
  }
  static std::atomic<unsigned>& largest(int row, int group) {
    return blocks_together->largest[row % 3][blockIdx.x % blocks_together->size * GROUPS_HERE + group];
  }
};
inline void follow_grid() {}
inline void order_stores() { std::atomic_thread_fence(std::memory_order_seq_cst); }

}  // namespace tilescale

// Runs each device's kernel, all at once.
template <typename Argument>
inline void on_all(void (**kernels)(Argument), const Argument* arguments, int ranks, int blocks, int threads, int cluster) {
  std::vector<std::thread> running;
  std::vector<Block*> made;
  std::vector<Blocks*> clusters;
  for (int rank = 0; rank < ranks; ++rank)
    for (unsigned b = 0; b < static_cast<unsigned>(blocks); ++b) {
      Block* own = new Block(threads);
      made.push_back(own);
      if (b % cluster == 0) clusters.push_back(new Blocks(cluster, threads, b / cluster));
      Blocks* around = clusters.back();
      for (unsigned t = 0; t < static_cast<unsigned>(threads); ++t)
        running.emplace_back([=] {
          threadIdx = {t, 0, 0}, blockIdx = {b, 0, 0}, block = own, blocks_together = around;
          blockDim = {static_cast<unsigned>(threads), 1, 1}, gridDim = {static_cast<unsigned>(blocks), 1, 1};
          kernels[rank](arguments[rank]);
        });
    }
  for (auto& thread : running) thread.join();
  for (Block* own : made) delete own;
  for (Blocks* around : clusters) delete around;
}
