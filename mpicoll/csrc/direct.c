/* Collectives of the ranks of a node in each other's arrays, without copies through slots.
 *
 * First the ranks exchange the locations of their arrays. A collective is carried out here if these lie in segments
 * that all ranks have mapped, or if it may access private memory (process_vm_readv, process_vm_writev) and no rank
 * forbids that. All ranks draw the same conclusion from the same numbers. An operation ends with a step, after which
 * the arrays belong to their owners again.
 *
 * Where each rank sends and receives as much, it writes to the others' outputs, and reads none of their inputs: an
 * input that was just computed lies in the caches of its owner's core, from which another core reads several times
 * slower, and the owner reads it anyway for its own output. Where a rank sends to many or receives from many, both
 * sides move a part of each block, so that they take about the same time.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "direct.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#include "prefixes.h"

enum {
    SEGMENT_BYTES = 4096, /* from which on the locations of arrays that may lie in segments are exchanged */
    STREAM_WIDTH = 8 * 1024, /* of pieces that are copied from the nearest cache to several outputs */
    WRITE_BYTES = 1 << 20, /* to private memory of another rank, which may have to wait until they are written */
    PIECE_BYTES = 256 * 1024, /* of a block that is copied twice or more, and stays in a private cache meanwhile */
    SHIFT = 64 /* bytes: to a place whose lines lie like those of the first one */
};

/* What a rank posts: the segments of its input and output (0: none) and the offsets in them, their addresses, flags,
 * and its trials. */
enum { SOURCE_SEGMENT, SOURCE_OFFSET, TARGET_SEGMENT, TARGET_OFFSET, SOURCE, TARGET, FLAGS, TRIALS, NUMBERS };

/* Flags: its memory can't be read; it writes its output around the caches. */
enum { FORBIDS_READING = 1, STREAMS = 2 };

_Static_assert((int)NUMBERS <= (int)POSTED, "the numbers are posted in one step");

struct Segment {
    Segment *next;
    int64_t number;
    size_t nbytes; /* of this rank's part */
    char *parts[]; /* of the ranks */
};

struct Locations {
    char **sources, **targets;       /* the parts of the segments of this rank's input and output */
    int64_t (*posted)[NUMBERS];      /* by all ranks */
    int64_t *trials;                 /* of all ranks */
    char *pieces;                    /* of other ranks, read to be reduced, for each share */
    bool cannot_read;                /* reading has failed */
    size_t piece_bytes;
};

/* --- locations */

static const Segment *find(const Steps *steps, const char *address)
{
    for (const Segment *one = steps->segments; address != NULL && one != NULL; one = one->next) {
        if ((uintptr_t)address - (uintptr_t)one->parts[steps->rank] < one->nbytes)
            return one;
    }
    return NULL;
}

void free_locations(Steps *steps)
{
    for (Segment *one = steps->segments, *next; one != NULL; one = next) {
        next = one->next;
        free(one);
    }
    free(steps->processes);
    if (steps->locations != NULL) {
        free(steps->locations->sources);
        free(steps->locations->targets);
        free(steps->locations->posted);
        free(steps->locations->trials);
        free(steps->locations->pieces);
        free(steps->locations);
    }
}

static int allocate(const Collective *one)
{
    Steps *steps = one->steps;
    const size_t size = (size_t)steps->size;
    if (steps->locations == NULL)
        steps->locations = calloc(1, sizeof(Locations));
    Locations *made = steps->locations;
    if (made != NULL && made->posted == NULL) {
        free(made->sources);
        free(made->targets);
        free(made->trials);
        made->sources = calloc(size, sizeof(char *));
        made->targets = calloc(size, sizeof(char *));
        made->trials = calloc(size, sizeof *made->trials);
        if (made->sources != NULL && made->targets != NULL && made->trials != NULL)
            made->posted = calloc(size, sizeof *made->posted);
    }
    if (made == NULL || made->posted == NULL)
        return -1;
    const size_t threads = steps->threads > 1 ? min_size((size_t)steps->threads, MAX_THREADS) : 1;
    const size_t piece_bytes = threads * one->access_width;
    if ((one->reads_memory || one->streams) && one->access > ACCESS_MOVES && made->piece_bytes < piece_bytes) {
        free(made->pieces);
        made->pieces = malloc(size * piece_bytes);
        made->piece_bytes = made->pieces == NULL ? 0 : piece_bytes;
        if (made->pieces == NULL)
            return -1;
    }
    return 0;
}

bool tries_direct(const Collective *one)
{
    return one->access != ACCESS_NOTHING &&
           (one->reads_memory ||
            (!is_prefix(one) && one->steps->has_segments && one->nbytes >= SEGMENT_BYTES));
}

int locate_arrays(const Collective *one, const char *source, const char *target)
{
    const Steps *steps = one->steps;
    if (allocate(one) < 0) {
        PyErr_NoMemory();
        end_failed(one->steps);
        return -1;
    }
    /* Copied, since other threads may add and remove segments, though not those of arrays that are in use. */
    const Segment *segments[2] = {find(steps, source), find(steps, target)};
    char **parts[2] = {steps->locations->sources, steps->locations->targets};
    int64_t *own = steps->locations->posted[steps->rank];
    for (size_t i = 0; i < 2; i++) {
        const char *address = i == 0 ? source : target;
        own[2 * i] = segments[i] == NULL ? 0 : segments[i]->number;
        own[2 * i + 1] = segments[i] == NULL ? 0 : address - segments[i]->parts[steps->rank];
        if (segments[i] != NULL)
            memcpy(parts[i], segments[i]->parts, (size_t)steps->size * sizeof(char *));
    }
    own[SOURCE] = (int64_t)(uintptr_t)source;
    own[TARGET] = (int64_t)(uintptr_t)target;
    return 0;
}

/* Exchange the locations of the ranks' arrays. */
static int exchange_locations(const Collective *one)
{
    Steps *steps = one->steps;
    Locations *all = steps->locations;
    /* A library that protects its secrets may make the process unreadable at any time. No rank reads in a call for
     * which one has written to its slot. */
    const bool forbids =
        one->reads_memory && !is_written(one) &&
        (all->cannot_read || (steps->processes[steps->rank] != 0 && prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) != 1));
    all->posted[steps->rank][FLAGS] = (forbids ? FORBIDS_READING : 0) | (one->streams ? STREAMS : 0);
    all->posted[steps->rank][TRIALS] = one->trials == NULL ? 0 : pack_trials(one->trials);
    memcpy(get_posted(steps, steps->rank, get_parity(steps)), all->posted[steps->rank], sizeof *all->posted);
    if (sync_ranks(steps) < 0)
        return -1;
    for (int rank = 0; rank < steps->size; rank++)
        memcpy(all->posted[rank], get_posted(steps, rank, 1 - get_parity(steps)), sizeof *all->posted);
    return 0;
}

static bool lie_in_segments(const Collective *one)
{
    const Steps *steps = one->steps;
    const int64_t(*posted)[NUMBERS] = (const int64_t(*)[NUMBERS])steps->locations->posted;
    const bool writes = one->access == ACCESS_VECTOR && one->everywhere;
    const int64_t source = posted[one->has_one_source ? one->root : 0][SOURCE_SEGMENT];
    const int64_t target = posted[0][TARGET_SEGMENT];
    if (is_prefix(one) || source == 0 || (writes && target == 0))
        return false;
    for (int rank = 0; rank < steps->size; rank++) {
        /* Where only the root has data, a rank has mapped it if its own output lies in the same segment. */
        const bool has_target_only = one->has_one_source && rank != one->root;
        if (posted[rank][has_target_only ? TARGET_SEGMENT : SOURCE_SEGMENT] != source ||
            (writes && posted[rank][TARGET_SEGMENT] != target))
            return false;
    }
    return true;
}

/* Whether a rank writes its output where others still read its input. Of a share of a scan in place, the rank that
 * reads the input is the one that writes the output; but the first rank writes the identity of exscan. */
static bool have_outputs_in_inputs(const Collective *one)
{
    const bool may_be_same = one->access == ACCESS_PREFIXES && one->inclusive;
    for (int rank = 0; rank < one->steps->size && is_prefix(one); rank++) {
        const uint64_t source = (uint64_t)one->steps->locations->posted[rank][SOURCE];
        const uint64_t target = (uint64_t)one->steps->locations->posted[rank][TARGET];
        if (may_be_same && source == target)
            continue;
        if (target - source < one->nbytes || source - target < one->nbytes)
            return true;
    }
    return false;
}

static bool can_all_read(const Collective *one)
{
    Steps *steps = one->steps;
    steps->unreadable_rank = -1;
    for (int rank = 0; rank < steps->size && steps->unreadable_rank < 0; rank++) {
        if (steps->locations->posted[rank][FLAGS] & FORBIDS_READING)
            steps->unreadable_rank = rank;
    }
    return steps->unreadable_rank < 0;
}

/* Whether the ranks read each other's memory in this call, if they can. */
static bool prefers_reads(const Collective *one)
{
    const Locations *all = one->steps->locations;
    if (one->trials == NULL)
        return one->reads_memory;
    for (int rank = 0; rank < one->steps->size; rank++)
        all->trials[rank] = all->posted[rank][TRIALS];
    return choose_reads(one->trials, all->trials, one->steps->size);
}

/* --- in segments */

static const char *get_source(const Collective *one, int rank)
{
    const Locations *all = one->steps->locations;
    return (one->has_one_source ? all->targets : all->sources)[rank] + all->posted[rank][SOURCE_OFFSET];
}

static char *get_target(const Collective *one, int rank)
{
    const Locations *all = one->steps->locations;
    return all->targets[rank] + all->posted[rank][TARGET_OFFSET];
}

/* To access the memory of another rank. */
typedef struct {
    int number, peer;
    bool writes;
} Failure;

/* A reduction of a part of the inputs, which begins at `origin`. */
typedef struct {
    const Collective *one;
    const char *source;
    char *target; /* of the part */
    size_t origin;
    Failure *failures; /* of each share */
} Reduction;

/* Reduce the bytes from `begin` to `end`; of an all-reduction also write them to the outputs of all ranks. */
static void reduce_share_in_segments(const void *task, int share, size_t begin, size_t end)
{
    const Reduction *whole = task;
    const Collective *one = whole->one;
    const int rank = one->steps->rank, size = one->steps->size;
    const void **parts = get_parts(one, share);
    const bool writes = one->access == ACCESS_VECTOR && one->everywhere;
    /* A piece of a large result is copied to each output from a cache: stores to one of them, from which the others are
     * copied, would first read its memory. The inputs of the next piece are fetched meanwhile. */
    const bool apart = writes && one->streams;
    char *piece = apart ? one->steps->locations->pieces + (size_t)share * (size_t)size * one->access_width : NULL;
    const size_t width = apart ? min_size(STREAM_WIDTH, one->access_width) : one->access_width;
    for (size_t start = begin; start < end; start += width) {
        const size_t nbytes = min_size(width, end - start), at = whole->origin + start;
        for (int peer = 0; peer < size; peer++)
            parts[peer] = (peer == rank ? whole->source : get_source(one, peer)) + at;
        char *result = apart ? piece : whole->target + start;
        (writes ? one->reduce : one->reduce_out)(result, parts, size, nbytes / one->itemsize);
        for (int peer = 0; peer < size && writes; peer++) {
            if (apart)
                stream_and_fetch(peer == rank ? whole->target + start : get_target(one, peer) + at, result, nbytes,
                                 (const char *)parts[peer] + (start + width < end ? width : 0));
            else if (peer != rank)
                copy(get_target(one, peer) + at, result, nbytes);
        }
    }
    if (apart)
        end_streams();
}

/* Reduce the bytes from `begin` to `end` of the inputs, and write them to `target`. */
static void reduce_in_segments(const Collective *one, const char *source, char *target, size_t begin, size_t end)
{
    const Reduction whole = {.one = one, .source = source, .target = target, .origin = begin};
    run_shares(one->steps->threads, reduce_share_in_segments, &whole, end - begin);
}

static void run_in_segments(const Collective *one, const char *source, char *target)
{
    const int rank = one->steps->rank, size = one->steps->size;
    if (one->access == ACCESS_BLOCK) {
        reduce_in_segments(one, source, target, one->own.from, one->own.from + one->own.nbytes);
    } else if (one->access == ACCESS_MOVES) {
        for (int i = 1; i < size; i++) {
            const int peer = (rank + i) % size;
            const Move *move = &one->moves[peer];
            if (move->nbytes > 0)
                copy_out(one, target + move->to, get_source(one, peer) + one->origin, move->nbytes);
        }
    } else if (one->everywhere) {
        const size_t low = get_share_offset(one->nbytes, rank, size);
        reduce_in_segments(one, source, target + low, low, get_share_offset(one->nbytes, rank + 1, size));
    } else if (one->has_result) {
        reduce_in_segments(one, source, target, 0, one->nbytes);
    }
}

/* --- in private memory */

/* Read where the kernel would be slow at copying: to the next line of the array, from where it is moved. Returns the
 * error number. */
static int read_shifted(int process, int64_t from, char *to, size_t nbytes)
{
    char last[SHIFT]; /* for which there is no room in the array */
    for (size_t part; nbytes > 0; from += (int64_t)part, to += part, nbytes -= part) {
        const bool is_last = nbytes < PIECE_BYTES + SHIFT;
        part = is_last ? nbytes : PIECE_BYTES;
        const size_t shifted = is_last ? part - SHIFT : part;
        struct iovec here[2] = {{to + SHIFT, shifted}, {last, SHIFT}}, there = {(void *)(uintptr_t)from, part};
        const ssize_t done = process_vm_readv(process, here, is_last ? 2 : 1, &there, 1, 0);
        if (done != (ssize_t)part)
            return done < 0 ? errno : EFAULT;
        memmove(to, to + SHIFT, shifted);
        if (is_last)
            memcpy(to + shifted, last, SHIFT);
    }
    return 0;
}

int read_memory(int process, int64_t from, char *to, size_t nbytes)
{
    if (process == 0) {
        copy(to, (const char *)(uintptr_t)from, nbytes);
        return 0;
    }
    if (nbytes >= STRING_BYTES && collide((uintptr_t)to, (uintptr_t)from))
        return read_shifted(process, from, to, nbytes);
    while (nbytes > 0) {
        struct iovec here = {to, nbytes}, there = {(void *)(uintptr_t)from, nbytes};
        ssize_t done = process_vm_readv(process, &here, 1, &there, 1, 0);
        if (done <= 0)
            return done < 0 ? errno : EFAULT;
        /* The kernel may read less, and reads at most 2 GiB per call. */
        from += done, to += done, nbytes -= (size_t)done;
    }
    return 0;
}

/* Copy to private memory of another rank, a moment at a time: nothing any more when that rank has abandoned the
 * operation, which this one finds out in its next step. Returns the error number. */
static int write_memory(const Steps *steps, int rank, const char *from, int64_t to, size_t nbytes)
{
    const int process = steps->processes[rank];
    char *pieces = NULL; /* that the kernel is fast at copying */
    if (process != 0 && nbytes >= STRING_BYTES && collide((uintptr_t)to, (uintptr_t)from))
        pieces = malloc(PIECE_BYTES + PAGE_BYTES);
    const size_t width = pieces == NULL ? WRITE_BYTES : PIECE_BYTES;
    int failure = 0;
    while (failure == 0 && nbytes > 0) {
        const size_t part = min_size(nbytes, width);
        const char *piece = from;
        if (pieces != NULL) {
            char *const copied = pieces + ((size_t)((uintptr_t)to - (uintptr_t)pieces) & (PAGE_BYTES - 1));
            copy(copied, from, part);
            piece = copied;
        }
        if (!begin_write(steps, rank))
            break;
        struct iovec here = {(void *)(uintptr_t)piece, part}, there = {(void *)(uintptr_t)to, part};
        ssize_t done = (ssize_t)part;
        if (process == 0)
            copy((char *)(uintptr_t)to, from, part);
        else
            done = process_vm_writev(process, &here, 1, &there, 1, 0);
        failure = done > 0 ? 0 : done < 0 ? errno : EFAULT;
        end_write(steps);
        if (failure == 0)
            from += done, to += done, nbytes -= (size_t)done;
    }
    free(pieces);
    return failure;
}

/* Raise CommunicationError. Returns -1. */
static int fail_to_access(const Collective *one, const char *access, int peer, int number)
{
    Steps *steps = one->steps;
    steps->locations->cannot_read = true;
    acquire_gil(steps);
    PyObject *module = PyImport_ImportModule("mpicoll.errors");
    PyObject *error = module == NULL ? NULL : PyObject_GetAttrString(module, "CommunicationError");
    if (error != NULL)
        PyErr_Format(error,
                     "rank %d of %d (of this node) can't %s the memory of rank %d any more (%s): the operation is"
                     " incomplete; later ones do not need this",
                     steps->rank, steps->size, access, peer,
                     strerror(number)); /* NOLINT(concurrency-mt-unsafe): GIL held */
    Py_XDECREF(module);
    Py_XDECREF(error);
    end_failed(steps);
    return -1;
}

typedef struct {
    int process;
    int64_t from;
    char *to;
    int *numbers; /* of errors, of each share */
} Read;

static void read_share(const void *task, int share, size_t begin, size_t end)
{
    const Read *whole = task;
    whole->numbers[share] = read_memory(whole->process, whole->from + (int64_t)begin, whole->to + begin, end - begin);
}

/* Read from an array of another rank. Returns -1 with an exception. */
static int read_array(const Collective *one, int peer, int which, size_t at, char *to, size_t nbytes)
{
    const Steps *steps = one->steps;
    int numbers[MAX_THREADS] = {0};
    const Read whole = {steps->processes[peer], steps->locations->posted[peer][which] + (int64_t)at, to, numbers};
    run_shares(steps->threads, read_share, &whole, nbytes);
    for (int share = 0; share < MAX_THREADS; share++) {
        if (numbers[share] != 0)
            return fail_to_access(one, "read", peer, numbers[share]);
    }
    return 0;
}

/* Write a piece of the result of a vector, or of prefixes those in place of the parts, to the other ranks that get it.
 * Returns false if that has failed. */
static bool write_results(
    const Collective *one, const char *result, const void *const *parts, size_t at, size_t nbytes, Failure *failure)
{
    const Steps *steps = one->steps;
    const bool prefixes = one->access == ACCESS_PREFIXES;
    for (int i = 1; i < steps->size; i++) {
        const int peer = (steps->rank + i) % steps->size;
        /* Rank 0 writes its prefix itself. */
        if (prefixes ? peer == 0 : !one->everywhere && peer != one->root)
            continue;
        failure->peer = peer;
        failure->writes = true;
        const int64_t target = steps->locations->posted[peer][TARGET] + (int64_t)at;
        failure->number = write_memory(steps, peer, prefixes ? parts[peer] : result, target, nbytes);
        if (failure->number != 0)
            return false;
    }
    return true;
}

/* Whether two ranks read the results of an all-reduction from each other after one more step, instead of writing them:
 * the same on both. They do where results are written around the caches, which then takes one pass over them less. Two
 * ranks took up to a sixth less time for 16 to 64 MiB, never more; 3 and 4 ranks on 2 cores took as long. */
static bool fetches_results(const Collective *one)
{
    return one->access == ACCESS_VECTOR && one->everywhere && one->steps->size == 2 &&
           (one->steps->locations->posted[0][FLAGS] & STREAMS);
}

/* Ranks begin to read with the next one, so that they don't all read from the same one. What is written for others is
 * in the cache then. */
static void read_and_reduce_share(const void *task, int share, size_t begin, size_t end)
{
    const Reduction *whole = task;
    const Collective *one = whole->one;
    const Locations *all = one->steps->locations;
    const int rank = one->steps->rank, size = one->steps->size;
    const bool writes = one->access == ACCESS_VECTOR && (one->everywhere || !one->has_result) && !fetches_results(one);
    const int operands = one->access == ACCESS_PREFIX ? one->operands : size;
    const void **parts = get_parts(one, share);
    char *pieces = all->pieces + (size_t)share * (size_t)size * one->access_width;
    for (size_t start = begin; start < end; start += one->access_width) {
        const size_t nbytes = min_size(one->access_width, end - start), at = whole->origin + start;
        for (int i = 1; i < size; i++) {
            const int peer = (rank + i) % size;
            if (peer >= operands)
                continue;
            char *piece = pieces + (size_t)peer * one->access_width;
            const int number =
                read_memory(one->steps->processes[peer], all->posted[peer][SOURCE] + (int64_t)at, piece, nbytes);
            if (number != 0) {
                whole->failures[share].number = number;
                whole->failures[share].peer = peer;
                return;
            }
            parts[peer] = piece;
        }
        parts[rank] = whole->source + at;
        if (one->access == ACCESS_PREFIXES) {
            reduce_all_prefixes(one, parts, whole->target + start, nbytes);
            if (!write_results(one, NULL, parts, at, nbytes, &whole->failures[share]))
                return;
            continue;
        }
        /* Large outputs are written around the caches, from a piece that is in them. */
        const bool apart = writes && (one->streams || !one->has_result);
        char *result = apart ? pieces + (size_t)rank * one->access_width : whole->target + start;
        (writes ? one->reduce : one->reduce_out)(result, parts, operands, nbytes / one->itemsize);
        if (writes && !write_results(one, result, parts, at, nbytes, &whole->failures[share]))
            return;
        if (apart && one->has_result)
            stream(whole->target + start, result, nbytes);
    }
}

/* Reduce the bytes from `begin` to `end` of the inputs, and write them to `target`, or of a vector to the other ranks
 * that get them too. Returns -1 with an exception. */
static int read_and_reduce(const Collective *one, const char *source, char *target, size_t begin, size_t end)
{
    Failure failures[MAX_THREADS] = {0};
    const Reduction whole = {one, source, target, begin, failures};
    run_shares(one->steps->threads, read_and_reduce_share, &whole, end - begin);
    for (int share = 0; share < MAX_THREADS; share++) {
        if (failures[share].number != 0)
            return fail_to_access(one, failures[share].writes ? "write to" : "read", failures[share].peer,
                                  failures[share].number);
    }
    return 0;
}

typedef struct {
    const Steps *steps;
    int rank;
    const char *from;
    int64_t to;
    int *numbers; /* of errors, of each share */
} MemoryWrite;

static void write_memory_share(const void *task, int share, size_t begin, size_t end)
{
    const MemoryWrite *whole = task;
    whole->numbers[share] =
        write_memory(whole->steps, whole->rank, whole->from + begin, whole->to + (int64_t)begin, end - begin);
}

/* Write to the output of another rank. Returns -1 with an exception. */
static int write_array(const Collective *one, int peer, const char *from, size_t at, size_t nbytes)
{
    const Steps *steps = one->steps;
    int numbers[MAX_THREADS] = {0};
    const MemoryWrite whole = {steps, peer, from, steps->locations->posted[peer][TARGET] + (int64_t)at, numbers};
    run_shares(steps->threads, write_memory_share, &whole, nbytes);
    for (int share = 0; share < MAX_THREADS; share++) {
        if (numbers[share] != 0)
            return fail_to_access(one, "write to", peer, numbers[share]);
    }
    return 0;
}

enum {
    WRITTEN_AT = 8 * 1024 /* bytes of a block that its owner writes: the call takes as long as to read so many */
};

/* What this rank's input contributes to its own output by a copy, and the identity: done last, while others still
 * access arrays. */
static void write_own(const Collective *one, const char *source, char *target)
{
    if (one->access == ACCESS_MOVES)
        copy_own(one, source, target);
    else if (is_prefix(one))
        write_first_prefix(one, source, target);
}

/* Return how many of the first bytes of a block its receiver reads. Its owner writes the rest, if that is worth a call.
 */
static size_t get_read_bytes(const Collective *one, size_t nbytes)
{
    const size_t read = get_share_offset(nbytes, one->read_parts, one->all_parts);
    return read > 0 && nbytes - read < WRITTEN_AT ? nbytes : read;
}

/* Write the part of a block that its receiver does not read, from byte `at` on of that rank's output. */
static int write_rest(const Collective *one, int peer, const char *block, size_t at, size_t nbytes)
{
    const size_t read = get_read_bytes(one, nbytes);
    return read < nbytes ? write_array(one, peer, block + read, at + read, nbytes - read) : 0;
}

static int move_blocks(const Collective *one, const char *source, char *target)
{
    const int rank = one->steps->rank, size = one->steps->size;
    for (int i = 1; i < size; i++) {
        const int peer = (rank + i) % size;
        const Move *in = &one->moves[peer], *out = &one->moves[size + (one->outgoing == size ? peer : 0)];
        const bool sends = one->has_one_source ? rank == one->root : one->everywhere || peer == one->root;
        if (sends && one->read_parts < one->all_parts &&
            write_rest(one, peer, source + out->from, one->place, out->nbytes) < 0)
            return -1;
        const size_t read = get_read_bytes(one, in->nbytes);
        if (read > 0 && read_array(one, peer, SOURCE, one->origin, target + in->to, read) < 0)
            return -1;
    }
    return 0;
}

/* Write this rank's block to all outputs, its own too. */
static int write_pieces(const Collective *one, const char *source, char *target)
{
    const int rank = one->steps->rank, size = one->steps->size;
    for (size_t start = 0; start < one->own.nbytes; start += PIECE_BYTES) {
        const size_t nbytes = min_size(PIECE_BYTES, one->own.nbytes - start);
        for (int i = 1; i < size; i++) {
            if (write_array(one, (rank + i) % size, source + start, one->place + start, nbytes) < 0)
                return -1;
        }
        copy_out(one, target + one->own.to + start, source + start, nbytes);
    }
    return 0;
}

/* A rank that has nothing to reduce of exscan or scan. */
static int move_prefix(const Collective *one, const char *source, char *target)
{
    if (one->steps->rank > 0)
        return read_array(one, 0, SOURCE, 0, target, get_read_bytes(one, one->nbytes));
    return one->read_parts < one->all_parts ? write_rest(one, 1, source, 0, one->nbytes) : 0;
}

/* Reduce this rank's share, and deliver or fetch what others get of a share. */
static int run_shares_of_vector(const Collective *one, const char *source, char *target)
{
    Steps *steps = one->steps;
    const bool has_result = one->access == ACCESS_PREFIXES || one->has_result;
    const size_t low = get_share_offset(one->nbytes, steps->rank, steps->size);
    const size_t high = get_share_offset(one->nbytes, steps->rank + 1, steps->size);
    if (read_and_reduce(one, source, has_result ? target + low : NULL, low, high) < 0)
        return -1;
    if (!fetches_results(one))
        return 0;
    if (sync_ranks(steps) < 0)
        return -1;
    return steps->rank == 0 ? read_array(one, 1, TARGET, high, target + high, one->nbytes - high)
                            : read_array(one, 0, TARGET, 0, target, low);
}

/* `has_own` is set if the own block has been copied too. */
static int run_in_private_memory(const Collective *one, const char *source, char *target, bool *has_own)
{
    if (one->access == ACCESS_BLOCK)
        return read_and_reduce(one, source, target, one->own.from, one->own.from + one->own.nbytes);
    if (one->access == ACCESS_PREFIX)
        return one->operands < 2 ? move_prefix(one, source, target)
                                 : read_and_reduce(one, source, target, 0, one->nbytes);
    if (one->access == ACCESS_VECTOR || one->access == ACCESS_PREFIXES)
        return run_shares_of_vector(one, source, target);
    *has_own = one->everywhere && one->outgoing == 1 && !one->has_one_source && one->own.nbytes > PIECE_BYTES &&
               is_own_apart(one, source, target);
    return (*has_own ? write_pieces : move_blocks)(one, source, target);
}

int run_direct(const Collective *one, const char *source, char *target)
{
    if (one->trials != NULL && expect_slots(one->trials) && one->write != NULL) {
        one->write(one, one->steps->step + 1, source, target, 0);
        one->trials->written = true;
    }
    if (exchange_locations(one) < 0)
        return -1;
    bool has_own = false;
    if (one->steps->has_segments && lie_in_segments(one))
        run_in_segments(one, source, target);
    else if (!prefers_reads(one) || !can_all_read(one) || have_outputs_in_inputs(one))
        return 0;
    else if (run_in_private_memory(one, source, target, &has_own) < 0)
        return -1;
    const int status = reach_step(one->steps);
    if (!has_own)
        write_own(one, source, target);
    return complete_reached_step(one->steps, status) < 0 ? -1 : 1;
}

int read_uneven_blocks(const Collective *one, const char *source, char *target, size_t start, bool copies_own)
{
    Steps *steps = one->steps;
    const int rank = steps->rank, size = steps->size, parity = get_parity(steps);
    Locations *all = steps->locations;
    for (int peer = 0; peer < size; peer++) {
        /* Of the block for each rank: only this one knows where it begins. */
        const int64_t address = (int64_t)(uintptr_t)(source + one->moves[size + peer].from);
        memcpy(get_slot(steps, parity, rank) + (size_t)peer * sizeof address, &address, sizeof address);
    }
    if (exchange_locations(one) < 0)
        return -1;
    if (!can_all_read(one))
        return 0;
    for (int i = 1; i < size; i++) {
        const int peer = (rank + i) % size;
        const Move *move = &one->moves[peer];
        memcpy(&all->posted[peer][SOURCE], get_slot(steps, parity, peer) + (size_t)rank * sizeof(int64_t),
               sizeof(int64_t));
        if (start < move->nbytes &&
            read_array(one, peer, SOURCE, start, target + move->to + start, move->nbytes - start) < 0)
            return -1;
    }
    if (copies_own)
        copy_own(one, source, target);
    return sync_ranks(steps) < 0 ? -1 : 1;
}

/* --- methods of Steps */

PyObject *add_segment(PyObject *self, PyObject *args)
{
    Steps *steps = as_steps(self);
    long long number;
    PyObject *addresses;
    Py_ssize_t nbytes;
    if (steps == NULL || !PyArg_ParseTuple(args, "LOn", &number, &addresses, &nbytes))
        return NULL;
    if (PySequence_Size(addresses) != steps->size)
        return PyErr_Format(PyExc_ValueError, "Steps: a segment has an address for each rank");
    Segment *made = malloc(sizeof *made + (size_t)steps->size * sizeof(char *));
    if (made == NULL)
        return PyErr_NoMemory();
    *made = (Segment){.next = steps->segments, .number = number, .nbytes = (size_t)nbytes};
    for (int rank = 0; rank < steps->size; rank++) {
        PyObject *address = PySequence_GetItem(addresses, rank);
        made->parts[rank] = address == NULL ? NULL : PyLong_AsVoidPtr(address);
        Py_XDECREF(address);
    }
    if (PyErr_Occurred()) {
        free(made);
        return NULL;
    }
    steps->segments = made;
    steps->has_segments = true;
    Py_RETURN_NONE;
}

PyObject *remove_segment(PyObject *self, PyObject *argument)
{
    long long number = PyLong_AsLongLong(argument);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    for (Segment **place = &((Steps *)self)->segments; *place != NULL; place = &(*place)->next) {
        Segment *one = *place;
        if (one->number == number) {
            *place = one->next;
            free(one);
            break;
        }
    }
    Py_RETURN_NONE;
}

PyObject *find_segment(PyObject *self, PyObject *argument)
{
    const Steps *steps = (Steps *)self;
    const char *address = PyLong_AsVoidPtr(argument);
    if (address == NULL && PyErr_Occurred())
        return NULL;
    const Segment *one = find(steps, address);
    return one == NULL ? Py_BuildValue("(ii)", 0, 0)
                       : Py_BuildValue("(Ln)", (long long)one->number, (Py_ssize_t)(address - one->parts[steps->rank]));
}

PyObject *set_processes(PyObject *self, PyObject *processes)
{
    Steps *steps = as_steps(self);
    if (steps == NULL)
        return NULL;
    if (PySequence_Size(processes) != steps->size)
        return PyErr_Format(PyExc_ValueError, "Steps: there is a process of each rank");
    int *made = calloc((size_t)steps->size, sizeof(int));
    if (made == NULL)
        return PyErr_NoMemory();
    for (int rank = 0; rank < steps->size; rank++) {
        PyObject *number = PySequence_GetItem(processes, rank);
        made[rank] = number == NULL ? 0 : (int)PyLong_AsLong(number);
        Py_XDECREF(number);
    }
    if (PyErr_Occurred()) {
        free(made);
        return NULL;
    }
    free(steps->processes);
    steps->processes = made;
    if (steps->locations != NULL)
        steps->locations->cannot_read = false;
    Py_RETURN_NONE;
}
