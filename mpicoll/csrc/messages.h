/* Messages of the caller over MPI that are like earlier ones. */

#ifndef MPICOLL_MESSAGES_H
#define MPICOLL_MESSAGES_H

#include <Python.h>
#include <stdbool.h>

#include "mpi_library.h"
#include "native_calls.h"
#include "records.h"

/* How long a thread polls for its messages before a wait is shown, about 20 us. */
enum { POLLS = 100 };

/* A message that is sent or received, or one of each if they are completed in the call. */
typedef struct {
    PyObject_HEAD
    Summary summary;
    HandleValue comm;
    unsigned long long comm_number; /* the same as mpi4py has it */
    bool sends, receives;
    int dest, send_tag;    /* of what is sent */
    int source, recv_tag;  /* of what is received, as MPI's constants where they may be any */
    PyObject *sent;        /* counts the messages that leave; NULL where none does */
    PyObject *received;    /* counters of the messages that arrive, by source and tag; NULL where none does */
    PyObject *active;      /* waits of this process, by thread; NULL: no watchdog looks at them */
    PyObject *conclude;    /* returns the exception for a message that has failed */
    PyObject *wrap;        /* returns what the call returns for a PendingMessage; NULL: it completes the messages */
    PyObject *accept;      /* may store what a message of another size stands for; NULL: nothing does */
} MessageCall;

/* A wait as the watchdog sees it. */
typedef struct {
    PyObject *thread, *outer; /* the wait of this thread that a signal handler has interrupted; NULL: there is none */
} ShownWait;

bool is_message_call(PyObject *one);

/* Send and receive what a call describes, on the memory of `x` and of the result, and record that. Returns 1, or -1
 * with an exception. */
int carry_out_messages(const MessageCall *one, PyObject *group, PyObject *call, PyObject *x, const Operands *operands);

/* Show the wait of this thread in the call of a record. An exception, of memory that is missing, does not matter: the
 * messages have begun. */
void show_wait(const MessageCall *one, int record, ShownWait *shown);

void hide_wait(const MessageCall *one, ShownWait *shown);

/* Have Python store what a message of `nbytes`, another size than that of `into`, stands for. Returns the bytes of
 * that, or -1 with an exception. */
long long accept_message(const MessageCall *one, PyObject *into, long long nbytes);

/* Count a message by next(counter). Returns -1 with an exception. */
int advance_counter(PyObject *counter);

/* Count a message by the counter of its peer and tag. Returns -1 with an exception. */
int count_message(PyObject *counters, int peer, int tag);

extern PyType_Spec message_call_spec;

#endif
