/* The record of the calls that were carried out without Python code. */

#ifndef MPICOLL_RECORDS_H
#define MPICOLL_RECORDS_H

#include <Python.h>
#include <stdbool.h>

extern bool recording; /* False if all calls are to be left to Python */

/* Seconds of the clock of time.monotonic. */
double read_clock(void);

/* Return what identifies a call that has begun, as Python's EntryTuple. */
PyObject *make_entry_tuple(PyObject *group, unsigned long long number, PyObject *call, double begin);

/* Record a call that ends now. */
void record(PyObject *group, unsigned long long number, PyObject *call, double begin);

PyObject *list_records(PyObject *module, PyObject *unused);
PyObject *set_recording(PyObject *module, PyObject *flag);

#endif
