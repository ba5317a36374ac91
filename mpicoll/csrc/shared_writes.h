/* Writes to memory that other ranks read, and to large arrays. */

#ifndef MPICOLL_SHARED_WRITES_H
#define MPICOLL_SHARED_WRITES_H

#include <stddef.h>

#include "steps.h"

/* Copy to memory that other ranks have read, and read again after the next step. The arrays don't overlap. */
void write_shared(Steps *steps, char *to, const char *from, size_t nbytes);

/* Copy by stores around the caches, which do not read the memory first, if the processor has such stores. The arrays
 * don't overlap. */
void stream(char *to, const char *from, size_t nbytes);

/* The same, in several threads if that is faster. */
void stream_in_threads(const Steps *steps, char *to, const char *from, size_t nbytes);

/* Copy around the caches, and fetch `nbytes` bytes from `next` meanwhile. What has been written is visible to other
 * ranks after end_streams. */
void stream_and_fetch(char *to, const char *from, size_t nbytes, const char *next);
void end_streams(void);

#endif
