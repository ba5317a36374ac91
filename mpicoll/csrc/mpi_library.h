/* Functions of the MPI library that mpi4py has loaded, found without being linked with one: there are several. */

#ifndef MPICOLL_MPI_LIBRARY_H
#define MPICOLL_MPI_LIBRARY_H

#include <Python.h>
#include <stdint.h>

enum { MAX_STATUS_BYTES = 64 };

/* A communicator, datatype, request or message: a pointer in some libraries and an int in others. As an argument it is
 * passed as an integer of the size of a pointer, with its sign: both are passed in one register. */
typedef uintptr_t HandleValue;

/* A variable of such a type, of which functions take the address. */
typedef union {
    int number;
    void *pointer;
} Handle;

typedef struct {
    _Alignas(16) char bytes[MAX_STATUS_BYTES];
} Status;

typedef struct {
    int (*isend)(const void *data, int count, HandleValue datatype, int dest, int tag, HandleValue comm,
                 Handle *request);
    int (*issend)(const void *data, int count, HandleValue datatype, int dest, int tag, HandleValue comm,
                  Handle *request);
    int (*irecv)(void *data, int count, HandleValue datatype, int source, int tag, HandleValue comm, Handle *request);
    int (*iprobe)(int source, int tag, HandleValue comm, int *flag, Status *status);
    int (*improbe)(int source, int tag, HandleValue comm, int *flag, Handle *message, Status *status);
    int (*mprobe)(int source, int tag, HandleValue comm, Handle *message, Status *status);
    int (*imrecv)(void *data, int count, HandleValue datatype, Handle *message, Handle *request);
    int (*test)(Handle *request, int *flag, Status *status);
    /* Handles and statuses are arrays, whose elements have the sizes of this library. */
    int (*testsome)(int count, void *requests, int *completed, int *indices, void *statuses);
    int (*wait)(Handle *request, Status *status);
    int (*cancel)(Handle *request);
    int (*request_free)(Handle *request);
    int (*test_cancelled)(const Status *status, int *flag);
    int (*get_elements)(const Status *status, HandleValue datatype, int64_t *count);
    HandleValue byte; /* MPI_BYTE */
    int handle_bytes, status_bytes;
    int source_offset, tag_offset, error_offset; /* of fields of a status */
} MpiLibrary;

extern MpiLibrary mpi;

/* Return a handle as it is passed to functions. */
HandleValue to_handle(unsigned long long value);

extern const char set_mpi_doc[];

PyObject *set_mpi(PyObject *module, PyObject *args);

#endif
