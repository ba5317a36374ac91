/* The choice between the slots and the private memory of other ranks, by the time that both have taken.
 *
 * Which of the two is faster depends on where the inputs lie. The slots take two copies in user space, of which the
 * second one reads what another core has just written; the kernel copies once, but needs time for each page, and is
 * slow at reading what another core has just written. Where a program passes a new input in each call, the slots win
 * up to about 1 MiB; where it passes the same one again, the core that reads it has it in its cache.
 *
 * So the calls of a collective form rounds. The first ones of a round take the slots, the next ones read, and all
 * others do what took less time on the slowest rank. The ranks post their times before each call, with the number of
 * the call in its round, of which that of rank 0 counts: all of them choose alike, even if one has forgotten its times.
 */

#define _GNU_SOURCE
#include "path_trials.h"

#include <time.h>

enum {
    ROUND = 1024, /* calls */
    LATE = 8,     /* calls before the first round: the slots of a message are at different places in that many */
    TRIES = 8,    /* of each path in a round: their least time counts, since other programs may disturb some */
    LARGE = 4 << 20, /* bytes from which on a slot has one place, and disturbances matter less */
    LARGE_TRIES = 2,
    CALL_BITS = 10,
    TIME_BITS = 27,
    UNIT = 8 /* nanoseconds: a call of more than a second has the greatest time */
};

static const uint32_t LONGEST = (1u << TIME_BITS) - 1;

_Static_assert(ROUND == 1 << CALL_BITS && CALL_BITS + 2 * TIME_BITS <= 64, "all that is posted is one number");

static int64_t read_nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void begin_trials(PathTrials *trials, size_t nbytes)
{
    const bool large = nbytes >= LARGE;
    *trials = (PathTrials){.tries = large ? LARGE_TRIES : TRIES, .call = large ? 0 : ROUND - LATE};
}

int64_t pack_trials(const PathTrials *trials)
{
    const uint64_t times = (uint64_t)trials->least[0] << TIME_BITS | trials->least[1];
    return (int64_t)((uint64_t)trials->call << 2 * TIME_BITS | times);
}

bool choose_reads(PathTrials *trials, const int64_t *posted, int size)
{
    const uint32_t call = (uint32_t)((uint64_t)posted[0] >> 2 * TIME_BITS);
    uint32_t slots = 0, reads = 0; /* of the slowest rank */
    for (int rank = 0; rank < size; rank++) {
        const uint32_t own_slots = (uint32_t)((uint64_t)posted[rank] >> TIME_BITS) & LONGEST;
        const uint32_t own_reads = (uint32_t)(uint64_t)posted[rank] & LONGEST;
        slots = own_slots > slots ? own_slots : slots;
        reads = own_reads > reads ? own_reads : reads;
    }
    if (call == 0)
        trials->least[0] = trials->least[1] = 0;
    trials->reads = call < trials->tries ? false : call < 2 * trials->tries ? true : reads < slots;
    trials->call = (call + 1) % ROUND;
    trials->begin = call < 2 * trials->tries ? read_nanoseconds() : 0;
    return trials->reads;
}

void end_trial(PathTrials *trials)
{
    if (trials->begin == 0)
        return;
    const int64_t units = (read_nanoseconds() - trials->begin) / UNIT + 1;
    uint32_t *least = &trials->least[trials->reads];
    if (*least == 0 || units < *least)
        *least = units < LONGEST ? (uint32_t)units : LONGEST;
    trials->begin = 0;
}
