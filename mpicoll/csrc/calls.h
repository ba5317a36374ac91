/* Repeated calls, and the rules that they leave to Python. */

#ifndef MPICOLL_CALLS_H
#define MPICOLL_CALLS_H

#include <Python.h>

extern PyType_Spec calls_spec;
extern PyType_Spec bound_call_spec;

PyObject *check_rules(PyObject *module, PyObject *function);

#endif
