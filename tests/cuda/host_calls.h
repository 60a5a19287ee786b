// SPDX-License-Identifier: MIT
// Calls of a small program on several devices, each block of one thread: the needs of
// headers/sync.cuh and headers/rendezvous.cuh on a host precede them, the calls follow.
#ifdef AFTER_HEADERS

using namespace tilescale;

// A rank's memory: its instances of the words, the flags and the inbox, its own counts, its report.
enum Place { WORDS = 0, FLAGS = 1024, INBOX = 2048, COUNTS = 3072, REPORT = 3584, BYTES = 4096 };

template <typename V>
static V* at(char* memory, int rank, Place place) {
  return reinterpret_cast<V*>(memory + rank * BYTES + place);
}

// The output of lowering/call_barriers.py for a program in which each block sends the number of the call to its
// counterparts. It waits for all of them, or for one, and synchronizes with them as it leaves. Returns the number of errors.
static long block_of_call(char* memory, int rank, int ranks, int call, bool waits_for_all, i64 limit) {
  int block = blockIdx.x, blocks = gridDim.x;
  i64 *words = at<i64>(memory, 0, WORDS), *report = at<i64>(memory, rank, REPORT);
  int *counts = at<int>(memory, rank, COUNTS), *flags = at<int>(memory, rank, FLAGS);
  int* inbox = at<int>(memory, rank, INBOX) + block * ranks;
  const i64 stride = BYTES / 8;
  long wrong = 0;
  if (block == 0)  // no rank has entered
    for (int b = 0; b < blocks; ++b) wrong += load_acquire(flags + b) != 0;
  come(words, stride, rank, ranks, counts, 7, report);
  enter(words, stride, rank, rank, ranks, counts, 7, limit, report, 0);
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    store_relaxed(at<int>(memory, peer, INBOX) + block * ranks + rank, call);
    signal<0, int>(at<int>(memory, peer, FLAGS), block, blocks, 1, report, 1);
  }
  wait<GE, int>(flags, block, blocks, waits_for_all ? ranks - 1 : 1, limit, report, 2);
  if (!waits_for_all) {
    leave(words, stride, rank, rank, ranks, counts, 8, limit, report, 3, flags, blocks);
    return wrong;
  }
  wrong += load_acquire(flags + block) != ranks - 1;
  for (int peer = 0; peer < ranks; ++peer) wrong += peer != rank && load_acquire(inbox + peer) != call;
  count(counts, report, flags, blocks);
  return wrong;
}

// `calls` of them on each rank but `absent`, which makes one less. Ranks come at different times.
extern "C" long run(char* memory, int ranks, int blocks, int calls, int waits_for_all, int absent, long limit) {
  std::atomic<long> wrong{0};
  std::vector<std::unique_ptr<std::barrier<>>> kernels;
  std::vector<std::thread> running;
  for (int rank = 0; rank < ranks; ++rank) {
    i64* report = at<i64>(memory, rank, REPORT);
    report[MIRROR] = reinterpret_cast<i64>(report + HEAD_WORDS + ranks * ROW_WORDS);
    report[SLOT] = report[RANK] = rank, report[STRIDE] = BYTES / 8, report[RANKS] = ranks;
    kernels.push_back(std::make_unique<std::barrier<>>(blocks));
    for (int block = 0; block < blocks; ++block)
      running.emplace_back([=, &wrong, &kernels] {
        blockIdx = {static_cast<unsigned>(block), 0, 0}, gridDim = {static_cast<unsigned>(blocks), 1, 1};
        unsigned random = 1 + rank * blocks + block;
        for (int call = 1; call <= calls - (rank == absent); ++call) {
          for (unsigned yields = (random = random * 1664525 + 1013904223) >> 28; yields > 0; --yields) sched_yield();
          wrong += block_of_call(memory, rank, ranks, call, waits_for_all, limit);
          kernels[rank]->arrive_and_wait();
        }
      });
  }
  for (auto& thread : running) thread.join();
  return wrong;
}

#else

#include <sched.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline

struct Dim {
  unsigned x, y, z;
};
static thread_local Dim threadIdx{0, 0, 0}, blockIdx, gridDim{1, 1, 1};

inline long now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
inline void __nanosleep(unsigned) { sched_yield(); }
inline void __syncwarp() {}
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline unsigned long long atomicCAS(unsigned long long* at, unsigned long long old, unsigned long long value) {
  __atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return old;
}

#endif
