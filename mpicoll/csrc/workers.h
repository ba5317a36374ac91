/* Threads of this process that share the work on large arrays. */

#ifndef MPICOLL_WORKERS_H
#define MPICOLL_WORKERS_H

#include <stddef.h>

enum {
    MAX_THREADS = 8,              /* that work on one array, with the calling one: they saturate the memory */
    SHARED_BYTES = 2 * 128 * 1024 /* from which on they do: a share takes longer than to hand it over */
};

/* Work on the bytes from `begin` to `end`. `share`, less than MAX_THREADS, is another one for each call of a task. */
typedef void (*ShareFunction)(const void *task, int share, size_t begin, size_t end);

/* Call `function` on shares of `nbytes` bytes, each of which begins at a multiple of CACHE_LINE, in at most `threads`
 * threads at once, of which one is the caller. Returns the number of threads that have worked when all have ended. No
 * share calls Python. */
int run_shares(int threads, ShareFunction function, const void *task, size_t nbytes);

#endif
