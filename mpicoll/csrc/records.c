/* The flight recorder: the last operations of this process, and those that it is in. The GIL is held in all functions.
 *
 * The records are a ring, in which an operation gets its place when it begins; the places of operations that have not
 * ended are passed over.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "records.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VERSION = 1 };

static const char MAGIC[8] = "mpicoll";

static Area own_area; /* until the ranks of the node share one */
static Area *area = &own_area;
static References references[RECORDS];
static int next; /* record */
bool recording = true;

static bool is_open(const Record *one)
{
    uint8_t state = atomic_load_explicit(&one->state, memory_order_relaxed);
    return state == RECORD_RUNNING || state == RECORD_WAITING;
}

/* --- descriptions of calls */

typedef enum { NBYTES, ROOT, PEER, TAG, NAME, DTYPE, OP, ALGORITHM, SUMMARY, NUMBER, ATTRIBUTES } Attribute;

static const char *const ATTRIBUTE_NAMES[] = {
    "nbytes", "root", "peer", "tag", "name", "dtype", "op", "algorithm", "summary", "number"};
static PyObject *attribute_names[ATTRIBUTES]; /* interned at the first use: that takes longer than to get the value */

static PyObject *get_name(Attribute attribute)
{
    if (attribute_names[attribute] == NULL)
        attribute_names[attribute] = PyUnicode_InternFromString(ATTRIBUTE_NAMES[attribute]);
    return attribute_names[attribute];
}

/* Return an attribute of an object as a new reference; NULL without an exception if it has none. */
static PyObject *find_attribute(PyObject *object, Attribute attribute)
{
    PyObject *name = get_name(attribute), *value = name == NULL ? NULL : PyObject_GetAttr(object, name);
    if (value == NULL)
        PyErr_Clear();
    return value;
}

static int32_t read_number(PyObject *object, Attribute attribute)
{
    PyObject *value = find_attribute(object, attribute);
    long number = value == NULL || value == Py_None ? -1 : PyLong_AsLong(value);
    PyErr_Clear();
    Py_XDECREF(value);
    return number < INT32_MIN || number > INT32_MAX ? -1 : (int32_t)number;
}

/* Copy a text, cut off at the size of its field. */
static void copy_text(PyObject *text, char *to, size_t size)
{
    Py_ssize_t length = 0;
    const char *from = text == NULL || !PyUnicode_Check(text) ? NULL : PyUnicode_AsUTF8AndSize(text, &length);
    PyErr_Clear();
    memset(to, 0, size);
    if (from != NULL)
        memcpy(to, from, (size_t)length < size ? (size_t)length : size);
}

static void read_text(PyObject *object, Attribute attribute, char *to, size_t size)
{
    PyObject *text = find_attribute(object, attribute);
    copy_text(text, to, size);
    Py_XDECREF(text);
}

/* Return the number of a communicator, whose name is recorded. */
static uint32_t name_communicator(PyObject *group)
{
    PyObject *value = find_attribute(group, NUMBER);
    uint32_t number = value == NULL ? 0 : (uint32_t)PyLong_AsUnsignedLongMask(value);
    PyErr_Clear();
    Py_XDECREF(value);
    CommunicatorName *one = &area->communicators[number % COMMUNICATORS];
    if (one->number != number || one->name[0] == 0) {
        read_text(group, NAME, one->name, sizeof one->name);
        one->number = number;
    }
    return number;
}

void summarize_call(PyObject *group, PyObject *call, bool collective, Summary *summary)
{
    PyObject *nbytes = find_attribute(call, NBYTES);
    summary->nbytes = nbytes == NULL || nbytes == Py_None ? UINT64_MAX : PyLong_AsUnsignedLongLong(nbytes);
    PyErr_Clear(); /* UINT64_MAX, if it is no number */
    Py_XDECREF(nbytes);
    summary->communicator = name_communicator(group);
    read_text(call, NAME, summary->name, sizeof summary->name);
    read_text(call, DTYPE, summary->dtype, sizeof summary->dtype);
    /* Each attribute takes 30 ns. */
    if (collective) {
        summary->peer = summary->tag = -1;
        summary->root = read_number(call, ROOT);
        read_text(call, OP, summary->op, sizeof summary->op);
        read_text(call, ALGORITHM, summary->algorithm, sizeof summary->algorithm);
    } else {
        summary->root = -1;
        summary->peer = read_number(call, PEER);
        summary->tag = read_number(call, TAG);
        memset(summary->op, 0, sizeof summary->op);
        memset(summary->algorithm, 0, sizeof summary->algorithm);
    }
}

/* Find the description of a call. That of a collective, which may be repeated, is kept in the call. */
static void find_summary(PyObject *group, PyObject *call, bool collective, Summary *summary)
{
    PyObject *kept = collective ? find_attribute(call, SUMMARY) : NULL;
    const bool known = kept != NULL && PyBytes_Check(kept) && PyBytes_Size(kept) == (Py_ssize_t)sizeof *summary;
    if (known) {
        memcpy(summary, PyBytes_AsString(kept), sizeof *summary);
        summary->communicator = name_communicator(group);
    } else {
        summarize_call(group, call, collective, summary);
    }
    Py_XDECREF(kept);
    if (known || !collective)
        return;
    kept = PyBytes_FromStringAndSize((const char *)summary, sizeof *summary);
    if (kept == NULL || PyObject_SetAttr(call, get_name(SUMMARY), kept) < 0)
        PyErr_Clear();
    Py_XDECREF(kept);
}

/* --- the ring */

int begin_record(
    uint64_t begin, unsigned long long number, const Summary *summary, const References *own, References *old)
{
    int at = next;
    for (int passed = 0; is_open(&area->records[at]) && passed < RECORDS; passed++)
        at = at + 1 < RECORDS ? at + 1 : 0;
    next = at + 1 < RECORDS ? at + 1 : 0;
    Record *one = &area->records[at];
    atomic_store_explicit(&one->order, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    one->begin = begin;
    one->number = number;
    one->direct = own->entry == NULL;
    one->summary = *summary;
    atomic_store_explicit(&one->end, 0, memory_order_relaxed);
    atomic_store_explicit(&one->step, 0, memory_order_relaxed);
    atomic_store_explicit(&one->late_count, 0, memory_order_relaxed);
    atomic_store_explicit(&one->state, RECORD_RUNNING, memory_order_relaxed);
    uint64_t order = atomic_load_explicit(&area->begun, memory_order_relaxed) + 1;
    atomic_store_explicit(&area->begun, order, memory_order_relaxed);
    atomic_store_explicit(&one->order, order, memory_order_release);
    *old = references[at];
    references[at] = *own;
    return at;
}

void end_record(int record, uint64_t end, RecordState state)
{
    Record *one = &area->records[record];
    atomic_store_explicit(&one->end, end, memory_order_relaxed);
    atomic_store_explicit(&one->state, (uint8_t)state, memory_order_release);
}

void drop_references(References *old)
{
    Py_XDECREF(old->group);
    Py_XDECREF(old->call);
    Py_XDECREF(old->entry);
    Py_XDECREF(old->error);
}

PyObject *get_entry(int record)
{
    const References own = references[record];
    if (own.entry != NULL)
        return Py_NewRef(own.entry);
    const uint64_t order = area->records[record].order;
    PyObject *group = Py_NewRef(own.group), *call = Py_NewRef(own.call);
    PyObject *parts[] = {
        Py_NewRef(group), PyLong_FromUnsignedLongLong(area->records[record].number), Py_NewRef(call),
        PyFloat_FromDouble(1e-9 * (double)area->records[record].begin), Py_NewRef(Py_None)};
    /* Py_BuildValue takes twice as long. */
    PyObject *entry = parts[1] == NULL || parts[3] == NULL ? NULL : PyTuple_New(5);
    for (Py_ssize_t i = 0; i < 5; i++) {
        if (entry != NULL)
            PyTuple_SetItem(entry, i, parts[i]);
        else
            Py_XDECREF(parts[i]);
    }
    /* An allocation may collect garbage, and finalizers may begin operations: the record may be another one by now. */
    if (entry != NULL && area->records[record].order == order && references[record].entry == NULL)
        references[record].entry = Py_NewRef(entry);
    Py_DECREF(group);
    Py_DECREF(call);
    return entry;
}

/* Return the youngest record for which `is_wanted` is true; -1 if there is none. */
static int find_record(bool (*is_wanted)(int, const void *), const void *argument)
{
    for (int back = 1; back <= RECORDS; back++) {
        int at = next - back < 0 ? next - back + RECORDS : next - back;
        if (is_open(&area->records[at]) && is_wanted(at, argument))
            return at;
    }
    return -1;
}

static bool is_of_thread(int record, const void *thread)
{
    return references[record].thread == *(const unsigned long *)thread;
}

static bool is_of_entry(int record, const void *entry) { return references[record].entry == entry; }

int find_record_of_thread(void)
{
    unsigned long thread = PyThread_get_thread_ident();
    return find_record(is_of_thread, &thread);
}

void record_wait(int record, uint32_t step, const int *ranks, int count)
{
    Record *one = record < 0 ? NULL : &area->records[record];
    if (one == NULL || !is_open(one))
        return;
    for (int i = 0; i < count && i < SHOWN_RANKS; i++)
        atomic_store_explicit(&one->late[i], (uint16_t)ranks[i], memory_order_relaxed);
    atomic_store_explicit(&one->late_count, (uint16_t)(count < UINT16_MAX ? count : UINT16_MAX), memory_order_relaxed);
    atomic_store_explicit(&one->step, step, memory_order_relaxed);
    atomic_store_explicit(&one->state, count > 0 ? RECORD_WAITING : RECORD_RUNNING, memory_order_release);
}

/* --- functions of the module */

const char begin_entry_doc[] = "begin_entry(entry)\n--\n\nRecord that an operation begins, given as EntryTuple.";

/* Return a time of Python's monotonic clock, a float, in nanoseconds. */
static uint64_t read_time(PyObject *seconds)
{
    const double value = PyFloat_AsDouble(seconds);
    return value > 0 ? (uint64_t)(1e9 * value + 0.5) : 0;
}

PyObject *begin_entry(PyObject *module, PyObject *entry)
{
    (void)module;
    if (!PyTuple_Check(entry) || PyTuple_Size(entry) < 4) {
        PyErr_SetString(PyExc_TypeError, "begin_entry: an EntryTuple is needed");
        return NULL;
    }
    const unsigned long long number = PyLong_AsUnsignedLongLong(PyTuple_GetItem(entry, 1));
    const uint64_t begin = read_time(PyTuple_GetItem(entry, 3));
    if (PyErr_Occurred())
        return NULL;
    Summary summary;
    find_summary(PyTuple_GetItem(entry, 0), PyTuple_GetItem(entry, 2), number > 0, &summary);
    References own = {.entry = Py_NewRef(entry), .thread = PyThread_get_thread_ident()}, old;
    begin_record(begin, number, &summary, &own, &old);
    drop_references(&old);
    Py_RETURN_NONE;
}

const char end_entry_doc[] =
    "end_entry(record)\n--\n\nRecord that an operation has ended, given as Record. It need not have been recorded when"
    " it began.";

PyObject *end_entry(PyObject *module, PyObject *record)
{
    if (!PyTuple_Check(record) || PyTuple_Size(record) != 3 || !PyUnicode_Check(PyTuple_GetItem(record, 2))) {
        PyErr_SetString(PyExc_TypeError, "end_entry: a Record is needed");
        return NULL;
    }
    PyObject *entry = PyTuple_GetItem(record, 0), *time = PyTuple_GetItem(record, 1);
    PyObject *error = PyTuple_GetItem(record, 2);
    const uint64_t end = time == Py_None ? 0 : read_time(time);
    if (PyErr_Occurred())
        return NULL;
    int at = find_record(is_of_entry, entry);
    if (at < 0) {
        PyObject *none = begin_entry(module, entry);
        if (none == NULL)
            return NULL;
        Py_DECREF(none);
        at = find_record(is_of_entry, entry);
    }
    if (at < 0) /* references that were dropped have run other operations */
        Py_RETURN_NONE;
    const bool failed = PyUnicode_GetLength(error) > 0;
    if (failed)
        references[at].error = Py_NewRef(error);
    end_record(at, end, time == Py_None ? RECORD_STARTED : failed ? RECORD_FAILED : RECORD_DONE);
    Py_RETURN_NONE;
}

/* Return an operation that has ended as Python's Record. */
static PyObject *make_record_tuple(int record)
{
    const Record *one = &area->records[record];
    const bool started = one->state == RECORD_STARTED;
    const double end = 1e-9 * (double)one->end;
    PyObject *error = Py_XNewRef(references[record].error), *entry = get_entry(record);
    PyObject *time = started ? Py_NewRef(Py_None) : PyFloat_FromDouble(end);
    if (error == NULL)
        error = PyUnicode_FromString("");
    PyObject *tuple = entry == NULL || error == NULL || time == NULL ? NULL : PyTuple_Pack(3, entry, time, error);
    Py_XDECREF(entry);
    Py_XDECREF(error);
    Py_XDECREF(time);
    return tuple;
}

const char list_records_doc[] =
    "list_records(direct)\n--\n\nReturn the last operations that have ended; if `direct` is true, only those that were"
    " carried out without Python code.";

PyObject *list_records(PyObject *module, PyObject *direct)
{
    (void)module;
    const int only_direct = PyObject_IsTrue(direct);
    PyObject *all = only_direct < 0 ? NULL : PyList_New(0);
    const int first = next;
    for (int i = 0; all != NULL && i < RECORDS; i++) {
        const int at = (first + i) % RECORDS;
        const Record *one = &area->records[at];
        if (one->order == 0 || is_open(one) || (only_direct && !one->direct))
            continue;
        PyObject *tuple = make_record_tuple(at);
        if (tuple == NULL || PyList_Append(all, tuple) < 0)
            Py_CLEAR(all);
        Py_XDECREF(tuple);
    }
    return all;
}

PyObject *clear_records(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    for (int at = 0; at < RECORDS; at++) {
        Record *one = &area->records[at];
        if (is_open(one))
            continue;
        References old = references[at];
        references[at] = (References){0};
        atomic_store_explicit(&one->order, 0, memory_order_release);
        drop_references(&old);
    }
    Py_RETURN_NONE;
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

/* --- the area that the ranks of a node share */

/* Return when this process has started, as in /proc/PID/stat; 0 if that can't be read. */
static uint64_t find_process_start(void)
{
    char text[1024];
    int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    if (length <= 0)
        return 0;
    text[length] = 0;
    /* The second field, the name of the program, may have spaces and brackets. */
    const char *field = strrchr(text, ')');
    for (int i = 0; field != NULL && i < 20; i++)
        field = strchr(field + 1, ' ');
    return field == NULL ? 0 : strtoull(field + 1, NULL, 10);
}

/* A child of this process has its memory, but is not this rank. */
static void leave_area(void) { area = &own_area; }

const char place_records_doc[] =
    "place_records(memory, rank, size)\n--\n\nMove the records to memory that other processes can read. This process is"
    " `rank` of a job of `size`.";

PyObject *place_records(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *memory;
    int rank, size;
    if (!PyArg_ParseTuple(args, "Oii", &memory, &rank, &size))
        return NULL;
    static Py_buffer view;
    Py_buffer new_view;
    if (PyObject_GetBuffer(memory, &new_view, PyBUF_WRITABLE) < 0)
        return NULL;
    if ((size_t)new_view.len < sizeof(Area) || (uintptr_t)new_view.buf % _Alignof(Area) != 0) {
        PyBuffer_Release(&new_view);
        PyErr_Format(PyExc_ValueError, "place_records: %zu aligned bytes are needed", sizeof(Area));
        return NULL;
    }
    Area *to = new_view.buf;
    memcpy(to->communicators, area->communicators, sizeof to->communicators);
    memcpy(to->records, area->records, sizeof to->records);
    memcpy(to->job, area->job, sizeof to->job);
    to->begun = area->begun;
    /* A child returns to that area, where the records would be older than the references beside them. */
    memset(own_area.records, 0, sizeof own_area.records);
    to->version = VERSION;
    to->area_bytes = sizeof(Area);
    to->record_count = RECORDS;
    to->record_bytes = sizeof(Record);
    to->communicator_count = COMMUNICATORS;
    to->pid = getpid();
    to->rank = rank;
    to->size = size;
    to->process_start = find_process_start();
    static bool forks = false;
    if (!forks)
        forks = pthread_atfork(NULL, NULL, leave_area) == 0;
    area = to;
    /* Last: it states that the rest is there. */
    atomic_thread_fence(memory_order_release);
    memcpy(to->magic, MAGIC, sizeof MAGIC);
    if (view.obj != NULL)
        PyBuffer_Release(&view);
    view = new_view;
    Py_RETURN_NONE;
}

PyObject *name_job(PyObject *module, PyObject *name)
{
    (void)module;
    copy_text(name, area->job, sizeof area->job);
    Py_RETURN_NONE;
}

PyObject *mark_left(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    atomic_store_explicit(&area->left, 1, memory_order_release);
    Py_RETURN_NONE;
}
