/* Schedules with large messages over MPI, in pieces, as mpicoll/engine/executors/streamed.py carries them out.
 *
 * MPI moves a large message only while a thread calls it. A thread of Python that does so competes with the program for
 * the GIL, and takes several times as long: this one has the GIL at the beginning and at the end only, so that pieces
 * are posted, completed and reduced while the program computes in Python.
 *
 * What is to be done comes as a plan, numbers of 64 bits that don't depend on the memory: for each step the steps that
 * must have ended before it, and its parts, a message each, with the memory that they are sent from or received into,
 * as regions and bytes in these, and the region that operands are read from: it is that of the caller's input until a
 * step has written there. The messages are those of the Python executor: a rank of a job may use either where
 * MPI moves all of them. Some go over connections of their own instead, see connections.c. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "streamed_program.h"

#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "clock.h"
#include "connections.h"
#include "copies.h"
#include "kernels.h"
#include "mpi_library.h"

enum {
    SPINS = 20,              /* looks without a pause before the thread yields its core, where it may not sleep */
    YIELDS = 1000,           /* of the core before the thread sleeps between its looks */
    YIELD_TIME = 2000000,    /* nanoseconds after which it does so in any case */
    SHORTEST_NAP = 50000,    /* nanoseconds between two looks of a thread that sleeps */
    LONGEST_NAP = 1000000,
    WAIT_SHARE = 1000,       /* of the wait so far */
    MOST_PROGRAMS = 64,
    MOST_POLLED = 256        /* connections that a thread waits for; with more, it sleeps between its looks */
};

/* Nanoseconds after which a program fails because of a connection that has failed. The reason usually is the death of
 * the other rank, and is reported before. */
static const int64_t LOSS_TIME = 5000000000;

/* Numbers that a plan has for each thing. */
enum { HEAD_NUMBERS = 3, STEP_NUMBERS = 3, PART_NUMBERS = 5, RUN_NUMBERS = 4, LOCAL_NUMBERS = 2 + 2 * RUN_NUMBERS };

/* A copy of `left`, or a combination of both, which are in the order of ranks. */
typedef struct {
    char *to;
    const char *left, *right; /* NULL: a copy */
    size_t nbytes;
} Action;

typedef struct {
    Transfer transfer;
    int peer, step;
    int lane;    /* of a send, or on a connection; -1 */
    bool posted; /* with MPI, and has not completed */
    Handle request;
} Message;

/* Indices of what a step has. Those of one kind lie one after another. */
typedef struct {
    int64_t needs;
    int first_before, end_before, first_after, end_after, first_recv, end_recv, first_send, end_send;
    int unsent, received;
} Step;

/* The sends to a rank by MPI, or over a connection, in order, which are posted when there is room. */
typedef struct {
    int peer;
    Connection *connection; /* NULL: MPI */
    Stream stream;
    int *sends;
    int count, waiting, posted, done; /* of all; of those whose steps have begun */
} Lane;

typedef struct {
    PyObject_HEAD
    HandleValue comm;
    PyObject *connections; /* a tuple: ranks and connections, by turns */
    int tag;
    ReduceKernel kernel;
    size_t itemsize;
    char *incoming; /* memory for what is received to be reduced */
    size_t incoming_bytes;
    int first_sends;   /* posted to a rank at a time first */
    size_t most_bytes; /* of these later */
    double nap_share;  /* of the time of a step: between two looks */
    Action *first; /* copies before all steps */
    Action *before, *after;
    Message *recvs, *sends;
    Step *steps;
    Lane *lanes;
    char **packed; /* memory for messages that lie in several places */
    int first_count, before_count, after_count, recv_count, send_count, step_count, lane_count, packed_count;
    int at, begun;  /* steps that have ended, and begun */
    int mpi_posted; /* messages that MPI has, and that have not completed */
    int64_t begin;
    bool running, broken;
    /* Of a failure: MPI's error code or 0, the rank, the bytes expected, and those that have arrived. */
    int code, peer, expected;
    int64_t arrived;
} Program;

/* --- the plan */

/* The numbers that are left of a plan, and where the regions begin. */
typedef struct {
    const int64_t *next, *end;
    char *const *regions;
    const size_t *region_bytes;
    int64_t region_count;
} Plan;

/* Append an element to an array whose room doubles. Returns it, zeroed; NULL if memory is missing. */
static void *append(void *array, int *count, size_t width)
{
    void *old, *longer;
    memcpy(&old, array, sizeof old);
    const size_t used = (size_t)*count;
    if ((used & (used - 1)) == 0) { /* 0, 1, 2, 4 and so on */
        longer = realloc(old, (used == 0 ? 1 : 2 * used) * width);
        if (longer == NULL)
            return NULL;
        memcpy(array, &longer, sizeof longer);
        old = longer;
    }
    ++*count;
    return memset((char *)old + used * width, 0, width);
}

static bool has_numbers(const Plan *plan, int64_t count) { return count >= 0 && plan->end - plan->next >= count; }

static char *find_place(const Plan *plan, int64_t region, int64_t begin, int64_t end)
{
    if (region < 0 || region >= plan->region_count || begin < 0 || end < begin ||
        (uint64_t)end > plan->region_bytes[region])
        return NULL;
    return plan->regions[region] + begin;
}

/* Read the place of some bytes, and that of the operand there, which may be in another region. Returns NULL if there is
 * no such place. */
static char *read_run(Plan *plan, size_t *nbytes, const char **operand)
{
    const int64_t *run = plan->next;
    plan->next += RUN_NUMBERS;
    char *place = find_place(plan, run[0], run[1], run[2]);
    *operand = find_place(plan, run[3], run[1], run[2]);
    *nbytes = (size_t)(run[2] - run[1]);
    return *operand == NULL ? NULL : place;
}

/* Return the connection with a rank, or NULL. */
static Connection *find_connection(const Program *one, int64_t peer)
{
    for (Py_ssize_t i = 0; i + 1 < PyTuple_Size(one->connections); i += 2) {
        if (PyLong_AsLongLong(PyTuple_GetItem(one->connections, i)) == peer)
            return as_connection(PyTuple_GetItem(one->connections, i + 1));
    }
    return NULL;
}

static Lane *find_lane(Program *one, int peer, Connection *connection)
{
    for (int i = 0; i < one->lane_count; i++) {
        if (one->lanes[i].peer == peer && one->lanes[i].connection == connection)
            return &one->lanes[i];
    }
    Lane *made = append(&one->lanes, &one->lane_count, sizeof *made);
    if (made != NULL) {
        made->peer = peer;
        made->connection = connection;
    }
    return made;
}

/* Memory for a message of `count` runs that does not lie in one place. */
static char *allocate_packed(Program *one, const Plan *plan, int64_t count)
{
    size_t nbytes = 0;
    for (int64_t i = 0; i < count; i++)
        nbytes += (size_t)(plan->next[i * RUN_NUMBERS + 2] - plan->next[i * RUN_NUMBERS + 1]);
    char **made = append(&one->packed, &one->packed_count, sizeof *made);
    return made == NULL ? NULL : (*made = malloc(nbytes + 1));
}

static bool add_action(Program *one, bool first, Action action)
{
    Action *made = first ? append(&one->before, &one->before_count, sizeof *made)
                         : append(&one->after, &one->after_count, sizeof *made);
    if (made != NULL)
        *made = action;
    return made != NULL;
}

/* Read the message of a part of a step. Returns false if the plan is invalid, or memory is missing. */
static bool read_part(Program *one, Plan *plan, int step)
{
    if (!has_numbers(plan, PART_NUMBERS))
        return false;
    const int64_t peer = plan->next[0], sends = plan->next[1], incoming = plan->next[2], runs = plan->next[3];
    Connection *connection = plan->next[4] != 0 ? find_connection(one, peer) : NULL;
    plan->next += PART_NUMBERS;
    if (peer < 0 || peer > INT_MAX || runs < 0 || runs > INT_MAX || !has_numbers(plan, runs * RUN_NUMBERS))
        return false;
    char *data = NULL, *packed = runs > 1 && incoming < 0 ? allocate_packed(one, plan, runs) : NULL;
    if (runs > 1 && incoming < 0 && packed == NULL)
        return false;
    size_t total = 0;
    for (int64_t i = 0; i < runs; i++) {
        size_t nbytes = 0;
        const char *operand;
        char *place = read_run(plan, &nbytes, &operand);
        if (place == NULL || total + nbytes > INT_MAX)
            return false;
        bool added = true;
        if (incoming >= 0) { /* with those of lower ranks on the left */
            if ((uint64_t)incoming + total + nbytes > one->incoming_bytes || one->kernel == NULL)
                return false;
            const char *arrived = one->incoming + incoming + total;
            const bool is_left = sends < 0;
            added = add_action(one, false,
                               (Action){place, is_left ? arrived : operand, is_left ? operand : arrived, nbytes});
        } else if (packed != NULL) {
            added = sends > 0 ? add_action(one, true, (Action){packed + total, place, NULL, nbytes})
                              : add_action(one, false, (Action){place, packed + total, NULL, nbytes});
        } else {
            data = place;
        }
        if (!added)
            return false;
        total += nbytes;
    }
    Message *made = sends > 0 ? append(&one->sends, &one->send_count, sizeof *made)
                              : append(&one->recvs, &one->recv_count, sizeof *made);
    if (made == NULL)
        return false;
    static char token;
    *made = (Message){.peer = (int)peer, .step = step, .lane = -1, .transfer.nbytes = total};
    made->transfer.data = runs == 0       ? &token
                          : incoming >= 0 ? one->incoming + incoming
                          : packed != NULL ? packed
                                           : data;
    if (sends <= 0 && connection == NULL)
        return mpi.testsome != NULL;
    Lane *lane = connection == NULL && mpi.testsome == NULL ? NULL : find_lane(one, (int)peer, connection);
    made->lane = lane == NULL ? -1 : (int)(lane - one->lanes);
    if (sends <= 0)
        return lane != NULL;
    int *number = lane == NULL ? NULL : append(&lane->sends, &lane->count, sizeof *number);
    if (number != NULL)
        *number = one->send_count - 1;
    return number != NULL;
}

/* Read a step of this rank alone. */
static bool read_local(Program *one, Plan *plan)
{
    if (!has_numbers(plan, LOCAL_NUMBERS))
        return false;
    const bool combines = plan->next[0] != 0, source_left = plan->next[1] != 0;
    plan->next += 2;
    size_t nbytes = 0, same = 0;
    const char *source, *operand;
    const bool is_valid = read_run(plan, &nbytes, &source) != NULL;
    char *target = read_run(plan, &same, &operand);
    if (!is_valid || target == NULL || same != nbytes || (combines && one->kernel == NULL))
        return false;
    if (!combines)
        return add_action(one, false, (Action){target, source, NULL, nbytes});
    return add_action(one, false,
                      (Action){target, source_left ? source : operand, source_left ? operand : source, nbytes});
}

/* Read a copy before all steps, of what lies at the same place of another region. */
static bool read_first_copy(Program *one, Plan *plan)
{
    if (!has_numbers(plan, RUN_NUMBERS))
        return false;
    size_t nbytes = 0;
    const char *source;
    char *target = read_run(plan, &nbytes, &source);
    Action *made = target == NULL ? NULL : append(&one->first, &one->first_count, sizeof *made);
    if (made != NULL)
        *made = (Action){target, source, NULL, nbytes};
    return made != NULL;
}

static bool read_step(Program *one, Plan *plan)
{
    if (!has_numbers(plan, STEP_NUMBERS))
        return false;
    const int64_t needs = plan->next[0], parts = plan->next[1], locals = plan->next[2];
    plan->next += STEP_NUMBERS;
    Step *step = append(&one->steps, &one->step_count, sizeof *step);
    if (step == NULL || needs < 0 || needs >= one->step_count)
        return false;
    *step = (Step){.needs = needs,
                   .first_before = one->before_count,
                   .first_after = one->after_count,
                   .first_recv = one->recv_count,
                   .first_send = one->send_count};
    const int number = one->step_count - 1;
    for (int64_t i = 0; i < parts; i++) {
        if (!read_part(one, plan, number))
            return false;
    }
    for (int64_t i = 0; i < locals; i++) {
        if (!read_local(one, plan))
            return false;
    }
    step->end_before = one->before_count;
    step->end_after = one->after_count;
    step->end_recv = one->recv_count;
    step->end_send = one->send_count;
    return true;
}

/* --- the steps, without the GIL */

static void fail(Program *one, int code, const Message *message)
{
    one->broken = true;
    one->code = code;
    one->peer = message->peer;
    one->expected = (int)message->transfer.nbytes;
    one->arrived = -1;
}

static Connection *get_connection(const Program *one, const Message *message)
{
    return message->lane < 0 ? NULL : one->lanes[message->lane].connection;
}

/* Return true if a message that was posted has completed, not if it has failed. */
static bool has_completed(Program *one, Message *message, Status *status)
{
    if (get_connection(one, message) != NULL)
        return message->transfer.done;
    int completed = 0;
    const int code = mpi.test(&message->request, &completed, status);
    if (code != 0)
        fail(one, code, message);
    if (code != 0 || !completed)
        return false;
    message->posted = false;
    one->mpi_posted--;
    return true;
}

static void act(const Program *one, const Action *first, const Action *end)
{
    for (const Action *action = first; action < end; action++) {
        if (action->right == NULL) {
            copy(action->to, action->left, action->nbytes);
        } else {
            const void *parts[2] = {action->left, action->right};
            one->kernel(action->to, parts, 2, action->nbytes / one->itemsize);
        }
    }
}

static bool has_room(const Program *one, const Lane *lane)
{
    const int count = lane->posted - lane->done;
    if (count < one->first_sends)
        return true;
    const size_t nbytes = one->sends[lane->sends[lane->posted]].transfer.nbytes;
    return count < one->first_sends + lane->done && (size_t)(count + 1) * nbytes <= one->most_bytes;
}

/* Post the next send of a lane. Returns false if there is no room for it, or it fails. */
static bool post_next(Program *one, Lane *lane)
{
    Message *message = &one->sends[lane->sends[lane->posted]];
    if (lane->connection != NULL) {
        /* There is as much room as the other rank has memory. */
        if (!post_send(&lane->stream, &message->transfer))
            return false;
    } else {
        if (!has_room(one, lane))
            return false;
        const int code = mpi.isend(message->transfer.data, (int)message->transfer.nbytes, mpi.byte, message->peer,
                                   one->tag, one->comm, &message->request);
        if (code != 0) {
            fail(one, code, message);
            return false;
        }
        message->posted = true;
        one->mpi_posted++;
    }
    lane->posted++;
    return true;
}

/* Post the next sends of a lane, and take note of those that have completed. */
static void send_next(Program *one, Lane *lane)
{
    while (!one->broken) {
        while (lane->posted < lane->waiting && post_next(one, lane)) {
        }
        if (one->broken || lane->done == lane->posted)
            return;
        Message *message = &one->sends[lane->sends[lane->done]];
        Status status = {{0}};
        if (!has_completed(one, message, &status))
            return;
        one->steps[message->step].unsent--;
        lane->done++;
    }
}

/* Begin the steps whose memory is final. */
static void begin_steps(Program *one)
{
    while (!one->broken && one->begun < one->step_count && one->steps[one->begun].needs <= one->at) {
        Step *step = &one->steps[one->begun++];
        act(one, one->before + step->first_before, one->before + step->end_before);
        step->unsent = step->end_send - step->first_send;
        step->received = step->first_recv;
        for (int i = step->first_recv; i < step->end_recv; i++) {
            Message *message = &one->recvs[i];
            if (get_connection(one, message) != NULL) {
                post_receive(&one->lanes[message->lane].stream, &message->transfer);
                continue;
            }
            const int code = mpi.irecv(message->transfer.data, (int)message->transfer.nbytes, mpi.byte, message->peer,
                                       one->tag, one->comm, &message->request);
            if (code != 0) {
                fail(one, code, message);
                return;
            }
            message->posted = true;
            one->mpi_posted++;
        }
        for (int i = step->first_send; i < step->end_send; i++) {
            Lane *lane = &one->lanes[one->sends[i].lane];
            lane->waiting++;
            send_next(one, lane);
        }
    }
}

/* Return true if the messages to be received in a step have arrived. */
static bool has_arrived(Program *one, Step *step)
{
    for (; step->received < step->end_recv; step->received++) {
        Message *message = &one->recvs[step->received];
        Status status = {{0}};
        if (!has_completed(one, message, &status))
            return false;
        int64_t arrived = (int64_t)message->transfer.arrived;
        const bool by_mpi = get_connection(one, message) == NULL;
        if ((by_mpi && mpi.get_elements(&status, mpi.byte, &arrived) != 0) ||
            arrived != (int64_t)message->transfer.nbytes) {
            fail(one, 0, message);
            one->arrived = arrived;
            return false;
        }
    }
    return true;
}

static bool has_ended(const Program *one) { return one->broken || one->at == one->step_count; }

static void close_streams(Program *one)
{
    for (int i = 0; i < one->lane_count; i++)
        close_stream(&one->lanes[i].stream);
}

/* Return true if messages of a lane over a connection are left. */
static bool has_messages_left(const Program *one, const Lane *lane)
{
    bool left = lane->done < lane->count;
    for (int i = 0; i < one->recv_count && !left; i++)
        left = one->recvs[i].lane == lane - one->lanes && !one->recvs[i].transfer.done;
    return left;
}

/* Fail if a connection has failed some time ago. A rank that has no messages left may have closed it. */
static void check_connection(Program *one, const Lane *lane)
{
    int64_t since;
    const int error = find_connection_error(lane->connection, read_nanoseconds(CLOCK_MONOTONIC), &since);
    if (error != 0 && since > LOSS_TIME && !one->broken && has_messages_left(one, lane))
        fail(one, -error, &(Message){.peer = lane->peer});
}

/* Post and complete what can be without waiting. Returns true if a step has ended, or all have. */
static bool advance(Program *one)
{
    const int first = one->at;
    if (has_ended(one))
        return true;
    if (!one->running)
        return false;
    bool moved = false;
    for (int i = 0; i < one->lane_count; i++) {
        if (one->lanes[i].connection != NULL && drive_connection(one->lanes[i].connection))
            moved = true;
        send_next(one, &one->lanes[i]);
    }
    while (!one->broken && one->at < one->begun) {
        Step *step = &one->steps[one->at];
        if (!has_arrived(one, step) || step->unsent > 0)
            break;
        act(one, one->after + step->first_after, one->after + step->end_after);
        one->at++;
        begin_steps(one);
    }
    if (one->at == one->step_count)
        close_streams(one);
    for (int i = 0; i < one->lane_count && !moved && one->at < one->step_count; i++) {
        if (one->lanes[i].connection != NULL)
            check_connection(one, &one->lanes[i]);
    }
    return moved || one->at > first || one->broken;
}

/* Nanoseconds between two looks, by which the end of a step may be seen late, by how long steps have taken so far. */
static int64_t find_nap(const Program *one, int64_t now)
{
    return one->at == 0 ? 0 : (int64_t)(one->nap_share * (double)(now - one->begin) / one->at);
}

/* Connections that a thread waits for, and how many programs have messages that only MPI moves. */
typedef struct {
    struct pollfd polled[MOST_POLLED];
    nfds_t count;
    bool all;
    int by_mpi;
} Awaited;

static void list_awaited(Program *const *programs, Py_ssize_t count, Awaited *awaited)
{
    *awaited = (Awaited){.all = true};
    for (Py_ssize_t i = 0; i < count; i++) {
        const Program *one = programs[i];
        if (has_ended(one) || !one->running)
            continue;
        awaited->by_mpi += one->mpi_posted > 0;
        for (int lane = 0; lane < one->lane_count; lane++) {
            short events;
            const Connection *connection = one->lanes[lane].connection;
            const int fd = connection == NULL ? -1 : find_connection_events(connection, &events);
            /* Programs at a time have the same connections. */
            nfds_t at = 0;
            while (fd >= 0 && at < awaited->count && awaited->polled[at].fd != fd)
                at++;
            if (fd < 0 || at < awaited->count)
                continue;
            if (awaited->count == MOST_POLLED)
                awaited->all = false;
            else
                awaited->polled[awaited->count++] = (struct pollfd){.fd = fd, .events = events};
        }
    }
}

/* Sleep, at most until something arrives over a connection or can be sent over one. */
static void sleep_for(Awaited *awaited, int64_t nanoseconds)
{
    const struct timespec nap = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    ppoll(awaited->polled, awaited->count, &nap, NULL);
}

/* Carry out the first program, for `limit` nanoseconds at most, while the others advance. */
static void run(Program *const *programs, Py_ssize_t count, int64_t limit)
{
    const int64_t begin = read_nanoseconds(CLOCK_MONOTONIC);
    int64_t idle = begin; /* since when nothing has happened */
    int looks = 0;
    while (true) {
        bool found = false;
        for (Py_ssize_t i = 0; i < count; i++)
            found = (!has_ended(programs[i]) && advance(programs[i])) || found;
        const int64_t now = read_nanoseconds(CLOCK_MONOTONIC);
        if (has_ended(programs[0]) || now - begin > limit)
            return;
        if (found) {
            idle = now, looks = 0;
            continue;
        }
        Awaited awaited;
        list_awaited(programs, count, &awaited);
        if (awaited.count > 0 && awaited.all && awaited.by_mpi == 0) {
            sleep_for(&awaited, limit - (now - begin));
            continue;
        }
        const int64_t nap = find_nap(programs[0], now), waited = (now - idle) / WAIT_SHARE;
        looks++;
        if (nap >= SHORTEST_NAP)
            sleep_for(&awaited, nap < LONGEST_NAP ? nap : LONGEST_NAP);
        else if (looks > SPINS + YIELDS || now - idle > YIELD_TIME)
            sleep_for(&awaited, waited < SHORTEST_NAP  ? SHORTEST_NAP
                                : waited < LONGEST_NAP ? waited
                                                       : LONGEST_NAP);
        else if (looks > SPINS)
            sched_yield();
    }
}

/* --- the Python type */

static void free_program(Program *one)
{
    for (int i = 0; i < one->lane_count; i++)
        free(one->lanes[i].sends);
    for (int i = 0; i < one->packed_count; i++)
        free(one->packed[i]);
    free(one->packed);
    free(one->lanes);
    free(one->steps);
    free(one->sends);
    free(one->recvs);
    free(one->first);
    free(one->before);
    free(one->after);
    free(one->incoming);
}

static bool is_used(const Program *one)
{
    bool used = one->mpi_posted > 0;
    for (int i = 0; i < one->lane_count; i++)
        used = used || one->lanes[i].done < one->lanes[i].posted;
    return used;
}

static void dealloc_program(PyObject *self)
{
    Program *one = (Program *)self;
    PyTypeObject *type = Py_TYPE(self);
    close_streams(one);
    /* MPI, or a connection, may still use the memory of messages that have not completed. */
    if (!is_used(one)) {
        free_program(one);
        Py_XDECREF(one->connections);
    }
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static int read_plan(Program *one, const Py_buffer *numbers, PyObject *regions)
{
    const Py_ssize_t count = PyTuple_Size(regions) / 2;
    char **places = calloc((size_t)count + 1, sizeof *places);
    size_t *sizes = calloc((size_t)count + 1, sizeof *sizes);
    bool valid = places != NULL && sizes != NULL;
    for (Py_ssize_t i = 0; i < count && valid; i++) {
        places[i] = PyLong_AsVoidPtr(PyTuple_GetItem(regions, 2 * i));
        sizes[i] = PyLong_AsSize_t(PyTuple_GetItem(regions, 2 * i + 1));
        valid = PyErr_Occurred() == NULL;
    }
    const int64_t *first = numbers->buf;
    Plan plan = {first, first + (size_t)numbers->len / sizeof *first, places, sizes, count};
    valid = valid && has_numbers(&plan, HEAD_NUMBERS) && first[1] >= 0;
    if (valid) {
        const int64_t steps = first[0], copies = first[2];
        one->incoming_bytes = (size_t)first[1];
        one->incoming = malloc(one->incoming_bytes + 1);
        valid = one->incoming != NULL;
        plan.next += HEAD_NUMBERS;
        for (int64_t i = 0; i < copies && valid; i++)
            valid = read_first_copy(one, &plan);
        for (int64_t i = 0; i < steps && valid; i++)
            valid = read_step(one, &plan);
        valid = valid && plan.next == plan.end;
    }
    free(places);
    free(sizes);
    if (!valid && PyErr_Occurred() == NULL)
        PyErr_SetString(PyExc_ValueError, "StreamedProgram: the plan is invalid, needs MPI before set_mpi, or there is"
                                          " not enough memory");
    return valid ? 0 : -1;
}

static int init_program(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    Program *one = (Program *)self;
    unsigned long long comm;
    PyObject *regions, *connections;
    Py_buffer numbers;
    const char *op, *dtype;
    Py_ssize_t itemsize, most_bytes;
    int first_sends;
    double nap_share;
    if (!PyArg_ParseTuple(args, "KO!O!y*ssnind", &comm, &PyTuple_Type, &connections, &PyTuple_Type, &regions, &numbers,
                          &op, &dtype, &itemsize, &first_sends, &most_bytes, &nap_share))
        return -1;
    int status = -1;
    if (one->connections != NULL || itemsize < 1 || first_sends < 1 || most_bytes < 0 ||
        (op[0] != '\0' && find_kernel(op, dtype) == NULL)) {
        PyErr_SetString(PyExc_ValueError, "StreamedProgram: invalid arguments, or initialised twice");
    } else {
        one->comm = to_handle(comm);
        one->connections = Py_NewRef(connections);
        one->kernel = find_kernel(op, dtype);
        one->itemsize = (size_t)itemsize;
        one->first_sends = first_sends;
        one->most_bytes = (size_t)most_bytes;
        one->nap_share = nap_share;
        status = read_plan(one, &numbers, regions);
    }
    PyBuffer_Release(&numbers);
    return status;
}

static PyObject *start_program(PyObject *self, PyObject *argument)
{
    Program *one = (Program *)self;
    const long tag = PyLong_AsLong(argument);
    if (tag == -1 && PyErr_Occurred())
        return NULL;
    if (one->running && one->at < one->step_count) {
        PyErr_SetString(PyExc_RuntimeError, "StreamedProgram: messages of an earlier run have not completed");
        return NULL;
    }
    one->tag = (int)tag;
    one->at = one->begun = 0;
    one->broken = false;
    one->running = true;
    one->mpi_posted = 0;
    for (int i = 0; i < one->recv_count; i++)
        one->recvs[i].transfer.done = false;
    for (int i = 0; i < one->lane_count; i++) {
        Lane *lane = &one->lanes[i];
        lane->waiting = lane->posted = lane->done = 0;
        if (lane->connection != NULL)
            open_stream(&lane->stream, lane->connection, one->tag);
    }
    Py_BEGIN_ALLOW_THREADS
    one->begin = read_nanoseconds(CLOCK_MONOTONIC);
    act(one, one->first, one->first + one->first_count);
    begin_steps(one);
    advance(one); /* connections take what they can at once */
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *run_program(PyObject *self, PyObject *args)
{
    double seconds;
    PyObject *beside;
    Program *programs[MOST_PROGRAMS] = {(Program *)self};
    Py_ssize_t count = 1;
    if (!PyArg_ParseTuple(args, "dO!", &seconds, &PyTuple_Type, &beside))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(beside) && count < MOST_PROGRAMS; i++) {
        PyObject *other = PyTuple_GetItem(beside, i); /* borrowed from the tuple, which the caller holds */
        if (Py_TYPE(other) != Py_TYPE(self))
            return PyErr_Format(PyExc_TypeError, "StreamedProgram: a program is required");
        programs[count++] = (Program *)other;
    }
    Py_BEGIN_ALLOW_THREADS
    run(programs, count, (int64_t)(1e9 * (seconds > 0 ? seconds : 0)));
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(has_ended(programs[0]));
}

static PyObject *advance_program(PyObject *self, PyObject *unused)
{
    (void)unused;
    Program *one = (Program *)self;
    Py_BEGIN_ALLOW_THREADS
    advance(one);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(has_ended(one));
}

static PyObject *abandon_program(PyObject *self, PyObject *unused)
{
    (void)unused;
    Program *one = (Program *)self;
    Py_BEGIN_ALLOW_THREADS
    close_streams(one);
    for (int i = 0; i < one->recv_count; i++) {
        if (one->recvs[i].posted && mpi.cancel(&one->recvs[i].request) == 0)
            mpi.request_free(&one->recvs[i].request);
        one->recvs[i].posted = false;
    }
    Py_END_ALLOW_THREADS
    one->broken = true;
    Py_RETURN_NONE;
}

static PyObject *get_at(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((Program *)self)->at);
}

static PyObject *get_failure(PyObject *self, void *unused)
{
    (void)unused;
    const Program *one = (Program *)self;
    if (!one->broken)
        Py_RETURN_NONE;
    return Py_BuildValue("(iiiL)", one->code, one->peer, one->expected, (long long)one->arrived);
}

static PyMethodDef program_methods[] = {
    {"start", start_program, METH_O, "start(tag)\n--\n\nPost the first messages."},
    {"advance", advance_program, METH_NOARGS,
     "advance()\n--\n\nPost and complete what can be without waiting. Return True if all steps have ended, or one has"
     " failed."},
    {"run", run_program, METH_VARARGS,
     "run(seconds, beside)\n--\n\nThe same, until then, or for `seconds`, while the programs `beside` advance. Return"
     " True if it has ended or failed."},
    {"abandon", abandon_program, METH_NOARGS,
     "abandon()\n--\n\nCancel the receives. MPI may still use the memory, and that of this program."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef program_attributes[] = {
    {"at", get_at, NULL, "Number of the steps that have ended.", NULL},
    {"failure", get_failure, NULL,
     "MPI's error code, or that of a connection, below 0, or 0: a message of another size; rank, bytes expected and"
     " arrived (-1: not known) of the message that has failed. None without a failure.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot program_slots[] = {
    {Py_tp_doc,
     "StreamedProgram(comm, connections, regions, numbers, op, dtype, itemsize, first_sends, most_bytes, nap_share)\n"
     "--\n\nA schedule, carried out on the communicator with the handle `comm`. `connections` are ranks and the"
     " connections with them, by turns, for messages that the plan allows there. `regions` are the addresses and the"
     " bytes of the memory, by turns, which the caller keeps; `numbers` of 64 bits the plan, see the source. `op` and"
     " `dtype` name a reduction of elements of `itemsize`, \"\" none. By MPI, `first_sends` to a rank are posted at a"
     " time first, later more of `most_bytes`. Between looks, a thread sleeps for `nap_share` of the time of a step."},
    {Py_tp_init, init_program},
    {Py_tp_dealloc, dealloc_program},
    {Py_tp_methods, program_methods},
    {Py_tp_getset, program_attributes},
    {0, NULL},
};

PyType_Spec streamed_program_spec = {
    .name = "mpicoll._shm.StreamedProgram",
    .basicsize = sizeof(Program),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = program_slots,
};
