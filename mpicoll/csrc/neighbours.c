/* Collectives of neighbours on a node: rounds in which each rank sends a message to each of its neighbours, and
 * receives one from each of them.
 *
 * In a round a rank writes a list of its messages to its ring slot, and small ones behind it. Larger ones that are not
 * contiguous it packs into memory that the ranks share, of which rounds of even and odd numbers use one half each. For
 * the largest ones the list has the address in the private memory of the rank, from which the receiver reads. Then the
 * rank ends a step in which it waits for its neighbours only, and reads what is for it. A further step follows the last
 * round: a rank that has ended it knows that its neighbours have read its messages, and which of them have another size
 * than the receiver expects. So a rank needs to know nothing of the sizes of other ranks, and all ranks take the same
 * number of steps: a rank that has failed goes on to the last one, and the ranks stay synchronised.
 *
 * Of the messages from one rank to another one in a round, the first in the list of the sender is the first one among
 * those of the receiver, and so on.
 */

#define PY_SSIZE_T_CLEAN
#include "neighbours.h"

#include <stdlib.h>
#include <string.h>

#include "collectives.h"
#include "direct.h"

enum {
    BOX_DIMENSIONS = 16,
    COPIED_BYTES = 8 << 10, /* up to this size, to copy a contiguous message twice takes less than the kernel's read */
    ALIGNMENT = 8, /* of messages in a slot */
    UNLOCKED_BYTES = 64 << 10 /* from here on, copies take longer than to release the interpreter lock */
};

/* The bytes of a message in an array: runs of contiguous bytes at regular distances. */
typedef struct {
    size_t offset, nbytes, run;
    int ndim;
    size_t extents[BOX_DIMENSIONS], strides[BOX_DIMENSIONS];
} Box;

typedef struct {
    int peer;
    int index; /* of a message that is received: among those of this peer */
    Box box;
} Message;

typedef struct {
    int send_count, recv_count;
    Message *sends, *recvs;
    bool unlocks; /* copies take long */
} Round;

/* What is wrong. */
typedef struct {
    int peer;
    uint64_t expected, sent;
    bool is_mine; /* the message was sent by this rank */
    int number;   /* of the error of the kernel; 0: the sizes differ */
} Fault;

typedef struct {
    Collective base;
    bool in_place; /* messages are sent from the output, which is the input at first */
    char name[24];
    int round_count;
    Round *rounds;
    int *peers; /* all of them but this rank, each once */
    int peer_count;
    char **memories;         /* of the ranks, for messages */
    size_t half_bytes;       /* of such a memory */
    struct Entry *list;      /* of messages, for rounds that have more than a ring slot has room for */
    char *packed[2];         /* larger messages that are not contiguous, of rounds of even and odd numbers */
    size_t packed_bytes[2];
    char *arrived;           /* such a message that was read */
    size_t arrived_bytes;
} NeighbourCollective;

typedef enum { IN_SLOT, IN_MEMORY, PRIVATE } Place;

/* A message in the list of a rank. */
typedef struct Entry {
    int32_t dest;
    uint32_t place;
    uint64_t nbytes;
    uint64_t where; /* in the slot or the memory, or an address */
} Entry;

/* The beginning of a ring slot. The list follows it, or is at an address if that is not 0. */
typedef struct {
    uint64_t count, address;
} Head;

enum { LISTED = (RING_SLOT_BYTES - sizeof(Head)) / sizeof(Entry) };

/* --- boxes */

/* Copy `count` runs, whose places are `from_stride` and `to_stride` bytes apart. */
static inline void copy_runs(char *to, size_t to_stride, const char *from, size_t from_stride, size_t run, size_t count)
{
    for (size_t i = 0; i < count; i++, to += to_stride, from += from_stride)
        copy(to, from, run);
}

/* The same; runs of single elements, of which a column of an array consists, are copied without a call. */
static void copy_row(char *to, size_t to_stride, const char *from, size_t from_stride, size_t run, size_t count)
{
    switch (run) {
    case 1: copy_runs(to, to_stride, from, from_stride, 1, count); break;
    case 2: copy_runs(to, to_stride, from, from_stride, 2, count); break;
    case 4: copy_runs(to, to_stride, from, from_stride, 4, count); break;
    case 8: copy_runs(to, to_stride, from, from_stride, 8, count); break;
    case 16: copy_runs(to, to_stride, from, from_stride, 16, count); break;
    default: copy_runs(to, to_stride, from, from_stride, run, count);
    }
}

/* Copy between a box of an array, which has dimensions, and contiguous memory. */
static void copy_box(const Box *box, char *array, char *flat, bool packs)
{
    const int last = box->ndim - 1;
    const size_t run = box->run, count = box->extents[last], stride = box->strides[last];
    size_t at[BOX_DIMENSIONS] = {0};
    char *place = array + box->offset;
    for (size_t done = 0; done < box->nbytes; done += run * count, flat += run * count) {
        if (packs)
            copy_row(flat, run, place, stride, run, count);
        else
            copy_row(place, stride, flat, run, run, count);
        for (int i = last - 1; i >= 0; i--) {
            place += box->strides[i];
            if (++at[i] < box->extents[i])
                break;
            place -= box->extents[i] * box->strides[i];
            at[i] = 0;
        }
    }
}

static void pack(const Box *box, const char *array, char *to)
{
    if (box->ndim > 0)
        copy_box(box, (char *)array, to, true);
    else
        copy(to, array + box->offset, box->nbytes);
}

static void unpack(const Box *box, const char *from, char *array)
{
    if (box->ndim > 0)
        copy_box(box, array, (char *)from, false);
    else
        copy(array + box->offset, from, box->nbytes);
}

/* --- a round */

/* Make `memory` at least as large as needed. Returns false if there is not enough. */
static bool reserve(char **memory, size_t *nbytes, size_t needed)
{
    if (*nbytes >= needed)
        return true;
    free(*memory);
    *memory = malloc(needed);
    *nbytes = *memory == NULL ? 0 : needed;
    return *memory != NULL;
}

static bool is_same(const Box *one, const Box *other)
{
    const size_t used = (size_t)one->ndim * sizeof one->extents[0];
    return one->offset == other->offset && one->nbytes == other->nbytes && one->ndim == other->ndim &&
           one->run == other->run && memcmp(one->extents, other->extents, used) == 0 &&
           memcmp(one->strides, other->strides, used) == 0;
}

/* What a rank has used in a round of the places for messages. */
typedef struct {
    char *slot;
    size_t in_slot, in_memory, packed;
    int parity;
} Used;

static size_t align(size_t nbytes) { return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* Copy a message to the first place that has room for it. */
static Entry place_message(const NeighbourCollective *one, const Box *box, const char *array, Used *used)
{
    Entry entry = {.nbytes = box->nbytes};
    char *memory = one->memories[one->base.steps->rank];
    if (used->in_slot + box->nbytes <= RING_SLOT_BYTES) {
        entry.place = IN_SLOT;
        entry.where = used->in_slot;
        pack(box, array, used->slot + used->in_slot);
        used->in_slot += align(box->nbytes);
    } else if ((box->ndim > 0 || box->nbytes <= COPIED_BYTES) && used->in_memory + box->nbytes <= one->half_bytes) {
        entry.place = IN_MEMORY;
        entry.where = (size_t)used->parity * one->half_bytes + used->in_memory;
        pack(box, array, memory + entry.where);
        used->in_memory += align(box->nbytes);
    } else if (box->ndim > 0) {
        char *to = one->packed[used->parity] + used->packed;
        entry.place = PRIVATE;
        entry.where = (uintptr_t)to;
        pack(box, array, to);
        used->packed += box->nbytes;
    } else {
        entry.place = PRIVATE;
        entry.where = (uintptr_t)(array + box->offset);
    }
    return entry;
}

/* Write the list of messages to a ring slot, and the messages to their places. */
static void write_messages(
    const NeighbourCollective *one, const Round *round, int parity, const char *array, char *slot)
{
    Head head = {.count = (uint64_t)round->send_count};
    Used used = {.slot = slot, .in_slot = sizeof head, .parity = parity};
    Entry *list = (Entry *)(void *)(slot + sizeof head);
    if (round->send_count > (int)LISTED) {
        list = one->list;
        head.address = (uintptr_t)list;
    } else {
        used.in_slot += (size_t)round->send_count * sizeof *list;
    }
    memcpy(slot, &head, sizeof head);
    for (int i = 0; i < round->send_count; i++) {
        const Box *box = &round->sends[i].box;
        Entry entry = i > 0 && is_same(box, &round->sends[i - 1].box) /* as in allgather */
                          ? list[i - 1]
                          : place_message(one, box, array, &used);
        entry.dest = round->sends[i].peer;
        list[i] = entry;
    }
}

/* Find a message for this rank in the list of a peer. Returns the number of the kernel's error. */
static int find_message(const Steps *steps, const Message *message, const char *slot, Entry *found)
{
    Head head;
    memcpy(&head, slot, sizeof head);
    const int process = message->peer == steps->rank ? 0 : steps->processes[message->peer];
    int index = message->index;
    for (uint64_t i = 0; i < head.count; i++) {
        const size_t at = (size_t)i * sizeof *found;
        int number = 0;
        if (head.address == 0)
            memcpy(found, slot + sizeof head + at, sizeof *found);
        else
            number = read_memory(process, (int64_t)(head.address + at), (char *)found, sizeof *found);
        if (number != 0)
            return number;
        if (found->dest == steps->rank && index-- == 0)
            return 0;
    }
    *found = (Entry){.nbytes = UINT64_MAX};
    return 0;
}

/* Read a message, which has the expected size. Returns the number of the kernel's error. */
static int read_message(
    NeighbourCollective *one, const Message *message, const Entry *entry, const char *slot, char *array)
{
    const Steps *steps = one->base.steps;
    const Box *box = &message->box;
    if (entry->place != PRIVATE) {
        unpack(box, (entry->place == IN_SLOT ? slot : one->memories[message->peer]) + entry->where, array);
        return 0;
    }
    const int process = message->peer == steps->rank ? 0 : steps->processes[message->peer];
    if (box->ndim == 0)
        return read_memory(process, (int64_t)entry->where, array + box->offset, box->nbytes);
    if (process == 0) {
        unpack(box, (const char *)(uintptr_t)entry->where, array);
        return 0;
    }
    const int number = read_memory(process, (int64_t)entry->where, one->arrived, box->nbytes);
    if (number == 0)
        unpack(box, one->arrived, array);
    return number;
}

/* Read all messages of the round. The first fault is kept. */
static void read_messages(NeighbourCollective *one, const Round *round, char *array, Fault *fault)
{
    const Steps *steps = one->base.steps;
    for (int i = 0; i < round->recv_count; i++) {
        const Message *message = &round->recvs[i];
        const char *slot = get_ring_slot(steps, steps->step, message->peer);
        Entry entry;
        int number = find_message(steps, message, slot, &entry);
        if (number == 0 && entry.nbytes == message->box.nbytes)
            number = read_message(one, message, &entry, slot, array);
        if (fault->peer < 0 && (number != 0 || entry.nbytes != message->box.nbytes))
            *fault = (Fault){.peer = message->peer, .expected = message->box.nbytes, .sent = entry.nbytes,
                             .number = number};
    }
}

/* Reserve private memory for messages of a round that are not contiguous and larger than the shared memory. Returns
 * false if there is not enough. */
static bool reserve_for(NeighbourCollective *one, const Round *round, int parity)
{
    size_t packed = 0, arrived = 0;
    for (int i = 0; i < round->send_count; i++)
        packed += round->sends[i].box.ndim > 0 ? align(round->sends[i].box.nbytes) : 0;
    for (int i = 0; i < round->recv_count; i++) {
        const Box *box = &round->recvs[i].box;
        if (box->ndim > 0 && box->nbytes > arrived)
            arrived = box->nbytes;
    }
    return (packed <= one->half_bytes || reserve(&one->packed[parity], &one->packed_bytes[parity], packed)) &&
           reserve(&one->arrived, &one->arrived_bytes, arrived);
}

static int move_round(NeighbourCollective *one, int number, const char *from, char *to, Fault *fault)
{
    Steps *steps = one->base.steps;
    const Round *round = &one->rounds[number];
    const int parity = number % 2;
    if (!reserve_for(one, round, parity)) {
        PyErr_NoMemory();
        end_failed(steps);
        return -1;
    }
    char *slot = get_ring_slot(steps, steps->step + 1, steps->rank);
    PyThreadState *released = round->unlocks ? PyEval_SaveThread() : NULL;
    write_messages(one, round, parity, from, slot);
    if (released != NULL)
        PyEval_RestoreThread(released);
    if (sync_with_each(steps, one->peers, one->peer_count) < 0)
        return -1;
    released = round->unlocks ? PyEval_SaveThread() : NULL;
    read_messages(one, round, to, fault);
    if (released != NULL)
        PyEval_RestoreThread(released);
    return 0;
}

/* --- the end */

/* End the last step, and find out whether neighbours have expected messages of other sizes. */
static int exchange_faults(NeighbourCollective *one, Fault *fault)
{
    Steps *steps = one->base.steps;
    char *slot = get_ring_slot(steps, steps->step + 1, steps->rank);
    const bool reports = fault->peer >= 0 && fault->number == 0 && fault->peer != steps->rank;
    const Head head = {.count = reports};
    memcpy(slot, &head, sizeof head);
    const Entry report = {.dest = fault->peer, .nbytes = fault->expected, .where = fault->sent};
    if (reports)
        memcpy(slot + sizeof head, &report, sizeof report);
    if (sync_with_each(steps, one->peers, one->peer_count) < 0)
        return -1;
    for (int i = 0; i < one->peer_count && fault->peer < 0; i++) {
        const char *other = get_ring_slot(steps, steps->step, one->peers[i]);
        Head found;
        Entry entry;
        memcpy(&found, other, sizeof found);
        memcpy(&entry, other + sizeof found, sizeof entry);
        if (found.count > 0 && entry.dest == steps->rank)
            *fault = (Fault){.peer = one->peers[i], .expected = entry.nbytes, .sent = entry.where, .is_mine = true};
    }
    return 0;
}

/* Raise the exception for a fault. Returns -1. */
static int raise_fault(const NeighbourCollective *one, const Fault *fault)
{
    const Steps *steps = one->base.steps;
    const char *name = fault->number == 0 ? "TruncationError" : "CommunicationError";
    PyObject *module = PyImport_ImportModule("mpicoll.errors");
    PyObject *error = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    if (error != NULL && fault->number != 0)
        PyErr_Format(error,
                     "%s: rank %d of %d can't read the memory of rank %d any more (%s): the call is incomplete; allow"
                     " it (PR_SET_DUMPABLE), or forbid it before mpicoll starts",
                     one->name, steps->rank, steps->size, fault->peer,
                     strerror(fault->number)); /* NOLINT(concurrency-mt-unsafe): GIL held */
    else if (error != NULL && fault->is_mine)
        PyErr_Format(error, "%s: rank %d of %d sends rank %d %llu bytes, which expects %llu", one->name, steps->rank,
                     steps->size, fault->peer, (unsigned long long)fault->sent, (unsigned long long)fault->expected);
    else if (error != NULL)
        PyErr_Format(error, "%s: rank %d of %d expects %llu bytes of rank %d, which sends %llu", one->name, steps->rank,
                     steps->size, (unsigned long long)fault->expected, fault->peer, (unsigned long long)fault->sent);
    Py_XDECREF(module);
    Py_XDECREF(error);
    raise_interrupt(one->base.steps);
    return -1;
}

static int exchange(const Collective *base, const char *source, char *target)
{
    /* What changes is memory for messages: the lock of the queue is held. */
    NeighbourCollective *one = (NeighbourCollective *)(void *)base;
    Fault fault = {.peer = -1};
    if (one->in_place && source != target) {
        PyThreadState *released = base->target_bytes >= UNLOCKED_BYTES ? PyEval_SaveThread() : NULL;
        copy(target, source, base->target_bytes);
        if (released != NULL)
            PyEval_RestoreThread(released);
    }
    for (int number = 0; number < one->round_count; number++) {
        if (move_round(one, number, one->in_place ? target : source, target, &fault) < 0)
            return -1;
    }
    if (exchange_faults(one, &fault) < 0)
        return -1;
    base->steps->last = base->steps->step;
    return fault.peer < 0 ? 0 : raise_fault(one, &fault);
}

/* --- the Python type */

static int read_sizes(PyObject *tuple, size_t *sizes)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++)
        sizes[i] = PyLong_AsSize_t(PyTuple_GetItem(tuple, i));
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether a box lies in an array. */
static bool lies_in(const Box *box, size_t nbytes)
{
    if (box->nbytes == 0)
        return true;
    size_t end = box->run;
    for (int i = 0; i < box->ndim; i++)
        end += (box->extents[i] - 1) * box->strides[i];
    return box->offset <= nbytes && end <= nbytes - box->offset;
}

static int read_message_arguments(PyObject *given, const Steps *steps, size_t nbytes, Message *message)
{
    PyObject *extents, *strides;
    Py_ssize_t offset, run;
    Box *box = &message->box;
    if (!PyArg_ParseTuple(
            given, "innO!O!", &message->peer, &offset, &run, &PyTuple_Type, &extents, &PyTuple_Type, &strides))
        return -1;
    box->ndim = (int)PyTuple_Size(extents);
    if (message->peer < 0 || message->peer >= steps->size || offset < 0 || run < 0 || box->ndim > BOX_DIMENSIONS ||
        PyTuple_Size(strides) != box->ndim) {
        PyErr_SetString(PyExc_ValueError, "NeighbourCollective: invalid message");
        return -1;
    }
    if (read_sizes(extents, box->extents) < 0 || read_sizes(strides, box->strides) < 0)
        return -1;
    box->offset = (size_t)offset;
    box->run = box->nbytes = (size_t)run;
    for (int i = 0; i < box->ndim; i++)
        box->nbytes *= box->extents[i];
    if (lies_in(box, nbytes))
        return 0;
    PyErr_SetString(PyExc_ValueError, "NeighbourCollective: a message does not lie in the array");
    return -1;
}

/* Read the messages of a round in one direction. Returns NULL with an exception. */
static Message *read_messages_of(PyObject *given, const Steps *steps, size_t nbytes, int *count)
{
    *count = (int)PyTuple_Size(given);
    Message *messages = *count < 0 ? NULL : PyMem_Calloc((size_t)*count + 1, sizeof(Message));
    if (messages == NULL && !PyErr_Occurred())
        PyErr_NoMemory();
    for (int i = 0; messages != NULL && i < *count; i++) {
        if (read_message_arguments(PyTuple_GetItem(given, i), steps, nbytes, &messages[i]) < 0) {
            PyMem_Free(messages);
            return NULL;
        }
        for (int before = 0; before < i; before++)
            messages[i].index += messages[before].peer == messages[i].peer;
    }
    return messages;
}

static void add_peers(NeighbourCollective *one, const Message *messages, int count)
{
    for (int i = 0; i < count; i++) {
        bool known = messages[i].peer == one->base.steps->rank;
        for (int other = 0; other < one->peer_count; other++)
            known = known || one->peers[other] == messages[i].peer;
        if (!known)
            one->peers[one->peer_count++] = messages[i].peer;
    }
}

static int read_round(NeighbourCollective *one, PyObject *given, Round *round)
{
    const Collective *base = &one->base;
    PyObject *sends, *recvs;
    if (!PyArg_ParseTuple(given, "O!O!", &PyTuple_Type, &sends, &PyTuple_Type, &recvs))
        return -1;
    const size_t sent_from = one->in_place ? base->target_bytes : base->source_bytes;
    round->sends = read_messages_of(sends, base->steps, sent_from, &round->send_count);
    round->recvs = round->sends == NULL
                       ? NULL
                       : read_messages_of(recvs, base->steps, base->target_bytes, &round->recv_count);
    if (round->recvs == NULL)
        return -1;
    size_t sent = 0, received = 0;
    for (int i = 0; i < round->send_count; i++)
        sent += round->sends[i].box.nbytes;
    for (int i = 0; i < round->recv_count; i++)
        received += round->recvs[i].box.nbytes;
    round->unlocks = sent >= UNLOCKED_BYTES || received >= UNLOCKED_BYTES;
    add_peers(one, round->sends, round->send_count);
    add_peers(one, round->recvs, round->recv_count);
    return 0;
}

static int read_rounds(NeighbourCollective *one, PyObject *rounds)
{
    const Py_ssize_t count = PyTuple_Size(rounds);
    one->rounds = PyMem_Calloc((size_t)count + 1, sizeof(Round));
    one->peers = PyMem_Calloc((size_t)one->base.steps->size, sizeof(int));
    if (one->rounds == NULL || one->peers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int most = 0;
    for (one->round_count = 0; one->round_count < count; one->round_count++) {
        Round *round = &one->rounds[one->round_count];
        if (read_round(one, PyTuple_GetItem(rounds, one->round_count), round) < 0)
            return -1;
        most = round->send_count > most ? round->send_count : most;
    }
    if (most > (int)LISTED && (one->list = PyMem_Calloc((size_t)most, sizeof(Entry))) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int read_memories(NeighbourCollective *one, PyObject *addresses)
{
    const int size = one->base.steps->size;
    if (PyTuple_Size(addresses) != size) {
        PyErr_SetString(PyExc_ValueError, "NeighbourCollective: a memory is needed of each rank");
        return -1;
    }
    one->memories = PyMem_Calloc((size_t)size, sizeof(char *));
    if (one->memories == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int rank = 0; rank < size; rank++)
        one->memories[rank] = PyLong_AsVoidPtr(PyTuple_GetItem(addresses, rank));
    return PyErr_Occurred() ? -1 : 0;
}

static int init_neighbour_collective(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    NeighbourCollective *one = (NeighbourCollective *)self;
    Collective *base = &one->base;
    PyObject *steps, *rounds, *addresses;
    const char *name;
    unsigned long signature;
    Py_ssize_t source_bytes, target_bytes, half_bytes;
    int in_place;
    if (!PyArg_ParseTuple(args, "OskpnnO!O!n", &steps, &name, &signature, &in_place, &source_bytes, &target_bytes,
                          &PyTuple_Type, &rounds, &PyTuple_Type, &addresses, &half_bytes))
        return -1;
    if (base->steps != NULL || source_bytes < 0 || target_bytes < 0 || half_bytes < 0 ||
        strlen(name) >= sizeof one->name ||
        (in_place && source_bytes != target_bytes) || !PyObject_HasAttrString(steps, "list_late_ranks") ||
        ((Steps *)steps)->processes == NULL || ((Steps *)steps)->slots == NULL) {
        PyErr_SetString(PyExc_ValueError, "NeighbourCollective: invalid arguments, or initialised twice");
        return -1;
    }
    base->steps = (Steps *)Py_NewRef(steps);
    base->signature = (uint32_t)signature;
    base->itemsize = 1;
    base->source_bytes = (size_t)source_bytes;
    base->target_bytes = (size_t)target_bytes;
    base->has_result = true;
    base->uses_ring = true;   /* so that its description is kept: this rank may be ahead of others */
    base->keeps_gil = true;   /* to wait; it is released for copies that take long */
    memcpy(one->name, name, strlen(name));
    one->in_place = in_place != 0;
    one->half_bytes = (size_t)half_bytes;
    if (read_memories(one, addresses) < 0 || read_rounds(one, rounds) < 0)
        return -1;
    base->step_count = (uint32_t)one->round_count + 1;
    base->run = exchange; /* only now it can be carried out */
    return 0;
}

static void dealloc_neighbour_collective(PyObject *self)
{
    NeighbourCollective *one = (NeighbourCollective *)self;
    PyObject_GC_UnTrack(self);
    for (int i = 0; one->rounds != NULL && i <= one->round_count; i++) {
        PyMem_Free(one->rounds[i].sends);
        PyMem_Free(one->rounds[i].recvs);
    }
    PyMem_Free(one->rounds);
    PyMem_Free(one->peers);
    PyMem_Free(one->list);
    PyMem_Free(one->memories);
    free(one->packed[0]);
    free(one->packed[1]);
    free(one->arrived);
    free_collective(self);
}

static PyType_Slot slots[] = {
    {Py_tp_doc, "NeighbourCollective(steps, name, signature, in_place, source_bytes, target_bytes, rounds, addresses,"
                " half_bytes)\n--\n\n"
                "A collective of neighbours. Each of the rounds, the same number on all ranks, has a tuple of the"
                " messages that are sent from the input, and one of those that are received in the output; with"
                " `in_place` they are sent from the output, to which the input is copied first. A message is a tuple:"
                " the rank of the neighbour, the offset of its first byte, the bytes that are contiguous, and the"
                " extents and the strides, in bytes, of such runs. Messages may go through memory of two halves of each"
                " rank, at the `addresses`, which belongs to the steps."},
    {Py_tp_init, init_neighbour_collective},
    {Py_tp_dealloc, dealloc_neighbour_collective},
    {0, NULL},
};

PyType_Spec neighbour_collective_spec = {
    .name = "mpicoll._shm.NeighbourCollective",
    .basicsize = sizeof(NeighbourCollective),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
