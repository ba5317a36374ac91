/* Connections by TCP with ranks on other hosts, for the messages of schedules.
 *
 * MPI libraries move bytes over TCP only while a thread calls them, which has to look again and again, and announce
 * each large message before they send it. Here the thread sleeps until the kernel has something to do, and a message
 * leaves as soon as the other end has memory for it, which that end says beforehand: a credit for each receive.
 *
 * On a connection there are frames: a header, and the bytes of a message. A message is sent only if there is a credit,
 * so what arrives always has a place, and none has to wait behind another one. A frame for which there is no receive
 * belongs to a program that was abandoned, and is dropped.
 *
 * A connection is used by one thread at a time. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "connections.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"

enum {
    MESSAGE = 0x6d706331, /* kinds of frames */
    CREDIT = 0x6d706332,
    TAGS = 1 << 15,       /* of collectives; they are drawn in turn */
    MOST_AHEAD = 1024,    /* tags by which the other end may be ahead; the programs under way are few */
    MOST_EARLY = 64,      /* programs for which the other end has sent credits before they begin here */
    DROPPED_AT_A_TIME = 16384,
    MOST_AT_A_TIME = 2 << 20 /* bytes received before the caller may reduce them */
};

typedef struct {
    uint32_t kind;
    int32_t tag;
    uint64_t count; /* bytes that follow, or credits */
} Header;

/* Credits for a program that has not begun here. */
typedef struct {
    int tag;
    int64_t credits;
} Early;

struct Connection {
    PyObject_HEAD
    int fd;
    int error;
    int64_t error_at;
    Stream *streams;
    Early early[MOST_EARLY]; /* the oldest first */
    int early_count;
    /* What is being sent: a frame that has begun, and the messages after it. */
    Header out;
    size_t header_sent, body_sent;
    Transfer *body; /* of the frame, which is its first message; NULL: credits */
    bool sending;
    TransferQueue sends;
    /* What is being received: a header, or the bytes that follow it. */
    Header in;
    size_t header_read;
    uint64_t body_left;
    char *into; /* NULL: they are dropped */
    Transfer *arriving;
    Stream *arriving_on;
};

static void fail(Connection *connection, int error)
{
    if (connection->fd > 0)
        shutdown(connection->fd, SHUT_RDWR); /* so that the other end fails too */
    connection->error = error;
    connection->error_at = read_nanoseconds(CLOCK_MONOTONIC);
}

static Stream *find_stream(const Connection *connection, int tag)
{
    Stream *stream = connection->streams;
    while (stream != NULL && stream->tag != tag)
        stream = stream->next;
    return stream;
}

static void remove_early(Connection *connection, int at)
{
    connection->early_count--;
    Early *early = &connection->early[at];
    memmove(early, early + 1, (size_t)(connection->early_count - at) * sizeof *early);
}

static void add_early(Connection *connection, int tag, int64_t credits)
{
    for (int i = 0; i < connection->early_count; i++) {
        if (connection->early[i].tag == tag) {
            connection->early[i].credits += credits;
            return;
        }
    }
    if (connection->early_count == MOST_EARLY)
        remove_early(connection, 0);
    connection->early[connection->early_count++] = (Early){tag, credits};
}

void open_stream(Stream *stream, Connection *connection, int tag)
{
    *stream = (Stream){.connection = connection, .tag = tag, .is_open = true, .next = connection->streams};
    connection->streams = stream;
    for (int i = connection->early_count - 1; i >= 0; i--) {
        const int ahead = (connection->early[i].tag - tag) & (TAGS - 1);
        if (ahead == 0)
            stream->credits = connection->early[i].credits;
        /* Others than for the next programs belong to some that failed before they began here. */
        if (ahead == 0 || ahead > MOST_AHEAD)
            remove_early(connection, i);
    }
}

void close_stream(Stream *stream)
{
    if (!stream->is_open)
        return;
    stream->is_open = false;
    Connection *connection = stream->connection;
    if (connection->arriving_on == stream) {
        connection->into = NULL;
        connection->arriving = NULL;
        connection->arriving_on = NULL;
    }
    Stream **place = &connection->streams;
    while (*place != stream)
        place = &(*place)->next;
    *place = stream->next;
}

static void append(TransferQueue *queue, Transfer *transfer)
{
    transfer->done = false;
    transfer->next = NULL;
    if (queue->first == NULL)
        queue->first = transfer;
    else
        queue->last->next = transfer;
    queue->last = transfer;
}

bool post_send(Stream *stream, Transfer *transfer)
{
    if (stream->credits == 0)
        return false;
    stream->credits--;
    transfer->tag = stream->tag;
    append(&stream->connection->sends, transfer);
    return true;
}

void post_receive(Stream *stream, Transfer *transfer)
{
    append(&stream->recvs, transfer);
    stream->owed++;
}

/* --- what is sent */

static Stream *find_owing(const Connection *connection)
{
    Stream *stream = connection->streams;
    while (stream != NULL && stream->owed == 0)
        stream = stream->next;
    return stream;
}

/* Begin the next frame. Credits go first: messages of the other end wait for them. */
static bool begin_frame(Connection *connection)
{
    connection->header_sent = connection->body_sent = 0;
    Stream *stream = find_owing(connection);
    if (stream != NULL) {
        connection->out = (Header){CREDIT, stream->tag, (uint64_t)stream->owed};
        stream->owed = 0;
        connection->body = NULL;
        return true;
    }
    connection->body = connection->sends.first;
    if (connection->body == NULL)
        return false;
    connection->out = (Header){MESSAGE, connection->body->tag, connection->body->nbytes};
    return true;
}

static void end_frame(Connection *connection)
{
    connection->sending = false;
    if (connection->body != NULL) {
        connection->sends.first = connection->body->next;
        connection->body->done = true;
    }
}

static bool write_frames(Connection *connection)
{
    bool moved = false;
    while (connection->sending || (connection->sending = begin_frame(connection))) {
        struct iovec parts[2];
        size_t count = 0;
        const size_t header_left = sizeof connection->out - connection->header_sent;
        if (header_left > 0)
            parts[count++] = (struct iovec){(char *)&connection->out + connection->header_sent, header_left};
        const Transfer *body = connection->body;
        const size_t nbytes = body == NULL ? 0 : body->nbytes;
        if (body != NULL && connection->body_sent < nbytes)
            parts[count++] = (struct iovec){body->data + connection->body_sent, nbytes - connection->body_sent};
        const struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
        const ssize_t sent = sendmsg(connection->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
                fail(connection, errno);
            return moved;
        }
        moved = true;
        const size_t of_header = (size_t)sent < header_left ? (size_t)sent : header_left;
        connection->header_sent += of_header;
        connection->body_sent += (size_t)sent - of_header;
        if (connection->header_sent == sizeof connection->out && connection->body_sent == nbytes)
            end_frame(connection);
    }
    return moved;
}

/* --- what is received */

static void end_message(Connection *connection)
{
    if (connection->arriving != NULL)
        connection->arriving->done = true;
    connection->arriving = NULL;
    connection->arriving_on = NULL;
    connection->into = NULL;
}

static void take_header(Connection *connection)
{
    const Header header = connection->in;
    connection->header_read = 0;
    Stream *stream = find_stream(connection, header.tag);
    if (header.tag < 0 || header.tag >= TAGS || (header.kind != MESSAGE && header.kind != CREDIT)) {
        fail(connection, EPROTO);
    } else if (header.kind == CREDIT) {
        if (header.count > INT32_MAX)
            fail(connection, EPROTO);
        else if (stream != NULL)
            stream->credits += (int64_t)header.count;
        else
            add_early(connection, header.tag, (int64_t)header.count);
    } else {
        connection->body_left = header.count;
        Transfer *transfer = stream == NULL ? NULL : stream->recvs.first;
        if (transfer != NULL) {
            stream->recvs.first = transfer->next;
            transfer->arrived = header.count;
            connection->arriving = transfer;
            connection->arriving_on = stream;
            connection->into = header.count == transfer->nbytes ? transfer->data : NULL;
        }
        if (header.count == 0)
            end_message(connection);
    }
}

static bool read_frames(Connection *connection)
{
    size_t taken = 0;
    while (taken < MOST_AT_A_TIME && connection->error == 0) {
        ssize_t got;
        if (connection->body_left > 0 && connection->into == NULL) {
            char dropped[DROPPED_AT_A_TIME];
            const size_t most = connection->body_left < sizeof dropped ? (size_t)connection->body_left : sizeof dropped;
            got = recv(connection->fd, dropped, most, MSG_DONTWAIT);
        } else {
            /* The next header often has arrived too. */
            struct iovec parts[2];
            size_t count = 0;
            if (connection->body_left > 0)
                parts[count++] = (struct iovec){connection->into, (size_t)connection->body_left};
            parts[count++] = (struct iovec){(char *)&connection->in + connection->header_read,
                                            sizeof connection->in - connection->header_read};
            struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
            got = recvmsg(connection->fd, &message, MSG_DONTWAIT);
        }
        if (got == 0) {
            fail(connection, ECONNRESET);
            break;
        }
        if (got < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
                fail(connection, errno);
            break;
        }
        taken += (size_t)got;
        const size_t of_body = (uint64_t)got < connection->body_left ? (size_t)got : (size_t)connection->body_left;
        if (of_body > 0) {
            connection->body_left -= of_body;
            if (connection->into != NULL)
                connection->into += of_body;
            if (connection->body_left == 0)
                end_message(connection);
        }
        connection->header_read += (size_t)got - of_body;
        if (connection->header_read == sizeof connection->in)
            take_header(connection);
    }
    return taken > 0;
}

bool drive_connection(Connection *connection)
{
    if (connection->error != 0)
        return false;
    const bool received = read_frames(connection);
    const bool sent = connection->error == 0 && write_frames(connection);
    return received || sent;
}

int find_connection_error(const Connection *connection, int64_t now, int64_t *since)
{
    *since = now - connection->error_at;
    return connection->error;
}

int find_connection_events(const Connection *connection, short *events)
{
    *events = POLLIN;
    /* Also of a program that has posted more after the connection was driven. */
    if (connection->sending || connection->sends.first != NULL || find_owing(connection) != NULL)
        *events |= POLLOUT;
    return connection->error == 0 ? connection->fd : -1;
}

/* --- the Python type */

static PyTypeObject *connection_type;

void set_connection_type(PyTypeObject *type) { connection_type = (PyTypeObject *)Py_NewRef((PyObject *)type); }

Connection *as_connection(PyObject *object)
{
    return Py_TYPE(object) == connection_type ? (Connection *)object : NULL;
}

static int init_connection(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    Connection *connection = (Connection *)self;
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return -1;
    if (connection->fd > 0 || fd <= 0) {
        PyErr_SetString(PyExc_ValueError, "Connection: a descriptor above 0 is required, once");
        return -1;
    }
    connection->fd = fd;
    return 0;
}

static PyObject *close_connection(PyObject *self, PyObject *unused)
{
    (void)unused;
    Connection *connection = (Connection *)self;
    if (connection->fd > 0)
        close(connection->fd);
    connection->fd = -1;
    if (connection->error == 0)
        fail(connection, EBADF);
    Py_RETURN_NONE;
}

static void dealloc_connection(PyObject *self)
{
    Connection *connection = (Connection *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (connection->fd > 0)
        close(connection->fd);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef connection_methods[] = {
    {"close", close_connection, METH_NOARGS, "close()\n--\n\nClose the connection."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot connection_slots[] = {
    {Py_tp_doc,
     "Connection(fd)\n--\n\nA connection with a rank, for the messages of programs. It owns the socket `fd`."},
    {Py_tp_init, init_connection},
    {Py_tp_dealloc, dealloc_connection},
    {Py_tp_methods, connection_methods},
    {0, NULL},
};

PyType_Spec connection_spec = {
    .name = "mpicoll._shm.Connection",
    .basicsize = sizeof(Connection),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = connection_slots,
};
