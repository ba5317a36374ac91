/* Collectives of the MPI library, called through mpi4py on the memory of repeated calls. */

#ifndef MPICOLL_NATIVE_CALLS_H
#define MPICOLL_NATIVE_CALLS_H

#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "records.h"

/* The memory of this rank's input and output; NULL where there is none. */
typedef struct {
    const char *source;
    size_t source_bytes;
    char *target;
    size_t target_bytes;
} Operands;

/* An array of the running call, which mpi4py reads as a buffer. */
typedef struct {
    PyObject_HEAD
    char *data; /* NULL: no call runs */
    size_t nbytes;
} CallMemory;

typedef struct {
    PyObject_HEAD
    PyObject *function;             /* a method of mpi4py's communicator; NULL: there is a single rank */
    PyObject *arguments, *in_place; /* tuples; the second one is NULL where the output can't be the input */
    CallMemory *source, *target;    /* to which they refer; NULL: they don't */
    PyObject *fill;                 /* an element of which the output consists after the call; NULL: it is the result */
    bool copies;                    /* the input to the output, after the call */
    Summary summary;                /* of the call that it carries out */
    uint32_t signature;             /* of this call; 0: only Python can compare it */
} NativeCall;

/* Return true for a NativeCall, false for a Collective. */
bool is_native_call(PyObject *one);

/* Return true for a call on a communicator of one rank, which has no other rank to compare the call with. */
bool is_local(const NativeCall *one);

/* Carry out such a call. */
void copy_locally(const NativeCall *one, const Operands *operands);

/* Call MPI. Returns -1 with an exception. */
int call_mpi(const NativeCall *one, const Operands *operands);

extern PyType_Spec call_memory_spec, native_call_spec;

#endif
