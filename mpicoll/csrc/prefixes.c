/* The prefixes of exscan and scan.
 *
 * Where each rank combines the operands of all ranks before it, the last of P ranks reads all of them, n P bytes, while
 * the first one is idle. Where it combines a share of the operands for all ranks instead, each reads n bytes and writes
 * n: each prefix is the one before it, combined with one more operand, which gives the same bits as to combine all
 * operands in order. Only the halves, of which a total is kept in float32 and rounded once, are combined from the first
 * operand on for each rank.
 */

#define PY_SSIZE_T_CLEAN
#include "prefixes.h"

enum { TILE = 8 * 1024 /* bytes of each operand, which stay in the nearest caches */ };

static char *find_result(const Collective *one, const void *const *parts, char *own, int rank, size_t at)
{
    return rank == one->steps->rank ? own + at : (char *)(uintptr_t)parts[rank] + at;
}

static void combine(const Collective *one, char *result, const char *before, const char *next, size_t nbytes)
{
    const void *const operands[2] = {before, next};
    one->reduce(result, operands, 2, nbytes / one->itemsize);
}

static void scan_tile(const Collective *one, const void *const *parts, char *own, size_t at, size_t nbytes)
{
    const char *before = (const char *)parts[0] + at;
    for (int rank = 1; rank < one->steps->size; rank++) {
        char *result = find_result(one, parts, own, rank, at);
        combine(one, result, before, (const char *)parts[rank] + at, nbytes);
        before = result;
    }
}

static void exscan_tile(const Collective *one, const void *const *parts, char *own, size_t at, size_t nbytes)
{
    _Alignas(CACHE_LINE) char totals[2][TILE];
    const char *before = (const char *)parts[0] + at;
    for (int rank = 1; rank < one->steps->size; rank++) {
        char *total = totals[rank & 1];
        /* First, since the result may take the place of the operand. */
        if (rank < one->steps->size - 1)
            combine(one, total, before, (const char *)parts[rank] + at, nbytes);
        copy(find_result(one, parts, own, rank, at), before, nbytes);
        before = total;
    }
}

/* From the last rank on, since results take the place of operands that only later ranks need. */
static void combine_from_first(const Collective *one, const void *const *parts, char *own, size_t nbytes)
{
    for (int rank = one->steps->size - 1; rank > 0; rank--) {
        const int operands = rank + (one->inclusive ? 1 : 0);
        char *result = find_result(one, parts, own, rank, 0);
        if (operands == 1)
            copy(result, parts[0], nbytes);
        else
            one->reduce(result, parts, operands, nbytes / one->itemsize);
    }
}

void reduce_all_prefixes(const Collective *one, const void *const *parts, char *own, size_t nbytes)
{
    if (!one->rounds_each) {
        combine_from_first(one, parts, own, nbytes);
        return;
    }
    for (size_t at = 0; at < nbytes; at += TILE)
        (one->inclusive ? scan_tile : exscan_tile)(one, parts, own, at, min_size(TILE, nbytes - at));
}

void write_first_prefix(const Collective *one, const char *source, char *target)
{
    if (one->steps->rank > 0)
        return;
    if (!one->inclusive)
        fill_identity(one, target, one->nbytes);
    else if (target != source)
        copy_out(one, target, source, one->nbytes);
}
