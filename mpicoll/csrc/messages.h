/* Messages of the caller over MPI: blocking sends and receives like earlier ones. */

#ifndef MPICOLL_MESSAGES_H
#define MPICOLL_MESSAGES_H

#include <Python.h>
#include <stdbool.h>

#include "mpi_library.h"
#include "native_calls.h"
#include "records.h"

/* A message that is sent or received, or one of each. */
typedef struct {
    PyObject_HEAD
    Summary summary;
    HandleValue comm;
    bool sends, receives;
    int dest, send_tag;    /* of what is sent */
    int source, recv_tag;  /* of what is received, as MPI's constants where they may be any */
    PyObject *sent;        /* counts the messages that leave; NULL where none does */
    PyObject *received;    /* counters of the messages that arrive, by source and tag; NULL where none does */
    PyObject *active;      /* waits of this process, by thread; NULL: no watchdog looks at them */
    PyObject *conclude;    /* returns the exception for a message that has failed */
} MessageCall;

bool is_message_call(PyObject *one);

/* Send and receive what a call describes, on the memory of `x` and of the result, and record that. Returns 1, or -1
 * with an exception. */
int carry_out_messages(const MessageCall *one, PyObject *group, PyObject *call, PyObject *x, const Operands *operands);

extern PyType_Spec message_call_spec;

#endif
