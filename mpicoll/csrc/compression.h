/* Compression of float32 arrays for messages. */

#ifndef MPICOLL_COMPRESSION_H
#define MPICOLL_COMPRESSION_H

#include <Python.h>

/* _shm.compress(name, values, message, error, result) */
PyObject *shm_compress(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
extern const char shm_compress_doc[];

/* _shm.decompress(name, message, result, add) */
PyObject *shm_decompress(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
extern const char shm_decompress_doc[];

#endif
