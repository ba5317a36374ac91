/* The flight recorder: the last operations of this process, and those that it is in.
 *
 * Numbers and texts lie in an Area, which other processes can read at any time, also when this process has been killed.
 * What only this process can use, its Python objects, lies beside it.
 */

#ifndef MPICOLL_RECORDS_H
#define MPICOLL_RECORDS_H

#include <Python.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    RECORDS = 1000,
    COMMUNICATORS = 64,
    SHOWN_RANKS = 4 /* of those that a rank waits for */
};

typedef enum {
    RECORD_RUNNING = 1,
    RECORD_WAITING, /* for ranks that have not reached its step, longer than it polls in C */
    RECORD_DONE,
    RECORD_FAILED,
    RECORD_STARTED /* a message whose end is recorded apart */
} RecordState;

/* A call, without what differs between two calls of a kind. Texts end with a zero, unless they fill their field. */
typedef struct {
    uint64_t nbytes;          /* UINT64_MAX: not known */
    uint32_t communicator;    /* Group.number */
    int32_t root, peer, tag;  /* -1: none */
    char name[20], dtype[12], op[8], algorithm[16];
} Summary;

/* An operation. A reader compares `order` before and after it has copied the rest. */
typedef struct {
    _Atomic uint64_t order; /* of its begin among the operations of the process, from 1 on; 0: is being written */
    uint64_t begin;         /* nanoseconds of the monotonic clock */
    _Atomic uint64_t end;   /* 0: not yet */
    uint64_t number;        /* among the collectives of the communicator; 0: none of them */
    _Atomic uint32_t step;  /* in which it waits, or has waited */
    _Atomic uint8_t state;
    uint8_t direct;               /* carried out without Python code */
    _Atomic uint16_t late_count;  /* ranks that it waits for */
    _Atomic uint16_t late[SHOWN_RANKS]; /* the first of them, as ranks of the job */
    Summary summary;
} Record;

typedef struct {
    uint32_t number;
    char name[60];
} CommunicatorName;

typedef struct {
    char magic[8];
    uint32_t version, area_bytes, record_count, record_bytes, communicator_count;
    int32_t pid, rank, size;
    uint64_t process_start;  /* as in /proc/PID/stat: tells the process from a later one of the same number */
    _Atomic uint64_t begun;  /* operations */
    _Atomic uint32_t left;   /* the process has ended normally */
    uint32_t unused;
    char job[64];
    CommunicatorName communicators[COMMUNICATORS];
    _Alignas(128) Record records[RECORDS];
} Area;

_Static_assert(sizeof(Summary) == 80 && sizeof(Record) == 128, "the layout that record_area.py reads");

/* What a record refers to in this process. */
typedef struct {
    PyObject *group, *call; /* of an operation without Python code; NULL otherwise */
    PyObject *entry;        /* an EntryTuple; NULL until it is needed */
    PyObject *error;        /* a text; NULL: none */
    unsigned long thread;
} References;

extern bool recording; /* False if all calls are to be left to Python */

/* Describe a call, which is a collective or not. */
void summarize_call(PyObject *group, PyObject *call, bool collective, Summary *summary);

/* Record that an operation begins, and take over the references. Returns the number of its record. The references of
 * the record that it replaces are put to `old`. */
int begin_record(
    uint64_t begin, unsigned long long number, const Summary *summary, const References *own, References *old);

void end_record(int record, uint64_t end, RecordState state);

/* Drop references, which may run other code. */
void drop_references(References *old);

/* Return the running operation of a record as Python's EntryTuple. */
PyObject *get_entry(int record);

/* Return the record of the operation that this thread is in; -1 if there is none. */
int find_record_of_thread(void);

/* Record that an operation waits in a step for ranks of the job, `count` of them, or with 0 that it waits no more. */
void record_wait(int record, uint32_t step, const int *ranks, int count);

extern const char begin_entry_doc[], end_entry_doc[], list_records_doc[], place_records_doc[];

PyObject *begin_entry(PyObject *module, PyObject *entry);
PyObject *end_entry(PyObject *module, PyObject *record);
PyObject *list_records(PyObject *module, PyObject *direct);
PyObject *clear_records(PyObject *module, PyObject *unused);
PyObject *place_records(PyObject *module, PyObject *args);
PyObject *name_job(PyObject *module, PyObject *name);
PyObject *mark_left(PyObject *module, PyObject *unused);
PyObject *set_recording(PyObject *module, PyObject *flag);

#endif
