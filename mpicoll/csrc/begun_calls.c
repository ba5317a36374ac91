/* Nonblocking collectives that are begun in the caller's thread.
 *
 * A call of one step is begun by writing this rank's data to a slot, and its word (steps.c). No rank is waited for. It
 * is completed when the words of all ranks have been seen, by a thread of the program that waits for it, or tests it;
 * by the next call that is not begun in this way, before that; or, if none of these comes soon, by the thread of the
 * queue. Each holds the lock of the queue.
 *
 * Other calls are deferred: nothing of them is done before they are completed, in the same ways, except that a test
 * leaves them to the thread of the queue, since they may have to wait for other ranks. These are calls of several
 * steps, calls in which ranks may access each other's arrays, those that would have to wait for a rank before they
 * write to a slot, and all that follow a deferred one. To wake the thread of the queue, which then competes with this
 * one for the interpreter lock, takes several times as long as many of these calls.
 *
 * Calls are completed in the order in which they were begun, and none before a thread needs that one or a later one: to
 * wait for the ranks that have yet to begin a call may be a deadlock.
 *
 * Where the place of the data lies depends on the collective, never on how a rank carries it out: what one rank has
 * begun, others may call in the blocking form, or start in their queue.
 */

#define PY_SSIZE_T_CLEAN
#include "begun_calls.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>

#include "clock.h"
#include "collectives.h"
#include "direct.h"
#include "pending_messages.h"
#include "records.h"
#include "steps.h"

enum {
    MAX_BYTES = 256 * 1024, /* that are copied while no other thread of the program can use the communicator */
    RELEASE_AT = 64 * 1024  /* bytes from which on the GIL is released for a copy */
};

/* Nanoseconds after which a call that no thread waits for is left to the thread of the queue. */
static const uint64_t PATIENCE = 1000000;

typedef enum { PENDING, DONE, FAILED } State;

struct BegunCall {
    PyObject_HEAD
    Calls *calls;
    Collective *collective;
    PyObject *call, *text, *x, *value; /* the call and its description */
    PyObject *failure;         /* an operation of the queue, which raises the error; NULL: there is none */
    const char *source;
    char *target;
    unsigned long long number; /* among the collectives of the communicator; 0: of a deferred one that has not begun */
    uint64_t begin;            /* nanoseconds of the monotonic clock */
    uint32_t step;
    int record;
    State state;
    bool deferred; /* it has no step before it is completed */
    bool counted; /* among the calls that no thread attends to */
};

static PyTypeObject *begun_type;
static Calls *youngest; /* communicator with begun calls */

static void set_counted(BegunCall *one, bool counted)
{
    if (one->counted == counted)
        return;
    one->counted = counted;
    if (counted)
        leave_alone();
    else
        attend();
}

/* --- the list of the calls of a communicator, which keeps them and their memory: ranks use it even if the program has
 * dropped them */

static void list_call(Calls *calls, BegunCall *one)
{
    if (calls->begun_count == 0) {
        calls->older = youngest;
        calls->younger = NULL;
        if (youngest != NULL)
            youngest->younger = calls;
        youngest = calls;
    }
    calls->begun[calls->begun_count++] = (BegunCall *)Py_NewRef((PyObject *)one);
}

/* Remove the oldest call, and return the reference to it. */
static BegunCall *unlist_call(Calls *calls)
{
    BegunCall *one = calls->begun[0];
    calls->begun_count--;
    for (int i = 0; i < calls->begun_count; i++)
        calls->begun[i] = calls->begun[i + 1];
    if (calls->begun_count == 0) {
        if (calls->younger != NULL)
            calls->younger->older = calls->older;
        else
            youngest = calls->older;
        if (calls->older != NULL)
            calls->older->younger = calls->younger;
        calls->older = calls->younger = NULL;
    }
    return one;
}

/* --- beginning */

static bool is_large(const Collective *one) { return one->source_bytes + one->target_bytes >= RELEASE_AT; }

/* Write the data of a call, and its word. */
static void start_step(BegunCall *one)
{
    const Collective *collective = one->collective;
    Steps *steps = collective->steps;
    steps->call = (Kept){one->call, one->text, one->number};
    steps->signature = collective->signature;
    if (is_large(collective))
        release_gil(steps);
    collective->write(collective, steps->step + 1, one->source, one->target, 0);
    acquire_gil(steps);
    begin_step(steps);
    one->step = steps->step;
    steps->call = (Kept){0};
}

/* Return true if a call uses memory that an earlier one has yet to write, or writes memory that it has yet to read. */
static bool depends_on(const BegunCall *one, const BegunCall *earlier)
{
    const size_t sources = one->collective->source_bytes, targets = one->collective->target_bytes;
    const size_t written = earlier->collective->target_bytes, read = earlier->collective->source_bytes;
    return overlap(one->source, sources, earlier->target, written) ||
           overlap(one->target, targets, earlier->target, written) ||
           overlap(one->target, targets, earlier->source, read);
}

/* Return how many of the calls that were begun need not be completed before this one. */
static int count_independent(const Calls *calls, const BegunCall *one)
{
    if (!is_in_ring(one->collective) || calls->begins_alone)
        return 0;
    int most = 0;
    while (most < calls->begun_count && most < MAX_BEGUN - 1 &&
           !depends_on(one, calls->begun[calls->begun_count - 1 - most]))
        most++;
    return most;
}

/* Return true if a step comes before the data of a call leaves this rank, or the call has several. */
static bool has_more_steps(const Collective *one)
{
    return !is_one_step(one) || tries_direct(one) || one->reads_memory || one->source_bytes > MAX_BYTES ||
           one->target_bytes > MAX_BYTES;
}

static bool is_behind_deferred(const Calls *calls)
{
    return calls->begun_count > 0 && calls->begun[calls->begun_count - 1]->deferred;
}

/* Return true if the step of a call can be begun now; false, or with an exception, if it can't. Completes earlier ones
 * if they are in the way and other ranks have begun them. The lock is held. */
static bool make_way(Calls *calls, BegunCall *one)
{
    Collective *collective = one->collective;
    if (has_more_steps(collective) || is_behind_deferred(calls))
        return false;
    if (collective->text == NULL)
        describe_call(calls, collective, one->call);
    one->text = Py_XNewRef(collective->text);
    Steps *steps = collective->steps;
    const bool alone = !is_in_ring(collective);
    const int most = count_independent(calls, one);
    while (calls->begun_count > most) {
        if (test_begun_step(steps) != 1)
            return false;
        if (complete_begun_call(calls) < 0)
            return false;
    }
    steps->call.text = one->text;
    const bool can = can_begin(steps, alone);
    steps->call.text = NULL;
    return can;
}

static BegunCall *make_begun_call(
    Calls *calls, PyObject *carrier, PyObject *call, PyObject *x, PyObject *value, const Operands *operands)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(begun_type, Py_tp_alloc);
    BegunCall *one = (BegunCall *)allocate(begun_type, 0);
    if (one == NULL)
        return NULL;
    one->calls = (Calls *)Py_NewRef((PyObject *)calls);
    one->collective = (Collective *)Py_NewRef(carrier);
    one->call = Py_NewRef(call);
    one->x = Py_NewRef(x);
    one->value = Py_NewRef(value);
    one->source = operands->source;
    one->target = operands->target;
    return one;
}

/* Give a call its number among the collectives, and begin its record. The caller drops the `old` references. */
static void number_call(Calls *calls, BegunCall *one, uint64_t now, References *old)
{
    one->number = ++calls->lock->number;
    References own = {.group = Py_NewRef(calls->group), .call = Py_NewRef(one->call),
                      .thread = PyThread_get_thread_ident()};
    one->record = begin_record(now, one->number, &one->collective->summary, &own, old);
}

PyObject *begin_in_order(
    Calls *calls, PyObject *carrier, PyObject *call, PyObject *x, PyObject *value, const Operands *operands)
{
    if (!recording || !calls->enabled || calls->queue == NULL || is_native_call(carrier))
        return NULL;
    BegunCall *one = make_begun_call(calls, carrier, call, x, value, operands);
    if (one == NULL)
        return NULL;
    QueueLock *lock = calls->lock;
    bool begins = PyObject_Size(calls->pending) == 0 && try_to_lock(lock);
    if (begins) {
        one->deferred = !make_way(calls, one);
        if (PyErr_Occurred() || calls->begun_count == MAX_BEGUN) {
            unlock(lock);
            begins = false;
        }
    }
    if (!begins) {
        Py_DECREF((PyObject *)one);
        return NULL;
    }
    one->begin = read_clock();
    References old = {0};
    if (!one->deferred) {
        number_call(calls, one, one->begin, &old);
        start_step(one);
        calls->begins_alone = !is_in_ring(one->collective);
    }
    list_call(calls, one);
    unlock(lock);
    set_counted(one, true);
    /* Last, since this may run other code. */
    drop_references(&old);
    PyObject *request = PyObject_CallFunctionObjArgs(calls->wrap, (PyObject *)one, NULL);
    Py_DECREF((PyObject *)one);
    return request;
}

/* --- completing */

/* Keep the error of a call, which is the current exception. Returns -1 with the exception of a signal handler. */
static int keep_failure(Calls *calls, BegunCall *one)
{
    conclude_failure(calls);
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyObject *failure =
        error == NULL ? NULL : PyObject_CallMethod(calls->queue, "keep_failure", "OO", one->call, error);
    if (failure == NULL)
        PyErr_WriteUnraisable((PyObject *)one); /* memory is missing */
    one->failure = failure;
    one->state = FAILED;
    if (error != NULL && !PyErr_GivenExceptionMatches(error, PyExc_Exception)) {
        PyErr_Restore(type, error, traceback);
        return -1;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return 0;
}

/* Begin again what was begun after a step whose words have differed. */
static void begin_again(Calls *calls, const Steps *steps)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (int i = 0; i < calls->begun_count && !calls->begun[i]->deferred && !steps->unusable; i++)
        start_step(calls->begun[i]);
    PyErr_Restore(type, value, traceback);
}

static void read_data(const BegunCall *one)
{
    const Collective *collective = one->collective;
    if (is_large(collective))
        release_gil(collective->steps);
    collective->read(collective, one->step, one->source, one->target, 0);
    acquire_gil(collective->steps);
}

static int complete_begun_step(const BegunCall *one)
{
    Steps *steps = one->collective->steps;
    steps->first = steps->step - 1;
    if (complete_step(steps, one->step) < 0)
        return -1;
    read_data(one);
    return 0;
}

int complete_begun_call(Calls *calls)
{
    BegunCall *one = calls->begun[0];
    Steps *steps = one->collective->steps;
    set_counted(one, false);
    References old = {0};
    if (one->deferred)
        number_call(calls, one, read_clock(), &old);
    calls->running.record = one->record;
    calls->completes = true;
    steps->running = &calls->running;
    /* A deferred call waits for all ranks in each step: it would be too late for an error after it. */
    steps->call = one->deferred ? (Kept){0} : (Kept){one->call, one->text, one->number};
    int status = one->deferred ? run_operation(one->collective, one->source, one->target) : complete_begun_step(one);
    steps->running = NULL;
    steps->call = (Kept){0};
    unlist_call(calls);
    if (calls->begun_count == 0)
        calls->begins_alone = false;
    if (status == 0) {
        one->state = DONE;
        end_record(one->record, read_clock(), RECORD_DONE);
        status = raise_interrupt(steps);
    } else {
        begin_again(calls, steps);
        status = keep_failure(calls, one);
    }
    if (calls->published || calls->shows_runner)
        hide_completion(calls);
    calls->completes = false;
    PyObject *x = one->x;
    one->x = NULL;
    /* Last, since this may run other code. */
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    if (status < 0)
        PyErr_Fetch(&type, &value, &traceback);
    drop_references(&old);
    Py_DECREF(x);
    Py_DECREF((PyObject *)one);
    if (status < 0)
        PyErr_Restore(type, value, traceback);
    return status;
}

int complete_begun_calls(Calls *calls)
{
    while (calls->begun_count > 0) {
        if (complete_begun_call(calls) < 0)
            return -1;
    }
    return 0;
}

/* Return 1 if the oldest call can be completed without waiting, 0 if not, -1 if that is not known before. */
static int test_oldest(const Calls *calls)
{
    const BegunCall *oldest = calls->begun[0];
    return oldest->deferred ? -1 : test_begun_step(oldest->collective->steps);
}

/* Complete a call, and those before it, as far as that takes no wait. */
static PyObject *test_begun_call(PyObject *self, PyObject *unused)
{
    (void)unused;
    BegunCall *one = (BegunCall *)self;
    Calls *calls = one->calls;
    if (one->state == PENDING && !calls->refuses && try_to_lock(calls->lock)) {
        int found = 1, status = 0;
        while (one->state == PENDING && status == 0 && (found = test_oldest(calls)) == 1)
            status = complete_begun_call(calls);
        unlock(calls->lock);
        if (status < 0)
            return NULL;
        if (found < 0) { /* the ranks meet, or carry out the whole call, which may take long */
            PyObject *none = PyObject_CallMethod(calls->queue, "conclude_begun", NULL);
            if (none == NULL)
                return NULL;
            Py_DECREF(none);
        }
    }
    return PyBool_FromLong(one->state != PENDING);
}

/* Complete a call, and those before it. Returns 1, 0 if Python has to wait for the lock, -1 with an exception. */
static int complete_until(BegunCall *one)
{
    Calls *calls = one->calls;
    if (calls->refuses || !try_to_lock(calls->lock))
        return 0;
    int status = 0;
    set_counted(one, false);
    while (one->state == PENDING && status == 0)
        status = complete_begun_call(calls);
    unlock(calls->lock);
    if (status < 0 && one->state == PENDING)
        set_counted(one, true);
    return status < 0 ? -1 : 1;
}

static PyObject *wait_for_begun_call(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    BegunCall *one = (BegunCall *)self;
    PyObject *timeout = nargs > 0 ? args[0] : Py_None, *bound = nargs > 1 ? args[1] : Py_None;
    int status = 1;
    if (one->state == PENDING)
        status = timeout == Py_None ? complete_until(one) : 0;
    if (status < 0)
        return NULL;
    if (status == 0) {
        PyObject *none = PyObject_CallMethod(one->calls->queue, "wait_for_begun", "OOO", self, timeout, bound);
        if (none == NULL)
            return NULL;
        Py_DECREF(none);
    }
    if (one->failure != NULL)
        return PyObject_CallMethod(one->failure, "wait", "O", Py_None);
    return Py_NewRef(one->value);
}

const char hand_over_begun_calls_doc[] =
    "hand_over_begun_calls()\n--\n\nCall `hand_over_begun()` of the queues with calls that were begun a millisecond"
    " ago, and for which no thread waits.";

PyObject *hand_over_begun_calls(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *queues = PyList_New(0);
    const uint64_t now = read_clock();
    for (Calls *calls = youngest; queues != NULL && calls != NULL; calls = calls->older) {
        const BegunCall *one = calls->begun[0];
        if (one->counted && now - one->begin >= PATIENCE && PyList_Append(queues, calls->queue) < 0)
            Py_CLEAR(queues);
    }
    for (Py_ssize_t i = 0; queues != NULL && i < PyList_Size(queues); i++) {
        PyObject *none = PyObject_CallMethod(PyList_GetItem(queues, i), "hand_over_begun", NULL);
        if (none == NULL)
            Py_CLEAR(queues);
        Py_XDECREF(none);
    }
    if (queues == NULL)
        return NULL;
    Py_DECREF(queues);
    Py_RETURN_NONE;
}

/* --- methods of Calls */

PyObject *complete_oldest(PyObject *self, PyObject *unused)
{
    (void)unused;
    Calls *calls = (Calls *)self;
    if (calls->begun_count > 0 && complete_begun_call(calls) < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyObject *complete_handed_over(PyObject *self, PyObject *unused)
{
    (void)unused;
    Calls *calls = (Calls *)self;
    if (calls->begun_count == 0 || calls->begun[0]->counted)
        Py_RETURN_FALSE;
    return complete_begun_call(calls) < 0 ? NULL : Py_NewRef(Py_True);
}

PyObject *attend_to_begun(PyObject *self, PyObject *unused)
{
    (void)unused;
    const Calls *calls = (Calls *)self;
    for (int i = 0; i < calls->begun_count; i++)
        set_counted(calls->begun[i], false);
    Py_RETURN_NONE;
}

int count_deferred(const Calls *calls)
{
    int count = 0;
    for (int i = 0; i < calls->begun_count; i++)
        count += calls->begun[i]->number == 0;
    return count;
}

PyObject *fail_begun(PyObject *self, PyObject *make_failure)
{
    Calls *calls = (Calls *)self;
    if (calls->begun_count > 0)
        abandon_begun_steps(calls->begun[0]->collective->steps);
    while (calls->begun_count > 0) {
        BegunCall *one = unlist_call(calls);
        set_counted(one, false);
        one->failure = PyObject_CallFunctionObjArgs(make_failure, one->call, NULL);
        one->state = FAILED;
        if (!one->deferred)
            end_record(one->record, read_clock(), RECORD_FAILED);
        const bool failed = one->failure == NULL;
        Py_DECREF((PyObject *)one);
        if (failed)
            return NULL;
    }
    calls->begins_alone = false;
    Py_RETURN_NONE;
}

/* --- the Python type */

static PyObject *get_done(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((BegunCall *)self)->state != PENDING);
}

static int traverse_begun_call(PyObject *self, visitproc visit, void *arg)
{
    const BegunCall *one = (BegunCall *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)one->calls);
    Py_VISIT((PyObject *)one->collective);
    Py_VISIT(one->call);
    Py_VISIT(one->x);
    Py_VISIT(one->value);
    Py_VISIT(one->failure);
    return 0;
}

static int clear_begun_call(PyObject *self)
{
    BegunCall *one = (BegunCall *)self;
    Py_CLEAR(one->x);
    Py_CLEAR(one->value);
    Py_CLEAR(one->failure);
    return 0;
}

static void dealloc_begun_call(PyObject *self)
{
    BegunCall *one = (BegunCall *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear_begun_call(self);
    Py_XDECREF((PyObject *)one->calls);
    Py_XDECREF((PyObject *)one->collective);
    Py_XDECREF(one->call);
    Py_XDECREF(one->text);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"test", test_begun_call, METH_NOARGS,
     "test()\n--\n\nReturn True if the call has completed, or has failed; never blocks."},
    {"wait", (PyCFunction)(void (*)(void))wait_for_begun_call, METH_FASTCALL,
     "wait(timeout=None, bound=None)\n--\n\nWait until the call has completed, and return its result. Raises its error;"
     " Timeout after `timeout` seconds, with a message that states `bound`."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"call", T_OBJECT, offsetof(BegunCall, call), READONLY, "The description of the call."},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *get_number(PyObject *self, void *unused)
{
    (void)unused;
    const BegunCall *one = (BegunCall *)self;
    unsigned long long number = one->number;
    if (number == 0) { /* it follows the earlier ones in the list */
        number = one->calls->lock->number + 1;
        for (int i = 0; i < one->calls->begun_count && one->calls->begun[i] != one; i++)
            number += one->calls->begun[i]->number == 0;
    }
    return PyLong_FromUnsignedLongLong(number);
}

static PyObject *get_awaited(PyObject *self, void *unused)
{
    (void)unused;
    const BegunCall *one = (BegunCall *)self;
    return PyTuple_Pack(2, one->calls->queue, one->call);
}

static PyObject *get_limit(PyObject *self, void *unused)
{
    (void)unused;
    return PyObject_GetAttrString(((BegunCall *)self)->calls->group, "timeout");
}

static PyGetSetDef attributes[] = {
    {"awaited", get_awaited, NULL, "The queue and the description of the call.", NULL},
    {"limit", get_limit, NULL, "Seconds that the call may take.", NULL},
    {"number", get_number, NULL, "Number among the communicator's collectives.", NULL},
    {"done", get_done, NULL, "True if the call has completed, or has failed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A nonblocking collective that was begun in the thread of its caller."},
    {Py_tp_dealloc, dealloc_begun_call},
    {Py_tp_traverse, traverse_begun_call},
    {Py_tp_clear, clear_begun_call},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, attributes},
    {0, NULL},
};

PyType_Spec begun_call_spec = {
    .name = "mpicoll._shm.BegunCall",
    .basicsize = sizeof(BegunCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

void set_begun_call_type(PyTypeObject *type) { begun_type = (PyTypeObject *)Py_NewRef((PyObject *)type); }
