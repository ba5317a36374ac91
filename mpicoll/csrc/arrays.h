/* The memory of numpy arrays and torch tensors, found without Python code. */

#ifndef MPICOLL_ARRAYS_H
#define MPICOLL_ARRAYS_H

#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    DIMENSIONS = 8 /* of arrays that are looked at here */
};

/* The memory of an array. */
typedef struct {
    char *data;
    uintptr_t dtype; /* numpy: the address of the dtype; torch: an odd number */
    int ndim;
    const Py_ssize_t *shape;
    const Py_ssize_t *strides; /* NULL: the elements are contiguous */
    Py_ssize_t unit;           /* bytes of a stride of 1 */
} Memory;

/* Where the elements of an array lie that are not contiguous. */
typedef struct {
    char *data;
    int ndim;
    Py_ssize_t shape[DIMENSIONS], strides[DIMENSIONS]; /* in bytes */
} ElementLayout;

/* Find the memory of an array, and return true; `writable` states that it will be written to. Returns false, without an
 * exception, for everything but plain arrays whose elements are contiguous. */
bool find_memory(PyObject *array, bool writable, Memory *memory);

/* The same also for arrays whose elements are not contiguous, but apart from each other. */
bool find_strided_memory(PyObject *array, bool writable, Memory *memory);

/* Return the layout of such an array, which it may change while other code runs. */
ElementLayout copy_layout(const Memory *memory);

/* Return the number of bytes from the first to the last one of the elements, and where they begin. */
size_t find_extent(const ElementLayout *layout, size_t itemsize, const char **begin);

/* Copy the elements, of `itemsize` bytes, to contiguous memory, in C's order, or from there. */
void pack_elements(const ElementLayout *layout, size_t itemsize, char *to);
void unpack_elements(const ElementLayout *layout, size_t itemsize, const char *from);

/* Return true if `make_array` can make arrays like `like`. */
bool can_make(PyObject *like);

/* Return a new array, whose elements are not set. */
PyObject *make_array(PyObject *dtype, int ndim, const Py_ssize_t *shape);

PyObject *set_numpy_interface(PyObject *module, PyObject *capsule);
PyObject *set_numpy_layout(PyObject *module, PyObject *samples);
PyObject *set_torch_access(PyObject *module, PyObject *type);

#endif
