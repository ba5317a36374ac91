/* Repeated calls, and the lock and the record that they share with other operations. */

#ifndef MPICOLL_CALLS_H
#define MPICOLL_CALLS_H

#include <Python.h>

extern PyType_Spec calls_spec;

PyObject *list_records(PyObject *module, PyObject *unused);
PyObject *set_recording(PyObject *module, PyObject *flag);

#endif
