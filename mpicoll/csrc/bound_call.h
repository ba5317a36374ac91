/* Calls that are bound to their arrays, for plans. */

#ifndef MPICOLL_BOUND_CALL_H
#define MPICOLL_BOUND_CALL_H

#include <Python.h>

extern PyType_Spec bound_call_spec;

#endif
