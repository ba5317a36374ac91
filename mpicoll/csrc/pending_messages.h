/* Messages of the caller over MPI that were started, and complete later. */

#ifndef MPICOLL_PENDING_MESSAGES_H
#define MPICOLL_PENDING_MESSAGES_H

#include <Python.h>

#include "messages.h"
#include "native_calls.h"

/* Start the message that a call describes, on the memory of `array`, and record that. Returns a new PendingMessage, or
 * NULL with an exception. */
PyObject *make_pending_message(
    MessageCall *carrier, PyObject *group, PyObject *call, PyObject *array, const Operands *operands);

/* Have the thread of progress look at a message, or a collective, until a thread attends to it. */
void leave_alone(void);
void attend(void);

extern PyType_Spec pending_message_spec;

/* Set the type that was made of it. */
void set_pending_message_type(PyTypeObject *type);

extern const char list_pending_messages_doc[], await_unattended_message_doc[], set_progress_doc[];

PyObject *list_pending_messages(PyObject *module, PyObject *unused);
PyObject *test_pending_messages(PyObject *module, PyObject *unused);
PyObject *await_unattended_message(PyObject *module, PyObject *unused);
PyObject *set_progress(PyObject *module, PyObject *start);
PyObject *stop_progress(PyObject *module, PyObject *unused);

#endif
