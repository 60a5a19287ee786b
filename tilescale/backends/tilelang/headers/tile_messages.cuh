// SPDX-License-Identifier: MIT
// Sums of small tiles by short messages, between the programs of one number on all siblings of a level. Needs
// short_messages.cuh and siblings.cuh.
//
// A program sends its tile to every peer in words with their number inside, and adds theirs as they arrive: a transfer is
// one trip over the network, without a fence, a flag or an answer. messages.cuh says why two slots are enough.
#ifndef TILESCALE_TILE_MESSAGES_CUH
#define TILESCALE_TILE_MESSAGES_CUH

namespace tilescale {

// The number of a program's last message.
__device__ __forceinline__ unsigned last_message(const int* counts, i64 program) {
  return static_cast<unsigned>(*const_cast<const volatile int*>(counts + program));
}

// Threads BEGIN to BEGIN + THREADS, between barriers: a tile in shared memory becomes the sum over all siblings, by message
// `number`. `workspace` is that in the first slot of the heap.
template <typename T, int OP, int RANKS, int BYTES, int BEGIN, int THREADS>
__device__ __forceinline__ void reduce_tile(void* tile, int* workspace, i64 stride, Siblings siblings, i64 program,
                                            int programs, int* counts, unsigned number, i64 limit, i64* report,
                                            int site) {
  constexpr int UNITS = (BYTES + InWords::DATA - 1) / InWords::DATA, COUNT = (UNITS + THREADS - 1) / THREADS;
  constexpr int MOST = RANKS == 2 ? 4 : RANKS <= 4 ? 2 : 1, AT_ONCE = COUNT < MOST ? COUNT : MOST;  // polled
  const i64 stop = stopped(report);  // arrives while messages do
  Exchange x = {};
  x.workspace = reinterpret_cast<char*>(workspace), x.stride = stride, x.slot = UNITS * sizeof(Words);
  x.report = report, x.limit = limit, x.site = site, x.blocks = programs;
  x.rank = siblings.rank, x.first = siblings.first, x.step = siblings.step;
  x.shift = siblings.shift, x.devices = siblings.slots;
  const Short<InWords, RANKS> by(x, Share(0, UNITS), static_cast<int>(program), number);
  const int thread = threadIdx.x - BEGIN;
  char* bytes = static_cast<char*>(tile);
  auto unit_of = [&](int i) { return i < COUNT && thread + i * THREADS < UNITS ? thread + i * THREADS : -1; };
  Pack<InWords::BYTES> mine[COUNT];
  if (thread == 0) note(site, WAITS);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    mine[i] = read_unit<InWords, sizeof(T), true>(bytes, BYTES, Place<InWords>(unit_of(i)));
#pragma unroll
    for (int p = 0; p < RANKS - 1; ++p) by.send(by.group.peer(p), 0, unit_of(i), mine[i]);
  }
#pragma unroll
  for (int first = 0; first < COUNT; first += AT_ONCE) {
    Pack<InWords::BYTES> given[AT_ONCE][RANKS];
    const auto from = [&](int r) { return r != x.rank ? r : -1; };
    if (!by.receive_several(0, [&](int i) { return unit_of(first + i); }, from, given)) break;
#pragma unroll
    for (int i = 0; i < AT_ONCE && first + i < COUNT; ++i)
      write_unit<InWords, sizeof(T), true>(bytes, BYTES, Place<InWords>(unit_of(first + i)),
                                           reduced<T, OP>(given[i], mine[first + i], x.rank));
  }
  if (thread != 0) return;
  counts[program] = static_cast<int>(number);
  note(site, WAITED);
  if (stop) notify_host(report);
}

}  // namespace tilescale

#endif
