/* Collectives of the ranks of a node through slots of shared memory. */

#ifndef MPICOLL_COLLECTIVES_H
#define MPICOLL_COLLECTIVES_H

#include <Python.h>

extern PyType_Spec collective_spec;

#endif
