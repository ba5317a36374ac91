/* The synchronisation of the ranks of a node by flags in memory that they share. */

#ifndef MPICOLL_STEPS_H
#define MPICOLL_STEPS_H

#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    POSTED = 8, /* numbers that a rank posts in a step */
    SMALL_SLOT_BYTES = 48,
    AHEAD = 128, /* steps after the last one in which a rank has seen the words of all ranks: ranks that share cores
                    change places once for half a ring of calls of one that only sends */
    MAX_BEGUN = 8, /* steps that a rank has begun and not completed */
    RING = 2 * AHEAD, /* words, small and ring slots of a rank */
    RING_SLOT_BYTES = 1024,
    RING_STRIDE = RING_SLOT_BYTES + 128, /* not a distance at which caches keep all slots in the same few places */
    RING_BYTES = RING * RING_STRIDE,
    TEXT_BYTES = 1024 /* of the description of a call, with its length */
};

/* The running operation, which is shown to Python before Python code runs that may ask for it. */
typedef struct Running Running;
struct Running {
    int (*publish)(Running *running); /* returns -1 with an exception */
    int record;
};

/* What a rank looks at: the words of ranks in a step. */
typedef struct {
    uint32_t step;
    int next, end;            /* ranks: those before `next` have been seen */
    uint32_t own, difference; /* signatures */
    bool describes;           /* the words of ranks that have to publish descriptions, and not those of the others */
} Words;

/* A call in whose step this rank does not wait for all others. */
typedef struct {
    PyObject *call, *text;     /* the call and its description, which other ranks read */
    unsigned long long number; /* among the collectives of the communicator */
} Kept;

/* The steps of one communicator on this rank. Each step has a parity: a rank writes to the slots of the parity of its
 * next step, and after that step reads what the other ranks have written to theirs. Two slots of each rank suffice: a
 * rank that writes to a slot has completed the step before, so no other rank reads what was written two steps ago.
 * Ranks that may be ahead of others use small and ring slots, of which there are as many as words. */
typedef struct {
    PyObject_HEAD
    Py_buffer memory; /* of the flags */
    char *flags;
    int rank, size;
    int *members;           /* the ranks, as ranks of the job */
    uint32_t step;
    uint32_t seen;          /* the step up to which the words of all ranks have been seen */
    uint32_t signature;     /* of the running operation and the index of its step, never 0 */
    int begun;              /* the last steps, which this rank has begun and not completed */
    bool has_own_core;      /* no other rank of the node uses it */
    int patience;           /* long polls that may still fail while other programs use the core */
    bool unusable;          /* this rank has abandoned an operation */
    bool left;              /* the running operation has ended by a failure, on all ranks */
    uint32_t different_step; /* in which the words have differed */
    Words late;             /* those that this rank waits for, without the GIL or in Python */
    bool is_waiting;        /* for these */
    Kept call;              /* the running operation, if C has begun it and has its description; borrowed */
    Kept kept[RING];        /* the operations of the last steps */
    bool different;         /* because the ranks have begun different operations */
    uint32_t first;         /* number of the step before the running operation */
    uint32_t last;          /* number of the last step of the running operation */
    PyObject *interrupt;    /* exception of a signal handler, to be raised at the end of the operation; or NULL */
    bool keeps_interrupt;   /* until Python takes it */
    PyThreadState *released; /* the state of the thread that has released the GIL; NULL while it is held */
    int waiting;            /* record of the operation, while this rank waits in Python; else -1 */
    Running *running;       /* NULL where Python has begun the operation */
    char **slots;           /* of both parities, by rank: slots[parity * size + rank] */
    char *results[2];       /* of both parities, shared by the ranks */
    size_t slot_bytes;
    int threads;              /* that may work on a large array, with the calling one */
    struct Segment *segments; /* memory that all ranks have mapped besides the slots (direct.c) */
    bool has_segments;        /* there have been some; the same on all ranks */
    int *processes;           /* of the ranks, whose private memory can be read; 0: threads of this one */
    int unreadable_rank;      /* that forbade it in the last operation that would have read it; else -1 */
    struct Locations *locations;
    unsigned streamed_writes; /* to come, before ordinary stores to memory of other ranks are tried again */
    unsigned slow_writes;     /* by ordinary stores, the last ones in a row */
    unsigned slow_ticks;      /* for a line of these; 0: there has been none */
    unsigned slow_streams;    /* streamed writes that were not faster, the last ones in a row */
    unsigned stored_writes;   /* to come, before streaming stores are tried again */
} Steps;

static inline int get_parity(const Steps *steps) { return (int)(steps->step & 1); }

static inline char *get_slot(const Steps *steps, int parity, int rank)
{
    return steps->slots[parity * steps->size + rank];
}

/* Return a rank's slot for data of at most SMALL_SLOT_BYTES that is written before a step: one transfer between caches
 * brings it with the flag. It is aligned to 16 bytes. */
char *get_small_slot(const Steps *steps, uint32_t step, int rank);

/* Return a rank's slot for data of at most RING_SLOT_BYTES that is written before a step. */
char *get_ring_slot(const Steps *steps, uint32_t step, int rank);

/* The numbers that a rank posts in its next step, of parity `get_parity`, or has posted in the last one. */
int64_t *get_posted(const Steps *steps, int rank, int parity);

/* End a step: what the ranks wrote before is visible to all of them. Returns 0; or -1 with an exception, if the ranks
 * carry out different operations, one of them has failed in this one, or the wait for them has failed. Called with the
 * GIL or, after release_gil, without it. */
int sync_ranks(Steps *steps);

/* The same in two parts. Others may go on as soon as this rank has reached the step; what it does before it completes
 * the step concerns none of them. `status` is what reach_step has returned. */
int reach_step(Steps *steps);
int complete_reached_step(Steps *steps, int status);

/* End a step as sync_ranks, but wait only for the ranks from `first` to before `last`, whose data this rank reads.
 * What it has written lies in a small or ring slot. The words of the other ranks are compared before this rank is
 * AHEAD steps further, at the latest. In an operation whose `call` has a description, which is kept in shared memory;
 * others wait for all ranks. */
int sync_with(Steps *steps, int first, int last);

/* End a step as sync_with, but wait only for `count` other ranks. */
int sync_with_each(Steps *steps, const int *ranks, int count);

/* Return true if a step can be begun without waiting: by an operation whose `call` has a description, as in sync_with.
 * What it writes lies in a small or ring slot; or in another one, which is `alone`: all earlier steps have been
 * completed on this rank, and no other one is begun before it is. */
bool can_begin(Steps *steps, bool alone);

/* Begin a step, which ends when the words of all ranks have been seen. */
void begin_step(Steps *steps);

/* Look at the words that have been stored. Return 1 if the oldest step that was begun can be completed without waiting,
 * 0 if not, -1 if the words of a step differ before. */
int test_begun_step(Steps *steps);

/* Complete the oldest step that was begun. Returns as sync_ranks; with an exception, none is begun any more, and the
 * ranks are synchronised again unless `unusable` is set. */
int complete_step(Steps *steps, uint32_t step);

/* End all steps that were begun without completing them. The other ranks can't be synchronised with this one any more.
 */
void abandon_begun_steps(Steps *steps);

/* Wait until all ranks have reached the last step of this rank, and compare their words. The slots and posted numbers
 * of both parities can be written afterwards. Returns as sync_ranks. */
int catch_up(Steps *steps);

/* Begin to write to private memory of another rank, for a moment. Returns false if that rank has abandoned an
 * operation, so that its arrays may not be written any more; otherwise it waits with that until `end_write`. Any thread
 * may call this. */
bool begin_write(const Steps *steps, int rank);
void end_write(const Steps *steps);

/* End a step in which this rank has failed. As sync_ranks, but the failure of this rank is not an exception. */
int sync_failed(Steps *steps);

/* End the running operation on all ranks, which have seen in its last step that blocks differ in size from what their
 * receivers expect. Raises the error. */
void raise_row_mismatch(Steps *steps);

/* Return the steps of a Python object; NULL with an exception if it was not initialised, and has no memory. */
Steps *as_steps(PyObject *self);

void release_gil(Steps *steps);
void acquire_gil(Steps *steps);

/* Raise the exception that a signal handler has raised during the operation, which has ended, in place of any other
 * one. Returns -1 then; 0 if there is none, or Python takes it. The GIL is held. */
int raise_interrupt(Steps *steps);

extern PyType_Spec steps_spec;

#endif
