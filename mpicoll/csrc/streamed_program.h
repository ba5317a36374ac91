/* Schedules with large messages over MPI, in pieces. */

#ifndef MPICOLL_STREAMED_PROGRAM_H
#define MPICOLL_STREAMED_PROGRAM_H

#include <Python.h>

extern PyType_Spec streamed_program_spec;

#endif
