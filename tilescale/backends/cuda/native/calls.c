// SPDX-License-Identifier: MIT
// Recorded calls of Python functions: a call whose arguments have the form of a known one allocates, launches and computes
// what was recorded. Follows replays.c and python_abi.h in one library; running/call_table.py loads it.

#define MOST_FORMS 1024
#define INDEX_SIZE (4 * MOST_FORMS)

// -- what Python passes -----------------------------------------------------------------------------------------------

// What calls of any function need.
typedef struct {
  PyObject *tensor, *parameter, *tuple, *list, *dict, *none;  // types; None itself
  PyObject *not_replayed;                                      // the result of a call that is to be made by Python
  PyObject *records_grads, *is_negative, *is_conjugate;        // functions of PyTorch
  PyObject *requires_grad;                                     // the name of that attribute
  PyObject *view_of;  // a tensor, shape, strides, and offset in elements
  const DLPackExchangeAPI *exchange;
  int64_t device_type;  // of tensors whose calls are recorded
} Python;

// An argument of a step: a tensor by number, among those of the caller and those made by steps; a view of one, `value` is
// its shape, strides and offset; the result of `value` for a list of all tensors; `value` itself; or a tuple or list of
// so many parts.
typedef struct Argument {
  int64_t kind, number;
  PyObject *value;
  const struct Argument *parts;
} Argument;

enum { TENSOR_ARGUMENT, VIEW_ARGUMENT, READ_ARGUMENT, VALUE_ARGUMENT, TUPLE_ARGUMENT, LIST_ARGUMENT };

// A launch (`record`), or a call of `function`, whose results are tensors of later steps if it `keeps` them. `names`: of the
// last arguments, or NULL. `later`: it follows anything that cannot be undone.
typedef struct {
  const Record *record;
  PyObject *function;
  const Argument *arguments;
  int64_t count;
  PyObject *names;
  int64_t keeps, later;
} CallStep;

// `begin` returns the stream, or None if the call cannot be replayed now; then `end` ends it. `refused` raises the error of
// a launch's status. `owner` keeps all of this.
typedef struct {
  PyObject *owner;
  const CallStep *steps;
  int64_t count;
  Argument result;
  PyObject *begin, *end, *refused;
} RecordedCall;

// -- forms ------------------------------------------------------------------------------------------------------------

// A call's arguments: tensors, each once, and other objects, in the order in which they come.
typedef struct {
  Call call;
  int64_t tensors, objects;
  uint64_t hash;
  PyObject *tensor[MOST_VALUES], *object[MOST_VALUES];
} Given;

typedef struct {
  uint64_t hash;
  int64_t words, objects;
  int64_t *form;
  PyObject **object;
  PyObject *kept;  // Python's part
  const RecordedCall *recorded;
} Form;

// The forms of a function's calls. `state` returns what a call depends on besides its arguments, `make` Python's part of a
// new form. Calls for autograd to see are forms of their own, or have none.
typedef struct {
  const Python *python;
  int64_t sees_gradients;
  Table table;
  PyObject *state, *make;
  int64_t count;
  Form forms[MOST_FORMS];
  int32_t index[INDEX_SIZE];  // 1 + the number of a form, by its hash
} Calls;

static int32_t busy;  // a call is recorded, in any thread

void set_busy(int32_t is_busy) { busy = is_busy; }

enum { SAME = 'S', GRADIENT = 'G', OBJECT = 'O', TUPLE = '(', LIST = '[', DICT = '{' };

static int add_word(Call *call, int64_t word) {
  if (call->words == MOST_WORDS) return 0;
  call->form[call->words++] = word;
  return 1;
}

static PyObject *unknown(const Python *python) {
  Py_IncRef(python->not_replayed);
  return python->not_replayed;
}

static int is_true(PyObject *made) {  // of a new reference; an error counts as true
  const int truth = made ? PyObject_IsTrue(made) : -1;
  if (made) Py_DecRef(made);
  if (truth < 0) PyErr_Clear();
  return truth != 0;
}

static int differentiates(const Python *python, PyObject *tensor) {
  return is_true(PyObject_GetAttr(tensor, python->requires_grad)) &&
         is_true(PyObject_Vectorcall(python->records_grads, NULL, 0, NULL));
}

static int add_given_tensor(const Calls *calls, Given *given, PyObject *tensor) {
  const Python *python = calls->python;
  for (int64_t i = 0; i < given->tensors; ++i)
    if (given->tensor[i] == tensor) return add_word(&given->call, SAME | i << 8);
  DLTensor view;
  if (given->tensors == MOST_VALUES) return 0;
  if (python->exchange->dltensor_from_py_object_no_sync(tensor, &view)) return PyErr_Clear(), 0;
  const int for_autograd = differentiates(python, tensor);
  if (view.device.device_type != python->device_type || (for_autograd && !calls->sees_gradients)) return 0;
  if (is_true(PyObject_Vectorcall(python->is_negative, &tensor, 1, NULL))) return 0;
  if (view.dtype.code == kDLComplex && is_true(PyObject_Vectorcall(python->is_conjugate, &tensor, 1, NULL))) return 0;
  given->tensor[given->tensors] = tensor;
  if (for_autograd && !add_word(&given->call, GRADIENT)) return 0;
  return add_tensor(&calls->table, &given->call, given->tensors++, &view);
}

static int add_object(Given *given, PyObject *type, PyObject *x) {
  if (given->objects == MOST_VALUES) return 0;
  const Py_ssize_t hash = PyObject_Hash(x);
  if (hash == -1) return PyErr_Clear(), 0;
  given->object[given->objects++] = x;
  return add_word(&given->call, OBJECT) && add_word(&given->call, (intptr_t)type) && add_word(&given->call, hash);
}

// Whether the call has a form: its tensors are plain ones of the device, its other arguments can be hashed.
static int add_given(const Calls *calls, Given *given, PyObject *x) {
  const Python *python = calls->python;
  if (x == python->none) return add_word(&given->call, NONE);
  PyObject *type = PyObject_Type(x);
  Py_DecRef(type);  // x keeps it
  if (type == python->tensor || type == python->parameter) return add_given_tensor(calls, given, x);
  if (type == python->tuple) {
    const Py_ssize_t count = PyTuple_Size(x);
    int known = add_word(&given->call, TUPLE | count << 8);
    for (Py_ssize_t i = 0; known && i < count; ++i) known = add_given(calls, given, PyTuple_GetItem(x, i));
    return known;
  }
  if (type == python->list) {
    const Py_ssize_t count = PyList_Size(x);
    int known = add_word(&given->call, LIST | count << 8);
    for (Py_ssize_t i = 0; known && i < count; ++i) known = add_given(calls, given, PyList_GetItem(x, i));
    return known;
  }
  if (type == python->dict) {
    Py_ssize_t at = 0;
    PyObject *name, *value;
    int known = add_word(&given->call, DICT | PyDict_Size(x) << 8);
    while (known && PyDict_Next(x, &at, &name, &value)) known = add_given(calls, given, name) && add_given(calls, given, value);
    return known;
  }
  return !PyType_IsSubtype(type, python->tensor) && add_object(given, type, x);
}

static int take_form(const Calls *calls, Given *given, PyObject *state, PyObject *x) {
  given->call.words = given->call.end = given->tensors = given->objects = 0;
  if (!add_given(calls, given, state) || !add_given(calls, given, x)) return 0;
  given->call.count = given->tensors;
  given->hash = hash_of(&given->call);
  return given->tensors > 0;
}

static int is_of(const Form *form, const Given *given) {
  if (form->hash != given->hash || form->words != given->call.words) return 0;
  if (memcmp(form->form, given->call.form, 8 * form->words)) return 0;
  for (int64_t i = 0; i < form->objects; ++i)
    if (form->object[i] != given->object[i] && PyObject_RichCompareBool(form->object[i], given->object[i], Py_EQ) != 1)
      return PyErr_Clear(), 0;
  return 1;
}

// The form's entry in the index, or the one where it is to be.
static int32_t *entry_in_index(Calls *calls, const Given *given) {
  for (uint64_t i = given->hash;; ++i) {
    int32_t *entry = &calls->index[i % INDEX_SIZE];
    if (!*entry || is_of(&calls->forms[*entry - 1], given)) return entry;
  }
}

static void record_in(Form *form, const RecordedCall *recorded) {
  const RecordedCall *before = form->recorded;
  if (recorded) Py_IncRef(recorded->owner);
  form->recorded = recorded;
  if (before) Py_DecRef(before->owner);
}

static void clear(Calls *calls) {
  memset(calls->index, 0, sizeof calls->index);
  while (calls->count) {
    Form form = calls->forms[--calls->count];
    record_in(&form, NULL);
    for (int64_t j = 0; j < form.objects; ++j) Py_DecRef(form.object[j]);
    Py_DecRef(form.kept);
    free(form.form);
    free(form.object);
  }
}

static Form *new_form(Calls *calls, const Given *given) {
  PyObject *kept = PyObject_Vectorcall(calls->make, NULL, 0, NULL);
  if (!kept) return NULL;
  if (calls->count == MOST_FORMS) clear(calls);
  int32_t *entry = entry_in_index(calls, given);
  if (*entry) return Py_DecRef(kept), &calls->forms[*entry - 1];  // another thread was faster
  Form *form = &calls->forms[calls->count++];
  *entry = (int32_t)calls->count;
  form->hash = given->hash, form->words = given->call.words, form->objects = given->objects;
  form->form = (int64_t *)malloc(8 * form->words);
  form->object = (PyObject **)malloc(8 * form->objects + 1);
  memcpy(form->form, given->call.form, 8 * form->words);
  memcpy(form->object, given->object, 8 * form->objects);
  for (int64_t i = 0; i < form->objects; ++i) Py_IncRef(form->object[i]);
  form->kept = kept, form->recorded = NULL;
  return form;
}

// -- a recorded call --------------------------------------------------------------------------------------------------

// The tensors of a call that is replayed: the caller's, which it keeps, and those made by steps.
typedef struct {
  const Python *python;
  int64_t given, count;
  PyObject *tensor[MOST_VALUES];
  int64_t place[MOST_VALUES];
} Tensors;

static int add_made(Tensors *all, PyObject *tensor) {  // takes the reference
  DLTensor view;
  PyObject *type = PyObject_Type(tensor);
  Py_DecRef(type);
  if (all->count == MOST_VALUES || !PyType_IsSubtype(type, all->python->tensor)) {
    PyErr_SetString(PyExc_RuntimeError, "a recorded step has made other results than before");
    return Py_DecRef(tensor), 0;
  }
  if (all->python->exchange->dltensor_from_py_object_no_sync(tensor, &view)) return Py_DecRef(tensor), 0;
  all->tensor[all->count] = tensor;
  all->place[all->count++] = (int64_t)view.data + (int64_t)view.byte_offset;
  return 1;
}

static int add_all_made(Tensors *all, PyObject *made) {  // takes the reference
  PyObject *type = PyObject_Type(made);
  Py_DecRef(type);
  const int is_tuple = type == all->python->tuple;
  if (!is_tuple && type != all->python->list) return add_made(all, made);
  int known = 1;
  const Py_ssize_t count = is_tuple ? PyTuple_Size(made) : PyList_Size(made);
  for (Py_ssize_t i = 0; known && i < count; ++i) {
    PyObject *x = is_tuple ? PyTuple_GetItem(made, i) : PyList_GetItem(made, i);
    Py_IncRef(x);
    known = add_made(all, x);
  }
  Py_DecRef(made);
  return known;
}

static PyObject *read(const Tensors *all, PyObject *reader) {
  PyObject *list = PyList_New(0);
  for (int64_t i = 0; list && i < all->count; ++i)
    if (PyList_Append(list, all->tensor[i])) return Py_DecRef(list), NULL;
  PyObject *made = list ? PyObject_Vectorcall(reader, &list, 1, NULL) : NULL;
  if (list) Py_DecRef(list);
  return made;
}

static PyObject *value_of(const Tensors *all, const Argument *argument);

static PyObject *sequence_of(const Tensors *all, const Argument *argument) {
  const int is_list = argument->kind == LIST_ARGUMENT;
  PyObject *made = is_list ? PyList_New(argument->number) : PyTuple_New(argument->number);
  for (int64_t i = 0; made && i < argument->number; ++i) {
    PyObject *part = value_of(all, &argument->parts[i]);
    if (!part) return Py_DecRef(made), NULL;
    is_list ? PyList_SetItem(made, i, part) : PyTuple_SetItem(made, i, part);
  }
  return made;
}

// A new reference, or NULL for an error.
static PyObject *value_of(const Tensors *all, const Argument *argument) {
  if (argument->kind >= TUPLE_ARGUMENT) return sequence_of(all, argument);
  if (argument->kind == READ_ARGUMENT) return read(all, argument->value);
  if (argument->kind == VIEW_ARGUMENT) {
    PyObject *given[4] = {all->tensor[argument->number]};
    for (int i = 1; i < 4; ++i) given[i] = PyTuple_GetItem(argument->value, i - 1);
    return PyObject_Vectorcall(all->python->view_of, given, 4, NULL);
  }
  PyObject *value = argument->kind == TENSOR_ARGUMENT ? all->tensor[argument->number] : argument->value;
  Py_IncRef(value);
  return value;
}

// 0 for an error.
static int compute(const CallStep *step, Tensors *all) {
  PyObject *values[step->count + 1], *made = NULL;
  const int64_t named = step->names ? PyTuple_Size(step->names) : 0;
  int64_t count = 0;
  while (count < step->count && (values[count] = value_of(all, &step->arguments[count]))) ++count;
  if (count == step->count) made = PyObject_Vectorcall(step->function, values, count - named, step->names);
  while (count) Py_DecRef(values[--count]);
  if (!made) return 0;
  if (step->keeps) return add_all_made(all, made);
  Py_DecRef(made);
  return 1;
}

// LAUNCHED; UNKNOWN, if nothing has happened; or -1 with an error.
static int64_t steps_of(const RecordedCall *recorded, Tensors *all, void *stream) {
  for (const CallStep *step = recorded->steps; step < recorded->steps + recorded->count; ++step) {
    if (!step->record) {
      if (!compute(step, all)) return -1;
      continue;
    }
    if (!step->later && !can_run(step->record, all->place, all->count)) return UNKNOWN;
    const int64_t status = run(step->record, all->place, all->count, stream);
    if (status == LAUNCHED) continue;
    PyObject *number = PyLong_FromLongLong(status);
    PyObject *none = number ? PyObject_Vectorcall(recorded->refused, &number, 1, NULL) : NULL;
    if (number) Py_DecRef(number);
    if (none) Py_DecRef(none);
    return -1;
  }
  return LAUNCHED;
}

// Its end, also after an error, which stays. 0 for an error.
static int end(const RecordedCall *recorded) {
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyObject *none = PyObject_Vectorcall(recorded->end, NULL, 0, NULL);
  if (none) Py_DecRef(none);
  if (type) PyErr_Restore(type, error, trace);
  return none != NULL;
}

static PyObject *replayed(const Python *python, const RecordedCall *recorded, const Given *given) {
  for (int64_t i = 0; i < recorded->count; ++i)
    if (recorded->steps[i].later && !can_run(recorded->steps[i].record, given->call.given, given->tensors))
      return unknown(python);
  PyObject *owner = recorded->owner, *result = NULL;
  Py_IncRef(owner);  // Python lets other threads run, which may forget the call
  PyObject *stream = PyObject_Vectorcall(recorded->begin, NULL, 0, NULL);
  if (stream == python->none) result = unknown(python);
  if (stream && !result) {
    Tensors all;
    all.python = python, all.given = all.count = given->tensors;
    memcpy(all.tensor, given->tensor, given->tensors * sizeof *given->tensor);
    memcpy(all.place, given->call.given, given->tensors * sizeof *all.place);
    const int64_t status = steps_of(recorded, &all, PyLong_AsVoidPtr(stream));
    const int ended = end(recorded);
    if (ended && status == LAUNCHED) result = value_of(&all, &recorded->result);
    if (ended && status == UNKNOWN) result = unknown(python);
    while (all.count > all.given) Py_DecRef(all.tensor[--all.count]);
  }
  if (stream) Py_DecRef(stream);
  Py_DecRef(owner);
  return result;
}

// -- what Python calls ------------------------------------------------------------------------------------------------

// replay(arguments): the result of a recorded call with these arguments; NotImplemented, and nothing done, for others.
static PyObject *replay(PyObject *self, PyObject *arguments) {
  Calls *calls = (Calls *)PyLong_AsVoidPtr(self);
  if (busy) return unknown(calls->python);
  Given given;
  PyObject *state = PyObject_Vectorcall(calls->state, NULL, 0, NULL);
  if (!state) return NULL;
  const RecordedCall *recorded = NULL;
  if (take_form(calls, &given, state, arguments)) {
    const int32_t number = *entry_in_index(calls, &given);
    if (number) recorded = calls->forms[number - 1].recorded;
  }
  Py_DecRef(state);
  return recorded ? replayed(calls->python, recorded, &given) : unknown(calls->python);
}

// form(arguments): Python's part of the form, which is new or not, and the tensors; None for arguments without a form.
static PyObject *form_of(PyObject *self, PyObject *arguments) {
  Calls *calls = (Calls *)PyLong_AsVoidPtr(self);
  Given given;
  PyObject *none = calls->python->none, *state = PyObject_Vectorcall(calls->state, NULL, 0, NULL);
  if (!state) return NULL;
  const Form *form = NULL;
  const int has_form = take_form(calls, &given, state, arguments);
  if (has_form) {
    const int32_t number = *entry_in_index(calls, &given);
    form = number ? &calls->forms[number - 1] : new_form(calls, &given);
  }
  Py_DecRef(state);
  if (!has_form) return Py_IncRef(none), none;
  PyObject *tensors = form ? PyList_New(0) : NULL, *made = tensors ? PyTuple_New(2) : NULL;
  for (int64_t i = 0; tensors && i < given.tensors; ++i) PyList_Append(tensors, given.tensor[i]);
  if (!made) return NULL;
  Py_IncRef(form->kept);
  PyTuple_SetItem(made, 0, form->kept);
  PyTuple_SetItem(made, 1, tensors);
  return made;
}

PyMethodDef replay_method = {"replay", replay, METH_O, "replay(arguments): the result of a recorded call, or NotImplemented"};
PyMethodDef form_method = {"form", form_of, METH_O, "form(arguments): the form's object and the tensors, or None"};

Calls *calls_new(const Python *python, const Range *symmetric, int64_t count, PyObject *state, PyObject *make, int64_t sees) {
  Calls *calls = (Calls *)calloc(1, sizeof *calls);
  if (!calls) return NULL;
  calls->python = python, calls->state = state, calls->make = make, calls->sees_gradients = sees;
  calls->table.symmetric = symmetric, calls->table.symmetric_count = count;
  return calls;
}

// From now on calls of a form are replayed; NULL: no longer.
void calls_record(Calls *calls, const PyObject *kept, const RecordedCall *recorded) {
  for (int64_t i = 0; i < calls->count; ++i)
    if (calls->forms[i].kept == kept) record_in(&calls->forms[i], recorded);
}

void calls_free(Calls *calls) {
  clear(calls);
  free(calls);
}
