// SPDX-License-Identifier: MIT
// Collectives by messages of words or lines: every thread sends its words to all peers, and polls for theirs. Needs
// messages.cuh and sums.cuh.
#ifndef TILESCALE_SHORT_MESSAGES_CUH
#define TILESCALE_SHORT_MESSAGES_CUH

namespace tilescale {

enum { SHORT_SLOTS = 2, PIECE = 8 };  // slots of a sender; bytes of data that a thread loads at once

// The number in each thread's words.
struct InWords {
  enum { THREADS = 1, BYTES = 8, DATA = 8 };  // threads of a flag; maximum data bytes of a thread, and of all
  typedef Alone Any;
  static __device__ __forceinline__ void store(Words* at, Pack<BYTES> pack, unsigned number, bool exists) {
    if (exists) store_words(at, numbered(pack.words[0], pack.words[1], number));
  }
  static __device__ __forceinline__ Words load(const Words* at, bool exists) {
    return exists ? load_words(at) : Words{0, 0};
  }
  static __device__ __forceinline__ bool have(Words words, unsigned number) { return tilescale::have(words, number); }
  static __device__ __forceinline__ unsigned number(Words words) { return static_cast<unsigned>(words.first >> 32); }
  static __device__ __forceinline__ Pack<BYTES> data(Words words) {
    return {{static_cast<unsigned>(words.first), static_cast<unsigned>(words.second)}};
  }
};

// The number once in a line. All threads of a warp call these functions together.
struct InLines {
  enum { THREADS = LINE_THREADS, BYTES = 16, DATA = BYTES * LINE_THREADS - PIECE };
  struct Any {
    __device__ __forceinline__ bool operator()(bool mine) const { return any_of_warp(mine); }
  };
  static __device__ __forceinline__ void store(Words* at, Pack<BYTES> pack, unsigned number, bool exists) {
    store_line(at, *reinterpret_cast<const Words*>(&pack), number, exists);
  }
  static __device__ __forceinline__ Words load(const Words* at, bool exists) { return load_line(at, exists); }
  static __device__ __forceinline__ bool have(Words words, unsigned wanted) { return number(words) == wanted; }
  static __device__ __forceinline__ unsigned number(Words words) { return number_of_line(words); }
  static __device__ __forceinline__ Pack<BYTES> data(Words words) {
    return *reinterpret_cast<const Pack<BYTES>*>(&words);
  }
};

// A unit is one thread's store: its position in a part, and that of the first thread's unit in its group of threads
// sharing a flag, for which all make the same decisions. A negative one does not exist, and is beyond all parts.
template <typename Form>
struct Place {
  int first, at, room;
  __device__ __forceinline__ explicit Place(i64 unit) {
    const unsigned units = static_cast<unsigned>(unit);  // of a short part
    int number = units % Form::THREADS;
    first = units / Form::THREADS * Form::DATA;
    at = first + number * Form::BYTES;
    room = number == Form::THREADS - 1 ? Form::DATA - number * Form::BYTES : Form::BYTES;
    if (unit < 0) first = 0x7fffffff, room = 0;
  }
};

template <typename Form, int ELEMENT, bool ALIGNED>
__device__ __forceinline__ Pack<Form::BYTES> read_unit(const char* part, i64 bytes, const Place<Form>& place) {
  Pack<Form::BYTES> pack = {};
#pragma unroll
  for (int i = 0; i < Form::BYTES; i += PIECE)
    if (i < place.room)
      reinterpret_cast<Pack<PIECE>*>(&pack)[i / PIECE] =
          read<PIECE, ELEMENT, ALIGNED>(part + place.at + i, bytes - place.at - i);
  return pack;
}

template <typename Form, int ELEMENT, bool ALIGNED>
__device__ __forceinline__ void write_unit(char* part, i64 bytes, const Place<Form>& place, Pack<Form::BYTES> pack) {
#pragma unroll
  for (int i = 0; i < Form::BYTES; i += PIECE)
    if (i < place.room)
      write<PIECE, ELEMENT, ALIGNED>(part + place.at + i, bytes - place.at - i,
                                     reinterpret_cast<const Pack<PIECE>*>(&pack)[i / PIECE]);
}

template <typename Form, int RANKS>
struct Short {
  typedef Pack<Form::BYTES> Data;
  const Exchange& x;
  const Group<RANKS> group;
  const Share share;  // share of the group
  const unsigned number;

  __device__ __forceinline__ explicit Short(const Exchange& exchange)
      : Short(exchange, Share((exchange.bytes + Form::DATA - 1) / Form::DATA)) {}
  __device__ __forceinline__ Short(const Exchange& exchange, Share flags)
      : x(exchange),
        group{exchange},
        share(flags),
        number(share.begin < share.end ? group.next() : 0) {}
  // Message `number` of a program that is not a whole block.
  __device__ __forceinline__ Short(const Exchange& exchange, Share flags, int program, unsigned number)
      : x(exchange), group{exchange, program}, share(flags), number(number) {}

  __device__ __forceinline__ Words* words(int sender, int receiver, int set, i64 unit) const {
    return reinterpret_cast<Words*>(group.message(sender, receiver, number, SHORT_SLOTS, set)) +
           (unit - share.begin * Form::THREADS);
  }
  // All threads of a warp, here and in the following functions; nothing is sent for a negative unit.
  __device__ __forceinline__ void send(int peer, int set, i64 unit, Data data) const {
    Form::store(words(x.rank, peer, set, unit), data, number, unit >= 0);
  }
  // Whether a unit is one of the first ones of the share.
  __device__ __forceinline__ bool is_first(i64 unit) const { return unit < (share.begin + 1) * Form::THREADS; }
  // Every unit of the share, by one thread each; -1 for threads without one.
  template <typename Body>
  __device__ __forceinline__ void each_unit(Body body) const {
    i64 begin = share.begin * Form::THREADS, end = share.end * Form::THREADS;
    for (i64 first = begin; first < end; first += blockDim.x) {
      const i64 unit = first + threadIdx.x < end ? first + threadIdx.x : -1;
      body(unit, Place<Form>(unit));
    }
  }
  // The unit that each peer has sent, for those that `wanted(rank)`: zeros, if it does not exist. Other elements of `given`
  // are unchanged. False: a wait failed.
  template <typename Wanted>
  __device__ __forceinline__ bool receive(int set, i64 unit, Wanted wanted, Data (&given)[RANKS]) const {
    auto sender_of = [&](int r) { return r != x.rank && wanted(r) ? r : -1; };
    return receive_several(set, [&](int) { return unit; }, sender_of, reinterpret_cast<Data(&)[1][RANKS]>(given));
  }
  // The same for several units at once, `unit_of(i)` from `sender_of(s)`; negative for none.
  template <int COUNT, int SENDERS, typename UnitOf, typename SenderOf>
  __device__ __forceinline__ bool receive_several(int set, UnitOf unit_of, SenderOf sender_of,
                                                  Data (&given)[COUNT][SENDERS]) const {
    Words found[COUNT][SENDERS];
    const typename Form::Any any;
    auto comes = [&](int i, int s) { return unit_of(i) >= 0 && sender_of(s) >= 0; };
    auto here = [&] {
      bool missing = false;
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int s = 0; s < SENDERS; ++s)
          found[i][s] = Form::load(words(sender_of(s), x.rank, set, unit_of(i)), comes(i, s));
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int s = 0; s < SENDERS; ++s)
          missing = (!Form::have(found[i][s], number) && comes(i, s)) || missing;
      return !any(missing);
    };
    // The next set has the results of a set, with a longer limit: a rank that misses a message of the first set must
    // fail first, and name the sender.
    Outcome outcome = await(here, 2 * (1 + set) * x.limit, x.report, any);
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int s = 0; s < SENDERS; ++s) {
        if (outcome == LATE) {
          const bool have = Form::have(found[i][s], number);
          const unsigned seen = Form::number(found[i][s]);
          if (!have && comes(i, s)) report_absent(x.report, x.site, sender_of(s), number, seen);
        }
        if (sender_of(s) >= 0) given[i][s] = Form::data(found[i][s]);
      }
    return outcome == READY;
  }
  // All threads, last of all.
  __device__ __forceinline__ void end() const {
    __syncthreads();
    if (threadIdx.x == 0 && share.begin < share.end) x.counts[blockIdx.x] = number;
  }
  // Sends each peer its part, or the same to all.
  template <int ELEMENT, bool ALIGNED, bool SAME>
  __device__ __forceinline__ void send_parts() const {
    each_unit([&](i64 unit, Place<Form> place) {
      Data data;
      if (SAME) data = read_unit<Form, ELEMENT, ALIGNED>(x.source, x.bytes, place);
#pragma unroll
      for (int i = 0; i < RANKS - 1; ++i) {
        int peer = group.peer(i);
        i64 size = group.size(peer);
        if (!SAME) data = read_unit<Form, ELEMENT, ALIGNED>(x.source + peer * x.source_step, size, place);
        send(peer, 0, size > place.first ? unit : -1, data);
      }
    });
  }
};

// The target becomes the sum over all ranks: of their sources (SAME), or of their parts for this rank.
template <typename Form, typename T, int OP, int RANKS, bool ALIGNED, bool SAME>
__device__ __forceinline__ void reduce_short(const Exchange& x) {
  follow_grid();
  const Short<Form, RANKS> by(x);
  const char* own = x.source + x.rank * x.source_step;
  by.template send_parts<sizeof(T), ALIGNED, SAME>();
  by.each_unit([&](i64 unit, Place<Form> place) {
    Pack<Form::BYTES> given[RANKS], mine = read_unit<Form, sizeof(T), ALIGNED>(own, x.bytes, place);
    if (!by.receive(0, unit, [](int) { return true; }, given)) return;
    write_unit<Form, sizeof(T), ALIGNED>(x.target, x.bytes, place, reduced<T, OP>(given, mine, x.rank));
  });
  by.end();
}

// The sum of all sources, part by part: each rank sums a part and sends it to all.
template <typename Form, typename T, int OP, int RANKS, bool ALIGNED>
__device__ __forceinline__ void reduce_twice_short(const Exchange& x) {
  follow_grid();
  const Short<Form, RANKS> by(x);
  const i64 own = x.rank * x.bytes, size = by.group.size(x.rank);
  by.template send_parts<sizeof(T), ALIGNED, false>();
  by.each_unit([&](i64 unit, Place<Form> place) {
    const i64 summed = size > place.first ? unit : -1;
    Pack<Form::BYTES> given[RANKS], mine = read_unit<Form, sizeof(T), ALIGNED>(x.source + own, size, place);
    if (!by.receive(0, summed, [](int) { return true; }, given)) return;
    Pack<Form::BYTES> sum = reduced<T, OP>(given, mine, x.rank);
#pragma unroll
    for (int i = 0; i < RANKS - 1; ++i) by.send(by.group.peer(i), 1, summed, sum);
    write_unit<Form, sizeof(T), ALIGNED>(x.target + own, size, place, sum);
  });
  by.each_unit([&](i64 unit, Place<Form> place) {
    Pack<Form::BYTES> given[RANKS];
    if (!by.receive(1, unit, [&](int r) { return by.group.size(r) > place.first; }, given)) return;
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r != x.rank)
        write_unit<Form, sizeof(T), ALIGNED>(x.target + r * x.bytes, by.group.size(r), place, given[r]);
  });
  by.end();
}

// Part r of the target becomes rank r's message to this one: its source (SAME), or its part for this rank.
template <typename Form, int ELEMENT, int RANKS, bool ALIGNED, bool SAME>
__device__ __forceinline__ void move_short(const Exchange& x) {
  follow_grid();
  const Short<Form, RANKS> by(x);
  const char* own = x.source + x.rank * x.source_step;
  by.template send_parts<ELEMENT, ALIGNED, SAME>();
  by.each_unit([&](i64 unit, Place<Form> place) {
    Pack<Form::BYTES> given[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r == x.rank) given[r] = read_unit<Form, ELEMENT, ALIGNED>(own, x.bytes, place);
    if (!by.receive(0, unit, [](int) { return true; }, given)) return;
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      write_unit<Form, ELEMENT, ALIGNED>(x.target + r * x.target_step, x.bytes, place, given[r]);
  });
  by.end();
}

// The target becomes the root's source. The other ranks send dummy first units, so that every rank hears from every
// other.
template <typename Form, int ELEMENT, int RANKS, bool ALIGNED>
__device__ __forceinline__ void broadcast_short(const Exchange& x) {
  follow_grid();
  const Short<Form, RANKS> by(x);
  const bool root = x.rank == x.root;
  by.each_unit([&](i64 unit, Place<Form> place) {
    Pack<Form::BYTES> data = {};
    if (root) data = read_unit<Form, ELEMENT, ALIGNED>(x.source, x.bytes, place);
#pragma unroll
    for (int i = 0; i < RANKS - 1; ++i) by.send(by.group.peer(i), 0, root || by.is_first(unit) ? unit : -1, data);
  });
  by.each_unit([&](i64 unit, Place<Form> place) {
    Pack<Form::BYTES> given[RANKS];
    if (!by.receive(0, unit, [&](int r) { return r == x.root || by.is_first(unit); }, given) || root) return;
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r == x.root) write_unit<Form, ELEMENT, ALIGNED>(x.target, x.bytes, place, given[r]);
  });
  by.end();
}

}  // namespace tilescale

#endif
