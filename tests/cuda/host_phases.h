// SPDX-License-Identifier: MIT
// Threads of a block that wait for a phase of an mbarrier. What headers/phases.cuh needs on a host precedes it; the waits
// follow.
#ifdef AFTER_HEADERS

using namespace tilescale;

struct Barrier {};

enum { SIZE = HEAD_WORDS + 3 * ROW_WORDS };

// Waits of `threads` threads of rank 1 of 3 for a phase that is complete after `attempts` of each of them, or never if
// negative. The reports of the ranks and the row of the host are left in `reports`. Returns how often the grid ended.
extern "C" int run(i64* reports, int threads, int attempts, int parity, i64 limit, int has_failed,
                   const char* name) {
  i64 *own = reports + SIZE, *host = reports + 3 * SIZE;
  own[MIRROR] = reinterpret_cast<i64>(host), own[SLOT] = own[RANK] = 1, own[STRIDE] = SIZE, own[RANKS] = 3;
  own[HEAD_WORDS + ROW_WORDS] = has_failed ? COMPLETE : EMPTY;
  blockIdx = {3, 1, 0}, ended = 0, over = false;
  std::vector<std::thread> block;
  for (int thread = 0; thread < threads; ++thread)
    block.emplace_back([=] {
      blockIdx = {3, 1, 0}, left = attempts;
      Bounded<Barrier> barriers[4];
      try {
        barriers[2].wait(parity, limit, own, 5, name, 2);
      } catch (End) {
      }
    });
  for (auto& thread : block) thread.join();
  return ended;
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
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline unsigned long long atomicCAS(unsigned long long* at, unsigned long long old, unsigned long long value) {
  __atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return old;
}

// The end of a grid ends all of its threads, at their next look at the barrier.
struct End {};
static std::atomic<int> ended;
static std::atomic<bool> over;
static thread_local int left;
inline void trap() {
  ++ended;
  over = true;
  throw End();
}
#define TRAP trap()
inline void leave_if_over() {
  if (over) throw End();
}
inline bool try_wait() {
  leave_if_over();
  return left-- == 0;
}
#define TRY_WAIT try_wait()
inline void __nanosleep(unsigned ns) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
  leave_if_over();
}

#endif
