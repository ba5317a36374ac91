/* Reductions of arrays in host memory. */

#ifndef MPICOLL_KERNELS_H
#define MPICOLL_KERNELS_H

#include <Python.h>
#include <stddef.h>

/* Write the combination of `nparts` arrays of `count` elements, in the order of the parts, to `out`, which may be the
 * memory of one part and overlaps no other. */
typedef void (*ReduceKernel)(void *out, const void *const *parts, int nparts, size_t count);

/* Return the kernel for an operation and a dtype by their names, as in mpicoll/buffers; NULL if there is none. */
ReduceKernel find_kernel(const char *op, const char *dtype);

/* The same, for results that are written around the caches, if there is such a kernel. */
ReduceKernel find_streaming_kernel(const char *op, const char *dtype);

/* True if the processor has AVX2, and the operating system saves its registers. */
int has_avx2(void);

/* _shm.fold(op, dtype, parts, out) */
PyObject *shm_fold(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
extern const char shm_fold_doc[];

#endif
