/* The time of the monotonic clock. */

#ifndef MPICOLL_CLOCK_H
#define MPICOLL_CLOCK_H

#include <stdint.h>

/* Return the nanoseconds of CLOCK_MONOTONIC, with an error of a few microseconds at most. The GIL is held. */
uint64_t read_clock(void);

#endif
