// SPDX-License-Identifier: MIT
// The part of Python's stable ABI that calls.c uses. Python's own headers are often missing where there is a C compiler.

typedef struct PyObject PyObject;
typedef intptr_t Py_ssize_t;
typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef struct {
  const char *name;
  PyCFunction function;
  int flags;
  const char *text;
} PyMethodDef;
enum { METH_O = 8, Py_EQ = 2 };

void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
PyObject *PyObject_Type(PyObject *);
int PyType_IsSubtype(PyObject *, PyObject *);
Py_ssize_t PyTuple_Size(PyObject *), PyList_Size(PyObject *), PyDict_Size(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t), *PyList_GetItem(PyObject *, Py_ssize_t);
int PyDict_Next(PyObject *, Py_ssize_t *, PyObject **, PyObject **);
PyObject *PyList_New(Py_ssize_t), *PyTuple_New(Py_ssize_t);
int PyList_Append(PyObject *, PyObject *);
int PyList_SetItem(PyObject *, Py_ssize_t, PyObject *), PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
Py_ssize_t PyObject_Hash(PyObject *);
int PyObject_RichCompareBool(PyObject *, PyObject *, int), PyObject_IsTrue(PyObject *);
PyObject *PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
PyObject *PyObject_GetAttr(PyObject *, PyObject *);
PyObject *PyLong_FromLongLong(long long);
long long PyLong_AsLongLong(PyObject *);
void *PyLong_AsVoidPtr(PyObject *);
void PyErr_SetString(PyObject *, const char *);
extern PyObject *PyExc_RuntimeError;
void PyErr_Clear(void), PyErr_Fetch(PyObject **, PyObject **, PyObject **), PyErr_Restore(PyObject *, PyObject *, PyObject *);
