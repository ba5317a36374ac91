/* Collectives of the ranks of a node through slots of shared memory.
 *
 * The data goes through the slots in pieces, one step each: what a rank has written to its slot of one parity is read
 * by the others after the step, while it writes the next piece to its other slot. A collective of one piece has one
 * step, except for reductions by shares.
 *
 * Operands are combined in the order of ranks, each element by one rank or by all alike: results have the same bits on
 * every rank and in every run.
 */

#define PY_SSIZE_T_CLEAN
#include "collectives.h"

#include <structmember.h>

#include "direct.h"
#include "prefixes.h"
#include "shared_writes.h"
#include "uneven_blocks.h"

enum {
    RELEASE_AT = 256 * 1024,   /* bytes from which on the GIL is released for the whole collective: it takes 0.15 us */
    ROTATE_AT = 8 * 1024,
    ROTATED = 1024 * 1024,     /* of a slot: with those of both parities and the readers, more than a private cache */
    ACCESS_WIDTH = 256 * 1024, /* of pieces, whose result is still in the cache when it is copied to other ranks */
    PREFIX_SHARES_AT = 512 * 1024 /* bytes that the last rank of a scan would read, from which on a step costs less */
};

_Static_assert((int)RING_SLOT_BYTES < (int)ROTATE_AT, "ring slots have one place");
_Static_assert(sizeof(((Collective *)NULL)->identity) >= 2 * sizeof(double), "an element of any dtype with kernels");

/* Return where the data of a rank for a step lies.
 *
 * No slot is written while others read it:
 *
 * - Small and ring slots, for ranks that may be ahead: a rank writes the data of step s when it has seen the words of
 *   all ranks in step s - 1 - AHEAD, so all of them have read the data of the steps before that one, except for up to
 *   MAX_BEGUN steps that they have begun. It replaces that of step s - RING, which is earlier because RING >= AHEAD + 2
 *   + MAX_BEGUN. Such a slot has one place: a message that is large enough for several is too large for it.
 * - Other slots: in all operations that write to them each rank waits for all others in each step, and has caught up
 *   before the first one. One that is begun with data in such a slot is completed before its rank stores another word.
 *   So a rank writes the data of step s when all ranks have reached step s - 1, and have read
 *   that of step s - 2, the last one whose data may be in this slot, at any of its places: no place needs to be free
 *   for longer because other ranks are behind. All ranks are in step s - 1 or s, so the number of the step, from which
 *   the place follows, is the same on all of them. */
static inline char *find_slot(const Collective *one, uint32_t step, int rank)
{
    const Steps *steps = one->steps;
    if (one->is_small)
        return get_small_slot(steps, step, rank);
    if (one->uses_ring)
        return get_ring_slot(steps, step, rank);
    return get_slot(steps, (int)(1 - (step & 1)), rank) + find_place(one, step);
}

static inline int end_step(const Collective *one)
{
    return one->waits_for_all ? sync_ranks(one->steps) : sync_with(one->steps, one->first, one->last);
}

bool is_one_step(const Collective *one) { return one->write != NULL && one->step_count == 1; }

void set_places(Collective *one, size_t used)
{
    used += -used % CACHE_LINE;
    if (used < ROTATE_AT || used > ROTATED / 2 || ROTATED > one->steps->slot_bytes)
        return;
    one->stride = used;
    one->places = (uint32_t)(ROTATED / used);
}

typedef struct {
    char *to;
    const char *from;
} Copy;

static void copy_share(const void *task, int share, size_t begin, size_t end)
{
    const Copy *whole = task;
    (void)share;
    copy(whole->to + begin, whole->from + begin, end - begin);
}

void copy_in_threads(const Collective *one, char *to, const char *from, size_t nbytes)
{
    const Copy whole = {to, from};
    run_shares(one->steps->threads, copy_share, &whole, nbytes);
}

typedef struct {
    const Collective *one;
    ReduceKernel reduce;
    char *target;
    int nparts;
} Reduction;

static void reduce_share(const void *task, int share, size_t begin, size_t end)
{
    const Reduction *whole = task;
    const Collective *one = whole->one;
    const void **parts = get_parts(one, share);
    if (share > 0) {
        for (int part = 0; part < whole->nparts; part++)
            parts[part] = (const char *)one->parts[part] + begin;
    }
    whole->reduce(whole->target + begin, parts, whole->nparts, (end - begin) / one->itemsize);
}

/* Write the combination of the first `nparts` parts. */
static void reduce_parts(const Collective *one, ReduceKernel reduce, char *target, int nparts, size_t nbytes)
{
    const Reduction whole = {one, reduce, target, nparts};
    if (nbytes >= SHARED_BYTES && one->steps->threads > 1)
        run_shares(one->steps->threads, reduce_share, &whole, nbytes);
    else
        reduce(target, one->parts, nparts, nbytes / one->itemsize);
}

static void do_nothing(const Collective *one, uint32_t step, const char *source, char *target, size_t start)
{
    (void)one;
    (void)step;
    (void)source;
    (void)target;
    (void)start;
}

/* Carry out a collective whose pieces have one step each: in that step, `write` a piece, then `read` those of other
 * ranks. Compiled for each pair, since calls by pointers take up to a fifth of the time of a small operation. */
static inline __attribute__((always_inline)) int carry_out_pieces(
    const Collective *one, const char *source, char *target, PieceFunction write, PieceFunction read)
{
    uint32_t i = 0;
    if (is_written(one)) {
        read(one, one->steps->step, source, target, 0);
        i = 1;
    }
    for (; i < one->step_count; i++) {
        const uint32_t step = one->steps->step + 1;
        write(one, step, source, target, i * one->width);
        if (end_step(one) < 0)
            return -1;
        read(one, step, source, target, i * one->width);
    }
    return 0;
}

static int run_barrier(const Collective *one, const char *source, char *target)
{
    return carry_out_pieces(one, source, target, do_nothing, do_nothing);
}

/* Reduce the pieces of all ranks where the result is needed. Per rank n bytes written and n P read; one step a piece.
 */
static void write_vector(const Collective *one, uint32_t step, const char *source, char *target, size_t start)
{
    Steps *steps = one->steps;
    (void)target;
    if (one->everywhere || steps->rank != one->root)
        write_shared(steps, find_slot(one, step, steps->rank), source + start,
                     min_size(one->width, one->nbytes - start));
}

static void reduce_vectors(const Collective *one, uint32_t step, const char *source, char *target, size_t start)
{
    const Steps *steps = one->steps;
    if (!one->has_result)
        return;
    for (int peer = 0; peer < steps->size; peer++)
        one->parts[peer] = find_slot(one, step, peer);
    one->parts[steps->rank] = source + start;
    reduce_parts(one, one->reduce_out, target + start, steps->size, min_size(one->width, one->nbytes - start));
}

static int run_vectors(const Collective *one, const char *source, char *target)
{
    return carry_out_pieces(one, source, target, write_vector, reduce_vectors);
}

size_t get_share_offset(size_t nbytes, int rank, int size)
{
    size_t lines = (nbytes + CACHE_LINE - 1) / CACHE_LINE, share = lines / (size_t)size, more = lines % (size_t)size;
    size_t before = share * (size_t)rank + min_size((size_t)rank, more);
    return min_size(nbytes, before * CACHE_LINE);
}

/* Write a piece, except for this rank's share, which no other rank reads. */
static void write_shares(const Collective *one, uint32_t step, const char *source, char *target, size_t start)
{
    Steps *steps = one->steps;
    const size_t nbytes = min_size(one->width, one->nbytes - start);
    const size_t low = get_share_offset(nbytes, steps->rank, steps->size);
    const size_t high = get_share_offset(nbytes, steps->rank + 1, steps->size);
    char *slot = find_slot(one, step, steps->rank);
    (void)target;
    write_shared(steps, slot, source + start, low);
    write_shared(steps, slot + high, source + start + high, nbytes - high);
}

/* Reduce this rank's share of a piece of the vector, and write it to `results` for the others. */
static void reduce_vector_share(const Collective *one, char *target, char *results, size_t nbytes)
{
    /* The kernel's stores go to memory that other ranks have read only where there is no other. */
    char *result = one->has_result ? target : results;
    /* What is copied for the others is read at once. */
    reduce_parts(one, one->everywhere || !one->has_result ? one->reduce : one->reduce_out, result, one->steps->size,
                 nbytes);
    if (one->everywhere)
        write_shared(one->steps, results, result, nbytes);
}

/* In each step, write a piece, and reduce this rank's share of the previous piece, whose result is fetched after the
 * step. Per rank n(P-1)/P bytes written to slots, n read and n/P written in reducing, n/P written for the others and
 * n(P-1)/P copied out; one step a piece and one more.
 *
 * Of prefixes, a rank reduces its share of those of all ranks, which replace their operands in the slots: n(P-1)/P
 * bytes are written in reducing, and nothing besides for the others. */
static int reduce_pieces(const Collective *one, const char *source, char *target)
{
    Steps *steps = one->steps;
    const int rank = steps->rank, size = steps->size;
    const size_t width = one->width;
    const bool written = is_written(one), prefixes = one->access == ACCESS_PREFIXES;
    size_t place = written ? find_place(one, steps->step) : 0, former; /* of this piece and the previous one */
    for (uint32_t i = written ? 1 : 0; i < one->step_count; i++) {
        const int parity = get_parity(steps);
        const size_t start = i * width;
        former = place, place = find_place(one, steps->step + 1);
        char *results = prefixes ? get_slot(steps, 1 - parity, rank) + former : steps->results[parity] + place;
        if (start < one->nbytes)
            write_shares(one, steps->step + 1, source, target, start);
        if (i > 0) {
            size_t previous = start - width, nbytes = min_size(width, one->nbytes - previous);
            size_t low = get_share_offset(nbytes, rank, size), high = get_share_offset(nbytes, rank + 1, size);
            for (int peer = 0; peer < size; peer++)
                one->parts[peer] = get_slot(steps, 1 - parity, peer) + former + low;
            one->parts[rank] = source + previous + low;
            if (prefixes)
                reduce_all_prefixes(one, one->parts, target + previous + low, high - low);
            else
                reduce_vector_share(one, target + previous + low, results + low, high - low);
        }
        if (sync_ranks(steps) < 0)
            return -1;
        if (i > 0 && one->has_result) {
            const size_t previous = start - width, nbytes = min_size(width, one->nbytes - previous);
            const size_t low = get_share_offset(nbytes, rank, size), high = get_share_offset(nbytes, rank + 1, size);
            copy_out(one, target + previous, results, low);
            copy_out(one, target + previous + high, results + high, nbytes - high);
        }
    }
    if (prefixes)
        write_first_prefix(one, source, target);
    return 0;
}

/* Write the piece of each block to this rank's slot. */
static void write_blocks(const Collective *one, uint32_t step, const char *source, char *target, size_t start)
{
    Steps *steps = one->steps;
    char *slot = find_slot(one, step, steps->rank);
    const Move *outgoing = one->moves + steps->size;
    (void)target;
    for (int i = 0; i < one->outgoing; i++) {
        if (start < outgoing[i].nbytes)
            write_shared(steps, slot + outgoing[i].to, source + outgoing[i].from + start,
                         min_size(one->width, outgoing[i].nbytes - start));
    }
}

/* Reduce the pieces of this rank's block. Per rank n(P-1)/P bytes written to slots, and n read; one step a piece. */
static void reduce_blocks(const Collective *one, uint32_t step, const char *source, char *target, size_t start)
{
    const Steps *steps = one->steps;
    const Move *own = &one->own;
    if (start >= own->nbytes)
        return;
    for (int peer = 0; peer < steps->size; peer++)
        one->parts[peer] = find_slot(one, step, peer) + one->moves[peer].from;
    one->parts[steps->rank] = source + own->from + start;
    reduce_parts(one, one->reduce_out, target + start, steps->size, min_size(one->width, own->nbytes - start));
}

static int run_blocks(const Collective *one, const char *source, char *target)
{
    return carry_out_pieces(one, source, target, write_blocks, reduce_blocks);
}

/* In copies of what has been written, which stays in the caches. */
void fill_identity(const Collective *one, char *to, size_t nbytes)
{
    size_t done = min_size(FILL_BYTES, nbytes);
    fill(to, done, one->identity, one->itemsize);
    for (size_t more; done < nbytes; done += more) {
        more = min_size(FILL_BYTES, nbytes - done);
        copy_out(one, to + done, to, more);
    }
}

/* Reduce the pieces of the lower ranks, with scan this rank's too. Per rank n bytes written to slots, and n read for
 * each lower rank; one step a piece. */
static void write_for_higher(const Collective *one, uint32_t step, const char *source, char *target, size_t start)
{
    Steps *steps = one->steps;
    (void)target;
    if (steps->rank < steps->size - 1)
        write_shared(steps, find_slot(one, step, steps->rank), source + start,
                     min_size(one->width, one->nbytes - start));
}

static void reduce_prefixes(const Collective *one, uint32_t step, const char *source, char *target, size_t start)
{
    const int rank = one->steps->rank;
    const size_t nbytes = min_size(one->width, one->nbytes - start);
    for (int lower = 0; lower < rank; lower++)
        one->parts[lower] = find_slot(one, step, lower);
    one->parts[rank] = source + start;
    if (one->operands > 1)
        reduce_parts(one, one->reduce_out, target + start, one->operands, nbytes);
    else if (one->operands == 0)
        fill_identity(one, target + start, nbytes);
    else if (target + start != one->parts[0])
        copy_out(one, target + start, one->parts[0], nbytes);
}

static int run_prefixes(const Collective *one, const char *source, char *target)
{
    return carry_out_pieces(one, source, target, write_for_higher, reduce_prefixes);
}

/* Copy the pieces that other ranks have written for this one. A rank that sends the same data to all ranks writes it
 * once. One step a piece. */
static void write_moves(const Collective *one, uint32_t step, const char *source, char *target, size_t start)
{
    write_blocks(one, step, source, target, start);
    /* While others still write. All of the input that they need has been written. */
    if (start == (one->step_count - 1) * one->width)
        copy_own(one, source, target);
}

static void read_moves(const Collective *one, uint32_t step, const char *source, char *target, size_t start)
{
    (void)source;
    for (int peer = 0; peer < one->steps->size; peer++) {
        const Move *move = &one->moves[peer];
        if (start < move->nbytes)
            copy_out(one, target + move->to + start, find_slot(one, step, peer) + move->from,
                     min_size(one->width, move->nbytes - start));
    }
}

static int run_moves(const Collective *one, const char *source, char *target)
{
    return carry_out_pieces(one, source, target, write_moves, read_moves);
}

/* --- the Python type */

/* The sizes of the ranks' blocks. */
typedef struct {
    const size_t *blocks;   /* bytes of the ranks' blocks, or of the vector alone */
    const size_t *expected; /* of alltoall whose blocks differ in size: bytes of the blocks for this rank; else NULL */
    uint64_t rows;          /* number for these sizes */
    size_t total, largest;
    int root;
} Layout;

static size_t get_offset(const Layout *layout, int rank)
{
    size_t offset = 0;
    for (int before = 0; before < rank; before++)
        offset += layout->blocks[before];
    return offset;
}

/* Set the width of pieces for slots that hold a piece of each of `blocks` blocks, and return the number of pieces. */
static uint32_t cut(Collective *one, size_t nbytes, size_t piece, int blocks)
{
    size_t width = piece / (size_t)blocks;
    width = width < CACHE_LINE ? CACHE_LINE : width - width % CACHE_LINE;
    if (nbytes <= width) {
        one->width = nbytes ? nbytes : 1;
        one->is_small = nbytes * (size_t)blocks <= SMALL_SLOT_BYTES;
        set_places(one, nbytes * (size_t)blocks);
        return 1;
    }
    one->width = width;
    set_places(one, width * (size_t)blocks);
    return (uint32_t)((nbytes + width - 1) / width);
}

static void set_pieces(
    Collective *one, int (*run)(const Collective *, const char *, char *), PieceFunction write, PieceFunction read)
{
    one->run = run;
    one->write = write;
    one->read = read;
}

static void set_parts(Collective *one, int read, int all)
{
    one->read_parts = read;
    one->all_parts = all;
}

static void plan_vector_reduction(Collective *one, const Layout *layout, size_t piece, bool flat, bool everywhere)
{
    const Steps *steps = one->steps;
    one->access = ACCESS_VECTOR;
    one->everywhere = everywhere;
    one->has_result = everywhere || layout->root == steps->rank;
    one->source_bytes = layout->total;
    one->target_bytes = one->has_result ? layout->total : 0;
    /* Where shares save nothing: 2 ranks write and read n bytes either way, the root of 3 reads about as much. */
    const bool whole = flat || steps->size <= (everywhere ? 2 : 3);
    if (whole)
        set_pieces(one, run_vectors, write_vector, reduce_vectors);
    else
        set_pieces(one, reduce_pieces, write_shares, NULL);
    one->step_count = cut(one, layout->total, flat ? layout->total + CACHE_LINE : piece, 1) + (whole ? 0 : 1);
    one->is_small = whole && layout->total <= SMALL_SLOT_BYTES;
}

static void plan_prefix_reduction(Collective *one, const Layout *layout, size_t piece, bool inclusive)
{
    const size_t higher = (size_t)one->steps->size - 1;
    one->source_bytes = one->target_bytes = layout->total;
    one->step_count = cut(one, layout->total, piece, 1);
    one->operands = one->steps->rank + (inclusive ? 1 : 0);
    one->inclusive = inclusive;
    if (higher > 2 && layout->total >= PREFIX_SHARES_AT / higher) {
        set_pieces(one, reduce_pieces, write_shares, NULL);
        one->access = ACCESS_PREFIXES;
        one->has_result = one->steps->rank > 0; /* rank 0 knows its own */
        one->step_count++;
        one->is_small = false;
        return;
    }
    set_pieces(one, run_prefixes, write_for_higher, reduce_prefixes);
    one->access = ACCESS_PREFIX;
    /* The first of two ranks has only the identity to write besides, which takes about half as long as to move it. */
    if (!inclusive && one->steps->size == 2)
        set_parts(one, 3, 4);
}

static void plan_block_reduction(Collective *one, const Layout *layout, size_t piece)
{
    const Steps *steps = one->steps;
    set_pieces(one, run_blocks, write_blocks, reduce_blocks);
    one->access = ACCESS_BLOCK;
    one->step_count = cut(one, layout->largest, piece, steps->size);
    one->outgoing = steps->size;
    for (int peer = 0; peer < steps->size; peer++) {
        Move *out = &one->moves[steps->size + peer];
        out->from = get_offset(layout, peer);
        out->to = (size_t)peer * one->width;
        /* No other rank reads the block for this rank. */
        out->nbytes = peer == steps->rank ? 0 : layout->blocks[peer];
        one->moves[peer].from = (size_t)steps->rank * one->width;
    }
    one->own.from = get_offset(layout, steps->rank);
    one->own.nbytes = layout->blocks[steps->rank];
    one->source_bytes = layout->total;
    one->target_bytes = one->own.nbytes;
}

/* bcast, allgather, gather: each rank writes one block for all others. */
static void plan_gathering(Collective *one, const Layout *layout, size_t piece, bool everywhere)
{
    const Steps *steps = one->steps;
    const int rank = steps->rank;
    set_pieces(one, run_moves, write_moves, read_moves);
    one->access = ACCESS_MOVES;
    one->step_count = cut(one, layout->largest, piece, 1);
    one->outgoing = 1;
    one->moves[steps->size].nbytes = one->source_bytes = layout->blocks[rank];
    one->place = get_offset(layout, rank);
    one->everywhere = everywhere;
    /* A root copies its own block too, which takes about half as long as a block of another rank. */
    if (everywhere)
        set_parts(one, 0, 1);
    else
        set_parts(one, 1, 2 * steps->size);
    if (!everywhere && layout->root != rank)
        return;
    for (int peer = 0; peer < steps->size; peer++) {
        one->moves[peer].to = get_offset(layout, peer);
        one->moves[peer].nbytes = peer == rank ? 0 : layout->blocks[peer];
    }
    one->own.to = get_offset(layout, rank);
    one->own.nbytes = layout->blocks[rank];
    one->target_bytes = layout->total;
}

static void plan_bcast(Collective *one, const Layout *layout, size_t piece)
{
    const Steps *steps = one->steps;
    const bool root = layout->root == steps->rank;
    one->has_one_source = true;
    set_parts(one, steps->size - 1, steps->size);
    set_pieces(one, run_moves, write_moves, read_moves);
    one->access = ACCESS_MOVES;
    one->step_count = cut(one, layout->total, piece, 1);
    one->outgoing = 1;
    one->target_bytes = layout->total;
    if (root)
        one->moves[steps->size].nbytes = one->source_bytes = one->own.nbytes = layout->total;
    else
        one->moves[layout->root].nbytes = layout->total;
}

/* scatter, alltoall: a rank writes another block for each rank. */
static void plan_scattering(Collective *one, const Layout *layout, size_t piece, bool all)
{
    const Steps *steps = one->steps;
    const int rank = steps->rank, size = steps->size;
    set_pieces(one, run_moves, write_moves, read_moves);
    one->access = ACCESS_MOVES;
    one->step_count = cut(one, layout->largest, piece, size);
    one->target_bytes = all ? layout->total : layout->blocks[rank];
    one->everywhere = all;
    one->has_one_source = !all;
    if (all)
        set_parts(one, 0, 1);
    else
        set_parts(one, 2 * size - 1, 2 * size); /* see gather */
    one->origin = get_offset(layout, rank);
    one->place = all ? one->origin : 0;
    for (int peer = 0; peer < size; peer++) {
        if (peer == rank || (!all && peer != layout->root))
            continue;
        one->moves[peer].from = (size_t)rank * one->width;
        one->moves[peer].to = all ? get_offset(layout, peer) : 0;
        one->moves[peer].nbytes = all ? layout->blocks[peer] : layout->blocks[rank];
    }
    if (!all && layout->root != rank)
        return;
    one->source_bytes = layout->total;
    one->outgoing = size;
    for (int peer = 0; peer < size; peer++) {
        Move *out = &one->moves[size + peer];
        out->from = get_offset(layout, peer);
        out->to = (size_t)peer * one->width;
        out->nbytes = peer == rank ? 0 : layout->blocks[peer];
    }
    one->own.from = get_offset(layout, rank);
    one->own.to = all ? one->own.from : 0;
    one->own.nbytes = layout->blocks[rank];
}

/* Plan whether the data goes through ring slots, and for which ranks this one waits then: those whose data it reads. A
 * small slot would do for the blocks of some ranks only, so all of them decide by the largest ones. */
static void plan_waits(Collective *one, const char *name, const Layout *layout)
{
    const int rank = one->steps->rank, size = one->steps->size;
    const bool from_root = strcmp(name, "bcast") == 0 || strcmp(name, "scatter") == 0;
    const bool to_root = strcmp(name, "reduce") == 0 || strcmp(name, "gather") == 0;
    const bool upwards = strcmp(name, "scan") == 0 || strcmp(name, "exscan") == 0;
    const bool scatters = strcmp(name, "scatter") == 0 || one->outgoing == size;
    const size_t blocks = scatters ? (size_t)size : 1;
    const size_t largest = one->access == ACCESS_VECTOR || upwards ? layout->total : layout->largest;
    if (!is_one_step(one) || largest > RING_SLOT_BYTES / blocks)
        return;
    one->uses_ring = true;
    if (!(from_root || to_root || upwards))
        return;
    if (from_root && rank != layout->root)
        one->first = layout->root, one->last = layout->root + 1;
    else if (upwards)
        one->last = rank;
    one->waits_for_all = (to_root && rank == layout->root) || (upwards && rank == size - 1);
}

/* Returns -1 with an exception if there is no such collective. */
static int plan(Collective *one, const char *name, const Layout *layout, size_t piece, bool flat)
{
    set_parts(one, 1, 1);
    one->nbytes = layout->total;
    one->root = layout->root;
    if (layout->expected != NULL && strcmp(name, "alltoall") == 0) {
        plan_uneven_blocks(one, layout->blocks, layout->expected, piece, layout->rows);
    } else if (strcmp(name, "barrier") == 0) {
        set_pieces(one, run_barrier, do_nothing, do_nothing);
        one->step_count = 1;
    } else if (strcmp(name, "allreduce") == 0 || strcmp(name, "reduce") == 0) {
        plan_vector_reduction(one, layout, piece, flat, strcmp(name, "allreduce") == 0);
    } else if (strcmp(name, "reduce_scatter") == 0) {
        plan_block_reduction(one, layout, piece);
    } else if (strcmp(name, "scan") == 0 || strcmp(name, "exscan") == 0) {
        plan_prefix_reduction(one, layout, piece, strcmp(name, "scan") == 0);
    } else if (strcmp(name, "bcast") == 0) {
        plan_bcast(one, layout, piece);
    } else if (strcmp(name, "allgather") == 0 || strcmp(name, "gather") == 0) {
        plan_gathering(one, layout, piece, strcmp(name, "allgather") == 0);
    } else if (strcmp(name, "scatter") == 0 || strcmp(name, "alltoall") == 0) {
        plan_scattering(one, layout, piece, strcmp(name, "alltoall") == 0);
    } else {
        PyErr_Format(PyExc_ValueError, "Collective: there is no %s", name);
        return -1;
    }
    one->waits_for_all = true;
    plan_waits(one, name, layout);
    const bool reduces = one->run == reduce_pieces || one->read == reduce_vectors || one->read == reduce_blocks ||
                         one->read == reduce_prefixes;
    if (reduces && one->reduce == NULL) {
        PyErr_Format(PyExc_ValueError, "Collective: there is no kernel for this %s", name);
        return -1;
    }
    if (flat && one->read == reduce_vectors)
        piece = layout->total;
    if (one->read != do_nothing && (piece > one->steps->slot_bytes || one->steps->slots == NULL)) {
        PyErr_Format(PyExc_ValueError, "Collective: slots of %zu bytes are too small for pieces of %zu bytes",
                     one->steps->slot_bytes, piece);
        return -1;
    }
    return 0;
}

/* Read the sizes of blocks, in bytes. There may be an exception afterwards. */
static void read_sizes(PyObject *counts, Py_ssize_t blocks, size_t itemsize, size_t *nbytes)
{
    for (Py_ssize_t block = 0; block < blocks && !PyErr_Occurred(); block++) {
        PyObject *count = PySequence_GetItem(counts, block);
        nbytes[block] = count == NULL ? 0 : PyLong_AsSize_t(count) * itemsize;
        Py_XDECREF(count);
    }
}

static int init_collective(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {
        "steps", "collective", "op", "dtype", "itemsize", "counts", "root", "piece", "flat", "signature",
        "identity", "reads", "width", "arrivals", "rows", "tries", NULL};
    Collective *one = (Collective *)self;
    PyObject *steps, *counts, *arrivals = Py_None;
    const char *name, *op, *dtype;
    Py_ssize_t itemsize, piece;
    int root, flat;
    unsigned long signature;
    const char *identity = NULL;
    Py_ssize_t identity_bytes = 0, width = 0;
    int reads = 0, tries = 0;
    unsigned long long rows = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OsssnOinpk|y#pnOKp", names, &steps, &name, &op, &dtype, &itemsize,
                                     &counts, &root, &piece, &flat, &signature, &identity, &identity_bytes,
                                     &reads, &width, &arrivals, &rows, &tries))
        return -1;
    /* Objects are initialised once: other threads may run them. */
    if (one->steps != NULL || itemsize < 1 || piece < 1 || width < 0 ||
        identity_bytes > (Py_ssize_t)sizeof one->identity ||
        (identity_bytes > 0 && identity_bytes != itemsize) || !PyObject_HasAttrString(steps, "list_late_ranks")) {
        PyErr_SetString(PyExc_ValueError, "Collective: invalid arguments, or initialised twice");
        return -1;
    }
    one->steps = (Steps *)Py_NewRef(steps);
    const int size = one->steps->size;
    const bool uneven = arrivals != Py_None;
    const Py_ssize_t blocks = PySequence_Size(counts), expected = uneven ? PySequence_Size(arrivals) : 0;
    if (blocks < 0 || expected < 0)
        return -1;
    if (blocks > size || root < 0 || root >= size || (uneven && (blocks != size || expected != size))) {
        PyErr_SetString(PyExc_ValueError, "Collective: invalid counts or root");
        return -1;
    }
    one->signature = (uint32_t)signature;
    one->itemsize = (size_t)itemsize;
    copy(one->identity, identity, (size_t)identity_bytes);
    one->reads_memory = reads != 0 || tries != 0;
    one->access_width = width < CACHE_LINE ? ACCESS_WIDTH : (size_t)(width - width % CACHE_LINE);
    if (one->reads_memory && one->steps->processes == NULL) {
        PyErr_SetString(PyExc_ValueError, "Collective: the processes of the ranks are not known");
        return -1;
    }
    if (tries) {
        one->trials = PyMem_Malloc(sizeof *one->trials);
        if (one->trials == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    one->reduce = one->reduce_out = find_kernel(op, dtype);
    one->rounds_each = strcmp(dtype, "float16") != 0 && strcmp(dtype, "bfloat16") != 0 && strcmp(op, "avg") != 0;
    one->moves = PyMem_Calloc(2 * (size_t)size, sizeof(Move));
    one->parts = PyMem_Calloc(MAX_THREADS * (size_t)size, sizeof(void *));
    size_t *nbytes = PyMem_Calloc(2 * (size_t)size, sizeof(size_t));
    if (one->moves == NULL || one->parts == NULL || nbytes == NULL) {
        PyMem_Free(nbytes);
        PyErr_NoMemory();
        return -1;
    }
    Layout layout = {.blocks = nbytes, .expected = uneven ? nbytes + size : NULL, .rows = rows, .root = root};
    read_sizes(counts, blocks, one->itemsize, nbytes);
    if (uneven)
        read_sizes(arrivals, expected, one->itemsize, nbytes + size);
    for (Py_ssize_t block = 0; block < blocks; block++) {
        layout.total += nbytes[block];
        layout.largest = nbytes[block] > layout.largest ? nbytes[block] : layout.largest;
    }
    int status = PyErr_Occurred() ? -1 : plan(one, name, &layout, (size_t)piece, flat != 0);
    if (status < 0)
        one->run = NULL; /* it can't be carried out */
    if (one->trials != NULL)
        begin_trials(one->trials, layout.total);
    PyMem_Free(nbytes);
    one->streams = exceeds_cache((one->source_bytes + one->target_bytes) * (size_t)size);
    if (one->streams && one->reduce != NULL)
        one->reduce_out = find_streaming_kernel(op, dtype);
    return status;
}

static int traverse_collective(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)((Collective *)self)->steps);
    return 0;
}

/* No clear function: what refers to it can be cleared, and a collective always has its steps. */
void free_collective(PyObject *self)
{
    Collective *one = (Collective *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF((PyObject *)one->steps);
    Py_XDECREF(one->text);
    PyMem_Free(one->moves);
    PyMem_Free(one->parts);
    PyMem_Free(one->trials);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static void dealloc_collective(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    free_collective(self);
}

/* Get the address of an array; NULL for None, where the rank has no data. Returns -1 with an exception. */
static int get_address(PyObject *argument, Py_buffer *view, int flags, size_t nbytes, char **address)
{
    view->obj = NULL;
    *address = NULL;
    if (argument == Py_None && nbytes == 0)
        return 0;
    if (PyObject_GetBuffer(argument, view, flags) < 0)
        return -1;
    if ((size_t)view->len < nbytes) {
        PyErr_Format(PyExc_ValueError, "Collective: an array of %zd bytes was passed for %zu", view->len, nbytes);
        return -1;
    }
    *address = view->buf;
    return 0;
}

static int run_on(const Collective *one, const char *source, char *target)
{
    const bool releases = !one->keeps_gil && one->source_bytes + one->target_bytes >= RELEASE_AT;
    const bool direct = tries_direct(one);
    if (one->trials != NULL)
        begin_trial(one->trials);
    if ((direct || !is_in_ring(one)) && catch_up(one->steps) < 0)
        return -1;
    if ((direct || one->reads_memory) && locate_arrays(one, source, target) < 0)
        return -1;
    if (releases)
        release_gil(one->steps);
    int status = direct ? run_direct(one, source, target) : 0;
    if (status == 0)
        status = one->run(one, source, target);
    if (one->trials != NULL)
        end_trial(one->trials);
    if (status >= 0)
        one->steps->last = one->steps->step;
    if (releases)
        acquire_gil(one->steps);
    return status < 0 ? -1 : 0;
}

void end_failed(Steps *steps)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (sync_failed(steps) < 0)
        PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    raise_interrupt(steps);
}

int run_operation(const Collective *one, const char *source, char *target)
{
    one->steps->signature = one->signature;
    one->steps->first = one->steps->step;
    return run_on(one, source, target);
}

int carry_out_collective(const Collective *one, const char *source, char *target)
{
    int status = run_operation(one, source, target);
    return status == 0 ? raise_interrupt(one->steps) : status;
}

static int run_on_arrays(
    const Collective *one, PyObject *const *args, Py_ssize_t nargs,
    int (*run)(const Collective *, const char *, char *))
{
    if (nargs != 2 || one->run == NULL) {
        PyErr_SetString(PyExc_TypeError, "Collective: source and target are needed, and an initialised object");
        return -1;
    }
    Py_buffer from = {0}, to = {0};
    char *source, *target;
    int status = get_address(args[0], &from, PyBUF_SIMPLE, one->source_bytes, &source);
    if (status == 0)
        status = get_address(args[1], &to, PyBUF_WRITABLE, one->target_bytes, &target);
    if (status == 0)
        status = run(one, source, target);
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    return status;
}

static PyObject *run_collective(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return run_on_arrays((Collective *)self, args, nargs, run_on) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *carry_out(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const Collective *one = (Collective *)self;
    Steps *steps = one->steps;
    const uint32_t begin = steps == NULL ? 0 : steps->step;
    int status = run_on_arrays(one, args, nargs, carry_out_collective);
    if (status < 0 && one->run != NULL && steps->step == begin && !steps->unusable) {
        /* The arguments are invalid: the other ranks must not wait for this one. */
        end_failed(steps);
    }
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"carry_out", (PyCFunction)(void (*)(void))carry_out, METH_FASTCALL,
     "carry_out(source, target)\n--\n\nCarry out the collective as an operation. Both are contiguous arrays, or None"
     " where this rank has no data."},
    {"run", (PyCFunction)(void (*)(void))run_collective, METH_FASTCALL,
     "run(source, target)\n--\n\nCarry out the collective, as `carry_out` does, within the running operation."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"step_count", T_UINT, offsetof(Collective, step_count), READONLY, "Number of steps."},
    {"streams", T_BOOL, offsetof(Collective, streams), READONLY,
     "Whether the output is written around the caches."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Collective(steps, collective, op, dtype, itemsize, counts, root, piece, flat, signature,"
                " identity=b'', reads=False, width=0, arrivals=None, rows=0, tries=False)\n--\n\n"
                "A collective of the ranks of a node. `counts` are the elements of each rank's block, or of the vector;"
                " `identity` is an element, of which the output of exscan on rank 0 consists."
                " With `reads`, the ranks read each other's private memory if no rank forbids it, with `tries` only if"
                " that took less time in earlier calls than the slots; `width` is the bytes"
                " of a piece that is reduced in memory of others (0: the default). `arrivals` are the elements that are"
                " received from each rank where `counts` are those of this rank only; the numbers `rows` of all ranks"
                " add up to 0 modulo 2 to the power of 62 if the counts of senders and receivers agree."},
    {Py_tp_init, init_collective},
    {Py_tp_dealloc, dealloc_collective},
    {Py_tp_traverse, traverse_collective},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec collective_spec = {
    .name = "mpicoll._shm.Collective",
    .basicsize = sizeof(Collective),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
