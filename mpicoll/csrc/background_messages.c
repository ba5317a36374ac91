/* Messages over MPI that a thread of the extension moves, starts in turn and completes.
 *
 * MPI moves a large message only while a thread calls it. A thread of Python that does so competes with the program for
 * the GIL: it holds the program up when it has the GIL, the more so where it has lost its core meanwhile. The thread
 * here never takes the GIL. Between its looks it sleeps: a message of some hundred kilobytes takes milliseconds.
 *
 * Receives and plain sends are started by the caller. Sends in turn are started by the thread, few at a time to each
 * rank: MPI moves all that have been started side by side, so that all would arrive at the end, and none could be
 * answered while others arrive.
 *
 * A message consists of pieces that MPI sends without a handshake where its messages go through sockets: the handshakes
 * of large messages wait behind the data of the other direction, and a third of the bandwidth is lost. The last piece
 * is sent synchronously: without that a send would complete before it has left, and MPI would keep a copy of all.
 *
 * Of the pieces of a message that have not completed, only the last one is tested at each look: it is the last to be
 * matched, and one call of MPI makes progress on all. What is left of the others is tested once that has completed.
 *
 * A message has a state, which the thread sets last, and which is read without a lock. Lists that the thread and its
 * callers share are used under the mutex, which no thread holds while it calls MPI or Python.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "background_messages.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "clock.h"
#include "messages.h"
#include "mpi_library.h"

enum {
    IN_FLIGHT = 4,          /* sends in turn to one rank: their data and the answers to them are on their way */
    PIECE_BYTES = 60 << 10, /* with its header less than the 64 KiB that Open MPI sends at once by TCP */
    SHORTEST_NAP = 100000,  /* nanoseconds between two looks of the thread */
    LONGEST_NAP = 5000000,
    NAP_SHARE = 1000, /* of the time since something has happened */
    CANCEL_SECONDS = 10
};

typedef enum { PENDING, DONE, FAILED, CANCELLED } State;

typedef struct BackgroundMessage Message;

struct BackgroundMessage {
    PyObject_HEAD
    Py_buffer memory;
    PyObject *received; /* counters of the messages that have arrived; NULL: it is a send, or was counted */
    atomic_int state;
    int code; /* of MPI's error; 0: none */
    int lane, tag;
    bool sends, in_turn;
    atomic_bool cancelling; /* a caller waits for that */
    bool asked;             /* MPI to cancel it */
    bool cancelled;         /* some of it was */
    int left;               /* pieces from the first on that were started and whose completion has not been seen */
    int source, source_tag; /* of a message that has arrived */
    int64_t nbytes;
    Handle *requests; /* of the pieces */
    Message *next;
};

typedef struct {
    Message *first, *last;
} List;

/* Sends in turn to a rank. */
typedef struct {
    int peer;
    int in_flight;
    List waiting;
} Lane;

typedef struct {
    PyObject_HEAD
    HandleValue comm;
    PyObject *sent, *received; /* counters by rank and tag */
    pid_t process;             /* a child has neither the thread nor MPI */
    pthread_t thread;
    bool running, closed;
    pthread_mutex_t mutex;
    pthread_cond_t work, news;
    /* Under the mutex. */
    List added, ended;
    bool stopped, asleep, cancels;
    atomic_ullong completed; /* read without it, too */
    atomic_int left;
    /* Of the thread. */
    Lane *lanes;
    int lane_count;
    Message **active; /* whose pieces have been started, and have not all completed */
    char *requests;   /* of the last of these pieces of each, as MPI has them in arrays */
    int *indices;     /* of those that have completed */
    char *statuses;
    int active_count, capacity;
} Messages;

static PyTypeObject *message_type;

static uint64_t read_time(void) { return (uint64_t)read_nanoseconds(CLOCK_MONOTONIC); }

static struct timespec to_timespec(uint64_t nanoseconds)
{
    return (struct timespec){(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
}

static void append(List *list, Message *one)
{
    one->next = NULL;
    if (list->first == NULL)
        list->first = one;
    else
        list->last->next = one;
    list->last = one;
}

static Message *pop(List *list)
{
    Message *one = list->first;
    if (one != NULL)
        list->first = one->next;
    return one;
}

/* --- the thread */

/* Have the callers see the outcome of a message, whose other fields are set. */
static void settle(Messages *all, Message *one, State state)
{
    pthread_mutex_lock(&all->mutex);
    append(&all->ended, one);
    atomic_fetch_add(&all->completed, 1);
    atomic_fetch_sub(&all->left, 1);
    /* Last: a caller that sees it may read the others. */
    atomic_store_explicit(&one->state, state, memory_order_release);
    pthread_cond_broadcast(&all->news);
    pthread_mutex_unlock(&all->mutex);
}

/* Replace an array by a longer one. Returns false if memory is missing. */
static bool extend(void *array, size_t nbytes)
{
    void *old, *longer;
    memcpy(&old, array, sizeof old);
    longer = realloc(old, nbytes);
    if (longer != NULL)
        memcpy(array, &longer, sizeof longer);
    return longer != NULL;
}

static int count_pieces(const Message *one)
{
    return one->memory.len == 0 ? 1 : (int)((one->memory.len + PIECE_BYTES - 1) / PIECE_BYTES);
}

/* Make room for one more message. Returns false if memory is missing. */
static bool reserve(Messages *all)
{
    if (all->active_count < all->capacity)
        return true;
    const size_t capacity = 2 * (size_t)all->capacity + 64;
    if (!extend(&all->active, capacity * sizeof *all->active) || !extend(&all->requests, capacity * sizeof(Handle)) ||
        !extend(&all->indices, capacity * sizeof *all->indices) ||
        !extend(&all->statuses, capacity * sizeof(Status)))
        return false;
    all->capacity = (int)capacity;
    return true;
}

/* Have the last piece of a message that is left be the one at an index of the arrays. */
static void look_at_last(Messages *all, Message *one, int index)
{
    const size_t width = (size_t)mpi.handle_bytes;
    memcpy(all->requests + (size_t)index * width, &one->requests[one->left - 1], width);
    all->active[index] = one;
}

static void activate(Messages *all, Message *one) { look_at_last(all, one, all->active_count++); }

/* Start a piece of a message. Returns MPI's error code. */
static int start_piece(const Messages *all, const Message *one, int piece, Handle *request)
{
    const int peer = all->lanes[one->lane].peer, last = count_pieces(one) - 1;
    char *data = (char *)one->memory.buf + (size_t)piece * PIECE_BYTES;
    const int nbytes = piece < last ? PIECE_BYTES : (int)(one->memory.len - (Py_ssize_t)last * PIECE_BYTES);
    if (!one->sends)
        return mpi.irecv(data, nbytes, mpi.byte, peer, one->tag, all->comm, request);
    if (one->in_turn && piece == last)
        return mpi.issend(data, nbytes, mpi.byte, peer, one->tag, all->comm, request);
    return mpi.isend(data, nbytes, mpi.byte, peer, one->tag, all->comm, request);
}

/* Start the pieces of a message, up to one that fails. */
static void start_pieces(const Messages *all, Message *one)
{
    const int pieces = count_pieces(one);
    while (one->left < pieces && one->code == 0) {
        one->code = start_piece(all, one, one->left, &one->requests[one->left]);
        if (one->code == 0)
            one->left++;
    }
}

/* Take over what callers have added. The mutex is held. Returns false if there was nothing. */
static bool take_up(Messages *all)
{
    bool found = false;
    while (all->added.first != NULL && (all->added.first->in_turn || reserve(all))) {
        Message *one = pop(&all->added);
        if (one->in_turn)
            append(&all->lanes[one->lane].waiting, one);
        else
            activate(all, one);
        found = true;
    }
    return found;
}

static bool may_start(const Lane *lane) { return lane->waiting.first != NULL && lane->in_flight < IN_FLIGHT; }

static void end_message(Messages *all, Message *one)
{
    if (one->in_turn)
        all->lanes[one->lane].in_flight--;
    const bool whole = one->code == 0 && (one->sends || one->nbytes == one->memory.len);
    settle(all, one, one->cancelled ? CANCELLED : whole ? DONE : FAILED);
}

/* Start the sends whose turn it is. Returns false if there was none. */
static bool start_sends(Messages *all)
{
    bool found = false;
    for (Lane *lane = all->lanes; lane < all->lanes + all->lane_count; lane++) {
        while (may_start(lane) && reserve(all)) {
            Message *one = pop(&lane->waiting);
            lane->in_flight++;
            start_pieces(all, one);
            if (one->left > 0)
                activate(all, one);
            else
                end_message(all, one);
            found = true;
        }
    }
    return found;
}

/* Take note that the last piece of a message that is left has completed. */
static void end_piece(Message *one, int code, const Status *status)
{
    int64_t nbytes = 0;
    int cancelled = 0;
    if (code != 0)
        one->code = code;
    if (!one->sends && one->asked && (mpi.test_cancelled(status, &cancelled) != 0 || cancelled)) {
        one->cancelled = true;
    } else if (!one->sends) {
        memcpy(&one->source, status->bytes + mpi.source_offset, sizeof one->source);
        memcpy(&one->source_tag, status->bytes + mpi.tag_offset, sizeof one->source_tag);
        if (mpi.get_elements(status, mpi.byte, &nbytes) == 0)
            one->nbytes += nbytes;
    }
    one->left--;
}

/* End the pieces of a message that have completed, from the last one on. Returns true if none is left. */
static bool end_others(Message *one)
{
    while (one->left > 0) {
        Status status = {{0}};
        int completed = 0;
        const int code = mpi.test(&one->requests[one->left - 1], &completed, &status);
        if (code == 0 && !completed)
            return false;
        end_piece(one, code, &status);
    }
    return true;
}

/* End the messages that have completed, of which the last pieces at `count` indices have, for all of which MPI has
 * returned `code`. */
static void end_messages(Messages *all, int count, int code)
{
    const size_t width = (size_t)mpi.handle_bytes;
    for (int i = 0; i < count; i++) {
        const int index = all->indices[i];
        Message *one = all->active[index];
        Status status;
        memcpy(status.bytes, all->statuses + (size_t)i * (size_t)mpi.status_bytes, (size_t)mpi.status_bytes);
        int error = 0;
        if (code != 0) /* only then the field is set */
            memcpy(&error, status.bytes + mpi.error_offset, sizeof error);
        end_piece(one, error, &status);
        if (end_others(one)) {
            end_message(all, one);
            all->active[index] = NULL;
        } else {
            look_at_last(all, one, index);
        }
    }
    int left = 0;
    for (int i = 0; i < all->active_count; i++) {
        if (all->active[i] == NULL)
            continue;
        all->active[left] = all->active[i];
        memmove(all->requests + (size_t)left * width, all->requests + (size_t)i * width, width);
        left++;
    }
    all->active_count = left;
}

/* Make progress, and end the messages that have completed. Returns false if there was none. */
static bool complete_messages(Messages *all)
{
    bool found = false;
    while (all->active_count > 0) {
        int completed = 0;
        memset(all->statuses, 0, (size_t)all->active_count * (size_t)mpi.status_bytes);
        const int code = mpi.testsome(all->active_count, all->requests, &completed, all->indices, all->statuses);
        if (code != 0 && (completed <= 0 || completed > all->active_count)) {
            /* An error that MPI ascribes to none of them: it reports none of them any more. */
            for (int i = 0; i < all->active_count; i++) {
                all->active[i]->code = code;
                end_message(all, all->active[i]);
            }
            all->active_count = 0;
            return true;
        }
        if (completed <= 0 || completed > all->active_count) /* it is MPI_UNDEFINED where no request is active */
            break;
        end_messages(all, completed, code);
        found = true;
    }
    return found;
}

static void cancel_receives(Messages *all)
{
    for (int i = 0; i < all->active_count; i++) {
        Message *one = all->active[i];
        if (!atomic_exchange(&one->cancelling, false) || one->asked)
            continue;
        one->asked = true; /* MPI is asked once */
        for (int piece = 0; piece < one->left; piece++)
            mpi.cancel(&one->requests[piece]); /* it completes, in any case */
    }
}

/* Return the time of the next look, after one to no effect. 0: there is nothing to look for. */
static uint64_t find_next_look(const Messages *all, uint64_t last)
{
    const uint64_t now = read_time();
    uint64_t nap = (now - last) / NAP_SHARE;
    if (nap < SHORTEST_NAP)
        nap = SHORTEST_NAP;
    if (nap > LONGEST_NAP)
        nap = LONGEST_NAP;
    bool waiting = all->active_count > 0 || all->added.first != NULL;
    for (const Lane *lane = all->lanes; lane < all->lanes + all->lane_count; lane++) {
        waiting = waiting || lane->waiting.first != NULL;
    }
    return waiting ? now + nap : 0;
}

static void *run(void *argument)
{
    Messages *all = argument;
#ifdef __linux__
    prctl(PR_SET_NAME, "mpicoll-moving", 0, 0, 0);
#endif
    uint64_t last = read_time();
    pthread_mutex_lock(&all->mutex);
    while (!all->stopped) {
        bool found = take_up(all);
        const bool cancels = all->cancels;
        all->cancels = false;
        pthread_mutex_unlock(&all->mutex);
        if (cancels)
            cancel_receives(all);
        found = start_sends(all) || found;
        found = complete_messages(all) || found;
        if (found)
            last = read_time();
        pthread_mutex_lock(&all->mutex);
        if (found || all->cancels || all->stopped)
            continue;
        const uint64_t until = find_next_look(all, last);
        const struct timespec limit = to_timespec(until);
        all->asleep = until == 0 || until > read_time() + 2 * SHORTEST_NAP;
        if (until == 0)
            pthread_cond_wait(&all->work, &all->mutex);
        else
            pthread_cond_timedwait(&all->work, &all->mutex, &limit);
        all->asleep = false;
    }
    pthread_mutex_unlock(&all->mutex);
    return NULL;
}

/* Start the thread. Returns false if the system refuses that. */
static bool start_thread(Messages *all)
{
    if (all->running)
        return true;
    sigset_t signals, before;
    /* Signals are handled by the program's own threads, except for those of errors in the thread itself. */
    sigfillset(&signals);
    sigdelset(&signals, SIGSEGV);
    sigdelset(&signals, SIGBUS);
    sigdelset(&signals, SIGILL);
    sigdelset(&signals, SIGFPE);
    pthread_sigmask(SIG_SETMASK, &signals, &before);
    all->running = pthread_create(&all->thread, NULL, run, all) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return all->running;
}

static void stop_thread(Messages *all)
{
    all->closed = true;
    if (!all->running || all->process != getpid())
        return;
    all->running = false;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&all->mutex);
    all->stopped = true;
    pthread_cond_signal(&all->work);
    pthread_mutex_unlock(&all->mutex);
    pthread_join(all->thread, NULL);
    Py_END_ALLOW_THREADS
}

/* --- callers, with the GIL */

/* Drop the references of the thread to messages that have completed. */
static void release_ended(Messages *all)
{
    pthread_mutex_lock(&all->mutex);
    Message *one = all->ended.first;
    all->ended.first = NULL;
    pthread_mutex_unlock(&all->mutex);
    while (one != NULL) {
        Message *next = one->next;
        Py_DECREF((PyObject *)one);
        one = next;
    }
}

/* Return true if messages can be added, or false with an exception. */
static bool can_add(Messages *all)
{
    if (all->process == getpid() && !all->closed && start_thread(all))
        return true;
    PyErr_SetString(PyExc_RuntimeError, "BackgroundMessages: no thread moves the messages");
    return false;
}

static Message *make_message(Messages *all, PyObject *array, int lane, int tag, bool sends, bool in_turn)
{
    if (lane < 0 || lane >= all->lane_count) {
        PyErr_SetString(PyExc_ValueError, "BackgroundMessages: no such lane");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(message_type, Py_tp_alloc);
    Message *one = (Message *)allocate(message_type, 0);
    if (one == NULL)
        return NULL;
    one->lane = lane;
    one->tag = tag;
    one->sends = sends;
    one->in_turn = in_turn;
    one->source = one->source_tag = -1;
    const int status = PyObject_GetBuffer(array, &one->memory, sends ? PyBUF_SIMPLE : PyBUF_WRITABLE);
    if (status == 0 && one->memory.len > INT_MAX)
        PyErr_SetString(PyExc_ValueError, "BackgroundMessages: the message is too large");
    if (status < 0 || one->memory.len > INT_MAX) {
        Py_DECREF((PyObject *)one);
        return NULL;
    }
    one->requests = calloc((size_t)count_pieces(one), sizeof *one->requests);
    if (one->requests == NULL) {
        Py_DECREF((PyObject *)one);
        return (Message *)PyErr_NoMemory();
    }
    return one;
}

/* Start a message, or have the thread do so, which looks after it then. Returns it. */
static PyObject *hand_over(Messages *all, Message *one)
{
    if (!one->in_turn) {
        Py_BEGIN_ALLOW_THREADS
        start_pieces(all, one);
        Py_END_ALLOW_THREADS
    }
    if (!one->in_turn && one->left == 0) {
        one->state = FAILED;
        return (PyObject *)one;
    }
    Py_INCREF((PyObject *)one);
    pthread_mutex_lock(&all->mutex);
    append(&all->added, one);
    atomic_fetch_add(&all->left, 1);
    /* What has been started already needs no look at once. */
    if (one->in_turn || all->asleep)
        pthread_cond_signal(&all->work);
    pthread_mutex_unlock(&all->mutex);
    release_ended(all);
    return (PyObject *)one;
}

static PyObject *send_message(PyObject *self, PyObject *args)
{
    Messages *all = (Messages *)self;
    PyObject *array;
    int lane, tag, in_turn;
    if (!PyArg_ParseTuple(args, "iOip", &lane, &array, &tag, &in_turn) || !can_add(all))
        return NULL;
    Message *one = make_message(all, array, lane, tag, true, in_turn != 0);
    if (one == NULL)
        return NULL;
    if (count_message(all->sent, all->lanes[lane].peer, tag) < 0) {
        Py_DECREF((PyObject *)one);
        return NULL;
    }
    return hand_over(all, one);
}

static PyObject *receive_message(PyObject *self, PyObject *args)
{
    Messages *all = (Messages *)self;
    PyObject *array;
    int lane, tag;
    if (!PyArg_ParseTuple(args, "iOi", &lane, &array, &tag) || !can_add(all))
        return NULL;
    Message *one = make_message(all, array, lane, tag, false, false);
    if (one == NULL)
        return NULL;
    one->received = Py_NewRef(all->received);
    return hand_over(all, one);
}

static PyObject *wait_for_completion(PyObject *self, PyObject *args)
{
    Messages *all = (Messages *)self;
    unsigned long long seen, completed = 0;
    double seconds;
    if (!PyArg_ParseTuple(args, "Kd", &seen, &seconds))
        return NULL;
    if (all->process == getpid()) {
        Py_BEGIN_ALLOW_THREADS
        const struct timespec limit = to_timespec(read_time() + (uint64_t)(1e9 * (seconds > 0 ? seconds : 0)));
        int status = 0;
        pthread_mutex_lock(&all->mutex);
        while ((completed = atomic_load(&all->completed)) == seen && status == 0)
            status = pthread_cond_timedwait(&all->news, &all->mutex, &limit);
        pthread_mutex_unlock(&all->mutex);
        Py_END_ALLOW_THREADS
        release_ended(all);
    }
    return PyLong_FromUnsignedLongLong(completed);
}

static PyObject *cancel_receive(PyObject *self, PyObject *message)
{
    Messages *all = (Messages *)self;
    if (Py_TYPE(message) != message_type || ((Message *)message)->sends) {
        PyErr_SetString(PyExc_TypeError, "BackgroundMessages: only a receive can be cancelled");
        return NULL;
    }
    Message *one = (Message *)message;
    bool ended = atomic_load_explicit(&one->state, memory_order_acquire) != PENDING;
    if (!ended && all->running && all->process == getpid()) {
        Py_BEGIN_ALLOW_THREADS
        const struct timespec limit = to_timespec(read_time() + CANCEL_SECONDS * UINT64_C(1000000000));
        int status = 0;
        pthread_mutex_lock(&all->mutex);
        one->cancelling = all->cancels = true;
        pthread_cond_signal(&all->work);
        while (!(ended = one->state != PENDING) && status == 0)
            status = pthread_cond_timedwait(&all->news, &all->mutex, &limit);
        pthread_mutex_unlock(&all->mutex);
        Py_END_ALLOW_THREADS
        release_ended(all);
    }
    return PyBool_FromLong(ended);
}

static PyObject *stop_messages(PyObject *self, PyObject *unused)
{
    (void)unused;
    stop_thread((Messages *)self);
    Py_RETURN_NONE;
}

static PyObject *get_completed(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(atomic_load(&((Messages *)self)->completed));
}

static PyObject *get_left(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(atomic_load(&((Messages *)self)->left));
}

static PyObject *test_message(PyObject *self, PyObject *unused)
{
    (void)unused;
    Message *one = (Message *)self;
    const int state = atomic_load_explicit(&one->state, memory_order_acquire);
    if (state == PENDING)
        Py_RETURN_NONE;
    if (one->received != NULL) {
        PyObject *received = one->received;
        one->received = NULL;
        const int status =
            state == CANCELLED || one->code != 0 ? 0 : count_message(received, one->source, one->source_tag);
        Py_DECREF(received);
        if (status < 0)
            return NULL;
    }
    return Py_BuildValue("(iOiiL)", one->code, state == CANCELLED ? Py_True : Py_False, one->source, one->source_tag,
                         (long long)(one->cancelled ? -1 : one->nbytes));
}

/* --- the Python types */

static void dealloc_message(PyObject *self)
{
    Message *one = (Message *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyBuffer_Release(&one->memory);
    free(one->requests);
    Py_XDECREF(one->received);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static int init_messages(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    Messages *all = (Messages *)self;
    unsigned long long comm;
    PyObject *peers, *sent, *received;
    if (!PyArg_ParseTuple(args, "KO!OO", &comm, &PyTuple_Type, &peers, &sent, &received))
        return -1;
    if (all->lanes != NULL || mpi.testsome == NULL) {
        PyErr_SetString(PyExc_ValueError, "BackgroundMessages: initialised twice, or before set_mpi");
        return -1;
    }
    const Py_ssize_t count = PyTuple_Size(peers);
    all->lanes = calloc((size_t)count + 1, sizeof *all->lanes);
    if (all->lanes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        all->lanes[i].peer = (int)PyLong_AsLong(PyTuple_GetItem(peers, i));
    if (PyErr_Occurred())
        return -1;
    all->lane_count = (int)count;
    all->comm = to_handle(comm);
    all->process = getpid();
    all->sent = Py_NewRef(sent);
    all->received = Py_NewRef(received);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&all->mutex, NULL);
    pthread_cond_init(&all->work, &attributes);
    pthread_cond_init(&all->news, &attributes);
    pthread_condattr_destroy(&attributes);
    return 0;
}

static void dealloc_messages(PyObject *self)
{
    Messages *all = (Messages *)self;
    PyTypeObject *type = Py_TYPE(self);
    stop_thread(all);
    /* What MPI still moves keeps its reference, and its memory. */
    if (all->process == getpid() && all->lanes != NULL)
        release_ended(all);
    free(all->lanes);
    free(all->active);
    free(all->requests);
    free(all->indices);
    free(all->statuses);
    Py_XDECREF(all->sent);
    Py_XDECREF(all->received);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef message_methods[] = {
    {"test", test_message, METH_NOARGS,
     "test()\n--\n\nReturn None while the message is pending; then the error code of MPI, whether the message was"
     " cancelled, and source, tag and size of a message that was received."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot message_slots[] = {
    {Py_tp_doc, "Message of BackgroundMessages, whose memory it keeps."},
    {Py_tp_dealloc, dealloc_message},
    {Py_tp_methods, message_methods},
    {0, NULL},
};

PyType_Spec background_message_spec = {
    .name = "mpicoll._shm.BackgroundMessage",
    .basicsize = sizeof(Message),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = message_slots,
};

void set_background_message_type(PyTypeObject *type) { message_type = (PyTypeObject *)Py_NewRef((PyObject *)type); }

static PyMethodDef messages_methods[] = {
    {"send", send_message, METH_VARARGS,
     "send(lane, array, tag, in_turn)\n--\n\nSend the bytes of `array`, which must not be changed until the"
     " BackgroundMessage that is returned has completed: now, or after earlier sends `in_turn` to the same rank."},
    {"recv", receive_message, METH_VARARGS,
     "recv(lane, array, tag)\n--\n\nStart to receive a message into `array`. Return a BackgroundMessage."},
    {"wait", wait_for_completion, METH_VARARGS,
     "wait(seen, seconds)\n--\n\nWait until the number of messages that have completed is not `seen`, for at most"
     " `seconds`. Return the number."},
    {"cancel", cancel_receive, METH_O,
     "cancel(message)\n--\n\nCancel a receive, unless its message has been matched. Return True if it has completed,"
     " False if MPI has not done so in ten seconds."},
    {"stop", stop_messages, METH_NOARGS,
     "stop()\n--\n\nEnd the thread. Messages that have not completed do not complete any more."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef messages_attributes[] = {
    {"completed", get_completed, NULL, "Number of messages that have completed, or have failed.", NULL},
    {"left", get_left, NULL, "Number of messages that have not completed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot messages_slots[] = {
    {Py_tp_doc, "BackgroundMessages(comm, peers, sent, received)\n--\n\nMessages on the communicator with the handle"
                " `comm`, to and from the ranks `peers`, of which a lane is the index, that a thread moves which never"
                " takes the GIL. `sent` and `received` count messages by rank and tag."},
    {Py_tp_init, init_messages},
    {Py_tp_dealloc, dealloc_messages},
    {Py_tp_methods, messages_methods},
    {Py_tp_getset, messages_attributes},
    {0, NULL},
};

PyType_Spec background_messages_spec = {
    .name = "mpicoll._shm.BackgroundMessages",
    .basicsize = sizeof(Messages),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = messages_slots,
};
