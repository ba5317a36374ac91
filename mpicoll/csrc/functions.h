/* The public functions of blocking collectives. */

#ifndef MPICOLL_FUNCTIONS_H
#define MPICOLL_FUNCTIONS_H

#include <Python.h>

extern PyType_Spec function_spec;

PyObject *set_world(PyObject *module, PyObject *queue);
PyObject *set_communicator_type(PyObject *module, PyObject *type);

#endif
