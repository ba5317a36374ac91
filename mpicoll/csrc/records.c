/* The record of the calls that were carried out without Python code, for the flight recorder. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "records.h"

#include <time.h>

enum { RECORDS = 1000 };

typedef struct {
    PyObject *group, *call;
    unsigned long long number;
    double begin, end;
} Record;

static Record records[RECORDS];
static unsigned long long recorded;
bool recording = true;

double read_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

PyObject *make_entry_tuple(PyObject *group, unsigned long long number, PyObject *call, double begin)
{
    return Py_BuildValue("(OKOdO)", group, number, call, begin, Py_None);
}

void record(PyObject *group, unsigned long long number, PyObject *call, double begin)
{
    Record *one = &records[recorded++ % RECORDS];
    PyObject *old_group = one->group, *old_call = one->call;
    *one = (Record){Py_NewRef(group), Py_NewRef(call), number, begin, read_clock()};
    /* Last, since this may run other code. */
    Py_XDECREF(old_group);
    Py_XDECREF(old_call);
}

PyObject *list_records(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *all = PyList_New(0);
    unsigned long long last = recorded;
    for (unsigned long long i = last > RECORDS ? last - RECORDS : 0; all != NULL && i < last; i++) {
        /* A collection of garbage, which any allocation may begin, may replace the record by that of another call. */
        const Record one = records[i % RECORDS];
        Py_INCREF(one.group);
        Py_INCREF(one.call);
        PyObject *entry = make_entry_tuple(one.group, one.number, one.call, one.begin);
        Py_DECREF(one.group);
        Py_DECREF(one.call);
        PyObject *tuple = entry == NULL ? NULL : Py_BuildValue("(Nds)", entry, one.end, "");
        if (tuple == NULL || PyList_Append(all, tuple) < 0)
            Py_CLEAR(all);
        Py_XDECREF(tuple);
    }
    return all;
}

PyObject *set_recording(PyObject *module, PyObject *flag)
{
    (void)module;
    int value = PyObject_IsTrue(flag);
    if (value < 0)
        return NULL;
    recording = value != 0;
    Py_RETURN_NONE;
}
