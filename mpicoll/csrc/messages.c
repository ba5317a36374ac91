/* Messages of the caller over MPI: blocking sends and receives like earlier ones.
 *
 * A call polls without the GIL for as long as a peer that is in time takes. A longer wait is shown to the watchdog, and
 * goes on in a blocking function of MPI.
 *
 * A message is matched before it is received, so that its size is known: Open MPI writes all of a large message that
 * arrives through shared memory, also past the end of memory that is too small for it.
 */

#define PY_SSIZE_T_CLEAN
#include "messages.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"

/* The messages of a running call. */
typedef struct {
    char *target;
    size_t target_bytes;
    Handle send, message, recv;
    bool sending, expecting, receiving; /* what has not ended */
    char *whole;                        /* memory for a message that is too large for the target; NULL: it fits */
    int error;                          /* of MPI; 0: none */
    bool lacks_memory;                  /* for a message that is too large */
    int source, tag;                    /* of the message that has arrived */
    int64_t nbytes;
    Status status;
} Exchange;

static void read_envelope(Exchange *running)
{
    memcpy(&running->source, running->status.bytes + mpi.source_offset, sizeof running->source);
    memcpy(&running->tag, running->status.bytes + mpi.tag_offset, sizeof running->tag);
    running->error = mpi.get_elements(&running->status, mpi.byte, &running->nbytes);
}

/* Receive the message that has been matched. */
static void receive_matched(Exchange *running)
{
    running->expecting = false;
    read_envelope(running);
    if (running->error != 0)
        return;
    char *into = running->target;
    if (running->nbytes > (int64_t)running->target_bytes) {
        running->lacks_memory =
            running->nbytes > INT_MAX || (running->whole = malloc((size_t)running->nbytes)) == NULL;
        into = running->whole;
    }
    if (running->lacks_memory)
        return;
    running->error = mpi.imrecv(into, (int)running->nbytes, mpi.byte, &running->message, &running->recv);
    running->receiving = running->error == 0;
}

static bool has_ended(const Exchange *running)
{
    return running->error != 0 || running->lacks_memory ||
           !(running->sending || running->expecting || running->receiving);
}

static void start(const MessageCall *one, Exchange *running, const Operands *operands)
{
    if (one->sends) {
        running->error = mpi.isend(operands->source, (int)operands->source_bytes, mpi.byte, one->dest, one->send_tag,
                                   one->comm, &running->send);
        running->sending = running->error == 0;
    }
    running->expecting = one->receives;
}

static void advance(const MessageCall *one, Exchange *running)
{
    int flag = 0;
    if (running->expecting) {
        running->error =
            mpi.improbe(one->source, one->recv_tag, one->comm, &flag, &running->message, &running->status);
        if (running->error == 0 && flag)
            receive_matched(running);
    }
    if (running->receiving && running->error == 0) {
        running->error = mpi.test(&running->recv, &flag, &running->status);
        running->receiving = !flag;
    }
    if (running->sending && running->error == 0) {
        running->error = mpi.test(&running->send, &flag, &running->status);
        running->sending = !flag;
    }
}

/* Wait for what has not ended, in functions of MPI that block. */
static void complete(const MessageCall *one, Exchange *running)
{
    if (running->expecting) {
        running->error = mpi.mprobe(one->source, one->recv_tag, one->comm, &running->message, &running->status);
        if (running->error == 0)
            receive_matched(running);
    }
    if (running->receiving && running->error == 0) {
        running->error = mpi.wait(&running->recv, &running->status);
        running->receiving = false;
    }
    if (running->sending && running->error == 0 && !running->lacks_memory) {
        running->error = mpi.wait(&running->send, &running->status);
        running->sending = false;
    }
}

void show_wait(const MessageCall *one, int record, ShownWait *shown)
{
    if (one->active == NULL)
        return;
    PyObject *entry = get_entry(record);
    PyObject *wait = entry == NULL ? NULL : PyTuple_Pack(3, entry, Py_False, Py_False);
    shown->thread = wait == NULL ? NULL : PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    if (shown->thread != NULL) {
        shown->outer = Py_XNewRef(PyDict_GetItemWithError(one->active, shown->thread));
        if (PyDict_SetItem(one->active, shown->thread, wait) < 0)
            Py_CLEAR(shown->thread);
    }
    PyErr_Clear();
    Py_XDECREF(entry);
    Py_XDECREF(wait);
}

void hide_wait(const MessageCall *one, ShownWait *shown)
{
    if (shown->thread != NULL && shown->outer != NULL)
        PyDict_SetItem(one->active, shown->thread, shown->outer);
    else if (shown->thread != NULL)
        PyDict_DelItem(one->active, shown->thread);
    PyErr_Clear();
    Py_XDECREF(shown->thread);
    Py_XDECREF(shown->outer);
}

/* Raise the exception for a call that has failed, whose end Python records. */
static void raise_failure(const MessageCall *one, int record, const Exchange *running)
{
    PyObject *entry = get_entry(record);
    PyObject *error = entry == NULL
                          ? NULL
                          : PyObject_CallFunction(one->conclude, "OiiiL", entry, running->error, running->source,
                                                  running->tag, (long long)running->nbytes);
    if (error != NULL)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    else
        end_record(record, read_clock(), RECORD_FAILED);
    Py_XDECREF(error);
    Py_XDECREF(entry);
}

long long accept_message(const MessageCall *one, PyObject *into, long long nbytes)
{
    PyObject *found = PyObject_CallFunction(one->accept, "OL", into, nbytes);
    const long long whole = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return whole;
}

/* The same for a message that has been received into the target. Returns -1 with an exception if that fails. */
static int accept_received(const MessageCall *one, Exchange *running)
{
    PyObject *target = PyMemoryView_FromMemory(running->target, (Py_ssize_t)running->target_bytes, PyBUF_WRITE);
    running->nbytes = target == NULL ? -1 : accept_message(one, target, running->nbytes);
    Py_XDECREF(target);
    return PyErr_Occurred() ? -1 : 0;
}

int advance_counter(PyObject *counter)
{
    PyObject *number = counter == NULL ? NULL : PyIter_Next(counter);
    Py_XDECREF(number);
    return number == NULL ? -1 : 0;
}

int count_message(PyObject *counters, int peer, int tag)
{
    PyObject *key = Py_BuildValue("(ii)", peer, tag);
    PyObject *counter = key == NULL ? NULL : PyObject_GetItem(counters, key);
    int status = advance_counter(counter);
    Py_XDECREF(key);
    Py_XDECREF(counter);
    return status;
}

int carry_out_messages(const MessageCall *one, PyObject *group, PyObject *call, PyObject *x, const Operands *operands)
{
    if (one->sends && advance_counter(one->sent) < 0)
        return -1;
    References own = {.group = Py_NewRef(group), .call = Py_NewRef(call), .thread = PyThread_get_thread_ident()}, old;
    const int record = begin_record(read_clock(), 0, &one->summary, &own, &old);
    Exchange running = {
        .target = operands->target, .target_bytes = operands->target_bytes, .source = -1, .tag = -1, .nbytes = -1};
    /* Always without the GIL: a thread in MPI may need it for a reduction in Python, while others can't enter MPI. */
    Py_BEGIN_ALLOW_THREADS
    start(one, &running, operands);
    for (int polls = 0; polls < POLLS && !has_ended(&running); polls++)
        advance(one, &running);
    Py_END_ALLOW_THREADS
    if (!has_ended(&running)) {
        ShownWait shown = {0};
        show_wait(one, record, &shown);
        Py_BEGIN_ALLOW_THREADS
        complete(one, &running);
        Py_END_ALLOW_THREADS
        hide_wait(one, &shown);
    }
    const bool arrived = one->receives && running.error == 0 && !running.lacks_memory;
    int status = arrived ? count_message(one->received, running.source, running.tag) : 0;
    if (running.whole != NULL && !running.receiving)
        free(running.whole);
    if (running.sending) /* MPI may still read it */
        Py_INCREF(x);
    if (status == 0 && arrived && running.nbytes < (int64_t)running.target_bytes && one->accept != NULL)
        status = accept_received(one, &running);
    if (status == 0 && (running.error != 0 || running.lacks_memory ||
                        (arrived && running.nbytes != (int64_t)running.target_bytes))) {
        raise_failure(one, record, &running);
        status = -1;
    } else {
        end_record(record, read_clock(), status < 0 ? RECORD_FAILED : RECORD_DONE);
    }
    /* Last, since this may run other code. */
    drop_references(&old);
    return status < 0 ? -1 : 1;
}

/* --- the Python type */

/* Set the parts of a message: None where there is none. */
static int read_message(PyObject *message, bool *exists, int *peer, int *tag, PyObject **counters)
{
    *exists = message != Py_None;
    if (!*exists)
        return 0;
    if (!PyArg_ParseTuple(message, "iiO", peer, tag, counters))
        return -1;
    Py_INCREF(*counters);
    return 0;
}

static int init_message_call(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    MessageCall *one = (MessageCall *)self;
    PyObject *sent, *received, *active, *conclude, *wrap, *accept;
    unsigned long long comm;
    if (!PyArg_ParseTuple(args, "KOOOOOO", &comm, &sent, &received, &active, &conclude, &wrap, &accept))
        return -1;
    if (one->conclude != NULL || mpi.isend == NULL || (sent != Py_None && !PyTuple_Check(sent)) ||
        (received != Py_None && !PyTuple_Check(received)) || (active != Py_None && !PyDict_Check(active)) ||
        (wrap != Py_None && (sent == Py_None) == (received == Py_None))) {
        PyErr_SetString(PyExc_ValueError, "MessageCall: invalid arguments, initialised twice, or before set_mpi");
        return -1;
    }
    one->comm = to_handle(comm);
    one->comm_number = comm;
    one->active = active == Py_None ? NULL : Py_NewRef(active);
    one->conclude = Py_NewRef(conclude);
    one->wrap = wrap == Py_None ? NULL : Py_NewRef(wrap);
    one->accept = accept == Py_None ? NULL : Py_NewRef(accept);
    return read_message(sent, &one->sends, &one->dest, &one->send_tag, &one->sent) < 0 ||
                   read_message(received, &one->receives, &one->source, &one->recv_tag, &one->received) < 0
               ? -1
               : 0;
}

bool is_message_call(PyObject *one)
{
    return PyType_GetSlot(Py_TYPE(one), Py_tp_init) == (void *)init_message_call;
}

static int traverse_message_call(PyObject *self, visitproc visit, void *arg)
{
    const MessageCall *one = (MessageCall *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(one->sent);
    Py_VISIT(one->received);
    Py_VISIT(one->active);
    Py_VISIT(one->conclude);
    Py_VISIT(one->wrap);
    Py_VISIT(one->accept);
    return 0;
}

static void dealloc_message_call(PyObject *self)
{
    MessageCall *one = (MessageCall *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(one->sent);
    Py_XDECREF(one->received);
    Py_XDECREF(one->active);
    Py_XDECREF(one->conclude);
    Py_XDECREF(one->wrap);
    Py_XDECREF(one->accept);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_doc, "MessageCall(comm, sent, received, active, conclude, wrap, accept)\n--\n\nMessages on the communicator"
                " with the handle `comm`, for Calls.add. `sent` is rank, tag and counter of one that is sent;"
                " `received` rank, tag and counters by rank and tag of one that is received; each is None where there"
                " is none. Waits that last are shown in the dict `active`, unless that is None. For a failure"
                " `conclude(entry, error, source, tag, nbytes)` records the end of the operation and returns the"
                " exception; `error` is MPI's, and 0 if the message has another size than the memory for it. If `wrap`"
                " is not None the call only starts its message, of which there is one, and returns `wrap(message)` of"
                " a PendingMessage. `accept(array, nbytes)`, if it is not None, is called when a message of another"
                " size than `array`, an array or its bytes, was received into it: it stores the message that this one"
                " stands for, and returns the bytes of that; else `nbytes`."},
    {Py_tp_init, init_message_call},
    {Py_tp_dealloc, dealloc_message_call},
    {Py_tp_traverse, traverse_message_call},
    {0, NULL},
};

PyType_Spec message_call_spec = {
    .name = "mpicoll._shm.MessageCall",
    .basicsize = sizeof(MessageCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
