/* Repeated calls, and the rules that they leave to Python. */

#ifndef MPICOLL_CALLS_H
#define MPICOLL_CALLS_H

#include <Python.h>
#include <stdbool.h>

#include "collectives.h"
#include "native_calls.h"
#include "queue_lock.h"
#include "steps.h"

enum {
    MAX_KEY = 8, /* the name of a call, and its arguments that are not arrays */
    MAX_DEFERRED = 64
};

/* A call that is to be compared with those of the other ranks later. */
typedef struct {
    uint32_t signature;
    PyObject *entry;
} Deferred;

typedef struct BegunCall BegunCall;

/* The repeated calls of a communicator. */
typedef struct Calls Calls;
struct Calls {
    PyObject_HEAD
    Running running;
    QueueLock *lock;
    PyObject *queue, *pending, *group; /* NULL: garbage that was collected */
    bool enabled;
    unsigned int generation; /* how many times calls were removed */
    uint32_t drawn; /* the last number by which a call of the table was chosen to be replaced */
    struct Entry *entries;   /* NULL: there has been none */
    bool published;
    int deferrable; /* calls of MPI that may begin before Python compares them */
    int deferred_count;
    Deferred deferred[MAX_DEFERRED];
    BegunCall *begun[MAX_BEGUN]; /* the oldest one first */
    int begun_count;
    bool begins_alone;      /* the begun call: there may be no other one */
    bool completes;         /* the running call was begun before */
    bool shows_runner;
    bool refuses;           /* this process is not the rank any more */
    PyObject *wrap;         /* returns what a call returns that has been begun; NULL: none is begun */
    Calls *older, *younger; /* in the list of those with begun calls */
};

bool overlap(const char *one, size_t one_bytes, const char *other, size_t other_bytes);

/* Carry out a call like one that was added. Returns a new reference to its result; or NULL, with an exception, or
 * without one if Python has to carry out the call. */
PyObject *run_repeated(Calls *calls, PyObject *x, PyObject *out, PyObject *const *key, Py_ssize_t size);

/* Begin such a call, and return its request. Returns as run_repeated. */
PyObject *begin_repeated(Calls *calls, PyObject *x, PyObject *out, PyObject *const *key, Py_ssize_t size);

/* Have a Collective, a NativeCall or a MessageCall carry out `call`. */
void set_call(const Calls *calls, PyObject *carrier, PyObject *call);

/* Run a call in the order of the communicator, by a Collective or a NativeCall, and record it. Returns 1, -1 with an
 * exception, 0 if Python has to. */
int run_in_order(Calls *calls, PyObject *carrier, PyObject *call, const Operands *operands);

/* Set the description of a call that other ranks read. Without one this rank waits for them. */
void describe_call(const Calls *calls, Collective *collective, PyObject *call);

/* End the running call, which has raised an exception: replace it by what the queue makes of it. */
void conclude_failure(Calls *calls);

/* Show no running call any more. */
void hide_completion(Calls *calls);

extern PyType_Spec calls_spec;

PyObject *check_rules(PyObject *module, PyObject *function);

#endif
