/* Windows of the ranks of a node: memory of each rank that all of them read and write. */

#ifndef MPICOLL_WINDOW_H
#define MPICOLL_WINDOW_H

#include <Python.h>

extern PyType_Spec window_memory_spec, held_lock_spec;

/* Set the type that was made of the latter. */
void set_held_lock_type(PyTypeObject *type);

#endif
