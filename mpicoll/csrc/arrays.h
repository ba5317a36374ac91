/* The memory of numpy arrays and torch tensors, found without Python code. */

#ifndef MPICOLL_ARRAYS_H
#define MPICOLL_ARRAYS_H

#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    DIMENSIONS = 8 /* of arrays that are looked at here */
};

/* The memory of an array, whose elements are contiguous in it. */
typedef struct {
    char *data;
    uintptr_t dtype; /* numpy: the address of the dtype; torch: an odd number */
    int ndim;
    const Py_ssize_t *shape;
} Memory;

/* Find the memory of an array, and return true; `writable` states that it will be written to. Returns false, without an
 * exception, for everything but plain arrays. */
bool find_memory(PyObject *array, bool writable, Memory *memory);

/* Return true if `make_array` can make arrays like `like`. */
bool can_make(PyObject *like);

/* Return a new array, whose elements are not set. */
PyObject *make_array(PyObject *dtype, int ndim, const Py_ssize_t *shape);

PyObject *set_numpy_interface(PyObject *module, PyObject *capsule);
PyObject *set_numpy_layout(PyObject *module, PyObject *samples);
PyObject *set_torch_access(PyObject *module, PyObject *type);

#endif
