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
#include "begun_calls.h"
#include "clock.h"
#include "messages.h"
#include "pending_messages.h"
#include "records.h"

enum {
    ENTRIES = 512,
    WAYS = 4, /* entries that are looked at */
    MAX_PACKED = 1 << 20 /* bytes of arrays that are not contiguous */
};

typedef struct Entry Entry;

/* The dtype and the shape of an array. */
typedef struct {
    uintptr_t dtype;
    int ndim;
    Py_ssize_t shape[DIMENSIONS];
} Kind;

struct Entry {
    PyObject *key; /* the name of the call and the arguments that are not arrays; NULL: no entry */
    bool has_input, has_result, in_place;
    Kind input, result;
    size_t input_bytes, result_bytes;
    PyObject *prototypes[2]; /* dtypes of input and result, which must exist as long as their addresses are compared */
    PyObject *make_result; /* NULL: make_array makes it */
    PyObject *carrier; /* a Collective, a NativeCall or a MessageCall */
    bool has_messages; /* the carrier is a MessageCall: to ask its type takes a tenth of a small call */
    PyObject *call;    /* its description */
};

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

/* Attributes of the queue. */
typedef enum { THREAD, CURRENT, MATCH, RUNNER, BACKGROUND, ATTRIBUTES } Attribute;

static const char *const ATTRIBUTE_NAMES[] = {"thread", "current", "match", "runner_thread", "background_entry"};
static PyObject *attribute_names[ATTRIBUTES];

static int intern_names(void)
{
    for (int i = 0; i < ATTRIBUTES; i++) {
        if (attribute_names[i] == NULL && (attribute_names[i] = PyUnicode_InternFromString(ATTRIBUTE_NAMES[i])) == NULL)
            return -1;
    }
    return 0;
}

/* Show that a thread completes a call that was begun before: it is no blocking one. Returns -1 with an exception. */
static int show_runner(Calls *calls, PyObject *entry, PyObject *thread)
{
    calls->shows_runner = true;
    return PyObject_SetAttr(calls->queue, attribute_names[RUNNER], thread) < 0 ||
                   PyObject_SetAttr(calls->queue, attribute_names[BACKGROUND], entry) < 0
               ? -1
               : 0;
}

void hide_completion(Calls *calls)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyObject_SetAttr(calls->queue, attribute_names[CURRENT], Py_None) < 0 ||
        PyObject_SetAttr(calls->queue, attribute_names[RUNNER], Py_None) < 0)
        PyErr_WriteUnraisable((PyObject *)calls);
    PyErr_Restore(type, value, traceback);
    calls->published = calls->shows_runner = false;
}

/* Show the running call, before Python code runs that may ask for it. Returns -1 with an exception. */
static int publish(Running *running)
{
    Calls *calls = (Calls *)((char *)running - offsetof(Calls, running));
    if (calls->published)
        return 0;
    PyObject *entry = get_entry(running->record);
    PyObject *thread = entry == NULL ? NULL : PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    int status = thread == NULL || (calls->completes && show_runner(calls, entry, thread) < 0) ||
                         PyObject_SetAttr(calls->queue, attribute_names[THREAD], thread) < 0 ||
                 PyObject_SetAttr(calls->queue, attribute_names[CURRENT], entry) < 0
                     ? -1
                     : 0;
    calls->published = status == 0;
    Py_XDECREF(entry);
    Py_XDECREF(thread);
    return status;
}

void conclude_failure(Calls *calls)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    PyObject *shown = NULL;
    if (publish(&calls->running) == 0) {
        PyObject *entry = PyObject_GetAttr(calls->queue, attribute_names[CURRENT]);
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

/* Return the number of elements of a tuple or a list, -1 for other values. */
static Py_ssize_t get_length(PyObject *value)
{
    return PyTuple_CheckExact(value) ? PyTuple_Size(value) : PyList_CheckExact(value) ? PyList_Size(value) : -1;
}

static PyObject *get_element(PyObject *value, Py_ssize_t index)
{
    return PyTuple_CheckExact(value) ? PyTuple_GetItem(value, index) : PyList_GetItem(value, index);
}

/* Compare a value with a plain one: Python's == would take 1.0 and True for 1. A list is equal to a tuple of the same
 * values: both may be passed as counts. */
static bool is_equal(PyObject *value, PyObject *plain)
{
    if (value == plain)
        return true;
    if (PyTuple_CheckExact(plain)) {
        const Py_ssize_t size = PyTuple_Size(plain);
        if (get_length(value) != size)
            return false;
        for (Py_ssize_t i = 0; i < size; i++) {
            if (!is_equal(get_element(value, i), PyTuple_GetItem(plain, i)))
                return false;
        }
        return true;
    }
    return Py_TYPE(value) == Py_TYPE(plain) && !PyType_Check(plain) &&
           PyObject_RichCompareBool(value, plain, Py_EQ) == 1;
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

static uint64_t hash_elements(PyObject *value);

/* Return a number that is the same for all values that is_equal takes for equal. */
static inline uint64_t hash_value(PyObject *value)
{
    if (PyUnicode_CheckExact(value) || PyLong_CheckExact(value))
        return (uint64_t)PyObject_Hash(value);
    /* Apart from this function, which would not be inlined if it called itself. */
    if (PyTuple_CheckExact(value) || PyList_CheckExact(value))
        return hash_elements(value);
    return (uintptr_t)value >> 4;
}

static uint64_t hash_elements(PyObject *value)
{
    uint64_t hash = 0;
    for (Py_ssize_t i = 0; i < get_length(value); i++)
        hash = hash * 31 + hash_value(get_element(value, i));
    return hash;
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
    if (calls->entries == NULL)
        return NULL;
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

bool overlap(const char *one, size_t one_bytes, const char *other, size_t other_bytes)
{
    /* As numbers: an array without elements may be at NULL, to which C adds nothing. */
    const uintptr_t first = (uintptr_t)one, second = (uintptr_t)other;
    return first < second + other_bytes && second < first + one_bytes;
}

void describe_call(const Calls *calls, Collective *collective, PyObject *call)
{
    PyObject *text = PyObject_CallMethod(calls->queue, "describe_repeated", "O", call);
    if (text == NULL)
        PyErr_Clear();
    PyObject *old = collective->text;
    collective->text = text;
    Py_XDECREF(old);
}

void set_call(const Calls *calls, PyObject *carrier, PyObject *call)
{
    if (calls->group == NULL)
        return;
    if (is_message_call(carrier)) {
        summarize_call(calls->group, call, false, &((MessageCall *)carrier)->summary);
        return;
    }
    if (!is_native_call(carrier)) {
        Collective *collective = (Collective *)carrier;
        summarize_call(calls->group, call, true, &collective->summary);
        /* Where this rank may be ahead of others; in a call that is begun, when it is. */
        if (collective->uses_ring && !collective->waits_for_all)
            describe_call(calls, collective, call);
        else
            Py_CLEAR(collective->text);
        return;
    }
    NativeCall *native = (NativeCall *)carrier;
    summarize_call(calls->group, call, true, &native->summary);
    PyObject *value = PyObject_GetAttrString(call, "signature");
    const long long signature = value == NULL ? 0 : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    PyErr_Clear();
    native->signature = signature > 0 && signature <= UINT32_MAX ? (uint32_t)signature : 0;
}

static int run_collective(Calls *calls, const Collective *collective, PyObject *call, const Operands *operands)
{
    Steps *steps = collective->steps;
    /* Other threads may add a call by this collective meanwhile, with another description. */
    PyObject *text = Py_XNewRef(collective->text);
    steps->running = &calls->running;
    steps->call = (Kept){call, text, calls->lock->number};
    int status = carry_out_collective(collective, operands->source, operands->target);
    steps->running = NULL;
    steps->call = (Kept){0};
    Py_XDECREF(text);
    return status;
}

/* Compare the running call with those of the other ranks, or have Python do that later. Returns the exception of a
 * signal handler, or None; NULL with an exception. */
static PyObject *match(Calls *calls, const NativeCall *native, PyObject *call)
{
    if (native->signature != 0 && calls->deferrable > 0 && calls->deferred_count < MAX_DEFERRED) {
        PyObject *entry = get_entry(calls->running.record);
        if (entry == NULL)
            return NULL;
        calls->deferrable--;
        calls->deferred[calls->deferred_count++] = (Deferred){native->signature, entry};
        return Py_NewRef(Py_None);
    }
    PyObject *function = PyObject_GetAttr(calls->queue, attribute_names[MATCH]);
    PyObject *interrupt = function == NULL ? NULL : PyObject_CallFunctionObjArgs(function, call, NULL);
    Py_XDECREF(function);
    return interrupt;
}

/* Call MPI, as the queue calls the functions of Python. */
static int run_native(Calls *calls, const NativeCall *native, PyObject *call, const Operands *operands)
{
    if (is_local(native)) {
        copy_locally(native, operands);
        return 0;
    }
    if (publish(&calls->running) < 0)
        return -1;
    PyObject *interrupt = match(calls, native, call);
    int status = interrupt == NULL ? -1 : call_mpi(native, operands);
    if (status == 0 && interrupt != Py_None) {
        PyErr_SetObject((PyObject *)Py_TYPE(interrupt), interrupt);
        status = -1;
    }
    Py_XDECREF(interrupt);
    return status;
}

int run_in_order(Calls *calls, PyObject *carrier, PyObject *call, const Operands *operands)
{
    if (!recording || !calls->enabled || calls->queue == NULL || PyObject_Size(calls->pending) != 0 ||
        !try_to_lock(calls->lock))
        return 0;
    QueueLock *lock = calls->lock;
    if (calls->begun_count > 0 && complete_begun_calls(calls) < 0) {
        unlock(lock);
        return -1;
    }
    lock->call = call;
    lock->thread = PyThread_get_thread_ident();
    References own = {.group = Py_NewRef(calls->group), .call = Py_NewRef(call), .thread = lock->thread}, old;
    const bool native = is_native_call(carrier);
    const Summary *summary = native ? &((NativeCall *)carrier)->summary : &((Collective *)carrier)->summary;
    const int record = calls->running.record =
        begin_record(read_clock(), ++lock->number, summary, &own, &old);
    /* Code that runs meanwhile may drop the communicator. */
    PyObject *queue = Py_NewRef(calls->queue);
    int status = native ? run_native(calls, (NativeCall *)carrier, call, operands)
                        : run_collective(calls, (Collective *)carrier, call, operands);
    if (status < 0) {
        conclude_failure(calls);
        unlock(lock);
        drop_references(&old);
        Py_DECREF(queue);
        return -1;
    }
    end_record(record, read_clock(), RECORD_DONE);
    if (calls->published) {
        calls->published = false;
        status = PyObject_SetAttr(queue, attribute_names[CURRENT], Py_None);
    }
    unlock(lock);
    /* Last, since this may run other code. */
    drop_references(&old);
    Py_DECREF(queue);
    return status < 0 ? -1 : 1;
}

/* Carry out messages, which are in no order with the collectives. Returns as run_in_order does. */
static int run_messages(
    const Calls *calls, const MessageCall *messages, PyObject *call, PyObject *x, const Operands *operands)
{
    if (!recording || !calls->enabled || calls->group == NULL)
        return 0;
    return carry_out_messages(messages, calls->group, call, x, operands);
}

/* Start a message of `array`. Returns what the call returns, or NULL: with an exception, or without one if Python has
 * to carry out the call. */
static PyObject *start_message(
    const Calls *calls, PyObject *carrier, PyObject *call, PyObject *array, const Operands *operands)
{
    if (!recording || !calls->enabled || calls->group == NULL)
        return NULL;
    PyObject *message = make_pending_message((MessageCall *)carrier, calls->group, call, array, operands);
    PyObject *value =
        message == NULL ? NULL : PyObject_CallFunctionObjArgs(((MessageCall *)carrier)->wrap, message, NULL);
    Py_XDECREF(message);
    return value;
}

/* An array of a call, whose elements may not be contiguous. */
typedef struct {
    bool strided;
    ElementLayout layout;
    size_t itemsize;
    const char *begin;
    size_t extent;
} Place;

static void locate_elements(const Memory *memory, size_t nbytes, Place *place)
{
    place->strided = memory->strides != NULL;
    place->begin = memory->data;
    place->extent = nbytes;
    if (!place->strided)
        return;
    size_t count = 1;
    for (int i = 0; i < memory->ndim; i++)
        count *= (size_t)memory->shape[i];
    place->layout = copy_layout(memory);
    place->itemsize = nbytes / count;
    place->extent = find_extent(&place->layout, place->itemsize, &place->begin);
}

/* Replace the addresses of such arrays by those of contiguous memory, which is returned; NULL with an exception. */
static char *pack_operands(const Place *input, const Place *result, Operands *operands)
{
    const size_t input_bytes = operands->source_bytes + -operands->source_bytes % CACHE_LINE;
    char *packed = PyMem_Malloc(input_bytes + operands->target_bytes);
    if (packed == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    const bool in_place = operands->source == operands->target;
    if (input->strided) {
        pack_elements(&input->layout, input->itemsize, packed);
        operands->source = packed;
    }
    if (in_place) {
        operands->target = packed;
    } else if (result->strided) {
        operands->target = packed + input_bytes;
        /* A call may leave some of them, such as those beyond the border of a grid. */
        pack_elements(&result->layout, result->itemsize, operands->target);
    }
    return packed;
}

/* Carry out a call, or begin it. Returns a new reference to its result, or its request; or NULL: with an exception, or
 * without one if Python has to carry out the call. */
static PyObject *run_call(
    Calls *calls, PyObject *x, PyObject *out, PyObject *const *key, Py_ssize_t size, bool begins)
{
    Memory from = {0}, to = {0};
    if ((x == Py_None && out == Py_None) || (x != Py_None && !find_strided_memory(x, x == out, &from)))
        return NULL;
    if (out == x)
        to = from;
    else if (out != Py_None && !find_strided_memory(out, true, &to))
        return NULL;
    const Entry *entry = find_entry(calls, key, size, x == Py_None ? NULL : &from, out == Py_None ? NULL : &to);
    if (entry == NULL)
        return NULL;
    if (out == Py_None && entry->has_result && entry->make_result == Py_None)
        return NULL;
    const bool strided = from.strides != NULL || to.strides != NULL;
    if (strided && (entry->has_messages || begins || entry->input_bytes + entry->result_bytes > MAX_PACKED))
        return NULL;
    Place input, result;
    locate_elements(&from, entry->input_bytes, &input);
    locate_elements(&to, entry->result_bytes, &result);
    if (out != Py_None && x != Py_None && !(out == x && entry->in_place) &&
        overlap(input.begin, input.extent, result.begin, result.extent))
        return NULL;
    /* The table may change while other code runs. */
    PyObject *call = Py_NewRef(entry->call), *carrier = Py_NewRef(entry->carrier), *value = out;
    const bool has_messages = entry->has_messages;
    Operands operands = {from.data, entry->input_bytes, to.data, entry->result_bytes};
    if (out != Py_None || !entry->has_result) {
        Py_INCREF(value);
    } else {
        PyObject *make = Py_XNewRef(entry->make_result);
        value = make != NULL ? PyObject_CallNoArgs(make)
                             : make_array(entry->prototypes[1], entry->result.ndim, entry->result.shape);
        Py_XDECREF(make);
        if (value != NULL && !find_memory(value, true, &to))
            Py_CLEAR(value);
        operands.target = to.data;
    }
    if (value != NULL && has_messages && ((MessageCall *)carrier)->wrap != NULL) {
        PyObject *started = start_message(calls, carrier, call, ((MessageCall *)carrier)->sends ? x : value, &operands);
        Py_DECREF(value);
        Py_DECREF(carrier);
        Py_DECREF(call);
        return started;
    }
    if (value != NULL && begins) {
        PyObject *request = has_messages ? NULL : begin_in_order(calls, carrier, call, x, value, &operands);
        Py_DECREF(value);
        Py_DECREF(carrier);
        Py_DECREF(call);
        return request;
    }
    char *packed = NULL;
    if (value != NULL && strided && (packed = pack_operands(&input, &result, &operands)) == NULL)
        Py_CLEAR(value);
    const int status = value == NULL  ? 0
                       : has_messages ? run_messages(calls, (MessageCall *)carrier, call, x, &operands)
                                      : run_in_order(calls, carrier, call, &operands);
    if (status > 0 && result.strided)
        unpack_elements(&result.layout, result.itemsize, operands.target);
    PyMem_Free(packed);
    if (status <= 0)
        Py_CLEAR(value);
    Py_DECREF(carrier);
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

PyObject *run_repeated(Calls *calls, PyObject *x, PyObject *out, PyObject *const *key, Py_ssize_t size)
{
    return calls->enabled && (get_rules == NULL || !has_rules()) ? run_call(calls, x, out, key, size, false) : NULL;
}

PyObject *begin_repeated(Calls *calls, PyObject *x, PyObject *out, PyObject *const *key, Py_ssize_t size)
{
    const bool begins = calls->enabled && calls->wrap != NULL && (get_rules == NULL || !has_rules());
    return begins ? run_call(calls, x, out, key, size, true) : NULL;
}

static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 4) {
        PyErr_SetString(PyExc_TypeError, "Calls.run: missing, x, out and the name of the call are needed");
        return NULL;
    }
    PyObject *value = run_repeated((Calls *)self, args[1], args[2], args + 3, nargs - 3);
    return value != NULL || PyErr_Occurred() ? value : Py_NewRef(args[0]);
}

static PyObject *begin(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 4) {
        PyErr_SetString(PyExc_TypeError, "Calls.begin: missing, x, out and the name of the call are needed");
        return NULL;
    }
    PyObject *value = begin_repeated((Calls *)self, args[1], args[2], args + 3, nargs - 3);
    return value != NULL || PyErr_Occurred() ? value : Py_NewRef(args[0]);
}

/* --- the Python type */

static void clear_entry(Entry *entry)
{
    Entry old = *entry;
    memset(entry, 0, sizeof *entry);
    Py_XDECREF(old.key);
    Py_XDECREF(old.prototypes[0]);
    Py_XDECREF(old.prototypes[1]);
    Py_XDECREF(old.make_result);
    Py_XDECREF(old.carrier);
    Py_XDECREF(old.call);
}

/* Set what an array of an entry is like. Returns 1, 0 if such arrays are left to Python, -1 with an exception. */
static int describe_array(PyObject *array, Memory *memory, Kind *kind, size_t *nbytes, PyObject **dtype)
{
    if (!find_strided_memory(array, false, memory))
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

/* Choose the entry for a new call: the one that it replaces, or an empty one, or any: not always the first one, in
 * which two calls would replace each other again and again. */
static Entry *choose_entry(
    Calls *calls, PyObject *const *key, Py_ssize_t size, const Memory *from, const Memory *to)
{
    Entry *entry = find_entry(calls, key, size, from, to);
    size_t place = get_place(key, size, from != NULL ? from : to);
    for (size_t way = 0; entry == NULL && way < WAYS; way++) {
        if (calls->entries[(place + way) & (ENTRIES - 1)].key == NULL)
            entry = &calls->entries[(place + way) & (ENTRIES - 1)];
    }
    if (entry == NULL) {
        calls->drawn = calls->drawn * 1664525u + 1013904223u; /* whose upper bits vary most */
        entry = &calls->entries[(place + (calls->drawn >> 16) % WAYS) & (ENTRIES - 1)];
    }
    return entry;
}

static PyObject *add(PyObject *self, PyObject *args)
{
    Calls *calls = (Calls *)self;
    PyObject *key, *x, *result, *make_result, *carrier, *call;
    int in_place;
    if (!PyArg_ParseTuple(
            args, "O!OOOOOp", &PyTuple_Type, &key, &x, &result, &make_result, &carrier, &call, &in_place))
        return NULL;
    Memory from = {0}, to = {0};
    Entry entry = {.has_input = x != Py_None, .has_result = result != Py_None, .in_place = in_place != 0,
                   .has_messages = is_message_call(carrier)};
    const Py_ssize_t size = PyTuple_Size(key);
    int status = (entry.has_input || entry.has_result) && is_plain(key) && size <= MAX_KEY;
    if (status > 0 && entry.has_input)
        status = describe_array(x, &from, &entry.input, &entry.input_bytes, &entry.prototypes[0]);
    if (status > 0 && entry.has_result)
        status = describe_array(result, &to, &entry.result, &entry.result_bytes, &entry.prototypes[1]);
    if (status > 0 && calls->entries == NULL && (calls->entries = PyMem_Calloc(ENTRIES, sizeof(Entry))) == NULL) {
        PyErr_NoMemory();
        status = -1;
    }
    if (status > 0) {
        PyObject *parts[MAX_KEY];
        for (Py_ssize_t i = 0; i < size; i++)
            parts[i] = PyTuple_GetItem(key, i);
        Entry *place = choose_entry(calls, parts, size, entry.has_input ? &from : NULL, entry.has_result ? &to : NULL);
        entry.key = Py_NewRef(key);
        entry.make_result = make_result != Py_None && can_make(result) ? NULL : Py_NewRef(make_result);
        entry.carrier = Py_NewRef(carrier);
        entry.call = Py_NewRef(call);
        set_call(calls, carrier, call);
        Entry old = *place;
        *place = entry;
        entry = old;
    }
    clear_entry(&entry);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static void remove_entries(Calls *calls)
{
    calls->generation++;
    for (int i = 0; calls->entries != NULL && i < ENTRIES; i++)
        clear_entry(&calls->entries[i]);
}

static PyObject *clear(PyObject *self, PyObject *unused)
{
    (void)unused;
    remove_entries((Calls *)self);
    Py_RETURN_NONE;
}

static PyObject *take_deferred(PyObject *self, PyObject *unused)
{
    (void)unused;
    Calls *calls = (Calls *)self;
    PyObject *taken = PyList_New(0);
    int count = 0, status = taken == NULL ? -1 : 0;
    while (status == 0 && count < calls->deferred_count) {
        const Deferred *one = &calls->deferred[count++];
        PyObject *pair = Py_BuildValue("(IO)", (unsigned int)one->signature, one->entry);
        status = pair == NULL ? -1 : PyList_Append(taken, pair);
        Py_XDECREF(pair);
    }
    if (status < 0) {
        Py_XDECREF(taken);
        return NULL;
    }
    while (calls->deferred_count > 0)
        Py_DECREF(calls->deferred[--calls->deferred_count].entry);
    return taken;
}

static int init_calls(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    Calls *calls = (Calls *)self;
    PyObject *lock, *queue, *pending, *group;
    if (!PyArg_ParseTuple(args, "OOOO", &lock, &queue, &pending, &group))
        return -1;
    if (calls->lock != NULL) {
        PyErr_SetString(PyExc_ValueError, "Calls: initialised twice");
        return -1;
    }
    if (intern_names() < 0)
        return -1;
    calls->running.publish = publish;
    calls->lock = (QueueLock *)Py_NewRef(lock);
    calls->queue = Py_NewRef(queue);
    calls->pending = Py_NewRef(pending);
    calls->group = Py_NewRef(group);
    calls->enabled = true;
    return 0;
}

static int traverse_calls(PyObject *self, visitproc visit, void *arg)
{
    const Calls *calls = (Calls *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(calls->queue);
    Py_VISIT(calls->pending);
    Py_VISIT(calls->group);
    Py_VISIT(calls->wrap);
    for (int i = 0; calls->entries != NULL && i < ENTRIES; i++) {
        Py_VISIT(calls->entries[i].carrier);
        Py_VISIT(calls->entries[i].call);
    }
    return 0;
}

static int clear_calls(PyObject *self)
{
    Calls *calls = (Calls *)self;
    Py_CLEAR(calls->queue);
    Py_CLEAR(calls->pending);
    Py_CLEAR(calls->group);
    Py_CLEAR(calls->wrap);
    remove_entries(calls);
    while (calls->deferred_count > 0)
        Py_DECREF(calls->deferred[--calls->deferred_count].entry);
    return 0;
}

static void dealloc_calls(PyObject *self)
{
    Calls *calls = (Calls *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear_calls(self);
    PyMem_Free(calls->entries);
    Py_XDECREF((PyObject *)calls->lock);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "run(missing, x, out, *key)\n--\n\nCarry out a call like one that was added, and return its result; return"
     " `missing` if there is none, or if the call can't be carried out at once."},
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL,
     "begin(missing, x, out, *key)\n--\n\nBegin a call like one that was added, and return what `wrap` returns for its"
     " BegunCall; return `missing` if there is none, or if it would have to wait for another rank."},
    {"complete_oldest", complete_oldest, METH_NOARGS,
     "complete_oldest()\n--\n\nComplete the oldest call that was begun, if there is one. The lock must be held."},
    {"complete_handed_over", complete_handed_over, METH_NOARGS,
     "complete_handed_over()\n--\n\nComplete the oldest call that was begun, and return True; False if there is none,"
     " or if `hand_over_begun_calls` has yet to look at it. The lock must be held."},
    {"attend_to_begun", attend_to_begun, METH_NOARGS,
     "attend_to_begun()\n--\n\nHave `hand_over_begun_calls` pass over the calls that have been begun."},
    {"fail_begun", fail_begun, METH_O,
     "fail_begun(make_failure)\n--\n\nEnd all calls that were begun by the error of `make_failure(call)`, an operation"
     " of the queue, and the synchronisation with the other ranks. The lock must be held."},
    {"add", add, METH_VARARGS,
     "add(key, x, result, make_result, carrier, call, in_place)\n--\n\nCarry out later calls on arrays like `x` by"
     " `carrier`, a Collective, a NativeCall or a MessageCall. `key` is a tuple of all other arguments; `result` is an"
     " array like the result, which `make_result` makes. Each is None where there is none."},
    {"take_deferred", take_deferred, METH_NOARGS,
     "take_deferred()\n--\n\nReturn the signatures and the entries of the calls that have begun without a comparison,"
     " and forget them."},
    {"clear", clear, METH_NOARGS, "clear()\n--\n\nRemove all calls, those of `BoundCall` too."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"enabled", T_BOOL, offsetof(Calls, enabled), 0, "False if Python has to carry out all calls."},
    {"begun", T_INT, offsetof(Calls, begun_count), READONLY, "Number of calls that were begun and not completed."},
    {"refuses", T_BOOL, offsetof(Calls, refuses), 0, "True if no call is completed: this process is another one."},
    {"wrap", T_OBJECT, offsetof(Calls, wrap), 0,
     "Function of a BegunCall that returns the request; None: no call is begun."},
    {"deferrable", T_INT, offsetof(Calls, deferrable), 0,
     "Number of calls of MPI that may begin before they are compared with those of the other ranks, at most 64."},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *get_deferred(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(count_deferred((const Calls *)self));
}

static PyGetSetDef attributes[] = {
    {"deferred", get_deferred, NULL,
     "Number of begun calls of which nothing has been done yet, and which have no number.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Calls(lock, queue, pending, group)\n--\n\nThe repeated calls of a communicator."},
    {Py_tp_init, init_calls},
    {Py_tp_dealloc, dealloc_calls},
    {Py_tp_traverse, traverse_calls},
    {Py_tp_clear, clear_calls},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, attributes},
    {0, NULL},
};

PyType_Spec calls_spec = {
    .name = "mpicoll._shm.Calls",
    .basicsize = sizeof(Calls),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
