/* The time of the monotonic clock. */

#ifndef MPICOLL_CLOCK_H
#define MPICOLL_CLOCK_H

#include <stdint.h>

/* Return the nanoseconds of CLOCK_MONOTONIC, give or take microseconds where the processor's counter runs evenly. The
 * GIL is held. */
uint64_t read_clock(void);

#endif
