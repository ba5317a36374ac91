/* Collectives of neighbours on a node. */

#ifndef MPICOLL_NEIGHBOURS_H
#define MPICOLL_NEIGHBOURS_H

#include <Python.h>

extern PyType_Spec neighbour_collective_spec;

#endif
