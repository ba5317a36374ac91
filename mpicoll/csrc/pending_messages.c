/* Messages of the caller over MPI that were started, and complete later.
 *
 * A message is started, tested and waited for by the threads of the program. It needs another thread only while none of
 * them waits for it: MPI moves a large message while some thread calls it. That thread sleeps here, without the GIL,
 * and returns to Python when a message was left alone for a while.
 *
 * Messages that have not completed are in a list, which keeps them and their memory: MPI uses it even if the program
 * has dropped them.
 *
 * All fields are used with the GIL held, except those of the thread of progress, which are atomic. `busy` is set while
 * a thread is in MPI for the message, without the GIL: MPI reports an outcome once, and to one thread only.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "pending_messages.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#include "clock.h"
#include "records.h"

typedef enum { PENDING, DONE, FAILED } State;

typedef struct PendingMessage PendingMessage;

struct PendingMessage {
    PyObject_HEAD
    MessageCall *carrier;
    PyObject *group, *call, *array;
    PyObject *error; /* the exception of a message that has failed; NULL if no wait has made it yet */
    Handle request;
    Status status;
    State state;
    int code; /* of MPI's error; 0: none */
    int source, tag; /* of a message that has arrived */
    long long nbytes, size; /* of the message, and of the memory for it */
    bool sends, busy, listed;
    int waiting; /* threads */
    PendingMessage *older, *younger;
};

static PendingMessage *youngest;
static PyTypeObject *pending_type;

/* --- the thread of progress */

enum {
    TICKS_TO_SLEEP = 20,
    SECONDS_TO_END = 5
};
static const struct timespec TICK = {0, 1000000}, PAUSE = {0, 50000};

static atomic_int unattended; /* messages in the list, and collectives (begun_calls.c), for which no thread waits */
static atomic_bool sleeping, stopped;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool running;             /* there is a thread of progress */
static PyObject *start_progress; /* starts one */

static void wake(void)
{
    pthread_mutex_lock(&mutex);
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&mutex);
}

void leave_alone(void)
{
    atomic_fetch_add(&unattended, 1);
    if (atomic_load(&sleeping))
        wake();
    if (running || start_progress == NULL || atomic_load(&stopped))
        return;
    running = true;
    PyObject *result = PyObject_CallNoArgs(start_progress);
    if (result == NULL) { /* as at the end of the interpreter: the message makes progress while it is waited for */
        running = false;
        if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
            PyErr_SetInterrupt(); /* again, when the message has begun */
        PyErr_Clear();
    }
    Py_XDECREF(result);
}

void attend(void) { atomic_fetch_sub(&unattended, 1); }

/* Sleep until a message is left alone. Returns false after some seconds. */
static bool sleep_until_left_alone(void)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += SECONDS_TO_END;
    int status = 0;
    pthread_mutex_lock(&mutex);
    atomic_store(&sleeping, true);
    while (status == 0 && atomic_load(&unattended) == 0 && !atomic_load(&stopped))
        status = pthread_cond_timedwait(&changed, &mutex, &end);
    atomic_store(&sleeping, false);
    pthread_mutex_unlock(&mutex);
    return status == 0;
}

/* Return true when messages were left alone at two ticks in a row; false when there has been none for long. */
static bool watch_messages(void)
{
    int seen = 0, idle = 0;
    while (!atomic_load(&stopped)) {
        nanosleep(&TICK, NULL);
        if (atomic_load(&unattended) > 0) {
            if (++seen > 1)
                return true;
            idle = 0;
        } else {
            seen = 0;
            if (++idle >= TICKS_TO_SLEEP) {
                if (!sleep_until_left_alone())
                    return false;
                idle = 0;
            }
        }
    }
    return false;
}

const char await_unattended_message_doc[] =
    "await_unattended_message()\n--\n\nReturn True when a message has been pending for about a millisecond and no"
    " thread waits for it. Return False if there was none for some seconds, or after `stop_progress`: the thread that"
    " calls this, of which there is one, ends then, and the next message starts another one.";

PyObject *await_unattended_message(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    bool found;
    Py_BEGIN_ALLOW_THREADS
    found = watch_messages();
    Py_END_ALLOW_THREADS
    found = found || (atomic_load(&unattended) > 0 && !atomic_load(&stopped));
    running = found;
    return PyBool_FromLong(found);
}

const char set_progress_doc[] =
    "set_progress(start)\n--\n\nHave `start()` called when a message is pending, for which no thread waits: it starts a"
    " thread that calls `await_unattended_message` and, when that returns True, `test_pending_messages`.";

PyObject *set_progress(PyObject *module, PyObject *start)
{
    (void)module;
    PyObject *old = start_progress;
    start_progress = Py_NewRef(start);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

PyObject *stop_progress(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    atomic_store(&stopped, true);
    wake();
    Py_RETURN_NONE;
}

/* --- the list of messages that have not completed */

static void list_message(PendingMessage *one)
{
    Py_INCREF((PyObject *)one);
    one->listed = true;
    one->older = youngest;
    if (youngest != NULL)
        youngest->younger = one;
    youngest = one;
    leave_alone();
}

static void unlist_message(PendingMessage *one)
{
    if (!one->listed)
        return;
    one->listed = false;
    if (one->younger != NULL)
        one->younger->older = one->older;
    else
        youngest = one->older;
    if (one->older != NULL)
        one->older->younger = one->younger;
    one->older = one->younger = NULL;
    if (one->waiting == 0)
        attend();
    Py_DECREF((PyObject *)one);
}

/* --- one message */

/* How often a thread tests its message before the wait is shown. The peer, which takes its message from Python, needs
 * more time than in the calls of messages.c. */
enum { TESTS = 4 * POLLS };

/* Have Python store what a message of another size stands for. */
static void accept_pending(PendingMessage *one)
{
    one->busy = true; /* other threads see no outcome meanwhile */
    one->nbytes = accept_message(one->carrier, one->array, one->nbytes);
    if (PyErr_Occurred()) {
        PyObject *type, *traceback;
        PyErr_Fetch(&type, &one->error, &traceback);
        PyErr_NormalizeException(&type, &one->error, &traceback);
        Py_XDECREF(type);
        Py_XDECREF(traceback);
    }
    one->busy = false;
}

/* Store the outcome of a message that has completed, or for which MPI has returned an error. The caller has a reference
 * to it. */
static void settle(PendingMessage *one)
{
    State state = one->code == 0 ? DONE : FAILED;
    if (!one->sends) {
        int64_t nbytes = -1;
        memcpy(&one->source, one->status.bytes + mpi.source_offset, sizeof one->source);
        memcpy(&one->tag, one->status.bytes + mpi.tag_offset, sizeof one->tag);
        const int error = mpi.get_elements(&one->status, mpi.byte, &nbytes);
        one->nbytes = error == 0 ? nbytes : -1;
        if (state == DONE && one->nbytes != one->size && one->carrier->accept != NULL)
            accept_pending(one);
        if (one->nbytes != one->size || one->error != NULL)
            state = FAILED;
    }
    one->state = state;
    unlist_message(one);
    /* Last, since this may run other code, in which no thread may ask MPI again. */
    if (!one->sends && one->code == 0 && count_message(one->carrier->received, one->source, one->tag) < 0)
        PyErr_WriteUnraisable((PyObject *)one); /* memory is missing; the message has arrived */
}

/* Test a message for which no thread is in MPI, so many times as long as it is pending. */
static void poll_message(PendingMessage *one, int polls)
{
    int flag = 0, code = 0;
    one->busy = true;
    Py_BEGIN_ALLOW_THREADS
    for (int i = 0; i < polls && code == 0 && !flag; i++)
        code = mpi.test(&one->request, &flag, &one->status);
    Py_END_ALLOW_THREADS
    one->busy = false;
    one->code = code;
    if (flag || code != 0)
        settle(one);
}

PyObject *make_pending_message(
    MessageCall *carrier, PyObject *group, PyObject *call, PyObject *array, const Operands *operands)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(pending_type, Py_tp_alloc);
    PendingMessage *one = (PendingMessage *)allocate(pending_type, 0);
    if (one == NULL)
        return NULL;
    one->carrier = (MessageCall *)Py_NewRef((PyObject *)carrier);
    one->group = Py_NewRef(group);
    one->call = Py_NewRef(call);
    one->array = Py_NewRef(array);
    one->sends = carrier->sends;
    one->source = one->tag = -1;
    one->nbytes = -1;
    one->size = (long long)(one->sends ? operands->source_bytes : operands->target_bytes);
    if (one->sends && advance_counter(carrier->sent) < 0) {
        Py_DECREF((PyObject *)one);
        return NULL;
    }
    References own = {.group = Py_NewRef(group), .call = Py_NewRef(call), .thread = PyThread_get_thread_ident()}, old;
    const uint64_t now = read_clock();
    const int record = begin_record(now, 0, &carrier->summary, &own, &old);
    end_record(record, 0, RECORD_STARTED);
    int flag = 0, code;
    one->busy = true;
    Py_BEGIN_ALLOW_THREADS
    code = one->sends ? mpi.isend(operands->source, (int)operands->source_bytes, mpi.byte, carrier->dest,
                                  carrier->send_tag, carrier->comm, &one->request)
                      : mpi.irecv(operands->target, (int)operands->target_bytes, mpi.byte, carrier->source,
                                  carrier->recv_tag, carrier->comm, &one->request);
    if (code == 0)
        code = mpi.test(&one->request, &flag, &one->status);
    Py_END_ALLOW_THREADS
    one->busy = false;
    one->code = code;
    if (flag || code != 0)
        settle(one);
    else
        list_message(one);
    /* Last, since this may run other code. */
    drop_references(&old);
    return (PyObject *)one;
}

static PyObject *test_message(PyObject *self, PyObject *unused)
{
    (void)unused;
    PendingMessage *one = (PendingMessage *)self;
    if (one->state == PENDING && !one->busy)
        poll_message(one, 1);
    return PyBool_FromLong(one->state != PENDING);
}

/* Complete a message in functions of MPI that block, or see another thread do so. */
static void complete(PendingMessage *one)
{
    while (one->state == PENDING) {
        if (one->busy) {
            Py_BEGIN_ALLOW_THREADS
            nanosleep(&PAUSE, NULL);
            Py_END_ALLOW_THREADS
            continue;
        }
        int code;
        one->busy = true;
        Py_BEGIN_ALLOW_THREADS
        code = mpi.wait(&one->request, &one->status);
        Py_END_ALLOW_THREADS
        one->busy = false;
        one->code = code;
        settle(one);
    }
}

/* Wait for a message that is pending. */
static void wait_for_pending(PendingMessage *one, int record)
{
    if (one->waiting++ == 0)
        attend();
    if (!one->busy)
        poll_message(one, TESTS);
    if (one->state == PENDING) {
        ShownWait shown = {0};
        show_wait(one->carrier, record, &shown);
        complete(one);
        hide_wait(one->carrier, &shown);
    }
    one->waiting--;
}

/* Raise the exception of a message that has failed. */
static void raise_failure(PendingMessage *one, int record)
{
    if (one->error == NULL) {
        PyObject *entry = get_entry(record);
        PyObject *error = entry == NULL ? NULL
                                        : PyObject_CallFunction(one->carrier->conclude, "OiiiL", entry, one->code,
                                                                one->source, one->tag, one->nbytes);
        Py_XDECREF(entry);
        if (error == NULL) {
            end_record(record, read_clock(), RECORD_FAILED);
            return;
        }
        one->error = error;
    } else {
        end_record(record, read_clock(), RECORD_FAILED);
    }
    PyErr_SetObject((PyObject *)Py_TYPE(one->error), one->error);
}

static PyObject *wait_for_message(PyObject *self, PyObject *unused)
{
    (void)unused;
    PendingMessage *one = (PendingMessage *)self;
    References own = {.group = Py_NewRef(one->group), .call = Py_NewRef(one->call),
                      .thread = PyThread_get_thread_ident()};
    References old;
    const int record = begin_record(read_clock(), 0, &one->carrier->summary, &own, &old);
    if (one->state == PENDING)
        wait_for_pending(one, record);
    const bool done = one->state == DONE;
    if (done)
        end_record(record, read_clock(), RECORD_DONE);
    else
        raise_failure(one, record);
    /* Last, since this may run other code. */
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    if (!done)
        PyErr_Fetch(&type, &value, &traceback);
    drop_references(&old);
    if (!done) {
        PyErr_Restore(type, value, traceback);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* --- functions of the module */

/* Return the messages of the list, the oldest one last; NULL with an exception. */
static PyObject *copy_list(void)
{
    PyObject *all = PyList_New(0);
    for (PendingMessage *one = youngest; all != NULL && one != NULL; one = one->older) {
        if (PyList_Append(all, (PyObject *)one) < 0)
            Py_CLEAR(all);
    }
    return all;
}

PyObject *test_pending_messages(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *all = copy_list();
    for (Py_ssize_t at = all == NULL ? 0 : PyList_Size(all); at > 0; at--) {
        PendingMessage *one = (PendingMessage *)PyList_GetItem(all, at - 1);
        if (one->state == PENDING && !one->busy)
            poll_message(one, 1);
    }
    if (all == NULL)
        return NULL;
    Py_DECREF(all);
    Py_RETURN_NONE;
}

const char list_pending_messages_doc[] =
    "list_pending_messages()\n--\n\nReturn the handle of the communicator, \"send\" or \"recv\", the rank and the"
    " tag of the messages that were started and have not completed. They are not tested.";

PyObject *list_pending_messages(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    /* A tuple that is made may start a garbage collection, in which messages complete. */
    PyObject *messages = copy_list();
    PyObject *all = messages == NULL ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; all != NULL && i < PyList_Size(messages); i++) {
        const PendingMessage *one = (PendingMessage *)PyList_GetItem(messages, i);
        const MessageCall *by = one->carrier;
        PyObject *part = Py_BuildValue("(Ksii)", by->comm_number, one->sends ? "send" : "recv",
                                       one->sends ? by->dest : by->source, one->sends ? by->send_tag : by->recv_tag);
        if (part == NULL || PyList_Append(all, part) < 0)
            Py_CLEAR(all);
        Py_XDECREF(part);
    }
    Py_XDECREF(messages);
    return all;
}

/* --- the Python type */

static int traverse_pending_message(PyObject *self, visitproc visit, void *arg)
{
    const PendingMessage *one = (PendingMessage *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)one->carrier);
    Py_VISIT(one->group);
    Py_VISIT(one->call);
    Py_VISIT(one->array);
    Py_VISIT(one->error);
    return 0;
}

static int clear_pending_message(PyObject *self)
{
    Py_CLEAR(((PendingMessage *)self)->array);
    Py_CLEAR(((PendingMessage *)self)->error);
    return 0;
}

static void dealloc_pending_message(PyObject *self)
{
    PendingMessage *one = (PendingMessage *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF((PyObject *)one->carrier);
    Py_XDECREF(one->group);
    Py_XDECREF(one->call);
    Py_XDECREF(one->array);
    Py_XDECREF(one->error);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"test", test_message, METH_NOARGS,
     "test()\n--\n\nReturn True if the message has completed, or has failed; never blocks."},
    {"wait", wait_for_message, METH_NOARGS,
     "wait()\n--\n\nWait until the message has completed, without a bound of its own. Raises its error."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"array", T_OBJECT, offsetof(PendingMessage, array), READONLY, "What is sent, or receives the message."},
    {"call", T_OBJECT, offsetof(PendingMessage, call), READONLY, "The description of the call."},
    {"sends", T_BOOL, offsetof(PendingMessage, sends), READONLY, "True for a send."},
    {"source", T_INT, offsetof(PendingMessage, source), READONLY, "The rank that has sent a received message, or -1."},
    {"tag", T_INT, offsetof(PendingMessage, tag), READONLY, "The tag of a received message, or -1."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A message that was started by a call like an earlier one, and completes later."},
    {Py_tp_dealloc, dealloc_pending_message},
    {Py_tp_traverse, traverse_pending_message},
    {Py_tp_clear, clear_pending_message},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec pending_message_spec = {
    .name = "mpicoll._shm.PendingMessage",
    .basicsize = sizeof(PendingMessage),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

void set_pending_message_type(PyTypeObject *type) { pending_type = (PyTypeObject *)Py_NewRef((PyObject *)type); }
