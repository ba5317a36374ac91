/* Collectives of the ranks of a node through slots of shared memory. */

#ifndef MPICOLL_COLLECTIVES_H
#define MPICOLL_COLLECTIVES_H

#include <Python.h>

typedef struct Collective Collective;

/* Carry out a collective as an operation, on this rank's input and output. Returns -1 with an exception. */
int carry_out_collective(const Collective *one, const char *source, char *target);

extern PyType_Spec collective_spec;

#endif
