// SPDX-License-Identifier: MIT
// A block of a kernel of stock TileLang as threads of this process; integers only.
#ifndef AFTER_HEADERS
#include <barrier>
#include <thread>
#include <vector>

#define __global__
#define __launch_bounds__(...)
#define __shared__ static

struct Dim {
  unsigned x, y, z;
};
static thread_local Dim threadIdx;
static const Dim blockIdx{0, 0, 0};
static std::barrier<>* together;

struct int2 {
  int x, y;
};
static int2 make_int2(int x, int y) { return {x, y}; }
#define FOUR(type, of)                                              \
  struct type {                                                     \
    of x, y, z, w;                                                  \
  };                                                                \
  static type make_##type(of x, of y, of z, of w) { return {x, y, z, w}; }
FOUR(int4, int)
FOUR(ushort4, unsigned short)
static void __syncthreads() { together->arrive_and_wait(); }
#else

extern "C" void execute(int* out, int threads) {
  std::barrier<> block(threads);
  together = &block;
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i)
    running.emplace_back([=] {
      threadIdx = {unsigned(i), 0, 0};
      main_kernel(out);
    });
  for (auto& each : running) each.join();
}
#endif
