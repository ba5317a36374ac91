/* The time of the monotonic clock, for a third of the cost of clock_gettime.
 *
 * Linux derives it from a counter of the processor. For WINDOW after a reading of the clock the counter alone is read:
 * should it not run evenly although it did before, results are wrong by WINDOW at most, or do not advance for as long.
 */

#define _GNU_SOURCE
#include "clock.h"

#include <stdbool.h>
#include <time.h>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

/* Nanoseconds. */
static const uint64_t WINDOW = 100000000, CALIBRATION = 10000000;

/* Ticks between which the clock was read without an interruption, at any frequency of a counter. */
enum { MAX_READING = 1000 };

static uint64_t base, base_ticks; /* a reading of the clock, and of the counter at that time */
static uint64_t window;           /* ticks after it in which the counter alone is read */
static double scale;              /* nanoseconds of a tick */
static uint64_t last;             /* result */

static inline uint64_t read_counter(void)
{
#if defined(__x86_64__)
    return __rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return 0;
#endif
}

/* Read the clock, and compare the counter with it. */
static uint64_t calibrate(void)
{
    const uint64_t before = read_counter(), now = (uint64_t)read_nanoseconds(CLOCK_MONOTONIC), after = read_counter();
    if (after == 0 || after - before > MAX_READING)
        return now;
    const uint64_t passed = now - base, ticks = before - base_ticks;
    if (base != 0 && passed < CALIBRATION)
        return now;
    if (base != 0 && ticks > 0) {
        const double found = (double)passed / (double)ticks;
        const bool even = scale > 0 && found > 0.9999 * scale && found < 1.0001 * scale;
        window = even ? (uint64_t)((double)WINDOW / found) : 0;
        scale = found;
    }
    base = now;
    base_ticks = before;
    return now;
}

uint64_t read_clock(void)
{
    const uint64_t ticks = read_counter() - base_ticks;
    const uint64_t now = ticks < window ? base + (uint64_t)((double)ticks * scale) : calibrate();
    last = now > last ? now : last;
    return last;
}
