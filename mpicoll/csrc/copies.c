/* Copies of memory by ordinary loads and stores, and the size of the L3 cache. */

#define _GNU_SOURCE
#include "copies.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

bool has_slow_strings(void)
{
    static _Atomic int known = -1; /* every thread finds the same */
    int slow = atomic_load_explicit(&known, memory_order_relaxed);
    if (slow < 0) {
        unsigned greatest = 0, b = 0, c = 0, d = 0;
        slow = __get_cpuid(0, &greatest, &b, &c, &d) && b == signature_AMD_ebx && d == signature_AMD_edx;
        atomic_store_explicit(&known, slow, memory_order_relaxed);
    }
    return slow != 0;
}

void copy_lines(char *to, const char *from, size_t nbytes)
{
    enum { LINE = 64 };
    const size_t odd = -(uintptr_t)to & (LINE - 1), head = odd < nbytes ? odd : nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= LINE; to += LINE, from += LINE, nbytes -= LINE) {
        const __m128i *source = (const __m128i *)(const void *)from;
        __m128i *target = (__m128i *)(void *)to;
        const __m128i first = _mm_loadu_si128(source), second = _mm_loadu_si128(source + 1);
        const __m128i third = _mm_loadu_si128(source + 2), fourth = _mm_loadu_si128(source + 3);
        _mm_store_si128(target, first);
        _mm_store_si128(target + 1, second);
        _mm_store_si128(target + 2, third);
        _mm_store_si128(target + 3, fourth);
    }
    memcpy(to, from, nbytes);
}
#else
void copy_lines(char *to, const char *from, size_t nbytes) { memcpy(to, from, nbytes); }
#endif

void fill(char *to, size_t nbytes, const char *from, size_t size)
{
    size_t done = size < nbytes ? size : nbytes;
    memcpy(to, from, done);
    while (done < nbytes) {
        size_t more = done < FILL_BYTES ? done : FILL_BYTES;
        more = more < nbytes - done ? more : nbytes - done;
        copy(to + done, to, more);
        done += more;
    }
}

/* Bytes of the L3 cache of the processor that runs this; 0 if it has none, or the system does not state it. */
static size_t read_l3_bytes(void)
{
    char path[80];
    const int cpu = sched_getcpu();
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/cache/index3/size", cpu < 0 ? 0 : cpu);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return 0;
    unsigned kibibytes = 0;
    const int found = fscanf(file, "%uK", &kibibytes);
    fclose(file);
    return found == 1 ? (size_t)kibibytes * 1024 : 0;
}

/* With an L3 cache of 32 MiB, two ranks of an AMD EPYC took up to 2.3 times as long for moves of 6 and 8 MiB by stores
 * around it. Larger caches are shared by more programs: with one of 480 MiB, two ranks of an Intel Xeon took up to 1.5
 * times as long by such stores where all arrays had 128 MiB, and for exscan and alltoall less time where they had 160.
 */
bool exceeds_cache(size_t nbytes)
{
    enum { LEAST = 4 << 20, UNKNOWN = 16 << 20, WHOLE = 32 << 20 };
    static _Atomic size_t known = 0; /* every thread finds about the same */
    if (nbytes <= LEAST)
        return false;
    size_t bytes = atomic_load_explicit(&known, memory_order_relaxed);
    if (bytes == 0) {
        const size_t l3 = read_l3_bytes();
        const size_t share = l3 / 10 * 3;
        bytes = l3 == 0 ? UNKNOWN : l3 < LEAST ? LEAST : l3 < WHOLE ? l3 : share < WHOLE ? WHOLE : share;
        atomic_store_explicit(&known, bytes, memory_order_relaxed);
    }
    return nbytes > bytes;
}
