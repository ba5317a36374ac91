/* The choice between the slots and the private memory of other ranks, by the time that both have taken.
 *
 * Which of the two is faster depends on where the inputs lie. The slots take two copies in user space, of which the
 * second one reads what another core has just written; the kernel copies once, but needs time for each page, and is
 * slow at reading what another core has just written. Where a program passes a new input in each call, the slots win
 * up to about 1 MiB; where it passes the same one again, the core that reads it has it in its cache.
 *
 * So the calls of a collective form rounds. The first ones of a round take the slots, the next ones read, and all
 * others do what took less time on the slowest rank. The ranks post their times before each call, with the number of
 * the call, of which that of rank 0 counts: all of them choose alike, even if one has forgotten its times.
 *
 * What is timed is the whole call, waits included. A rank that has no result may write for the next call while others
 * still read for this one: what it waits for then belongs to the time of a call in a series of them, which is that of
 * the slowest rank. It differs from call to call, so the mean of most calls counts, not the least; and the lesser mean
 * of two rounds, since other programs may disturb a whole round.
 *
 * A rank that expects the slots writes its first piece before the step in which the ranks choose. If all have, that
 * step is also the one of the first piece, so the choice takes no time. A call reads only if no rank has.
 */

#define _GNU_SOURCE
#include "path_trials.h"

#include "clock.h"

enum {
    LATE = 8, /* calls before the first round: the slots of a message are at different places in that many */
    TRIES = MOST_TRIES, /* of each path in a round, of which the slowest quarter does not count: other programs may
                         * have disturbed it, or the change of the path */
    LARGE = 4 << 20, /* bytes from which on a slot has one place, and reads are what calls before the first round do */
    LARGE_TRIES = 4, /* of fewer calls, since the first ones have to get memory */
    LARGE_LATE = 4,
    MARGIN = 16, /* reads must be faster by one part in so many: the slots do not become slower with new inputs */
    CALL_BITS = 11,
    CALLS = 1 << CALL_BITS, /* the last ones come before the first round */
    TIME_BITS = 26,
    UNIT = 8 /* nanoseconds: a call of more than half a second has the greatest time */
};

static const uint32_t LONGEST = (1u << TIME_BITS) - 1;

/* The first calls of a program are unlike later ones: so rounds are short at first, and only the last one repeats. */
static const uint32_t rounds[] = {0, 32, 128, 1024};

_Static_assert(CALL_BITS + 1 + 2 * TIME_BITS <= 64, "all that is posted is one number");

void begin_trials(PathTrials *trials, size_t nbytes)
{
    const bool large = nbytes >= LARGE;
    *trials = (PathTrials){
        .tries = large ? LARGE_TRIES : TRIES,
        .call = CALLS - (large ? LARGE_LATE : LATE),
        .typical = {large ? LONGEST : 0, 0},
    };
}

void begin_trial(PathTrials *trials)
{
    trials->begin = read_nanoseconds(CLOCK_MONOTONIC);
    trials->is_timed = trials->written = false;
}

bool expect_slots(PathTrials *trials)
{
    const bool expects = trials->expects_slots;
    trials->expects_slots = false; /* until the ranks choose again: they don't where the arrays lie in segments */
    return expects;
}

int64_t pack_trials(const PathTrials *trials)
{
    const uint64_t head = (uint64_t)trials->call << 1 | (trials->written ? 1 : 0);
    return (int64_t)((head << TIME_BITS | trials->typical[0]) << TIME_BITS | trials->typical[1]);
}

/* The first call of the round that a call belongs to. */
static uint32_t find_round(uint32_t call)
{
    uint32_t first = 0;
    for (size_t i = 0; i < sizeof rounds / sizeof rounds[0]; i++)
        first = call >= rounds[i] ? rounds[i] : first;
    return first;
}

static uint32_t count_call(uint32_t call)
{
    const uint32_t last = CALLS - LATE - 1;
    return call == last ? rounds[sizeof rounds / sizeof rounds[0] - 1] : (call + 1) % CALLS;
}

bool choose_reads(PathTrials *trials, const int64_t *posted, int size)
{
    const uint32_t call = (uint32_t)((uint64_t)posted[0] >> (2 * TIME_BITS + 1));
    uint32_t slots = 0, reads = 0; /* of the slowest rank */
    int written = 0;
    for (int rank = 0; rank < size; rank++) {
        const uint32_t own_slots = (uint32_t)((uint64_t)posted[rank] >> TIME_BITS) & LONGEST;
        const uint32_t own_reads = (uint32_t)(uint64_t)posted[rank] & LONGEST;
        slots = own_slots > slots ? own_slots : slots;
        reads = own_reads > reads ? own_reads : reads;
        written += (int)((uint64_t)posted[rank] >> 2 * TIME_BITS & 1);
    }
    const uint32_t place = call - find_round(call); /* in the round */
    if (place == 0) {
        for (int path = 0; path < 2; path++) {
            trials->former[path] = trials->measured[path];
            trials->timed[path] = trials->measured[path] = trials->typical[path] = 0;
        }
    }
    const bool wins = reads + reads / MARGIN < slots;
    const bool chosen = place < trials->tries ? false : place < 2 * trials->tries ? true : wins;
    trials->call = count_call(call);
    const uint32_t next = trials->call - find_round(trials->call);
    /* After the last trial not all ranks' times are known. */
    trials->expects_slots = next < trials->tries || (next > 2 * trials->tries && !chosen);
    trials->reads = chosen && written == 0;
    trials->is_timed = place < 2 * trials->tries && trials->reads == chosen;
    trials->written = written == size;
    return trials->reads;
}

/* The mean time of the calls of a path, without the slowest ones. */
static uint32_t find_typical(const uint32_t *times, uint32_t count)
{
    uint32_t sorted[MOST_TRIES];
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = i;
        for (; at > 0 && sorted[at - 1] > times[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = times[i];
    }
    const uint32_t kept = count - (count + 2) / 4;
    uint64_t total = 0;
    for (uint32_t i = 0; i < kept; i++)
        total += sorted[i];
    return (uint32_t)(total / kept);
}

void end_trial(PathTrials *trials)
{
    const int path = trials->reads;
    if (!trials->is_timed || trials->timed[path] == MOST_TRIES)
        return;
    const int64_t units = (read_nanoseconds(CLOCK_MONOTONIC) - trials->begin) / UNIT + 1;
    trials->times[path][trials->timed[path]++] = units < LONGEST ? (uint32_t)units : LONGEST;
    const uint32_t measured = find_typical(trials->times[path], trials->timed[path]), former = trials->former[path];
    trials->measured[path] = measured;
    trials->typical[path] = former != 0 && former < measured ? former : measured;
}
