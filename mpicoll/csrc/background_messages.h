/* Messages over MPI that a thread of the extension moves, starts in turn and completes. */

#ifndef MPICOLL_BACKGROUND_MESSAGES_H
#define MPICOLL_BACKGROUND_MESSAGES_H

#include <Python.h>

extern PyType_Spec background_message_spec, background_messages_spec;

/* Set the type that was made of the first one. */
void set_background_message_type(PyTypeObject *type);

#endif
