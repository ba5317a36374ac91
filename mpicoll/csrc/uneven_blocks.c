/* alltoall whose blocks differ in size, where a rank knows only the sizes of the blocks that it sends and receives.
 *
 * In the first step each rank writes to its small slot, beside its flag, what the others must know to read its blocks,
 * and which number it has for their sizes. All ranks add up the numbers of all ranks, so they draw the same conclusion
 * from them, and all take as many steps as the largest block of any rank needs.
 */

#define PY_SSIZE_T_CLEAN
#include "uneven_blocks.h"

#include "direct.h"
#include "shared_writes.h"

/* What a rank writes before its blocks. */
typedef struct {
    uint64_t rows;
    uint32_t pieces;  /* of its largest block */
    uint32_t place;   /* where its first pieces begin in its slot; BESIDE: in the small slot, after this */
    uint32_t spacing; /* bytes from a piece to the next one */
    uint32_t unused;
} Header;

static const uint32_t BESIDE = UINT32_MAX;
static const uint64_t SUM = ((uint64_t)1 << 62) - 1;

enum {
    BESIDE_BYTES = SMALL_SLOT_BYTES - sizeof(Header),
    READ_AT = 1 << 20 /* bytes of all blocks of a rank, if they were all as large as the largest one of any rank */
};

/* The place among the pieces of `from` of that for `to`: it begins with the next rank, and has none for itself. */
static inline size_t get_index(const Steps *steps, int from, int to)
{
    return (size_t)(to > from ? to - from - 1 : to - from - 1 + steps->size);
}

/* Write the pieces of the blocks that begin at `start`. */
static void write_pieces(const Collective *one, char *to, size_t spacing, const char *source, size_t start)
{
    Steps *steps = one->steps;
    const Move *outgoing = one->moves + steps->size;
    for (int peer = 0; peer < steps->size; peer++) {
        if (start < outgoing[peer].nbytes)
            write_shared(steps, to + get_index(steps, steps->rank, peer) * spacing,
                         source + outgoing[peer].from + start, min_size(one->width, outgoing[peer].nbytes - start));
    }
}

/* Read a piece of the block of a rank. */
static void read_piece(
    const Collective *one, int peer, const char *from, size_t spacing, char *target, size_t start)
{
    const Move *move = &one->moves[peer];
    if (start < move->nbytes)
        copy_out(one, target + move->to + start, from + get_index(one->steps, peer, one->steps->rank) * spacing,
                 min_size(one->width, move->nbytes - start));
}

/* Write the header and the first pieces, end the step, and read those of the others. Returns the number of pieces of
 * the largest block of any rank; 0 with an exception. */
static uint32_t move_first(const Collective *one, const char *source, char *target)
{
    Steps *steps = one->steps;
    const uint32_t step = steps->step + 1;
    const int parity = get_parity(steps);
    Header header = {one->rows, one->step_count, one->is_small ? BESIDE : (uint32_t)find_place(one, step),
                     (uint32_t)one->spacing, 0};
    char *small = get_small_slot(steps, step, steps->rank);
    memcpy(small, &header, sizeof header);
    write_pieces(one, one->is_small ? small + sizeof header : get_slot(steps, parity, steps->rank) + header.place,
                 header.spacing, source, 0);
    /* While others still write. */
    if (one->step_count == 1)
        copy_own(one, source, target);
    if (sync_ranks(steps) < 0)
        return 0;
    uint64_t sum = 0;
    uint32_t pieces = 1;
    for (int peer = 0; peer < steps->size; peer++) {
        memcpy(&header, get_small_slot(steps, step, peer), sizeof header);
        sum += header.rows;
        pieces = header.pieces > pieces ? header.pieces : pieces;
    }
    if (sum & SUM) {
        raise_row_mismatch(steps);
        return 0;
    }
    for (int i = 1; i < steps->size; i++) {
        const int peer = (steps->rank + i) % steps->size;
        small = get_small_slot(steps, step, peer);
        memcpy(&header, small, sizeof header);
        const char *from =
            header.place == BESIDE ? small + sizeof header : get_slot(steps, parity, peer) + header.place;
        read_piece(one, peer, from, header.spacing, target, 0);
    }
    return pieces;
}

/* In each step, write a piece of every block, then read those of the others. Per rank n(P-1)/P bytes written to slots
 * and as many read; one step a piece. Large blocks are read from the memory of their ranks, except for the first
 * pieces, where that is permitted: two steps more. */
static int move_uneven_blocks(const Collective *one, const char *source, char *target)
{
    Steps *steps = one->steps;
    const uint32_t pieces = move_first(one, source, target);
    if (one->reads_memory && pieces > 1 && pieces * one->width * (size_t)steps->size >= READ_AT) {
        const int status = read_uneven_blocks(one, source, target, one->width, one->step_count > 1);
        if (status != 0)
            return status < 0 ? -1 : 0;
    }
    for (uint32_t i = 1; i < pieces; i++) {
        const int parity = get_parity(steps);
        const size_t start = i * one->width;
        write_pieces(one, get_slot(steps, parity, steps->rank), one->width, source, start);
        if (i == pieces - 1 && one->step_count > 1)
            copy_own(one, source, target);
        if (sync_ranks(steps) < 0)
            return -1;
        for (int next = 1; next < steps->size; next++) {
            const int peer = (steps->rank + next) % steps->size;
            read_piece(one, peer, get_slot(steps, parity, peer), one->width, target, start);
        }
    }
    return pieces > 0 ? 0 : -1;
}

void plan_uneven_blocks(Collective *one, const size_t *sent, const size_t *expected, size_t piece, uint64_t rows)
{
    const int rank = one->steps->rank, size = one->steps->size;
    size_t largest = 0;
    for (int peer = 0; peer < size; peer++) {
        Move *out = &one->moves[size + peer], *in = &one->moves[peer];
        out->from = one->source_bytes;
        in->to = one->target_bytes;
        if (peer == rank) {
            one->own = (Move){.from = out->from, .to = in->to, .nbytes = sent[peer]};
        } else {
            out->nbytes = sent[peer];
            in->nbytes = expected[peer];
            largest = sent[peer] > largest ? sent[peer] : largest;
        }
        one->source_bytes += sent[peer];
        one->target_bytes += expected[peer];
    }
    one->run = move_uneven_blocks;
    one->rows = rows;
    /* The same on all ranks: a rank writes pieces of this width, but less if its blocks are smaller. */
    one->width = piece / (size_t)size;
    one->width = one->width < CACHE_LINE ? CACHE_LINE : one->width - one->width % CACHE_LINE;
    one->step_count = largest == 0 ? 1 : (uint32_t)((largest + one->width - 1) / one->width);
    one->is_small = largest * (size_t)(size - 1) <= BESIDE_BYTES;
    one->spacing = one->is_small ? largest : one->step_count > 1 ? one->width : largest + -largest % CACHE_LINE;
    if (one->step_count == 1)
        set_places(one, one->spacing * (size_t)(size - 1));
}
