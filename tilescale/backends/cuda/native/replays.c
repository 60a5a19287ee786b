// SPDX-License-Identifier: MIT
// Calls of known forms: compare a call's arguments with the forms that a program was called with, pass the nodes of the
// form's CUDA graph what has changed, and launch it; and the same for the calls that an operator makes of its tensors.
// running/native.py compiles and loads this file.

#include <dlpack/dlpack.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

#define MOST_VALUES 64
#define MOST_WORDS 1024
#define ALIGNED 128  // as ALIGNED in running/plans.py

enum { UNKNOWN = 0, LAUNCHED = 1 };  // below zero: minus the driver's status

// -- replays ----------------------------------------------------------------------------------------------------------

// Bytes of a node that an argument decides: its address and an offset, or as a scalar so many bytes.
typedef struct {
  uint8_t *at;
  int64_t offset;
  int32_t position, nbytes;
} Site;

// A node with such bytes; a copy if it has a context.
typedef struct {
  void *node, *parameters, *context;
  const Site *sites;
  int64_t count;
} Node;

// Tensors of which one lies in the other: they have to move together.
typedef struct {
  int32_t one, other;
} Pair;

typedef struct {
  void *executable;
  const Node *nodes;
  int64_t node_count;
  int64_t *given;        // what the nodes are passed now
  const uint8_t *kinds;  // of each argument: ADDRESS, bytes of an integer, or how a float is passed
  const uint8_t *known;  // of each argument: whether the sites say all that it decides
  int64_t given_count;
  const Pair *pairs;
  int64_t pair_count;
  int64_t refused;  // not zero once it serves nobody: the driver has refused a node, or the program has forgotten it
} Replay;

enum { ADDRESS = 0, FLOAT = 0x40 };

static int (*set_kernel)(void *, void *, const void *);
static int (*set_copy)(void *, void *, const void *, void *);
static int (*launch_graph)(void *, void *);
static int (*copy_memory)(int64_t, int64_t, size_t, void *);

void driver(void *kernel, void *copy, void *launch, void *memory) {
  set_kernel = (int (*)(void *, void *, const void *))kernel;
  set_copy = (int (*)(void *, void *, const void *, void *))copy;
  launch_graph = (int (*)(void *, void *))launch;
  copy_memory = (int (*)(int64_t, int64_t, size_t, void *))memory;
}

static int serves(const Replay *replay, const int64_t *given) {
  if (replay->refused) return 0;
  for (int64_t i = 0; i < replay->given_count; ++i)
    if (given[i] != replay->given[i] && !replay->known[i]) return 0;
  for (int64_t i = 0; i < replay->pair_count; ++i) {
    Pair pair = replay->pairs[i];
    if (given[pair.one] - given[pair.other] != replay->given[pair.one] - replay->given[pair.other]) return 0;
  }
  return 1;
}

static int pass(const Replay *replay, const Node *node, const int64_t *given) {
  int changed = 0;
  for (int64_t i = 0; i < node->count; ++i) {
    const Site *site = &node->sites[i];
    int64_t now = given[site->position] + site->offset;
    if (given[site->position] != replay->given[site->position]) {
      memcpy(site->at, &now, site->nbytes);
      changed = 1;
    }
  }
  if (!changed) return 0;
  return node->context ? set_copy(replay->executable, node->node, node->parameters, node->context)
                       : set_kernel(replay->executable, node->node, node->parameters);
}

int64_t launch(Replay *replay, const int64_t *given, void *stream) {
  if (!serves(replay, given)) return UNKNOWN;
  for (int64_t i = 0; i < replay->node_count && !replay->refused; ++i) replay->refused = pass(replay, &replay->nodes[i], given);
  if (replay->refused) return UNKNOWN;
  memcpy(replay->given, given, replay->given_count * sizeof *given);
  int status = launch_graph(replay->executable, stream);
  return status ? -(int64_t)status : LAUNCHED;
}

// -- forms ------------------------------------------------------------------------------------------------------------

typedef struct {
  uint64_t hash;
  int64_t words;
  int64_t *form;
  void *kept;
} Entry;

// The forms of a program. Bits of `passed` and `fixed` are positions: of scalars that only kernels depend on, and of
// tensors whose places are a part of the form, as places in symmetric memory are.
typedef struct {
  int64_t first, end;
} Range;

typedef struct {
  uint64_t passed, fixed;
  const Range *symmetric;
  int64_t symmetric_count, count, room;
  Entry *entries;
} Table;

// What a call passes: addresses, and scalars as they come.
typedef struct {
  int64_t words, count, end;  // behind the last element of the last tensor
  int64_t form[MOST_WORDS];
  int64_t given[MOST_VALUES];
  int32_t types[MOST_VALUES];
} Call;

enum { TENSOR = 'T', NONE = 'N', INTEGER = 'I', REAL = 'R' };

static int add_tensor(const Table *table, Call *call, int position, const DLTensor *tensor) {
  if (call->words + 4 + 2 * tensor->ndim > MOST_WORDS || !tensor->strides) return 0;
  int64_t place = (int64_t)tensor->data + (int64_t)tensor->byte_offset, *form = call->form + call->words;
  int stays = table->fixed >> position & 1;
  for (int64_t i = 0; i < table->symmetric_count; ++i)
    stays |= table->symmetric[i].first <= place && place < table->symmetric[i].end;
  *form++ = TENSOR | (int64_t)tensor->ndim << 8 | (int64_t)tensor->device.device_id << 32;
  // What lies right behind the tensor before it may be taken for its next rows.
  int follows = call->end == place;
  int64_t elements = 1;
  for (int i = 0; i < tensor->ndim; ++i) elements += (tensor->shape[i] - 1) * tensor->strides[i];
  call->end = place + elements * (tensor->dtype.bits * tensor->dtype.lanes / 8);
  *form++ = (int64_t)follows << 56 | tensor->dtype.code | tensor->dtype.bits << 8 | (int64_t)tensor->dtype.lanes << 16 |
            (int64_t)tensor->device.device_type << 32;
  *form++ = stays ? place : place % ALIGNED;
  for (int i = 0; i < tensor->ndim; ++i) *form++ = tensor->shape[i];
  for (int i = 0; i < tensor->ndim; ++i) *form++ = tensor->strides[i];
  call->words = form - call->form;
  call->given[position] = place;
  return 1;
}

static int add(const Table *table, Call *call, int position, const TVMFFIAny *value) {
  int64_t *form = call->form + call->words;
  if (call->words + 2 > MOST_WORDS) return 0;
  switch (call->types[position] = value->type_index) {
    case kTVMFFITensor:
      return add_tensor(table, call, position, (const DLTensor *)((const char *)value->v_obj + sizeof(TVMFFIObject)));
    case kTVMFFIDLTensorPtr:
      return add_tensor(table, call, position, (const DLTensor *)value->v_ptr);
    case kTVMFFINone:
      *form = NONE;
      call->given[position] = 0;
      call->words += 1;
      return 1;
    case kTVMFFIBool:
    case kTVMFFIInt:
    case kTVMFFIFloat:
      form[0] = value->type_index == kTVMFFIFloat ? REAL : INTEGER;
      form[1] = table->passed >> position & 1 ? 0 : value->v_int64;
      call->given[position] = value->v_int64;
      call->words += 2;
      return 1;
  }
  return 0;
}

static int take_call(const Table *table, Call *call, const TVMFFIAny *values, int count) {
  call->words = 0, call->count = count, call->end = 0;
  if (count > MOST_VALUES) return 0;
  for (int i = 0; i < count; ++i)
    if (!add(table, call, i, &values[i])) return 0;
  return 1;
}

static uint64_t hash_of(const Call *call) {
  uint64_t hash = 0;
  for (int64_t i = 0; i < call->words; ++i) {
    hash = (hash ^ (uint64_t)call->form[i]) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

static Entry *entry_of(Table *table, const Call *call, uint64_t hash) {
  for (Entry *entry = table->entries; entry < table->entries + table->count; ++entry)
    if (entry->hash == hash && entry->words == call->words && !memcmp(entry->form, call->form, 8 * call->words))
      return entry;
  return NULL;
}

// Scalars as kernels are passed them; 0 for what they are not passed so.
static int encode(const Replay *replay, const Table *table, Call *call) {
  if (call->count != replay->given_count) return 0;
  for (int64_t i = 0; i < call->count; ++i) {
    uint8_t kind = replay->kinds[i];
    if (call->types[i] == kTVMFFITensor || call->types[i] == kTVMFFIDLTensorPtr || call->types[i] == kTVMFFINone) continue;
    if (!(table->passed >> i & 1)) {
      call->given[i] = 0;
    } else if (call->types[i] == kTVMFFIInt && kind >= 1 && kind <= 8) {
      if (kind < 8) call->given[i] &= ((int64_t)1 << 8 * kind) - 1;
    } else if (call->types[i] == kTVMFFIFloat && kind == (FLOAT | 4)) {
      double wide;
      memcpy(&wide, &call->given[i], 8);
      float narrow = (float)wide;
      call->given[i] = 0;
      memcpy(&call->given[i], &narrow, 4);
    } else if (call->types[i] != kTVMFFIFloat || kind != (FLOAT | 8)) {
      return 0;
    }
  }
  return 1;
}

// -- what Python calls ------------------------------------------------------------------------------------------------

Table *table_new(const Range *symmetric, int64_t count) {
  Table *table = (Table *)calloc(1, sizeof *table);
  if (table) table->symmetric = symmetric, table->symmetric_count = count;
  return table;
}

void table_clear(Table *table, uint64_t passed, uint64_t fixed) {
  for (int64_t i = 0; i < table->count; ++i) free(table->entries[i].form);
  table->count = 0, table->passed = passed, table->fixed = fixed;
}

void table_drop(Table *table, const void *kept) {
  for (int64_t i = table->count - 1; i >= 0; --i)
    if (table->entries[i].kept == kept) {
      free(table->entries[i].form);
      table->entries[i] = table->entries[--table->count];
    }
}

void table_free(Table *table) {
  table_clear(table, 0, 0);
  free(table->entries);
  free(table);
}

static int answer(TVMFFIAny *result, int64_t value) {
  result->type_index = kTVMFFIInt, result->zero_padding = 0, result->v_int64 = value;
  return 0;
}

// keep(table, kept, *values): from now on this replay is kept for calls of this form.
int __tvm_ffi_keep(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  Table *table = (Table *)args[0].v_int64;
  Call call;
  if (!take_call(table, &call, args + 2, count - 2)) return answer(result, 0);
  uint64_t hash = hash_of(&call);
  Entry *entry = entry_of(table, &call, hash);
  if (!entry) {
    if (table->count == table->room) {
      int64_t room = table->room ? 2 * table->room : 4;
      Entry *entries = (Entry *)realloc(table->entries, room * sizeof *entries);
      if (!entries) return answer(result, 0);
      table->entries = entries, table->room = room;
    }
    int64_t *form = (int64_t *)malloc(8 * call.words);
    if (!form) return answer(result, 0);
    memcpy(form, call.form, 8 * call.words);
    entry = &table->entries[table->count++];
    entry->hash = hash, entry->words = call.words, entry->form = form;
  }
  entry->kept = (void *)args[1].v_int64;
  return answer(result, 1);
}

// find(table, *values): the address that is kept for calls of this form; 0 for none.
int __tvm_ffi_find(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  Table *table = (Table *)args[0].v_int64;
  Call call;
  if (!take_call(table, &call, args + 1, count - 1)) return answer(result, 0);
  Entry *entry = entry_of(table, &call, hash_of(&call));
  return answer(result, entry ? (int64_t)entry->kept : 0);
}

// call(table, stream, *values): LAUNCHED, UNKNOWN, or minus the driver's status.
int __tvm_ffi_call(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  Table *table = (Table *)args[0].v_int64;
  Call call;
  if (!take_call(table, &call, args + 2, count - 2)) return answer(result, UNKNOWN);
  Entry *entry = entry_of(table, &call, hash_of(&call));
  if (!entry || !encode((Replay *)entry->kept, table, &call)) return answer(result, UNKNOWN);
  return answer(result, launch((Replay *)entry->kept, call.given, (void *)args[1].v_int64));
}

// -- records ----------------------------------------------------------------------------------------------------------

// What a replay is passed: a tensor's address, by its number, and an offset; or that number alone (-1).
typedef struct {
  int64_t tensor, offset;
} Source;

// A replay, or a copy of so many bytes from the second source to the first one.
typedef struct {
  Replay *replay;
  const Source *sources;
  int64_t count, nbytes;
} Step;

typedef struct {
  const Step *steps;
  int64_t count;
} Record;

// Addresses of a step's arguments. Only the first `count` tensors exist; for others, the replay keeps its argument.
static void find_sources(const Step *step, const int64_t *places, int64_t count, int64_t *given) {
  for (int64_t i = 0; i < step->count; ++i) {
    Source source = step->sources[i];
    given[i] = source.tensor < 0 ? source.offset : source.tensor < count ? places[source.tensor] + source.offset
                                                                         : step->replay ? step->replay->given[i] : 0;
  }
}

static int can_run(const Record *record, const int64_t *places, int64_t count) {
  int64_t given[MOST_VALUES];
  for (const Step *step = record->steps; step < record->steps + record->count; ++step) {
    find_sources(step, places, count, given);
    if (step->replay && !serves(step->replay, given)) return 0;
  }
  return 1;
}

static int64_t run(const Record *record, const int64_t *places, int64_t count, void *stream) {
  int64_t given[MOST_VALUES];
  for (const Step *step = record->steps; step < record->steps + record->count; ++step) {
    find_sources(step, places, count, given);
    int64_t status = step->replay ? launch(step->replay, given, stream) : -(int64_t)copy_memory(given[0], given[1], step->nbytes, stream);
    if (step->replay && status == UNKNOWN) return -step->replay->refused;
    if (status < 0) return status;
  }
  return LAUNCHED;
}
