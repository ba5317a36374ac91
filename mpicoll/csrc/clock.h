/* The time of the monotonic clock. */

#ifndef MPICOLL_CLOCK_H
#define MPICOLL_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Return the nanoseconds of CLOCK_MONOTONIC, give or take microseconds where the processor's counter runs evenly. The
 * GIL is held. */
uint64_t read_clock(void);

/* Return the nanoseconds of a clock of the system. */
static inline int64_t read_nanoseconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#endif
