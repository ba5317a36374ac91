/* The prefixes of exscan and scan. */

#ifndef MPICOLL_PREFIXES_H
#define MPICOLL_PREFIXES_H

#include <stdbool.h>
#include <stddef.h>

#include "collectives.h"

static inline bool is_prefix(const Collective *one)
{
    return one->access == ACCESS_PREFIX || one->access == ACCESS_PREFIXES;
}

/* Replace the operand of each rank, but of rank 0, by the combination of those of the ranks before it, with scan also
 * of its own. `parts` are `nbytes` bytes of each operand; this rank's result is written to `own` instead, which may be
 * its operand. */
void reduce_all_prefixes(const Collective *one, const void *const *parts, char *own, size_t nbytes);

/* Write the output of rank 0, on that rank: its input, or with exscan the identity. */
void write_first_prefix(const Collective *one, const char *source, char *target);

#endif
