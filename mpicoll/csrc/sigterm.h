/* A limit on the time in which SIGTERM has an effect. */

#ifndef MPICOLL_SIGTERM_H
#define MPICOLL_SIGTERM_H

#include <Python.h>

PyObject *limit_sigterm(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *cancel_sigterm_limit(PyObject *module, PyObject *unused);

#endif
