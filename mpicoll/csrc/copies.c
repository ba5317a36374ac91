/* Copies of memory by ordinary loads and stores. */

#include "copies.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <stdatomic.h>

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
