/* Writes to memory that other ranks read, and to large arrays, around the caches where that is faster.
 *
 * What a rank writes to a slot lies in the caches of the cores that have read it in an earlier step. Before a store
 * such a cache line is withdrawn from them, line by line, since stores take effect in order: within a group of cores
 * with a common cache 7 to 10 ns a line were measured, between two groups 28, where a copy to memory of its own takes
 * 1.4. Streaming stores withdraw a line without waiting: 2 ns a line, but the reader gets it from memory, for 5 ns
 * instead of 2 to 4. Two threads of one core share all caches: there, ordinary stores are best.
 *
 * Which cores a rank and its readers run on is not known, and changes in a virtual machine. So a rank times its
 * ordinary writes; while they are slow it writes around the caches, with an ordinary write from time to time. Others
 * need not know how it writes. It times the streaming stores, too: where other programs use the memory, both are slow,
 * and these gain less than their reader loses.
 */

#define PY_SSIZE_T_CLEAN
#include "shared_writes.h"

#include <limits.h>
#include <string.h>

#include "copies.h"
#include "workers.h"

typedef struct {
    void (*write)(char *to, const char *from, size_t nbytes);
    char *to;
    const char *from;
} Write;

static void write_share(const void *task, int share, size_t begin, size_t end)
{
    const Write *whole = task;
    (void)share;
    whole->write(whole->to + begin, whole->from + begin, end - begin);
}

/* Write in several threads if that is faster. Returns the number of threads that have. */
static size_t write_in_threads(const Steps *steps, const Write *whole, size_t nbytes)
{
    if (nbytes < SHARED_BYTES || steps->threads < 2) {
        whole->write(whole->to, whole->from, nbytes);
        return 1;
    }
    return (size_t)run_shares(steps->threads, write_share, whole, nbytes);
}

#if defined(__x86_64__)
#include <immintrin.h>

enum {
    LINE = 64,
    STREAM_AT = 8 * 1024, /* bytes; the first lines of a shorter write are not waited for */
    SLOW_TICKS = 16,      /* of the processor's counter for a line: 5 to 8 ns */
    SLOW_WRITES = 3,      /* in a row: one may have been interrupted */
    STREAMED_WRITES = 64, /* until ordinary stores are tried again */
    STREAM_GAIN = 2,      /* times as fast as ordinary stores, at least */
    STORED_WRITES = 256   /* after which streaming stores, which were not, are tried again */
};

void stream_and_fetch(char *to, const char *from, size_t nbytes, const char *next)
{
    const size_t odd = -(uintptr_t)to & (LINE - 1), head = odd < nbytes ? odd : nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= LINE; to += LINE, from += LINE, nbytes -= LINE, next += LINE) {
        __builtin_prefetch(next);
        for (int at = 0; at < LINE; at += 16)
            _mm_stream_si128((__m128i *)(void *)(to + at), _mm_loadu_si128((const __m128i *)(const void *)(from + at)));
    }
    memcpy(to, from, nbytes);
}

/* Streaming stores are ordered neither by the release of a flag nor by other stores. */
void end_streams(void) { _mm_sfence(); }

void stream(char *to, const char *from, size_t nbytes)
{
    /* What is in the cache is fetched at once. */
    stream_and_fetch(to, from, nbytes, from);
    end_streams();
}

/* Copy by `write`, and return the ticks for a line. */
static unsigned time_write(const Steps *steps, const Write *whole, size_t nbytes)
{
    const unsigned long long begin = __rdtsc();
    const size_t threads = write_in_threads(steps, whole, nbytes);
    const unsigned long long ticks = (__rdtsc() - begin) * threads / (nbytes / LINE + 1);
    return ticks < UINT_MAX ? (unsigned)ticks : UINT_MAX;
}

/* Copy by streaming stores, and end these if they have not been fast enough several times. */
static void write_streaming(Steps *steps, char *to, const char *from, size_t nbytes)
{
    const unsigned ticks = time_write(steps, &(Write){stream, to, from}, nbytes);
    if (steps->slow_ticks == 0 || ticks <= steps->slow_ticks / STREAM_GAIN) {
        steps->slow_streams = 0;
    } else if (++steps->slow_streams == SLOW_WRITES) {
        steps->slow_streams = steps->slow_writes = steps->streamed_writes = 0;
        steps->stored_writes = STORED_WRITES;
    }
}

void write_shared(Steps *steps, char *to, const char *from, size_t nbytes)
{
    size_t tried = 0;
    if (nbytes < STREAM_AT) {
        copy(to, from, nbytes);
        return;
    }
    if (steps->streamed_writes > 0) {
        steps->streamed_writes--;
    } else if (steps->stored_writes > 0) {
        steps->stored_writes--;
        write_in_threads(steps, &(Write){copy, to, from}, nbytes);
        return;
    } else {
        /* While ordinary stores are known to be slow, only as much as it takes to see whether they still are. */
        tried = steps->slow_writes < SLOW_WRITES ? nbytes : STREAM_AT;
        const unsigned ticks = time_write(steps, &(Write){copy, to, from}, tried);
        if (ticks < SLOW_TICKS) {
            steps->slow_writes = 0;
            write_in_threads(steps, &(Write){copy, to + tried, from + tried}, nbytes - tried);
            return;
        }
        /* The fastest of the slow ones: others may have been interrupted. */
        if (steps->slow_writes == 0 || ticks < steps->slow_ticks)
            steps->slow_ticks = ticks;
        if (steps->slow_writes < SLOW_WRITES)
            steps->slow_writes++;
        if (steps->slow_writes == SLOW_WRITES)
            steps->streamed_writes = STREAMED_WRITES;
    }
    if (tried < nbytes)
        write_streaming(steps, to + tried, from + tried, nbytes - tried);
}
#else
void stream(char *to, const char *from, size_t nbytes) { copy(to, from, nbytes); }

void stream_and_fetch(char *to, const char *from, size_t nbytes, const char *next)
{
    (void)next;
    copy(to, from, nbytes);
}

void end_streams(void) {}

void write_shared(Steps *steps, char *to, const char *from, size_t nbytes)
{
    write_in_threads(steps, &(Write){copy, to, from}, nbytes);
}
#endif

void stream_in_threads(const Steps *steps, char *to, const char *from, size_t nbytes)
{
    write_in_threads(steps, &(Write){stream, to, from}, nbytes);
}
