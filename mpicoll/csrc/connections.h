/* Connections by TCP with ranks on other hosts, for the messages of schedules. */

#ifndef MPICOLL_CONNECTIONS_H
#define MPICOLL_CONNECTIONS_H

#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Connection Connection;

/* A message. The memory of one that has been sent, but is not done, is read until it is. */
typedef struct Transfer {
    char *data;
    size_t nbytes;
    uint64_t arrived; /* bytes of what was received, which may have another size */
    bool done;
    int tag;
    struct Transfer *next;
} Transfer;

/* Messages in order. */
typedef struct {
    Transfer *first, *last;
} TransferQueue;

/* The messages of a program over a connection, in order. */
typedef struct Stream {
    Connection *connection;
    int tag;
    int64_t credits; /* messages that the other end has memory for, and that have not been sent */
    int owed;        /* of those received, not announced to it */
    TransferQueue recvs;
    bool is_open;
    struct Stream *next;
} Stream;

/* Begin to use a connection. Both ends open the streams of a connection in one order, and each has one tag. */
void open_stream(Stream *stream, Connection *connection, int tag);

/* Stop to receive. What arrives for it later is dropped. */
void close_stream(Stream *stream);

/* Return false if the other end has no memory for it yet. */
bool post_send(Stream *stream, Transfer *transfer);

void post_receive(Stream *stream, Transfer *transfer);

/* Move what can be without waiting. Returns true if anything has moved. */
bool drive_connection(Connection *connection);

/* The error number of a connection that has failed, and the nanoseconds since then, or 0. */
int find_connection_error(const Connection *connection, int64_t now, int64_t *since);

/* The descriptor, and the events of poll(), for which a thread has to wait. Returns -1 if there are none. */
int find_connection_events(const Connection *connection, short *events);

/* Return the connection of an object, or NULL if it is something else. */
Connection *as_connection(PyObject *object);

extern PyType_Spec connection_spec;

void set_connection_type(PyTypeObject *type);

#endif
