/* The choice between the slots and the private memory of other ranks, by the time that both have taken. */

#ifndef MPICOLL_PATH_TRIALS_H
#define MPICOLL_PATH_TRIALS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MOST_TRIES = 8 };

/* The trials of one collective, of which this rank knows its own times. */
typedef struct {
    uint32_t tries;    /* of each path in a round */
    uint32_t call;     /* number of the next call, as rank 0 counts */
    uint32_t timed[2]; /* calls in this round, through the slots and by reads */
    uint32_t times[2][MOST_TRIES]; /* of these */
    uint32_t measured[2]; /* typical time of a call of each path in this round; 0: none has been timed */
    uint32_t former[2];   /* the same in the previous round */
    uint32_t typical[2];  /* the lesser one; 0: none has been timed in this round */
    int64_t begin;     /* of the running call */
    bool is_timed;     /* the running call */
    bool reads;        /* the running call */
    bool expects_slots; /* for the next call, as all ranks do that have not forgotten the last one */
    bool written;      /* this rank has written its first piece to its slot before the step in which the ranks choose */
} PathTrials;

/* Begin the trials of a collective of `nbytes` bytes, the same on all ranks. */
void begin_trials(PathTrials *trials, size_t nbytes);

/* Begin a call. */
void begin_trial(PathTrials *trials);

/* Return true if this rank writes its first piece before the path of a call is chosen. */
bool expect_slots(PathTrials *trials);

/* Return what this rank has to post before the path of a call is chosen. */
int64_t pack_trials(const PathTrials *trials);

/* Choose the path of a call, and return true if it reads: the same on all ranks, which pass what all of them have
 * posted. Where it does not read, `written` is true afterwards if all ranks have written their first piece. */
bool choose_reads(PathTrials *trials, const int64_t *posted, int size);

/* End a call. */
void end_trial(PathTrials *trials);

#endif
