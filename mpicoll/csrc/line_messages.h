/* Values between pipeline stages that are like the previous one of their line. */

#ifndef MPICOLL_LINE_MESSAGES_H
#define MPICOLL_LINE_MESSAGES_H

#include <Python.h>

extern PyType_Spec line_end_spec;

/* Set the type that was made of it. */
void set_line_end_type(PyTypeObject *type);

extern const char pass_values_doc[];

extern const char send_value_doc[];

PyObject *send_value(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

PyObject *pass_values(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

#endif
