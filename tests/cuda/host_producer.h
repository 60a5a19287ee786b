// SPDX-License-Identifier: MIT
// A pipelined loop as stock TileLang specialises it: a producer of four warps, of which the first one loads, and a
// consumer. The needs of headers/sync.cuh on a host precede it, the loop follows. Each warp is one thread.
#ifdef AFTER_HEADERS

using namespace tilescale;

// An mbarrier of one arrival: the number of complete phases, of which a wait sees the parity alone.
struct Barrier {
  std::atomic<unsigned> complete{0};
  bool blocks(unsigned parity) const { return (complete & 1) == parity; }
};

constexpr int STAGES = 2, WARPS = 4;

static std::atomic<bool> over;

// Whether the phase completed before the end of the run.
template <typename Ready>
bool came(Ready ready) {
  for (; !ready(); std::this_thread::yield())
    if (over) return false;
  return true;
}

// Number of warps that wait forever, in a loop of `steps` steps whose first load waits for a flag. A warp that polls a
// barrier sees each of its phases, which take longer than a poll. So the consumer continues when all polling warps have
// seen the last phase.
// The flag is raised when the warps of a mask sleep, after a poll that did not find it.
extern "C" int stuck_warps(int steps, int sleepers) {
  Barrier full[STAGES], empty[STAGES];
  std::atomic<int> at[WARPS] = {}, asleep{0}, stuck{0};
  int flag = 0;
  i64 report[16] = {};
  over = consumed = false;
  asleep_once = 0;
  auto parity = [](int step) { return step / STAGES % 2 ^ 1; };
  auto producer = [&](unsigned warp) {
    threadIdx.x = 32 * warp;
    for (int i = 0; i < steps; at[warp] = ++i) {
      if (!came([&] { return !empty[i % STAGES].blocks(parity(i)); })) return void(++stuck);
      asleep |= (i == 0) << warp;
      if (i == 0) wait_by_producer<GE, int>(&flag, 0, 1, 1, 10'000'000'000l, report, 0);
      asleep &= ~(1 << warp);
      if (warp == 0) ++full[i % STAGES].complete;
    }
  };
  auto settled = [&] {
    for (int warp = 0, i; warp < WARPS; ++warp)
      if (i = at[warp]; !(asleep >> warp & 1) && i < steps && !empty[i % STAGES].blocks(parity(i))) return false;
    return true;
  };
  std::vector<std::thread> threads;
  for (unsigned warp = 0; warp < WARPS; ++warp) threads.emplace_back(producer, warp);
  came([&] { return (asleep_once & sleepers) == sleepers; });
  store_release(&flag, 1);
  for (int i = 0; i < steps; ++i) {
    came([&] { return !full[i % STAGES].blocks(i / STAGES % 2) && settled(); });
    ++empty[i % STAGES].complete;
  }
  consumed = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // no further arrivals
  over = true;
  for (auto& thread : threads) thread.join();
  return stuck;
}

#else

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline

struct Dim {
  unsigned x, y, z;
};
static thread_local Dim threadIdx, blockIdx;

inline long now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
inline void __syncwarp() {}
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
// Warps that did not find the flag; whether all steps were executed. The first warp polls again soon, others late.
static std::atomic<int> asleep_once;
static std::atomic<bool> consumed;
inline void __nanosleep(unsigned) {
  asleep_once |= 1 << threadIdx.x / 32;
  while (threadIdx.x && !consumed) std::this_thread::yield();
}
inline unsigned long long atomicCAS(unsigned long long* at, unsigned long long, unsigned long long) { return *at; }

#endif
