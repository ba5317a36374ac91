/* Copies of memory at the speed of the caches, whatever the addresses. */

#ifndef MPICOLL_COPIES_H
#define MPICOLL_COPIES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    FILL_BYTES = 16 * 1024, /* that are filled before these are copied; a multiple of the size of each element */
    STRING_BYTES = 2048, /* from which on memcpy may use the processor's string instructions */
    PAGE_BYTES = 4096    /* of the least page: the first cache is looked up by an address within one */
};

/* Whether `rep movsb` is slow at copying between these addresses: on AMD's processors (Zen 3, 4) where the destination
 * lies less than a line behind the source, up to multiples of a page. It was measured to take 5 to 20 times as long for
 * up to 31 bytes, and 1.6 times for more. The kernel copies between processes by this instruction, and the C library
 * from some KiB on (glibc 2.33 to 2.39, https://sourceware.org/bugzilla/show_bug.cgi?id=30994). Arrays that a program
 * allocates one after another often are 16 bytes more than a multiple of a page apart. */
#if defined(__x86_64__)
bool has_slow_strings(void);

static inline bool collide(uintptr_t to, uintptr_t from)
{
    return ((to - from - 1) & (PAGE_BYTES - 1)) < 63 && has_slow_strings();
}
#else
static inline bool collide(uintptr_t to, uintptr_t from)
{
    (void)to, (void)from;
    return false;
}
#endif

/* Copy without string instructions, between arrays that don't overlap. */
void copy_lines(char *to, const char *from, size_t nbytes);

/* Copy between arrays that don't overlap. */
static inline void copy(char *to, const char *from, size_t nbytes)
{
    if (nbytes >= STRING_BYTES && collide((uintptr_t)to, (uintptr_t)from))
        copy_lines(to, from, nbytes);
    else if (nbytes > 0)
        memcpy(to, from, nbytes);
}

/* Fill `nbytes` bytes, a multiple of `size`, with copies of the element at `from`, which is not among them. */
void fill(char *to, size_t nbytes, const char *from, size_t size);

/* Whether the arrays of all ranks, of so many bytes in all, are larger than the L3 cache, as far as its size counts. */
bool exceeds_cache(size_t nbytes);

#endif
