/* Writes to memory that other ranks read. */

#ifndef MPICOLL_SHARED_WRITES_H
#define MPICOLL_SHARED_WRITES_H

#include <stddef.h>

#include "steps.h"

/* Copy to memory that other ranks have read, and read again after the next step. The arrays don't overlap. */
void write_shared(Steps *steps, char *to, const char *from, size_t nbytes);

#endif
