/* Collectives of the ranks of a node through slots of shared memory. */

#ifndef MPICOLL_COLLECTIVES_H
#define MPICOLL_COLLECTIVES_H

#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "copies.h"
#include "kernels.h"
#include "path_trials.h"
#include "records.h"
#include "shared_writes.h"
#include "steps.h"
#include "workers.h"

enum { CACHE_LINE = 64 /* alignment of what different ranks write to */ };

/* Bytes that a rank copies to its own slot, or from the slot of another rank. */
typedef struct {
    size_t from, to, nbytes;
} Move;

/* What a rank does with the arrays of others, where it has access to them. */
typedef enum {
    ACCESS_NOTHING,
    ACCESS_MOVES,
    ACCESS_VECTOR,
    ACCESS_BLOCK,
    ACCESS_PREFIX,  /* reduces its own prefix */
    ACCESS_PREFIXES /* reduces a share of the prefixes of all ranks */
} Access;

typedef struct Collective Collective;
typedef void (*PieceFunction)(const Collective *, uint32_t step, const char *source, char *target, size_t start);

struct Collective {
    PyObject_HEAD
    Steps *steps;
    int (*run)(const Collective *, const char *source, char *target);
    /* What `run` does before and after the step of the piece that begins at `start`; NULL where it does more. */
    PieceFunction write, read;
    uint32_t signature, step_count;
    Summary summary;       /* of the call that the collective carries out */
    PyObject *text;        /* its description for other ranks, if this one may be ahead of them; else NULL */
    bool has_result;
    bool is_small;         /* what a rank writes fits in its small slot */
    size_t stride;         /* bytes between the places in a slot that are used in turn; 0 where there is one */
    uint32_t places;
    bool uses_ring;        /* or in its ring slot, and some rank does not wait for all others; the same on all ranks */
    bool keeps_gil;        /* while it runs, but for parts of it */
    bool waits_for_all;    /* the rank, in each step; otherwise only for those from `first` to before `last` */
    int first, last;
    size_t itemsize;
    size_t source_bytes, target_bytes;
    size_t nbytes;         /* of the vector, or of all blocks */
    size_t width;          /* bytes of a piece of each block */
    size_t spacing;        /* of blocks that differ in size: bytes from the first piece for a rank to the next one */
    uint64_t rows;         /* number for the sizes of these blocks */
    ReduceKernel reduce;
    ReduceKernel reduce_out; /* the same for results that go to the output and are not read at once */
    bool streams;          /* the output is written around the caches, which do not hold the arrays of all ranks */
    const void **parts;    /* operands of the ranks, for each share of a piece */
    Move *moves;           /* of each rank to this rank's output, then from this rank's input for each rank */
    int outgoing;          /* number of the latter: one where all ranks get the same */
    Move own;              /* from input to output */
    int operands;          /* of exscan and scan: those of as many ranks, from rank 0 on, are reduced */
    bool inclusive;        /* scan */
    bool rounds_each;      /* combining two operands rounds as often as combining more: no wider total is kept */
    char identity[16];     /* of exscan: each element of the output of rank 0 */
    Access access;
    bool reads_memory;     /* the ranks may read each other's private memory */
    PathTrials *trials;    /* if they do so only where that is faster; else NULL */
    bool has_one_source;   /* only the root has an input */
    bool everywhere;       /* all ranks get the result of the vector, or blocks */
    int root;
    int read_parts, all_parts; /* of a block in private memory, its receiver reads so many; its owner writes the rest */
    size_t place;          /* where a block of this rank begins in the outputs that it writes to */
    size_t origin;         /* where the data for this rank begins in the inputs of the others */
    size_t access_width;   /* bytes of a piece that is reduced in the arrays of others */
};

static inline size_t min_size(size_t one, size_t other) { return one < other ? one : other; }

/* The operands of the ranks, of one share of a piece. */
static inline const void **get_parts(const Collective *one, int share)
{
    return one->parts + (size_t)share * (size_t)one->steps->size;
}

/* The same, in several threads if that is faster. */
void copy_in_threads(const Collective *one, char *to, const char *from, size_t nbytes);

static inline void copy_piece(const Collective *one, char *to, const char *from, size_t nbytes)
{
    if (nbytes >= SHARED_BYTES && one->steps->threads > 1)
        copy_in_threads(one, to, from, nbytes);
    else
        copy(to, from, nbytes);
}

/* The same to the output. */
static inline void copy_out(const Collective *one, char *to, const char *from, size_t nbytes)
{
    if (one->streams)
        stream_in_threads(one->steps, to, from, nbytes);
    else
        copy_piece(one, to, from, nbytes);
}

/* Write elements that are equal to the identity to the output. */
void fill_identity(const Collective *one, char *to, size_t nbytes);

/* The place in a slot of what is written before a step. */
static inline size_t find_place(const Collective *one, uint32_t step)
{
    return one->stride == 0 ? 0 : (size_t)((step - 1) / 2 % one->places) * one->stride;
}

/* Use several places of a slot in turn for messages of `used` bytes, so that what is written to one has left the
 * private caches of the cores that read it last time: a store is slow while it is there. */
void set_places(Collective *one, size_t used);

/* Whether this rank's own block lies apart in its input and its output. */
static inline bool is_own_apart(const Collective *one, const char *source, const char *target)
{
    const uintptr_t to = (uintptr_t)(target + one->own.to), from = (uintptr_t)(source + one->own.from);
    return to - from >= one->own.nbytes && from - to >= one->own.nbytes;
}

/* Copy this rank's own block from its input to its output. */
static inline void copy_own(const Collective *one, const char *source, char *target)
{
    const size_t nbytes = one->own.nbytes;
    if (nbytes == 0 || target + one->own.to == source + one->own.from)
        return;
    if (is_own_apart(one, source, target))
        copy_out(one, target + one->own.to, source + one->own.from, nbytes);
    else
        memmove(target + one->own.to, source + one->own.from, nbytes);
}

/* The offset of a rank's share of a piece, aligned to cache lines; the shares of all ranks differ by at most a line. */
size_t get_share_offset(size_t nbytes, int rank, int size);

/* Return true if a collective has one step, which can be begun and completed later. */
bool is_one_step(const Collective *one);

/* Return true if the rank has written its first piece in the step in which the ranks have chosen the slots. */
static inline bool is_written(const Collective *one) { return one->trials != NULL && one->trials->written; }

/* Return true if what a rank writes before a step lies in a small or ring slot. */
static inline bool is_in_ring(const Collective *one)
{
    return one->is_small || one->uses_ring;
}

/* End the running operation on all ranks, because this one has failed in it. There is an exception, and the GIL is
 * held. */
void end_failed(Steps *steps);

/* Free the object of a collective: of the type itself or of one derived from it, which has untracked it. */
void free_collective(PyObject *self);

/* Carry out a collective as an operation, on this rank's input and output. Returns -1 with an exception. */
int carry_out_collective(const Collective *one, const char *source, char *target);

/* The same, but leave an exception of a signal handler to `raise_interrupt`. */
int run_operation(const Collective *one, const char *source, char *target);

extern PyType_Spec collective_spec;

#endif
