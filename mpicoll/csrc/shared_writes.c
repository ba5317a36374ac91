/* Writes to memory that other ranks read, around the caches where that is faster.
 *
 * What a rank writes to a slot lies in the caches of the cores that have read it in an earlier step. Before a store
 * such a cache line is withdrawn from them, line by line, since stores take effect in order: within a group of cores
 * with a common cache 7 to 10 ns a line were measured, between two groups 28, where a copy to memory of its own takes
 * 1.4. Streaming stores withdraw a line without waiting: 2 ns a line, but the reader gets it from memory, for 5 ns
 * instead of 2 to 4. Two threads of one core share all caches: there, ordinary stores are best.
 *
 * Which cores a rank and its readers run on is not known, and changes in a virtual machine. So a rank times its
 * ordinary writes; while they are slow it writes around the caches, with an ordinary write from time to time. Others
 * need not know how it writes.
 */

#define PY_SSIZE_T_CLEAN
#include "shared_writes.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

enum {
    LINE = 64,
    STREAM_AT = 8 * 1024, /* bytes; the first lines of a shorter write are not waited for */
    SLOW_TICKS = 16,      /* of the processor's counter for a line: 5 to 8 ns */
    SLOW_WRITES = 3,      /* in a row: one may have been interrupted */
    STREAMED_WRITES = 64  /* until ordinary stores are tried again */
};

static void stream(char *to, const char *from, size_t nbytes)
{
    const size_t odd = -(uintptr_t)to & (LINE - 1), head = odd < nbytes ? odd : nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= LINE; to += LINE, from += LINE, nbytes -= LINE) {
        for (int at = 0; at < LINE; at += 16)
            _mm_stream_si128((__m128i *)(void *)(to + at), _mm_loadu_si128((const __m128i *)(const void *)(from + at)));
    }
    memcpy(to, from, nbytes);
    /* Streaming stores are ordered neither by the release of a flag nor by other stores. */
    _mm_sfence();
}

/* Copy by ordinary stores, and return true if these are slow. */
static bool copy_slowly(char *to, const char *from, size_t nbytes)
{
    const unsigned long long begin = __rdtsc();
    memcpy(to, from, nbytes);
    return (__rdtsc() - begin) / SLOW_TICKS >= nbytes / LINE;
}

void write_shared(Steps *steps, char *to, const char *from, size_t nbytes)
{
    size_t tried = 0;
    if (nbytes < STREAM_AT) {
        if (nbytes > 0)
            memcpy(to, from, nbytes);
        return;
    }
    if (steps->streamed_writes > 0) {
        steps->streamed_writes--;
    } else {
        /* While ordinary stores are known to be slow, only as much as it takes to see whether they still are. */
        tried = steps->slow_writes < SLOW_WRITES ? nbytes : STREAM_AT;
        if (!copy_slowly(to, from, tried)) {
            steps->slow_writes = 0;
            memcpy(to + tried, from + tried, nbytes - tried);
            return;
        }
        if (steps->slow_writes < SLOW_WRITES)
            steps->slow_writes++;
        if (steps->slow_writes == SLOW_WRITES)
            steps->streamed_writes = STREAMED_WRITES;
    }
    stream(to + tried, from + tried, nbytes - tried);
}
#else
void write_shared(Steps *steps, char *to, const char *from, size_t nbytes)
{
    (void)steps;
    if (nbytes > 0)
        memcpy(to, from, nbytes);
}
#endif
