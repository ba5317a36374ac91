/* Nonblocking collectives that are begun in the caller's thread. */

#ifndef MPICOLL_BEGUN_CALLS_H
#define MPICOLL_BEGUN_CALLS_H

#include <Python.h>

#include "calls.h"
#include "native_calls.h"

/* Begin a call by `carrier`, a Collective or a NativeCall, on the memory of `x` and of `value`, its result. Returns
 * what the queue makes of a new BegunCall; or NULL, with an exception, or without one if Python has to start the call.
 */
PyObject *begin_in_order(
    Calls *calls, PyObject *carrier, PyObject *call, PyObject *x, PyObject *value, const Operands *operands);

/* Complete the oldest call that was begun, or all of them. The lock of the queue is held. An error is kept for the wait
 * for the call; returns -1 with the exception of a signal handler. */
int complete_begun_call(Calls *calls);
int complete_begun_calls(Calls *calls);

/* Return the number of begun calls of which nothing has been done yet: they have no number among the collectives. */
int count_deferred(const Calls *calls);

/* Methods of Calls. */
PyObject *complete_oldest(PyObject *self, PyObject *unused);
PyObject *complete_handed_over(PyObject *self, PyObject *unused);
PyObject *attend_to_begun(PyObject *self, PyObject *unused);
PyObject *fail_begun(PyObject *self, PyObject *make_failure);

extern const char hand_over_begun_calls_doc[];

PyObject *hand_over_begun_calls(PyObject *module, PyObject *unused);

extern PyType_Spec begun_call_spec;

/* Set the type that was made of it. */
void set_begun_call_type(PyTypeObject *type);

#endif
