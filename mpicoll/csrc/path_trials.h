/* The choice between the slots and the private memory of other ranks, by the time that both have taken. */

#ifndef MPICOLL_PATH_TRIALS_H
#define MPICOLL_PATH_TRIALS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The trials of one collective, of which this rank knows its own times. */
typedef struct {
    uint32_t tries;    /* of each path in a round */
    uint32_t call;     /* of the round that rank 0 is in */
    uint32_t least[2]; /* time of a call in this round, through the slots and by reads; 0: none has been timed */
    int64_t begin;     /* of the running call; 0 if it is not timed */
    bool reads;        /* the running call */
} PathTrials;

/* Begin the trials of a collective of `nbytes` bytes, the same on all ranks. */
void begin_trials(PathTrials *trials, size_t nbytes);

/* Return what this rank has to post before a call. */
int64_t pack_trials(const PathTrials *trials);

/* Begin a call, and return true if it reads: the same on all ranks, which pass what all of them have posted. */
bool choose_reads(PathTrials *trials, const int64_t *posted, int size);

/* End a call. */
void end_trial(PathTrials *trials);

#endif
