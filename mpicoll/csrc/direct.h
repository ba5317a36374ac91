/* Collectives of the ranks of a node in each other's arrays, without copies through slots. */

#ifndef MPICOLL_DIRECT_H
#define MPICOLL_DIRECT_H

#include "collectives.h"
#include "steps.h"

/* Memory that all ranks have mapped: a rank's part of it has another address for each rank. */
typedef struct Segment Segment;

/* The arrays of the ranks in the running operation. */
typedef struct Locations Locations;

/* Return true if the ranks have to exchange the locations of their arrays; the same on all ranks. */
bool tries_direct(const Collective *one);

/* Find the segments of this rank's arrays. The GIL is held. Returns -1 with an exception. */
int locate_arrays(const Collective *one, const char *source, const char *target);

/* Carry out a collective, after locate_arrays, where each rank can access what it needs. Returns 1; 0 if that is not
 * so, on all ranks, which have exchanged locations only; -1 with an exception. */
int run_direct(const Collective *one, const char *source, char *target);

/* Read the blocks of alltoall whose sizes differ, from their byte `start` on, from the memory of the other ranks, and
 * copy this rank's own one if `copies_own`; after locate_arrays. Returns as run_direct. */
int read_uneven_blocks(const Collective *one, const char *source, char *target, size_t start, bool copies_own);

/* Copy from private memory of another process; 0 is this one. Returns the error number. */
int read_memory(int process, int64_t from, char *to, size_t nbytes);

/* Methods of Steps. */
PyObject *add_segment(PyObject *self, PyObject *args);
PyObject *remove_segment(PyObject *self, PyObject *number);
PyObject *find_segment(PyObject *self, PyObject *address);
PyObject *set_processes(PyObject *self, PyObject *processes);

void free_locations(Steps *steps);

#endif
