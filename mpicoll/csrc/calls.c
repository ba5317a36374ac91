/* The way in for repeated calls: what was bound for the first call of a kind is looked up, run and recorded here.
 *
 * Everything that is not as it was when a call was bound is left to Python, which checks and binds the call again: run()
 * returns the module's constant MISSING before anything has been done.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "calls.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#include "collectives.h"
#include "queue_lock.h"
#include "steps.h"

enum { ENTRIES = 512, DIMENSIONS = 8, FORMAT = 4, RECORDS = 1000 };

/* The dtype and the shape of an array. */
typedef struct {
    char format[FORMAT];
    int ndim;
    Py_ssize_t shape[DIMENSIONS];
} Kind;

typedef struct {
    PyObject *key; /* the name of the call and the arguments that are not arrays; NULL: no entry */
    bool has_input, has_result, in_place;
    Kind input, result;
    PyObject *shape, *dtype; /* of the result */
    Collective *collective;
    PyObject *call; /* its description */
} Entry;

typedef struct {
    PyObject_HEAD
    Running running;
    Steps *steps;
    QueueLock *lock;
    PyObject *queue, *pending, *group; /* the queue of operations owns this object, so it is borrowed */
    PyObject *array_type, *empty;
    bool enabled;
    Entry *entries;
    const Entry *entry; /* of the running call */
    double begin;
    bool published;
} Calls;

/* --- the record of calls */

typedef struct {
    PyObject *group, *call;
    unsigned long long number;
    double begin, end;
} Record;

static Record records[RECORDS];
static unsigned long long recorded;
static bool recording = true;

static double read_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static PyObject *make_entry_tuple(PyObject *group, unsigned long long number, PyObject *call, double begin)
{
    return Py_BuildValue("(OKOdO)", group, number, call, begin, Py_None);
}

static void record(const Calls *calls, const Entry *entry)
{
    Record *one = &records[recorded++ % RECORDS];
    PyObject *group = one->group, *call = one->call;
    one->group = Py_NewRef(calls->group);
    one->call = Py_NewRef(entry->call);
    one->number = calls->lock->number;
    one->begin = calls->begin;
    one->end = read_clock();
    /* Last, since this may run other code. */
    Py_XDECREF(group);
    Py_XDECREF(call);
}

PyObject *list_records(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *all = PyList_New(0);
    unsigned long long last = recorded;
    for (unsigned long long i = last > RECORDS ? last - RECORDS : 0; all != NULL && i < last; i++) {
        const Record *one = &records[i % RECORDS];
        PyObject *entry = make_entry_tuple(one->group, one->number, one->call, one->begin);
        PyObject *tuple = entry == NULL ? NULL : Py_BuildValue("(Nds)", entry, one->end, "");
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

/* --- the running call, as the queue of operations shows it */

/* Show the running call, before Python code runs that may ask for it. Returns -1 with an exception. */
static int publish(Running *running)
{
    Calls *calls = (Calls *)((char *)running - offsetof(Calls, running));
    if (calls->published)
        return 0;
    PyObject *entry = make_entry_tuple(calls->group, calls->lock->number, calls->entry->call, calls->begin);
    PyObject *thread = entry == NULL ? NULL : PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    int status = thread == NULL || PyObject_SetAttrString(calls->queue, "thread", thread) < 0 ||
                 PyObject_SetAttrString(calls->queue, "current", entry) < 0
                     ? -1
                     : 0;
    calls->published = status == 0;
    Py_XDECREF(entry);
    Py_XDECREF(thread);
    return status;
}

/* End the running call, which has raised an exception: replace it by what the queue makes of it. */
static void conclude_failure(Calls *calls)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    PyObject *shown = NULL;
    if (publish(&calls->running) == 0) {
        PyObject *entry = PyObject_GetAttrString(calls->queue, "current");
        shown = entry == NULL ? NULL : PyObject_CallMethod(calls->queue, "conclude_failure", "OO", entry, value);
        Py_XDECREF(entry);
    }
    calls->published = false; /* the queue has cleared it */
    if (shown != NULL)
        PyErr_SetObject((PyObject *)Py_TYPE(shown), shown);
    Py_XDECREF(shown);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

/* --- looking calls up */

static bool set_kind(Kind *kind, const Py_buffer *view)
{
    if (view->format == NULL || strlen(view->format) >= FORMAT || view->ndim > DIMENSIONS)
        return false;
    memset(kind, 0, sizeof *kind);
    strcpy(kind->format, view->format);
    kind->ndim = view->ndim;
    for (int i = 0; i < view->ndim; i++)
        kind->shape[i] = view->shape[i];
    return true;
}

static bool is_of_kind(const Py_buffer *view, const Kind *kind)
{
    if (view->ndim != kind->ndim || strncmp(view->format, kind->format, FORMAT) != 0)
        return false;
    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] != kind->shape[i])
            return false;
    }
    return true;
}

static bool is_plain(PyObject *value)
{
    return value == Py_None || PyUnicode_CheckExact(value) || PyLong_CheckExact(value) || PyBool_Check(value);
}

static bool are_equal_keys(PyObject *one, PyObject *other)
{
    Py_ssize_t size = PyTuple_Size(one);
    if (size != PyTuple_Size(other))
        return false;
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *a = PyTuple_GetItem(one, i), *b = PyTuple_GetItem(other, i);
        if (a == b)
            continue;
        if (Py_TYPE(a) != Py_TYPE(b) || !is_plain(a) || PyObject_RichCompareBool(a, b, Py_EQ) != 1)
            return false;
    }
    return true;
}

/* The place of a call in the table. Names of calls and operations are mostly the same objects in each call. */
static size_t get_place(PyObject *key, size_t nbytes, int ndim)
{
    size_t hash = (size_t)(uintptr_t)PyTuple_GetItem(key, 0) >> 4;
    if (PyTuple_Size(key) > 1)
        hash ^= (size_t)(uintptr_t)PyTuple_GetItem(key, 1) >> 3;
    hash = (hash ^ nbytes ^ ((size_t)ndim << 20)) * 0x9E3779B97F4A7C15u;
    return hash >> 40 & (ENTRIES - 1);
}

/* Get the memory of an array, and return true. Otherwise Python looks at it. */
static bool get_view(const Calls *calls, PyObject *array, Py_buffer *view, int flags)
{
    if ((PyObject *)Py_TYPE(array) != calls->array_type)
        return false;
    if (PyObject_GetBuffer(array, view, flags | PyBUF_ND | PyBUF_FORMAT) == 0)
        return true;
    PyErr_Clear();
    return false;
}

static bool overlap(const Py_buffer *one, const Py_buffer *other)
{
    const char *a = one->buf, *b = other->buf;
    return a < b + other->len && b < a + one->len;
}

/* Run a call in the order of the communicator, and record it. Returns 1, -1 with an exception, 0 if Python has to. */
static int run_entry(Calls *calls, const Entry *entry, char *source, char *target)
{
    if (!try_to_lock(calls->lock))
        return 0;
    Steps *steps = calls->steps;
    calls->lock->number++;
    calls->entry = entry;
    calls->begin = read_clock();
    steps->running = &calls->running;
    int status = carry_out_collective(entry->collective, source, target);
    steps->running = NULL;
    if (status < 0) {
        conclude_failure(calls);
    } else {
        if (calls->published) {
            calls->published = false;
            status = PyObject_SetAttrString(calls->queue, "current", Py_None);
        }
        record(calls, entry);
    }
    unlock(calls->lock);
    return status < 0 ? -1 : 1;
}

/* Returns a new reference, or NULL: with an exception, or without one if Python has to carry out the call. */
static PyObject *run_call(Calls *calls, PyObject *key, PyObject *x, PyObject *out)
{
    Py_buffer from = {0}, to = {0};
    PyObject *value = NULL;
    if ((x != Py_None && !get_view(calls, x, &from, 0)) || !PyTuple_CheckExact(key))
        return NULL;
    Entry *place = &calls->entries[get_place(key, (size_t)from.len, from.ndim)], entry = *place;
    if (entry.key == NULL || entry.has_input != (x != Py_None) || !are_equal_keys(key, entry.key) ||
        (entry.has_input && !is_of_kind(&from, &entry.input)))
        goto leave;
    if (out != Py_None) {
        if (!entry.has_result || (out == x && !entry.in_place) || !get_view(calls, out, &to, PyBUF_WRITABLE) ||
            !is_of_kind(&to, &entry.result) || (out != x && x != Py_None && overlap(&from, &to)))
            goto leave;
        value = Py_NewRef(out);
    } else if (entry.has_result) {
        value = PyObject_CallFunctionObjArgs(calls->empty, entry.shape, entry.dtype, NULL);
        if (value == NULL || PyObject_GetBuffer(value, &to, PyBUF_WRITABLE) < 0) {
            Py_CLEAR(value);
            goto leave;
        }
    } else {
        value = Py_NewRef(Py_None);
    }
    /* The table may change while the call runs. */
    Py_INCREF((PyObject *)entry.collective);
    Py_INCREF(entry.call);
    if (run_entry(calls, &entry, from.buf, to.buf) <= 0)
        Py_CLEAR(value);
    Py_DECREF((PyObject *)entry.collective);
    Py_DECREF(entry.call);
leave:
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    return value;
}

static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Calls *calls = (Calls *)self;
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "Calls.run: key, x, out and missing are needed");
        return NULL;
    }
    if (recording && calls->enabled && PyObject_Size(calls->pending) == 0) {
        PyObject *value = run_call(calls, args[0], args[1], args[2]);
        if (value != NULL || PyErr_Occurred())
            return value;
    }
    return Py_NewRef(args[3]);
}

/* --- the Python type */

static void clear_entry(Entry *entry)
{
    Entry old = *entry;
    memset(entry, 0, sizeof *entry);
    Py_XDECREF(old.key);
    Py_XDECREF(old.shape);
    Py_XDECREF(old.dtype);
    Py_XDECREF((PyObject *)old.collective);
    Py_XDECREF(old.call);
}

static PyObject *add(PyObject *self, PyObject *args)
{
    Calls *calls = (Calls *)self;
    PyObject *key, *x, *result, *collective, *call;
    int in_place;
    if (!PyArg_ParseTuple(args, "O!OOOOp", &PyTuple_Type, &key, &x, &result, &collective, &call, &in_place))
        return NULL;
    Py_buffer from = {0}, to = {0};
    Entry entry = {.has_input = x != Py_None, .has_result = result != Py_None, .in_place = in_place != 0};
    if ((entry.has_input && !get_view(calls, x, &from, 0)) || (entry.has_result && !get_view(calls, result, &to, 0)))
        goto leave;
    if ((entry.has_input && !set_kind(&entry.input, &from)) || (entry.has_result && !set_kind(&entry.result, &to)))
        goto leave;
    size_t place = get_place(key, (size_t)from.len, from.ndim);
    if (entry.has_result) {
        entry.shape = PyObject_GetAttrString(result, "shape");
        entry.dtype = PyObject_GetAttrString(result, "dtype");
    }
    entry.key = Py_NewRef(key);
    entry.collective = (Collective *)Py_NewRef(collective);
    entry.call = Py_NewRef(call);
    clear_entry(&calls->entries[place]);
    calls->entries[place] = entry;
leave:
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *clear(PyObject *self, PyObject *unused)
{
    (void)unused;
    for (int i = 0; i < ENTRIES; i++)
        clear_entry(&((Calls *)self)->entries[i]);
    Py_RETURN_NONE;
}

static int init_calls(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    Calls *calls = (Calls *)self;
    PyObject *steps, *lock, *queue, *pending, *group, *array_type, *empty;
    if (!PyArg_ParseTuple(args, "OOOOOOO", &steps, &lock, &queue, &pending, &group, &array_type, &empty))
        return -1;
    if (calls->entries != NULL) {
        PyErr_SetString(PyExc_ValueError, "Calls: initialised twice");
        return -1;
    }
    calls->entries = PyMem_Calloc(ENTRIES, sizeof(Entry));
    if (calls->entries == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    calls->running.publish = publish;
    calls->steps = (Steps *)Py_NewRef(steps);
    calls->lock = (QueueLock *)Py_NewRef(lock);
    calls->queue = queue;
    calls->pending = Py_NewRef(pending);
    calls->group = Py_NewRef(group);
    calls->array_type = Py_NewRef(array_type);
    calls->empty = Py_NewRef(empty);
    calls->enabled = true;
    return 0;
}

static int traverse_calls(PyObject *self, visitproc visit, void *arg)
{
    const Calls *calls = (Calls *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)calls->steps);
    Py_VISIT(calls->pending);
    Py_VISIT(calls->group);
    for (int i = 0; calls->entries != NULL && i < ENTRIES; i++) {
        Py_VISIT((PyObject *)calls->entries[i].collective);
        Py_VISIT(calls->entries[i].call);
    }
    return 0;
}

/* The communicator that has this object refers to it by its queue, which can be cleared. */
static void dealloc_calls(PyObject *self)
{
    Calls *calls = (Calls *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (calls->entries != NULL) {
        for (int i = 0; i < ENTRIES; i++)
            clear_entry(&calls->entries[i]);
        PyMem_Free(calls->entries);
        Py_DECREF((PyObject *)calls->steps);
        Py_DECREF((PyObject *)calls->lock);
        Py_DECREF(calls->pending);
        Py_DECREF(calls->group);
        Py_DECREF(calls->array_type);
        Py_DECREF(calls->empty);
    }
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "run(key, x, out, missing)\n--\n\nCarry out a call like one that was added, and return its result; return `missing` if"
     " there is none, or if the call can't be carried out at once."},
    {"add", add, METH_VARARGS,
     "add(key, x, result, collective, call, in_place)\n--\n\nCarry out later calls on arrays like `x` by `collective`."
     " `key` is a tuple of all other arguments; `result` an array like the result. Each is None where there is none."},
    {"clear", clear, METH_NOARGS, "clear()\n--\n\nForget all calls."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"enabled", T_BOOL, offsetof(Calls, enabled), 0, "False if Python has to carry out all calls."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Calls(steps, lock, queue, pending, group, array_type, empty)\n--\n\nThe repeated calls of a communicator."},
    {Py_tp_init, init_calls},
    {Py_tp_dealloc, dealloc_calls},
    {Py_tp_traverse, traverse_calls},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec calls_spec = {
    .name = "mpicoll._shm.Calls",
    .basicsize = sizeof(Calls),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
