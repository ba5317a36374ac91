/* Values between pipeline stages that are like the previous one of their line.
 *
 * A line delivers values from one stage to another in order. A tensor that has the dtype and the shape of that in the
 * previous value is one message. The receiver acknowledges the first message of a value by an empty one, if the sender
 * waits for that. Both are sent and received here as long as no other message of the stage comes first, and no longer
 * than a peer that is in time takes. What is left then goes on in Python: nothing is taken here that Python would not
 * have taken.
 */

#define PY_SSIZE_T_CLEAN
#include "line_messages.h"

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

#include "arrays.h"
#include "messages.h"
#include "mpi_library.h"

enum {
    NUMBERS = 4,      /* sequence numbers of the messages of a line */
    /* For a message, some 200 us. The peer, which takes its value from Python, needs more time than one in C; and to go
     * on in Python takes as long. */
    LOOKS = 16 * POLLS
};

typedef struct {
    PyObject_HEAD
    HandleValue comm;
    int any_tag;
    int peer, acknowledgement_tag; /* -1: what arrives here is a later message of a value that has been acknowledged */
    int sync_tags[NUMBERS], plain_tags[NUMBERS]; /* of values that are acknowledged, and of others */
    PyObject *sent, *received;                   /* counters of messages, by peer and tag */
    PyObject *make_error;                        /* returns the exception for an error code of MPI */
    PyObject *adopt;                             /* returns the object of Python for a request that is left */
    uintptr_t dtype;                             /* of the values, as in Memory; 0: others are not found here */
    int ndim;
    Py_ssize_t shape[DIMENSIONS];
    size_t nbytes;
} LineEnd;

static PyTypeObject *line_end_type;

/* --- one exchange */

typedef enum { NO_MESSAGE, VALUE, ACKNOWLEDGEMENT, ANOTHER } Found;

typedef struct {
    const LineEnd *out, *in; /* NULL: nothing is sent, or received */
    Memory source, target;
    int out_number, in_number;
    Handle send, recv, answer;
    bool sending, acknowledged;           /* of the value that is sent */
    bool expecting, receiving, answering; /* of the other one */
    int tag;                              /* of the value that is received; -1: none */
    int code;                             /* of MPI's error; 0: none */
} Exchange;

/* Look for a message of a stage, and say what it is. */
static Found look(Exchange *running, const LineEnd *end)
{
    int flag = 0, tag;
    int64_t nbytes = -1;
    Status status;
    running->code = mpi.iprobe(end->peer, end->any_tag, end->comm, &flag, &status);
    if (running->code != 0 || !flag)
        return NO_MESSAGE;
    memcpy(&tag, status.bytes + mpi.tag_offset, sizeof tag);
    running->code = mpi.get_elements(&status, mpi.byte, &nbytes);
    const LineEnd *in = running->in, *out = running->out;
    if (running->expecting && in->peer == end->peer && nbytes == (int64_t)in->nbytes &&
        (tag == in->sync_tags[running->in_number] || tag == in->plain_tags[running->in_number])) {
        running->tag = tag;
        return VALUE;
    }
    if (out != NULL && !running->acknowledged && out->peer == end->peer && nbytes == 0 &&
        tag == out->acknowledgement_tag)
        return ACKNOWLEDGEMENT;
    return ANOTHER;
}

static bool has_ended(const Exchange *running)
{
    return (running->out == NULL || (running->acknowledged && !running->sending)) && !running->expecting &&
           !running->receiving && !running->answering;
}

static void test(Exchange *running, Handle *request, bool *pending)
{
    if (!*pending || running->code != 0)
        return;
    int flag = 0;
    Status status;
    running->code = mpi.test(request, &flag, &status);
    *pending = !flag;
}

/* Poll until a message is found, all has ended, or the time is over, which `looks` counts. */
static Found poll_messages(Exchange *running, int *looks)
{
    while (running->code == 0 && *looks > 0 && !has_ended(running)) {
        if (--*looks % POLLS == 0)
            sched_yield(); /* the peer may need this core */
        test(running, &running->send, &running->sending);
        test(running, &running->recv, &running->receiving);
        test(running, &running->answer, &running->answering);
        if (running->code != 0)
            break;
        Found found = running->expecting ? look(running, running->in) : NO_MESSAGE;
        if (found == NO_MESSAGE && running->code == 0 && running->out != NULL && !running->acknowledged &&
            !(running->expecting && running->in->peer == running->out->peer))
            found = look(running, running->out);
        if (found != NO_MESSAGE)
            return found;
    }
    return NO_MESSAGE;
}

static bool is_answered(const Exchange *running)
{
    return running->in->acknowledgement_tag >= 0 && running->tag == running->in->sync_tags[running->in_number];
}

/* Receive what was found, and answer a value. */
static void take(Exchange *running, Found found)
{
    if (found == ACKNOWLEDGEMENT) {
        Handle request;
        Status status;
        const LineEnd *out = running->out;
        /* It is empty and has arrived, so that this does not wait for the peer. */
        running->code =
            mpi.irecv(NULL, 0, mpi.byte, out->peer, out->acknowledgement_tag, out->comm, &request);
        if (running->code == 0)
            running->code = mpi.wait(&request, &status);
        running->acknowledged = running->code == 0;
        return;
    }
    const LineEnd *in = running->in;
    running->code = mpi.irecv(
        running->target.data, (int)in->nbytes, mpi.byte, in->peer, running->tag, in->comm, &running->recv);
    running->receiving = running->code == 0;
    running->expecting = false;
    if (running->code == 0 && is_answered(running)) {
        running->code =
            mpi.isend(NULL, 0, mpi.byte, in->peer, in->acknowledgement_tag, in->comm, &running->answer);
        running->answering = running->code == 0;
    }
}

static void start(Exchange *running)
{
    const LineEnd *out = running->out;
    running->code = mpi.isend(running->source.data, (int)out->nbytes, mpi.byte, out->peer,
                              out->sync_tags[running->out_number], out->comm, &running->send);
    running->sending = running->code == 0;
}

/* Send and receive. Returns -1 with an exception that is not of MPI. */
static int exchange(Exchange *running)
{
    const LineEnd *in = running->in, *out = running->out;
    if (out != NULL && count_message(out->sent, out->peer, out->sync_tags[running->out_number]) < 0)
        return -1;
    int looks = LOOKS;
    Found found;
    /* Always without the GIL: a thread in MPI may need it for a reduction in Python, while others can't enter MPI. */
    Py_BEGIN_ALLOW_THREADS
    if (out != NULL)
        start(running);
    found = poll_messages(running, &looks);
    Py_END_ALLOW_THREADS
    while (found == VALUE || found == ACKNOWLEDGEMENT) {
        if (found == VALUE && is_answered(running) && count_message(in->sent, in->peer, in->acknowledgement_tag) < 0)
            return -1;
        Py_BEGIN_ALLOW_THREADS
        take(running, found);
        if (found == VALUE)
            looks = LOOKS;
        Py_END_ALLOW_THREADS
        if (found == ACKNOWLEDGEMENT && running->acknowledged &&
            count_message(out->received, out->peer, out->acknowledgement_tag) < 0)
            return -1;
        Py_BEGIN_ALLOW_THREADS
        found = poll_messages(running, &looks);
        Py_END_ALLOW_THREADS
    }
    const bool arrived = in != NULL && !running->expecting && !running->receiving && running->code == 0;
    return arrived ? count_message(in->received, in->peer, running->tag) : 0;
}

/* --- the function of the module */

/* Return the handle of a request, or None. */
static PyObject *get_handle(bool pending, const Handle *request)
{
    if (!pending)
        return Py_NewRef(Py_None);
    return PyLong_FromUnsignedLongLong(mpi.handle_bytes == (int)sizeof(int) ? (unsigned int)request->number
                                                                            : (uintptr_t)request->pointer);
}

/* Raise the exception for an error of MPI. Returns NULL. */
static PyObject *raise_code(const LineEnd *end, int code)
{
    PyObject *error = PyObject_CallFunction(end->make_error, "i", code);
    if (error != NULL)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    return NULL;
}

/* Read one end of an exchange. Returns false without an exception if the array is not like the values of the line. */
static bool read_end(PyObject *const *args, bool writable, const LineEnd **end, Memory *memory, int *number)
{
    const LineEnd *one = (const LineEnd *)(const void *)args[0];
    const long value = PyLong_AsLong(args[2]);
    if (PyErr_Occurred())
        return false;
    if (Py_TYPE(args[0]) != line_end_type || value < 0 || value >= NUMBERS) {
        PyErr_SetString(PyExc_ValueError, "pass_values: a LineEnd, an array and a number below 4 are needed");
        return false;
    }
    *end = one;
    *number = (int)value;
    return one->dtype != 0 && find_memory(args[1], writable, memory) && memory->dtype == one->dtype &&
           memory->ndim == one->ndim &&
           (one->ndim == 0 || memcmp(memory->shape, one->shape, (size_t)one->ndim * sizeof *one->shape) == 0);
}

const char pass_values_doc[] =
    "pass_values(out, x, out_number, in_, into, in_number)\n--\n\nSend `x` at the end `out` of a line, and receive"
    " into `into` at the end `in_` of another one, as the messages of these numbers; either end may be None. Return"
    " True when both values have been passed, and acknowledged. Return None if nothing was sent or received: because"
    " an array is not like the previous values, or because nothing but a value was expected, and none or another"
    " message has arrived in some 200 us. Else return what is left to do, as a tuple: the handle of the request of the"
    " send, or None; whether it was acknowledged; the tag of the value that is received, -1 if there is none yet; the"
    " handle of its request, or None; and that of the acknowledgement that is sent, or None.";

PyObject *pass_values(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 6) {
        PyErr_SetString(PyExc_TypeError, "pass_values: six arguments are needed");
        return NULL;
    }
    Exchange running = {.tag = -1};
    if ((args[0] != Py_None && !read_end(args, false, &running.out, &running.source, &running.out_number)) ||
        (args[3] != Py_None && !read_end(args + 3, true, &running.in, &running.target, &running.in_number)))
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    running.expecting = running.in != NULL;
    const int status = exchange(&running);
    if (status < 0 || running.code != 0) {
        /* MPI may still use the memory. */
        if (running.sending)
            Py_INCREF(args[1]);
        if (running.receiving)
            Py_INCREF(args[4]);
        return status < 0 ? NULL : raise_code(running.out != NULL ? running.out : running.in, running.code);
    }
    if (has_ended(&running))
        Py_RETURN_TRUE;
    if (running.out == NULL && running.expecting)
        Py_RETURN_NONE;
    return Py_BuildValue("NNiNN", get_handle(running.sending, &running.send), PyBool_FromLong(running.acknowledged),
                         running.expecting ? -1 : running.tag, get_handle(running.receiving, &running.recv),
                         get_handle(running.answering, &running.answer));
}

const char send_value_doc[] =
    "send_value(out, x, number)\n--\n\nStart to send `x` at the end `out` of a line, as the message of this number,"
    " which is not acknowledged. Return True if `x` may be changed already, else the handle of the request; None if"
    " nothing was sent, because `x` is not like the previous values.";

PyObject *send_value(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    const LineEnd *out = NULL;
    Memory source;
    int number, flag = 0, code;
    Handle request;
    Status status;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "send_value: three arguments are needed");
        return NULL;
    }
    if (!read_end(args, false, &out, &source, &number))
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    if (count_message(out->sent, out->peer, out->plain_tags[number]) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    code = mpi.isend(source.data, (int)out->nbytes, mpi.byte, out->peer, out->plain_tags[number], out->comm, &request);
    if (code == 0)
        code = mpi.test(&request, &flag, &status);
    Py_END_ALLOW_THREADS
    return code != 0 ? raise_code(out, code) : flag ? Py_NewRef(Py_True) : get_handle(true, &request);
}

/* --- the Python type */

static int read_tags(PyObject *tags, int *to)
{
    for (Py_ssize_t i = 0; i < NUMBERS; i++) {
        PyObject *tag = PyTuple_GetItem(tags, i);
        to[i] = tag == NULL ? -1 : (int)PyLong_AsLong(tag);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int init_line_end(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    LineEnd *one = (LineEnd *)self;
    PyObject *like, *sync_tags, *plain_tags, *sent, *received, *make_error, *adopt;
    unsigned long long comm;
    Memory memory;
    Py_ssize_t nbytes;
    int peer, any_tag, acknowledgement_tag;
    if (!PyArg_ParseTuple(args, "KiiOnO!O!iOOOO", &comm, &any_tag, &peer, &like, &nbytes, &PyTuple_Type, &sync_tags,
                          &PyTuple_Type, &plain_tags, &acknowledgement_tag, &sent, &received, &make_error, &adopt))
        return -1;
    if (one->make_error != NULL || mpi.isend == NULL || nbytes < 0 || nbytes > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "LineEnd: invalid arguments, initialised twice, or before set_mpi");
        return -1;
    }
    if (read_tags(sync_tags, one->sync_tags) < 0 || read_tags(plain_tags, one->plain_tags) < 0)
        return -1;
    one->comm = to_handle(comm);
    one->any_tag = any_tag;
    one->peer = peer;
    one->acknowledgement_tag = acknowledgement_tag;
    if (find_memory(like, false, &memory)) {
        one->dtype = memory.dtype;
        one->ndim = memory.ndim;
        if (memory.ndim > 0)
            memcpy(one->shape, memory.shape, (size_t)memory.ndim * sizeof *one->shape);
    }
    one->nbytes = (size_t)nbytes;
    one->sent = Py_NewRef(sent);
    one->received = Py_NewRef(received);
    one->make_error = Py_NewRef(make_error);
    one->adopt = Py_NewRef(adopt);
    return 0;
}

static int traverse_line_end(PyObject *self, visitproc visit, void *arg)
{
    const LineEnd *one = (LineEnd *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(one->sent);
    Py_VISIT(one->received);
    Py_VISIT(one->make_error);
    Py_VISIT(one->adopt);
    return 0;
}

static void dealloc_line_end(PyObject *self)
{
    LineEnd *one = (LineEnd *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(one->sent);
    Py_XDECREF(one->received);
    Py_XDECREF(one->make_error);
    Py_XDECREF(one->adopt);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"adopt", T_OBJECT, offsetof(LineEnd, adopt), READONLY,
     "Returns the object of Python for a request that is left."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "LineEnd(comm, any_tag, peer, like, nbytes, sync_tags, plain_tags, acknowledgement_tag, sent,"
                " received, make_error, adopt)\n--\n\nAn end of a line to or from the rank `peer` of the"
                " communicator with the handle `comm`, for values like the tensor `like`, of `nbytes`. By"
                " sequence number, `sync_tags` are the tags of values that are acknowledged, `plain_tags` those"
                " of others; `acknowledgement_tag` is -1 for all messages of a value but the first one. `sent` and"
                " `received` have counters of messages by peer and tag."
                " ``make_error(code)`` returns the exception for an error of MPI. ``adopt(handle, data,"
                " received)`` returns the object of Python for a request that is left: of `data` that is sent or,"
                " with source and tag, `received`."},
    {Py_tp_init, init_line_end},
    {Py_tp_dealloc, dealloc_line_end},
    {Py_tp_traverse, traverse_line_end},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec line_end_spec = {
    .name = "mpicoll._shm.LineEnd",
    .basicsize = sizeof(LineEnd),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

void set_line_end_type(PyTypeObject *type) { line_end_type = (PyTypeObject *)Py_NewRef((PyObject *)type); }
