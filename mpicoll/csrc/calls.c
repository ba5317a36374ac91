/* Repeated calls: what was bound for the first call of a kind is looked up, run and recorded.
 *
 * Everything that is not as it was when a call was bound is left to Python, which checks and binds the call again: then
 * Calls.run returns its first argument, and BoundCall.run returns False, before anything has been done.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "calls.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#include "arrays.h"
#include "collectives.h"
#include "queue_lock.h"
#include "records.h"
#include "steps.h"

enum {
    ENTRIES = 512,
    WAYS = 4, /* entries that are looked at */
    MAX_KEY = 8
};

/* The dtype and the shape of an array. */
typedef struct {
    uintptr_t dtype;
    int ndim;
    Py_ssize_t shape[DIMENSIONS];
} Kind;

typedef struct {
    PyObject *key; /* the name of the call and the arguments that are not arrays; NULL: no entry */
    bool has_input, has_result, in_place;
    Kind input, result;
    size_t input_bytes, result_bytes;
    PyObject *prototypes[2]; /* dtypes of input and result, which must exist as long as their addresses are compared */
    PyObject *make_result;
    Collective *collective;
    PyObject *call; /* its description */
} Entry;

typedef struct {
    PyObject_HEAD
    Running running;
    Steps *steps;
    QueueLock *lock;
    PyObject *queue, *pending, *group; /* the queue of operations owns this object, so it is borrowed */
    bool enabled;
    Entry *entries;
    double begin; /* of the running call, which the lock names */
    bool published;
} Calls;

/* Returns the rules of `with algorithms(...)` blocks around a call; NULL as long as there has been no such block. */
static PyObject *get_rules;

PyObject *check_rules(PyObject *module, PyObject *function)
{
    (void)module;
    PyObject *old = get_rules;
    get_rules = Py_NewRef(function);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

/* --- the running call, as the queue of operations shows it */

/* Show the running call, before Python code runs that may ask for it. Returns -1 with an exception. */
static int publish(Running *running)
{
    Calls *calls = (Calls *)((char *)running - offsetof(Calls, running));
    if (calls->published)
        return 0;
    PyObject *entry = make_entry_tuple(calls->group, calls->lock->number, calls->lock->call, calls->begin);
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

static bool is_of_kind(const Memory *memory, const Kind *kind)
{
    return memory->dtype == kind->dtype && memory->ndim == kind->ndim &&
           (kind->ndim == 0 || memcmp(memory->shape, kind->shape, (size_t)kind->ndim * sizeof *kind->shape) == 0);
}

/* Immutable values, which are the same in each call where they are the same object. */
static bool is_plain(PyObject *value)
{
    if (PyTuple_CheckExact(value)) {
        for (Py_ssize_t i = 0; i < PyTuple_Size(value); i++) {
            if (!is_plain(PyTuple_GetItem(value, i)))
                return false;
        }
        return true;
    }
    return value == Py_None || PyUnicode_CheckExact(value) || PyLong_CheckExact(value) || PyBool_Check(value) ||
           PyType_Check(value);
}

/* Compare a value with a plain one: Python's == would take 1.0 and True for 1. */
static bool is_equal(PyObject *value, PyObject *plain)
{
    if (value == plain)
        return true;
    if (Py_TYPE(value) != Py_TYPE(plain) || PyType_Check(plain))
        return false;
    if (!PyTuple_CheckExact(plain))
        return PyObject_RichCompareBool(value, plain, Py_EQ) == 1;
    Py_ssize_t size = PyTuple_Size(plain);
    if (size != PyTuple_Size(value))
        return false;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (!is_equal(PyTuple_GetItem(value, i), PyTuple_GetItem(plain, i)))
            return false;
    }
    return true;
}

static bool is_equal_key(PyObject *const *key, Py_ssize_t size, PyObject *other)
{
    if (size != PyTuple_Size(other))
        return false;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (!is_equal(key[i], PyTuple_GetItem(other, i)))
            return false;
    }
    return true;
}

/* Return a number that is the same for all values that is_equal takes for equal. */
static uint64_t hash_value(PyObject *value)
{
    if (PyUnicode_CheckExact(value) || PyLong_CheckExact(value))
        return (uint64_t)PyObject_Hash(value);
    return PyTuple_CheckExact(value) ? 0 : (uintptr_t)value >> 4;
}

/* Return the first place of a call in the table. */
static size_t get_place(PyObject *const *key, Py_ssize_t size, const Memory *some)
{
    uint64_t hash = some->dtype + (uint64_t)some->ndim;
    for (Py_ssize_t i = 0; i < size; i++)
        hash = hash * 31 + hash_value(key[i]);
    for (int i = 0; i < some->ndim; i++)
        hash = hash * 31 + (uint64_t)some->shape[i];
    return (size_t)(hash * 0x9E3779B97F4A7C15u >> 40) & (ENTRIES - 1);
}

/* Find the entry of a call whose input and output are NULL where it has none. */
static Entry *find_entry(
    const Calls *calls, PyObject *const *key, Py_ssize_t size, const Memory *from, const Memory *to)
{
    size_t place = get_place(key, size, from != NULL ? from : to);
    for (size_t way = 0; way < WAYS; way++) {
        Entry *entry = &calls->entries[(place + way) & (ENTRIES - 1)];
        if (entry->key != NULL && entry->has_input == (from != NULL) && is_equal_key(key, size, entry->key) &&
            (from == NULL || is_of_kind(from, &entry->input)) &&
            (to == NULL || (entry->has_result && is_of_kind(to, &entry->result))))
            return entry;
    }
    return NULL;
}

static bool overlap(const char *one, size_t one_bytes, const char *other, size_t other_bytes)
{
    return one < other + other_bytes && other < one + one_bytes;
}

/* Run a call in the order of the communicator, and record it. Returns 1, -1 with an exception, 0 if Python has to. */
static int run_in_order(Calls *calls, const Collective *collective, PyObject *call, const char *source, char *target)
{
    if (!recording || !calls->enabled || PyObject_Size(calls->pending) != 0 || !try_to_lock(calls->lock))
        return 0;
    Steps *steps = calls->steps;
    QueueLock *lock = calls->lock;
    const unsigned long long number = ++lock->number;
    const double begin = calls->begin = read_clock();
    lock->call = call;
    lock->thread = PyThread_get_thread_ident();
    steps->running = &calls->running;
    int status = carry_out_collective(collective, source, target);
    steps->running = NULL;
    if (status < 0) {
        conclude_failure(calls);
        unlock(lock);
        return -1;
    }
    if (calls->published) {
        calls->published = false;
        status = PyObject_SetAttrString(calls->queue, "current", Py_None);
    }
    unlock(lock);
    /* Last, since this may run other code. */
    record(calls->group, number, call, begin);
    return status < 0 ? -1 : 1;
}

/* Returns a new reference, or NULL: with an exception, or without one if Python has to carry out the call. */
static PyObject *run_call(Calls *calls, PyObject *x, PyObject *out, PyObject *const *key, Py_ssize_t size)
{
    Memory from = {0}, to = {0};
    if ((x == Py_None && out == Py_None) || (x != Py_None && !find_memory(x, x == out, &from)))
        return NULL;
    if (out == x)
        to = from;
    else if (out != Py_None && !find_memory(out, true, &to))
        return NULL;
    const Entry *entry = find_entry(calls, key, size, x == Py_None ? NULL : &from, out == Py_None ? NULL : &to);
    if (entry == NULL)
        return NULL;
    if (out == Py_None && entry->has_result && entry->make_result == Py_None)
        return NULL;
    if (out != Py_None && x != Py_None && !(out == x && entry->in_place) &&
        overlap(from.data, entry->input_bytes, to.data, entry->result_bytes))
        return NULL;
    /* The table may change while other code runs. */
    PyObject *call = Py_NewRef(entry->call), *value = out;
    Collective *collective = (Collective *)Py_NewRef((PyObject *)entry->collective);
    if (out != Py_None || !entry->has_result) {
        Py_INCREF(value);
    } else {
        PyObject *make = Py_NewRef(entry->make_result);
        value = PyObject_CallNoArgs(make);
        Py_DECREF(make);
        if (value != NULL && !find_memory(value, true, &to))
            Py_CLEAR(value);
    }
    if (value != NULL && run_in_order(calls, collective, call, from.data, to.data) <= 0)
        Py_CLEAR(value);
    Py_DECREF((PyObject *)collective);
    Py_DECREF(call);
    return value;
}

/* Return true if Python has to look at the rules of `with algorithms(...)` blocks, or with an exception. */
static bool has_rules(void)
{
    PyObject *rules = PyObject_CallNoArgs(get_rules);
    bool found = rules == NULL || PyObject_IsTrue(rules) != 0;
    Py_XDECREF(rules);
    return found;
}

static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Calls *calls = (Calls *)self;
    if (nargs < 4) {
        PyErr_SetString(PyExc_TypeError, "Calls.run: missing, x, out and the name of the call are needed");
        return NULL;
    }
    if (calls->enabled && (get_rules == NULL || !has_rules())) {
        PyObject *value = run_call(calls, args[1], args[2], args + 3, nargs - 3);
        if (value != NULL)
            return value;
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(args[0]);
}

/* --- calls that are bound to their arrays */

typedef struct {
    PyObject_HEAD
    Calls *calls;
    PyObject *queue; /* which `calls` borrows */
    Collective *collective;
    PyObject *call;
    Py_buffer from, to;
} BoundCall;

static int init_bound_call(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    BoundCall *one = (BoundCall *)self;
    PyObject *calls, *collective, *call, *source, *target;
    if (!PyArg_ParseTuple(args, "OOOOO", &calls, &collective, &call, &source, &target))
        return -1;
    if (one->calls != NULL || !PyObject_HasAttrString(calls, "enabled")) {
        PyErr_SetString(PyExc_ValueError, "BoundCall: invalid arguments, or initialised twice");
        return -1;
    }
    if ((source != Py_None && PyObject_GetBuffer(source, &one->from, PyBUF_SIMPLE) < 0) ||
        (target != Py_None && PyObject_GetBuffer(target, &one->to, PyBUF_WRITABLE) < 0))
        return -1;
    one->calls = (Calls *)Py_NewRef(calls);
    one->queue = Py_NewRef(one->calls->queue);
    one->collective = (Collective *)Py_NewRef(collective);
    one->call = Py_NewRef(call);
    return 0;
}

static PyObject *run_bound_call(PyObject *self, PyObject *unused)
{
    (void)unused;
    const BoundCall *one = (BoundCall *)self;
    if (one->calls == NULL)
        Py_RETURN_FALSE;
    int status = run_in_order(one->calls, one->collective, one->call, one->from.buf, one->to.buf);
    return status < 0 ? NULL : PyBool_FromLong(status);
}

static int traverse_bound_call(PyObject *self, visitproc visit, void *arg)
{
    const BoundCall *one = (BoundCall *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)one->calls);
    Py_VISIT(one->queue);
    Py_VISIT((PyObject *)one->collective);
    Py_VISIT(one->call);
    Py_VISIT(one->from.obj);
    Py_VISIT(one->to.obj);
    return 0;
}

static void dealloc_bound_call(PyObject *self)
{
    BoundCall *one = (BoundCall *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    PyBuffer_Release(&one->from);
    PyBuffer_Release(&one->to);
    Py_XDECREF((PyObject *)one->calls);
    Py_XDECREF(one->queue);
    Py_XDECREF((PyObject *)one->collective);
    Py_XDECREF(one->call);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef bound_call_methods[] = {
    {"run", run_bound_call, METH_NOARGS,
     "run()\n--\n\nCarry out the call, and return True; False if it can't be carried out at once."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot bound_call_slots[] = {
    {Py_tp_doc, "BoundCall(calls, collective, call, source, target)\n--\n\nA repeated call on the same arrays; None"
                " where there is none."},
    {Py_tp_init, init_bound_call},
    {Py_tp_dealloc, dealloc_bound_call},
    {Py_tp_traverse, traverse_bound_call},
    {Py_tp_methods, bound_call_methods},
    {0, NULL},
};

PyType_Spec bound_call_spec = {
    .name = "mpicoll._shm.BoundCall",
    .basicsize = sizeof(BoundCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = bound_call_slots,
};

/* --- the Python type */

static void clear_entry(Entry *entry)
{
    Entry old = *entry;
    memset(entry, 0, sizeof *entry);
    Py_XDECREF(old.key);
    Py_XDECREF(old.prototypes[0]);
    Py_XDECREF(old.prototypes[1]);
    Py_XDECREF(old.make_result);
    Py_XDECREF((PyObject *)old.collective);
    Py_XDECREF(old.call);
}

/* Set what an array of an entry is like. Returns 1, 0 if such arrays are left to Python, -1 with an exception. */
static int describe_array(PyObject *array, Memory *memory, Kind *kind, size_t *nbytes, PyObject **dtype)
{
    if (!find_memory(array, false, memory))
        return 0;
    *kind = (Kind){.dtype = memory->dtype, .ndim = memory->ndim};
    /* An array without dimensions may come without a shape. */
    if (memory->ndim > 0)
        memcpy(kind->shape, memory->shape, (size_t)memory->ndim * sizeof *kind->shape);
    PyObject *number = PyObject_GetAttrString(array, "nbytes");
    *nbytes = number == NULL ? 0 : PyLong_AsSize_t(number);
    Py_XDECREF(number);
    *dtype = PyErr_Occurred() ? NULL : PyObject_GetAttrString(array, "dtype");
    return *dtype == NULL ? -1 : 1;
}

/* Choose the entry for a new call: the one that it replaces, or an empty one, or any. */
static Entry *choose_entry(
    Calls *calls, PyObject *const *key, Py_ssize_t size, const Memory *from, const Memory *to)
{
    Entry *entry = find_entry(calls, key, size, from, to);
    size_t place = get_place(key, size, from != NULL ? from : to);
    for (size_t way = 0; entry == NULL && way < WAYS; way++) {
        if (calls->entries[(place + way) & (ENTRIES - 1)].key == NULL)
            entry = &calls->entries[(place + way) & (ENTRIES - 1)];
    }
    return entry != NULL ? entry : &calls->entries[place];
}

static PyObject *add(PyObject *self, PyObject *args)
{
    Calls *calls = (Calls *)self;
    PyObject *key, *x, *result, *make_result, *collective, *call;
    int in_place;
    if (!PyArg_ParseTuple(
            args, "O!OOOOOp", &PyTuple_Type, &key, &x, &result, &make_result, &collective, &call, &in_place))
        return NULL;
    Memory from = {0}, to = {0};
    Entry entry = {.has_input = x != Py_None, .has_result = result != Py_None, .in_place = in_place != 0};
    const Py_ssize_t size = PyTuple_Size(key);
    int status = (entry.has_input || entry.has_result) && is_plain(key) && size <= MAX_KEY;
    if (status > 0 && entry.has_input)
        status = describe_array(x, &from, &entry.input, &entry.input_bytes, &entry.prototypes[0]);
    if (status > 0 && entry.has_result)
        status = describe_array(result, &to, &entry.result, &entry.result_bytes, &entry.prototypes[1]);
    if (status > 0) {
        PyObject *parts[MAX_KEY];
        for (Py_ssize_t i = 0; i < size; i++)
            parts[i] = PyTuple_GetItem(key, i);
        Entry *place = choose_entry(calls, parts, size, entry.has_input ? &from : NULL, entry.has_result ? &to : NULL);
        entry.key = Py_NewRef(key);
        entry.make_result = Py_NewRef(make_result);
        entry.collective = (Collective *)Py_NewRef(collective);
        entry.call = Py_NewRef(call);
        Entry old = *place;
        *place = entry;
        entry = old;
    }
    clear_entry(&entry);
    return status < 0 ? NULL : Py_NewRef(Py_None);
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
    PyObject *steps, *lock, *queue, *pending, *group;
    if (!PyArg_ParseTuple(args, "OOOOO", &steps, &lock, &queue, &pending, &group))
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
    }
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "run(missing, x, out, *key)\n--\n\nCarry out a call like one that was added, and return its result; return"
     " `missing` if there is none, or if the call can't be carried out at once."},
    {"add", add, METH_VARARGS,
     "add(key, x, result, make_result, collective, call, in_place)\n--\n\nCarry out later calls on arrays like `x` by"
     " `collective`. `key` is a tuple of all other arguments; `result` is an array like the result, which `make_result`"
     " makes. Each is None where there is none."},
    {"clear", clear, METH_NOARGS, "clear()\n--\n\nRemove all calls."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"enabled", T_BOOL, offsetof(Calls, enabled), 0, "False if Python has to carry out all calls."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Calls(steps, lock, queue, pending, group)\n--\n\nThe repeated calls of a communicator."},
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
