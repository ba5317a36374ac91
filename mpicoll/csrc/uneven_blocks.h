/* alltoall whose blocks differ in size, where a rank knows only the sizes of the blocks that it sends and receives. */

#ifndef MPICOLL_UNEVEN_BLOCKS_H
#define MPICOLL_UNEVEN_BLOCKS_H

#include "collectives.h"

/* Plan the collective: `sent` and `expected` are the bytes of the blocks for and from each rank. `rows` is a number for
 * these sizes; the numbers of all ranks add up to 0 modulo 2 to the power of 62 if each block has the size that its
 * receiver expects. */
void plan_uneven_blocks(Collective *one, const size_t *sent, const size_t *expected, size_t piece, uint64_t rows);

#endif
