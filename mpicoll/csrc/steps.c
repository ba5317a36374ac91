/* The synchronisation of the ranks of a node by flags in memory that they share.
 *
 * Each rank has a ring of words: the number of a step in the upper half, and the signature of the operation that the
 * rank carries out in the lower half. A rank ends a step by storing its word, then waits until the words of the other
 * ranks have the same number. It compares the words of all ranks, step by step:
 *
 * - all are equal: the operation goes on;
 * - the signature of a rank is 0: the rank has failed in this operation, which ends with this step on all ranks;
 * - other signatures differ: the ranks have begun different operations, which end with this step on all ranks.
 *
 * A rank stores the word of a step only after it has seen those of all ranks AHEAD steps before, and the ring has
 * twice as many words. So a word is replaced only after all ranks have seen it, and all of them draw the same
 * conclusion from the words of a step.
 *
 * Most operations wait for all ranks in each step. Then no rank has gone on when the words of a step differ, and the
 * ranks remain synchronised. A rank that needs no data of others, or not of all, may be ahead of them. That is a part
 * of its word: where words differ after such a rank has gone on, no rank uses this memory any more. The description of
 * its call is in shared memory then, so that the other ranks do not need it to raise their error: it may be far away in
 * its program, or have ended.
 *
 * A rank may also begin the steps of several operations before it completes the first one. It stores their words, and
 * compares those of each step when it completes it, in the order of steps: so it has not gone on where words differ.
 * But it may have begun MAX_BEGUN - 1 later steps, whose words count for nothing then. The ranks meet MAX_BEGUN steps
 * after the one that differs, which none of them has begun, are synchronised there, and begin these operations again.
 *
 * A rank that stops waiting for the others, because they are late or dead, abandons the operation. It and ranks that
 * leave after a difference state in a word of their own that they can't be synchronised any more. Ranks that write to
 * the memory of others look at this word before each write, and count their writes in a word of their own: the rank
 * that leaves waits until there are none.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "steps.h"

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <structmember.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "clock.h"
#include "direct.h"
#include "records.h"

/* Parts of the lower half of a word. */
static const uint32_t SIGNATURE = 0x3FFFFFFFu;
static const uint32_t WAITS_FOR_NONE = 1u << 31, WAITS_FOR_SOME = 1u << 30; /* or for all ranks */
static const uint32_t BEGUN = 3u << 30;                                     /* and waits for all later */

/* Signature of the step in which ranks that have begun different operations exchange descriptions of them. */
static const uint32_t DESCRIBING = 0x115C0FFEu;

enum {
    LINE = 128,              /* processors fetch pairs of cache lines */
    NUMBER_AT = 8,           /* in the cache line of a flag: the number of the call among the collectives */
    SMALL_AT = 16,           /* in the same line */
    STATE_AT = RING * LINE,
    WRITES_AT = STATE_AT + 64, /* in another cache line, since others look at the state */
    SLEEPERS_AT = STATE_AT + LINE, /* in a line that is seldom written: a look there takes no transfer */
    POSTED_AT = SLEEPERS_AT + RING * (int)sizeof(uint32_t),
    RANK_BYTES = POSTED_AT + LINE, /* flags and small slots, the state and sleepers, posted numbers of both parities */
    EAGER_SPINS = 20,        /* polls without a pause, which takes up to a third of a step */
    SPINS = 100,             /* more polls without releasing the GIL, which takes about as long */
    SHARED_SPINS = 4,        /* the same where ranks share cores: most often one that has yet to run is waited for */
    YIELDS = 64,             /* where ranks share cores, before the wait goes on in Python, which looks for failures */
    TURNS = 8,               /* of polls and a yield where each rank has a core, which other programs may use too */
    PATIENT_TURNS = 3,
    PATIENCE = 3,
    POLLS_PER_READING = 32   /* of the clock */
};

/* Nanoseconds. */
static const int64_t POLL = 6000, PATIENT_POLL = 1000000;
static const int64_t LONG_YIELD = 200000; /* another thread has used the core meanwhile */
static const int64_t LONGEST_WRITE = 1000000000;

_Static_assert(POSTED * 8 * 2 <= RANK_BYTES - POSTED_AT, "posted numbers of both parities");
_Static_assert(SMALL_AT + SMALL_SLOT_BYTES <= 64, "a flag and its small slot in one cache line");
_Static_assert(POSTED_AT % LINE == 0, "posted numbers in a line of their own");
_Static_assert(WRITES_AT + sizeof(uint32_t) <= SLEEPERS_AT, "the state and the writes in one pair of cache lines");
_Static_assert(AHEAD >= 2 && RING >= AHEAD + 2 + MAX_BEGUN, "what a rank replaces has been read: see find_slot");
_Static_assert(MAX_BEGUN <= AHEAD, "room for the words of a meeting, and those after it");
_Static_assert((RING & (RING - 1)) == 0 && RING % 4 == 0, "indices of numbers that wrap, of both parities");

typedef _Atomic uint64_t Word;

static inline char *get_block(const Steps *steps, int rank) { return steps->flags + (size_t)rank * RANK_BYTES; }

static inline Word *get_flag(const Steps *steps, int rank, uint32_t step)
{
    return (Word *)(void *)(get_block(steps, rank) + (size_t)(step % RING) * LINE);
}

/* Whether ranks sleep until a rank has stored this flag. */
static inline _Atomic uint32_t *get_sleepers(const Steps *steps, int rank, uint32_t step)
{
    return (_Atomic uint32_t *)(void *)(get_block(steps, rank) + SLEEPERS_AT) + step % RING;
}

/* The number of the call of a rank in a step, where it does not wait for all ranks. */
static inline int64_t *get_call_number(const Steps *steps, int rank, uint32_t step)
{
    return (int64_t *)(void *)(get_block(steps, rank) + (size_t)(step % RING) * LINE + NUMBER_AT);
}

/* The length of the description of this call, then the description. */
static inline char *get_text(const Steps *steps, int rank, uint32_t step)
{
    char *texts = steps->flags + (size_t)steps->size * RANK_BYTES;
    return texts + ((size_t)rank * RING + step % RING) * TEXT_BYTES;
}

char *get_small_slot(const Steps *steps, uint32_t step, int rank)
{
    return get_block(steps, rank) + (size_t)(step % RING) * LINE + SMALL_AT;
}

char *get_ring_slot(const Steps *steps, uint32_t step, int rank)
{
    return steps->slots[steps->size + rank] + steps->slot_bytes + (size_t)(step % RING) * RING_STRIDE;
}

static inline Word *get_state(const Steps *steps, int rank)
{
    return (Word *)(void *)(get_block(steps, rank) + STATE_AT);
}

/* The number of writes of a rank to the memory of others that have begun and not ended. */
static inline _Atomic uint32_t *get_writes(const Steps *steps, int rank)
{
    return (_Atomic uint32_t *)(void *)(get_block(steps, rank) + WRITES_AT);
}

int64_t *get_posted(const Steps *steps, int rank, int parity)
{
    return (int64_t *)(void *)(get_block(steps, rank) + POSTED_AT) + (size_t)parity * POSTED;
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline uint32_t get_word(const Steps *steps, int rank, uint32_t step)
{
    return (uint32_t)atomic_load_explicit(get_flag(steps, rank, step), memory_order_acquire);
}

static inline uint32_t get_signature(const Steps *steps, int rank, uint32_t step)
{
    return get_word(steps, rank, step) & SIGNATURE;
}

/* Whether a rank does not wait for all others in a step, and has described its call. */
static inline bool has_described(const Steps *steps, int rank, uint32_t step)
{
    return (get_word(steps, rank, step) & (WAITS_FOR_NONE | WAITS_FOR_SOME)) != 0;
}

/* Whether a rank is not one of those whose words are looked at. */
static inline bool is_skipped(const Steps *steps, const Words *words, int rank)
{
    return rank == steps->rank || (words->describes && has_described(steps, rank, steps->different_step));
}

/* Look at the words that have not been seen yet, and return true if there are no more of them. Each is read once after
 * its rank has stored it: that rank goes on, and soon writes to this memory again. */
static inline bool see_words(const Steps *steps, Words *words)
{
    for (; words->next < words->end; words->next++) {
        if (is_skipped(steps, words, words->next))
            continue;
        uint64_t word = atomic_load_explicit(get_flag(steps, words->next, words->step), memory_order_acquire);
        if ((uint32_t)(word >> 32) != words->step)
            return false;
        words->difference |= ((uint32_t)word ^ words->own) & SIGNATURE;
    }
    return true;
}

/* Prepare to look at the words of all ranks in a step. */
static inline Words begin_words(const Steps *steps, uint32_t step)
{
    return (Words){.step = step, .end = steps->size, .own = get_signature(steps, steps->rank, step)};
}

/* Look at the words of each step up to `until`, from those of the step after the last one that has been seen. Returns 0
 * if they have been seen, 1 if they differ in a step, -1 if some have not been stored. */
static inline int see_steps(Steps *steps, Words *words, uint32_t until)
{
    while ((int32_t)(until - steps->seen) > 0) {
        if (!see_words(steps, words))
            return -1;
        if (words->difference != 0) {
            steps->different_step = words->step;
            return 1;
        }
        steps->seen = words->step;
        *words = begin_words(steps, steps->seen + 1);
    }
    return 0;
}

/* Look at all words that have been stored. Returns as see_steps. */
static int look_ahead(Steps *steps)
{
    Words words = begin_words(steps, steps->seen + 1);
    return see_steps(steps, &words, steps->step);
}

/* Whether words differ in a step that has not been seen, after which this rank may not go on. Any thread may ask. */
static bool differ_ahead(const Steps *steps)
{
    const uint32_t last = steps->step;
    for (uint32_t step = steps->seen + 1; (int32_t)(last - step) >= 0; step++) {
        Words words = begin_words(steps, step);
        if (!see_words(steps, &words))
            return false;
        if (words.difference != 0)
            return true;
    }
    return false;
}

/* The step that this rank waits for. */
static inline uint32_t get_awaited_step(const Steps *steps)
{
    return steps->is_waiting ? steps->late.step : steps->step;
}

static inline bool has_reached(const Steps *steps, int rank)
{
    const uint32_t step = get_awaited_step(steps);
    return (uint32_t)(atomic_load_explicit(get_flag(steps, rank, step), memory_order_acquire) >> 32) == step;
}

/* Whether this rank waits for another one. */
static inline bool is_late(const Steps *steps, int rank)
{
    const Words *late = &steps->late;
    if (rank == steps->rank ||
        (steps->is_waiting && (rank < late->next || rank >= late->end || is_skipped(steps, late, rank))))
        return false;
    return !has_reached(steps, rank);
}

/* Look whether the wait is over: also where words differ in an earlier step. Any thread may ask. */
static bool is_over(const Steps *steps)
{
    Words late = steps->late;
    return see_words(steps, &late) || differ_ahead(steps);
}

void release_gil(Steps *steps)
{
    if (steps->released == NULL)
        steps->released = PyEval_SaveThread();
}

void acquire_gil(Steps *steps)
{
    if (steps->released != NULL) {
        PyThreadState *state = steps->released;
        steps->released = NULL;
        PyEval_RestoreThread(state);
    }
}

/* --- sleeping */

#ifdef __linux__
/* The half of a flag that has the number of the step. */
static uint32_t *get_number(Word *flag)
{
    const uint16_t one = 1;
    return (uint32_t *)(void *)flag + *(const uint8_t *)&one;
}

static void wait_for_change(Word *flag, uint32_t number, const struct timespec *limit)
{
    syscall(SYS_futex, get_number(flag), FUTEX_WAIT, number, limit, NULL, 0);
}

static void wake_all(Word *flag) { syscall(SYS_futex, get_number(flag), FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }
#else
static void wait_for_change(Word *flag, uint32_t number, const struct timespec *limit)
{
    (void)flag;
    (void)number;
    nanosleep(limit, NULL);
}

static void wake_all(Word *flag) { (void)flag; }
#endif

/* Wake the ranks that sleep until this rank stores its flag, which it has done. */
static __attribute__((noinline, cold)) void wake_sleepers(Word *flag, _Atomic uint32_t *sleepers)
{
    atomic_store_explicit(sleepers, 0, memory_order_relaxed);
    wake_all(flag);
}

/* Store this rank's flag of a step. */
static inline void store_word(const Steps *steps, uint32_t step, uint32_t signature)
{
    Word *flag = get_flag(steps, steps->rank, step);
    _Atomic uint32_t *sleepers = get_sleepers(steps, steps->rank, step);
    atomic_store_explicit(flag, (uint64_t)step << 32 | signature, memory_order_release);
    /* Without a fence, the store may become visible only after this. Then the ranks sleep on, but not for long. */
    if (__builtin_expect(atomic_load_explicit(sleepers, memory_order_relaxed) != 0, 0))
        wake_sleepers(flag, sleepers);
}

/* The same of the current step. */
static inline void store_flag(const Steps *steps, uint32_t signature) { store_word(steps, steps->step, signature); }

/* Sleep until a rank that has not reached the step stores its flag, for at most `seconds`, or until a signal. */
static PyObject *sleep_until_flag(PyObject *self, PyObject *argument)
{
    const Steps *steps = (Steps *)self;
    const double seconds = PyFloat_AsDouble(argument);
    if (PyErr_Occurred())
        return NULL;
    int rank = 0;
    while (rank < steps->size && !is_late(steps, rank))
        rank++;
    if (rank == steps->size || !(seconds > 0 && seconds < 1))
        Py_RETURN_NONE;
    const struct timespec limit = {.tv_nsec = (long)(1e9 * seconds)};
    const uint32_t step = get_awaited_step(steps);
    Word *flag = get_flag(steps, rank, step);
    atomic_store_explicit(get_sleepers(steps, rank, step), 1, memory_order_seq_cst);
    const uint32_t number = (uint32_t)(atomic_load_explicit(flag, memory_order_seq_cst) >> 32);
    if (number == step)
        Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS
    wait_for_change(flag, number, &limit);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Poll for some nanoseconds. Returns false if the wait is not over. */
static bool poll_for(const Steps *steps, Words *late, int64_t nanoseconds)
{
    const int64_t end = read_nanoseconds(CLOCK_MONOTONIC) + nanoseconds;
    do {
        for (int poll = 0; poll < POLLS_PER_READING; poll++) {
            if (see_words(steps, late))
                return true;
            relax();
        }
    } while (read_nanoseconds(CLOCK_MONOTONIC) < end);
    return false;
}

/* What has used this rank's core while it yielded. */
typedef enum { NOTHING, THIS_PROCESS, ANOTHER_ONE } User;

static User yield_core(void)
{
    const int64_t used = read_nanoseconds(CLOCK_PROCESS_CPUTIME_ID), begin = read_nanoseconds(CLOCK_MONOTONIC);
    sched_yield();
    const int64_t passed = read_nanoseconds(CLOCK_MONOTONIC) - begin;
    if (passed < LONG_YIELD)
        return NOTHING;
    return read_nanoseconds(CLOCK_PROCESS_CPUTIME_ID) - used < passed / 2 ? ANOTHER_ONE : THIS_PROCESS;
}

/* Poll until the wait is over, where each rank has a core. Returns false if it is not.
 *
 * Where other programs compete for the cores, each rank runs for a time slice of some milliseconds, then waits for one.
 * Ranks that run at the same time communicate as fast as on idle cores. A rank that yields gives up the rest of its
 * slice, and the others soon give up theirs. So it is patient: it yields only when the rank that it waits for has
 * probably lost its core. It does so early in its slice, which shifts the next one: ranks that run in turns would need
 * two slices for every step. Whether this pays is learned. Threads of this process that have work get the core.
 */
static bool poll_on_own_core(Steps *steps)
{
    Words late = steps->late;
    for (int turn = 0; turn < (steps->patience > 0 ? PATIENT_TURNS : TURNS); turn++) {
        const bool patient = steps->patience > 0;
        if (poll_for(steps, &late, patient ? PATIENT_POLL : POLL)) {
            steps->patience = patient ? PATIENCE : 0;
            return true;
        }
        const User user = yield_core();
        const bool over = see_words(steps, &late);
        if (user == ANOTHER_ONE && !over)
            steps->patience = PATIENCE;
        else if (user == THIS_PROCESS)
            steps->patience = 0;
        else if (patient)
            steps->patience--; /* the core is free, or the rank that was waited for has used it */
        if (over)
            return true;
        if (user == THIS_PROCESS)
            break;
    }
    return is_over(steps);
}

/* Poll until the wait is over, without the GIL. Returns false if it is not. */
static bool poll_words(Steps *steps)
{
    if (steps->has_own_core)
        return poll_on_own_core(steps);
    Words late = steps->late;
    for (int yields = 0; yields < YIELDS; yields++) {
        if (see_words(steps, &late))
            return true;
        relax();
        sched_yield();
    }
    return is_over(steps);
}

/* Show the running operation to Python code. Returns -1 with an exception. The GIL is held. */
static int show_operation(Steps *steps)
{
    return steps->running == NULL ? 0 : steps->running->publish(steps->running);
}

/* Call a method in Python. Returns -1 with its exception. The GIL is held. */
static int call_python(Steps *steps, const char *name)
{
    PyObject *none = show_operation(steps) < 0 ? NULL : PyObject_CallMethod((PyObject *)steps, name, NULL);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* Keep the current exception until the operation has ended. Return false if another one is kept already. */
static bool defer_exception(Steps *steps)
{
    if (steps->interrupt != NULL)
        return false;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    steps->interrupt = value;
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return true;
}

int raise_interrupt(Steps *steps)
{
    PyObject *interrupt = steps->interrupt;
    if (interrupt == NULL || steps->keeps_interrupt)
        return 0;
    steps->interrupt = NULL;
    PyErr_SetObject((PyObject *)Py_TYPE(interrupt), interrupt);
    Py_DECREF(interrupt);
    return -1;
}

bool begin_write(const Steps *steps, int rank)
{
    atomic_fetch_add_explicit(get_writes(steps, steps->rank), 1, memory_order_seq_cst);
    if (atomic_load_explicit(get_state(steps, rank), memory_order_seq_cst) == 0)
        return true;
    end_write(steps);
    return false;
}

void end_write(const Steps *steps)
{
    atomic_fetch_sub_explicit(get_writes(steps, steps->rank), 1, memory_order_release);
}

/* Wait until the other ranks have ended the writes that they have begun: each takes less than a millisecond, but a rank
 * that has died meanwhile never ends its one. */
static void wait_for_writes(const Steps *steps)
{
    const int64_t end = read_nanoseconds(CLOCK_MONOTONIC) + LONGEST_WRITE;
    for (int rank = 0; rank < steps->size; rank++) {
        while (rank != steps->rank && atomic_load_explicit(get_writes(steps, rank), memory_order_seq_cst) != 0 &&
               read_nanoseconds(CLOCK_MONOTONIC) < end)
            sched_yield();
    }
}

/* State that this rank can't be synchronised any more. Its arrays may change afterwards. */
static void leave_ranks(Steps *steps)
{
    steps->unusable = true;
    atomic_store_explicit(get_state(steps, steps->rank), 1, memory_order_seq_cst);
    wait_for_writes(steps);
}

static void abandon_operation(Steps *steps)
{
    /* Ranks that reach this step later, or one that was begun, must see that this rank has left it. */
    for (int back = steps->begun - 1; back > 0; back--)
        store_word(steps, steps->step - (uint32_t)back, 0);
    store_flag(steps, 0);
    steps->begun = 0;
    /* They must not have seen another word when this rank changes the arrays that they read. */
    atomic_thread_fence(memory_order_seq_cst);
    leave_ranks(steps);
}

/* Record the ranks that this rank waits for; none, if it does not wait any more. */
static void record_late_ranks(const Steps *steps)
{
    int late[SHOWN_RANKS], count = 0;
    for (int rank = 0; rank < steps->size; rank++) {
        if (!is_late(steps, rank))
            continue;
        if (count < SHOWN_RANKS)
            late[count] = steps->members == NULL ? rank : steps->members[rank];
        count++;
    }
    record_wait(steps->waiting, steps->step - steps->first, late, count);
}

/* Wait in Python, which abandons the operation before it raises an exception of its own. Any other exception is one of
 * a signal handler, which may be raised at each instruction: the other ranks may have seen that this rank has entered
 * the operation, so it waits on. */
static int wait_in_python(Steps *steps)
{
    steps->waiting = steps->running != NULL ? steps->running->record : find_record_of_thread();
    int status;
    while ((status = call_python(steps, "wait_for_late_ranks")) < 0 && !steps->unusable) {
        if (!defer_exception(steps)) {
            abandon_operation(steps);
            break; /* with the exception */
        }
    }
    if (status == 0)
        record_late_ranks(steps);
    steps->waiting = -1;
    return status;
}

/* Wait for words that have not been seen, without the GIL or in Python. Returns 0 when they have been stored, or the
 * words of an earlier step differ; -1 if the wait has failed. */
static __attribute__((noinline)) int wait_long(Steps *steps, const Words *words)
{
    /* The watchdog's thread may look at this: it changes here only. */
    steps->late = *words;
    steps->is_waiting = true;
    bool held = steps->released == NULL;
    release_gil(steps);
    const bool over = poll_words(steps);
    if (held || !over)
        acquire_gil(steps);
    int status = over ? 0 : wait_in_python(steps);
    steps->is_waiting = false;
    if (!held && !over)
        release_gil(steps);
    return status;
}

static inline int count_spins(const Steps *steps)
{
    return steps->has_own_core ? EAGER_SPINS + SPINS : SHARED_SPINS;
}

/* Pause between polls, of which `spin` are left. */
static inline void relax_late(int spin)
{
    if (spin <= SPINS)
        relax();
}

/* Wait until the words of all ranks up to a step of this rank have been seen. Returns 1 if they differ in a step, 0 if
 * they are equal, -1 with an exception if the wait has failed. */
static inline int wait_for_all(Steps *steps, uint32_t until)
{
    Words words = begin_words(steps, steps->seen + 1);
    for (int spin = count_spins(steps);; spin--) {
        int status = see_steps(steps, &words, until);
        if (status >= 0)
            return status;
        if (spin > 0) {
            relax_late(spin);
            continue;
        }
        const Words last = begin_words(steps, until);
        if (wait_long(steps, &last) < 0)
            return -1;
    }
}

/* Wait until this rank may store the word of its next step. Returns as wait_for_all. */
static __attribute__((noinline)) int make_room(Steps *steps)
{
    int status = look_ahead(steps);
    if (status < 0 && steps->step - steps->seen >= AHEAD)
        return wait_for_all(steps, steps->step - AHEAD / 2);
    return status > 0;
}

/* Store the word of the next step. Returns as wait_for_all. */
static inline int store_next_word(Steps *steps, uint32_t signature)
{
    if (__builtin_expect(steps->step - steps->seen >= AHEAD, 0)) {
        int status = make_room(steps);
        if (status != 0)
            return status;
    }
    /* What this rank has read from arrays of other ranks, it has read before it looks at their words again. */
    atomic_thread_fence(memory_order_acquire);
    steps->step++;
    store_flag(steps, signature);
    return 0;
}

/* End a step. Returns as wait_for_all. */
static inline int sync_words(Steps *steps, uint32_t signature)
{
    const int status = store_next_word(steps, signature);
    return status == 0 ? wait_for_all(steps, steps->step) : status;
}

/* Return true if the ranks have begun different operations, whether or not some have failed. */
static bool have_begun_different_operations(const Steps *steps, uint32_t step)
{
    uint32_t seen = 0;
    for (int rank = 0; rank < steps->size; rank++) {
        uint32_t signature = get_signature(steps, rank, step);
        if (signature != 0 && seen != 0 && signature != seen)
            return true;
        seen = signature != 0 ? signature : seen;
    }
    return false;
}

/* Return true if a rank may have gone on after a step in which words differ; the same on all ranks. */
static bool may_have_gone_on(const Steps *steps, uint32_t step)
{
    for (int rank = 0; rank < steps->size; rank++) {
        const uint32_t word = get_word(steps, rank, step), waits = word & ~SIGNATURE;
        if (waits == WAITS_FOR_NONE)
            return true;
        for (int other = 0; waits == WAITS_FOR_SOME && other < steps->size; other++) {
            if (other != rank && get_signature(steps, other, step) == (word & SIGNATURE))
                return true;
        }
    }
    return false;
}

/* Return true if a rank may have begun later steps; the same on all ranks. */
static bool have_begun_more(const Steps *steps, uint32_t step)
{
    for (int rank = 0; rank < steps->size; rank++) {
        if ((get_word(steps, rank, step) & ~SIGNATURE) == BEGUN)
            return true;
    }
    return false;
}

/* Synchronise the ranks again after a step whose words differ, if no rank has gone on. Returns as wait_for_all. */
static int meet_ranks(Steps *steps)
{
    const uint32_t step = steps->different_step;
    steps->seen = steps->step = have_begun_more(steps, step) ? step + MAX_BEGUN - 1 : step;
    return sync_words(steps, DESCRIBING);
}

/* Publish the description of the running call, for the step in which the words differ. */
static void publish_description(Steps *steps)
{
    /* A second exception of a signal handler replaces the description: the other ranks wait for this one. */
    for (int i = 0; i < 2 && call_python(steps, "publish_description") < 0; i++) {
        if (!defer_exception(steps))
            PyErr_Clear();
    }
}

/* Wait until the ranks that have not described their calls in the step whose words differ have published them. Returns
 * -1 with an exception if that fails. */
static int wait_for_descriptions(Steps *steps)
{
    Words words = {.step = steps->step, .end = steps->size, .describes = true};
    for (int spin = count_spins(steps); !see_words(steps, &words); spin--) {
        if (spin > 0)
            relax_late(spin);
        else if (wait_long(steps, &words) < 0)
            return -1;
    }
    return 0;
}

/* Exchange the descriptions of the calls that differ. Ranks that have not gone on reach another step, in which all of
 * them are synchronised again. If a rank has gone on, those that have not publish theirs, and state that in the word of
 * a step that no rank reaches otherwise. Returns -1 with an exception. */
static int exchange_descriptions(Steps *steps, bool have_parted)
{
    const uint32_t step = steps->different_step;
    const bool described = has_described(steps, steps->rank, step);
    if (!described)
        publish_description(steps);
    if (!have_parted)
        return meet_ranks(steps);
    steps->seen = steps->step = step + AHEAD;
    if (!described)
        store_flag(steps, DESCRIBING);
    return wait_for_descriptions(steps);
}

/* End the operation, on all ranks alike. Returns 0 if this rank has failed itself, otherwise -1 with the error. */
static int conclude(Steps *steps, uint32_t signature)
{
    const bool have_parted = may_have_gone_on(steps, steps->different_step);
    steps->left = true;
    steps->different = have_begun_different_operations(steps, steps->different_step);
    steps->begun = 0;
    int status = 0;
    if (steps->different)
        status = exchange_descriptions(steps, have_parted);
    else if (!have_parted && have_begun_more(steps, steps->different_step))
        status = meet_ranks(steps);
    if (status >= 0)
        steps->seen = steps->step;
    if (have_parted)
        leave_ranks(steps);
    if (status < 0)
        return -1;
    return signature == 0 ? 0 : call_python(steps, "raise_difference");
}

/* End a step, or an operation, whose words are not all equal: `status` is what sync_words has returned. Returns as
 * sync_ranks. */
static __attribute__((noinline, cold)) int end_operation(Steps *steps, int status, uint32_t signature)
{
    bool held = steps->released == NULL;
    acquire_gil(steps);
    if (steps->unusable && status >= 0)
        status = call_python(steps, "raise_unusable");
    else if (status >= 0)
        status = conclude(steps, signature);
    if (status < 0)
        raise_interrupt(steps);
    if (!held)
        release_gil(steps);
    return status;
}

/* Return the signature of the current step, and prepare that of the next one: ranks that disagree about the number of
 * steps disagree at the step that only some of them have. */
static inline uint32_t next_signature(Steps *steps)
{
    uint32_t signature = steps->signature & SIGNATURE;
    signature += signature == 0;
    steps->signature = signature + 1;
    return signature;
}

int sync_ranks(Steps *steps)
{
    const uint32_t signature = next_signature(steps);
    const int status = steps->unusable ? 1 : sync_words(steps, signature);
    return status == 0 ? 0 : end_operation(steps, status, signature);
}

int reach_step(Steps *steps)
{
    const uint32_t signature = next_signature(steps);
    return steps->unusable ? 1 : store_next_word(steps, signature);
}

int complete_reached_step(Steps *steps, int status)
{
    if (status == 0)
        status = wait_for_all(steps, steps->step);
    return status == 0 ? 0 : end_operation(steps, status, 1);
}

int sync_failed(Steps *steps)
{
    int status = steps->unusable ? 1 : sync_words(steps, 0);
    if (status == 0) /* all ranks have failed */
        steps->different_step = steps->step;
    return end_operation(steps, status, 0);
}

void raise_row_mismatch(Steps *steps)
{
    const bool held = steps->released == NULL;
    acquire_gil(steps);
    steps->left = true;
    call_python(steps, "raise_row_mismatch");
    raise_interrupt(steps);
    if (!held)
        release_gil(steps);
}

/* Keep the running operation, and its description in shared memory, for the next step. */
static inline void keep_call(Steps *steps)
{
    const uint32_t step = steps->step + 1;
    Kept *kept = &steps->kept[step % RING];
    kept->number = steps->call.number;
    *get_call_number(steps, steps->rank, step) = (int64_t)kept->number;
    if (__builtin_expect(kept->text == steps->call.text, 1))
        return;
    const Kept old = *kept;
    kept->text = Py_NewRef(steps->call.text);
    kept->call = Py_NewRef(steps->call.call);
    char *text = NULL;
    Py_ssize_t length = 0;
    if (PyBytes_AsStringAndSize(kept->text, &text, &length) < 0 || length > TEXT_BYTES - (Py_ssize_t)sizeof length) {
        PyErr_Clear();
        length = 0;
    }
    char *place = get_text(steps, steps->rank, step);
    memcpy(place, &length, sizeof length);
    if (length > 0)
        memcpy(place + sizeof length, text, (size_t)length);
    Py_XDECREF(old.text);
    Py_XDECREF(old.call);
}

/* Wait for some ranks in the last step. Returns as wait_for_all. */
static inline int wait_for_some(Steps *steps, uint32_t signature, int first, int last)
{
    Words words = {.step = steps->step, .next = first, .end = last, .own = signature};
    for (int spin = count_spins(steps); !see_words(steps, &words); spin--) {
        if (spin == 0) {
            if (wait_long(steps, &words) < 0)
                return -1;
            if (!see_words(steps, &words))
                words.difference = 1; /* in an earlier step */
            break;
        }
        relax_late(spin);
    }
    return words.difference == 0 ? 0 : wait_for_all(steps, steps->step);
}

/* Begin a step in which this rank does not wait for all others. Returns as wait_for_all. */
static inline int enter_step(Steps *steps, uint32_t word)
{
    const int status = steps->step - steps->seen < AHEAD ? 0 : make_room(steps);
    if (status == 0) {
        keep_call(steps);
        steps->step++;
        store_flag(steps, word);
    }
    return status;
}

int sync_with(Steps *steps, int first, int last)
{
    if (steps->call.text == NULL || steps->released != NULL || steps->unusable)
        return sync_ranks(steps);
    const uint32_t signature = next_signature(steps);
    int status = enter_step(steps, signature | (first < last ? WAITS_FOR_SOME : WAITS_FOR_NONE));
    if (status == 0)
        status = wait_for_some(steps, signature, first, last);
    return status == 0 ? 0 : end_operation(steps, status, signature);
}

int sync_with_each(Steps *steps, const int *ranks, int count)
{
    if (steps->call.text == NULL || steps->released != NULL || steps->unusable)
        return sync_ranks(steps);
    const uint32_t signature = next_signature(steps);
    int status = enter_step(steps, signature | (count > 0 ? WAITS_FOR_SOME : WAITS_FOR_NONE));
    for (int i = 0; i < count && status == 0; i++)
        status = wait_for_some(steps, signature, ranks[i], ranks[i] + 1);
    return status == 0 ? 0 : end_operation(steps, status, signature);
}

bool can_begin(Steps *steps, bool alone)
{
    if (steps->unusable || steps->call.text == NULL || steps->begun >= MAX_BEGUN)
        return false;
    if (steps->seen != steps->step && (alone || steps->step - steps->seen >= AHEAD) && look_ahead(steps) > 0)
        return false;
    return alone ? steps->begun == 0 && steps->seen == steps->step : steps->step - steps->seen < AHEAD;
}

void begin_step(Steps *steps)
{
    const uint32_t signature = next_signature(steps);
    keep_call(steps);
    steps->step++;
    steps->begun++;
    store_flag(steps, signature | BEGUN);
}

int test_begun_step(Steps *steps)
{
    const uint32_t oldest = steps->step - (uint32_t)steps->begun + 1;
    if (steps->unusable || steps->begun == 0)
        return -1;
    if ((int32_t)(oldest - steps->seen) <= 0)
        return 1;
    Words words = begin_words(steps, steps->seen + 1);
    const int status = see_steps(steps, &words, oldest);
    return status == 0 ? 1 : status > 0 ? -1 : 0;
}

int complete_step(Steps *steps, uint32_t step)
{
    int status = 1;
    if (!steps->unusable)
        status = (int32_t)(step - steps->seen) <= 0 ? 0 : wait_for_all(steps, step);
    if (status != 0)
        return end_operation(steps, status, 1);
    steps->begun--;
    return 0;
}

void abandon_begun_steps(Steps *steps)
{
    if (steps->begun > 0)
        abandon_operation(steps);
}

int catch_up(Steps *steps)
{
    if (__builtin_expect(steps->seen == steps->step, 1) || steps->unusable)
        return 0;
    const int status = wait_for_all(steps, steps->step);
    return status == 0 ? 0 : end_operation(steps, status, 1);
}

/* --- the Python type */

static int set_members(Steps *steps, PyObject *members)
{
    if (PyTuple_Size(members) != steps->size) {
        PyErr_Format(PyExc_ValueError, "Steps: %zd members of %d ranks", PyTuple_Size(members), steps->size);
        return -1;
    }
    steps->members = PyMem_Calloc((size_t)steps->size, sizeof *steps->members);
    if (steps->members == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int rank = 0; rank < steps->size; rank++)
        steps->members[rank] = (int)PyLong_AsLong(PyTuple_GetItem(members, rank));
    return PyErr_Occurred() ? -1 : 0;
}

static int init_steps(PyObject *self, PyObject *args, PyObject *keywords)
{
    Steps *steps = (Steps *)self;
    (void)keywords;
    PyObject *memory, *members = NULL;
    int rank, size, has_own_core;
    if (!PyArg_ParseTuple(args, "Oiip|O!", &memory, &rank, &size, &has_own_core, &PyTuple_Type, &members))
        return -1;
    if (steps->flags != NULL || size < 1 || rank < 0 || rank >= size) {
        PyErr_SetString(PyExc_ValueError, "Steps: invalid rank or size, or initialised twice");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &steps->memory, PyBUF_WRITABLE) < 0)
        return -1;
    size_t shift = -(uintptr_t)steps->memory.buf & (LINE - 1);
    if ((size_t)steps->memory.len < shift + (size_t)size * (RANK_BYTES + RING * TEXT_BYTES)) {
        PyBuffer_Release(&steps->memory);
        PyErr_Format(PyExc_ValueError, "Steps: %zd bytes are too few for %d ranks", steps->memory.len, size);
        return -1;
    }
    steps->rank = rank;
    steps->size = size;
    steps->has_own_core = has_own_core != 0;
    steps->flags = (char *)steps->memory.buf + shift;
    steps->signature = 1;
    steps->unreadable_rank = steps->waiting = -1;
    return members == NULL ? 0 : set_members(steps, members);
}

Steps *as_steps(PyObject *self)
{
    Steps *steps = (Steps *)self;
    if (steps->flags != NULL)
        return steps;
    PyErr_SetString(PyExc_ValueError, "Steps: not initialised");
    return NULL;
}

static void dealloc_steps(PyObject *self)
{
    Steps *steps = (Steps *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (steps->flags != NULL)
        PyBuffer_Release(&steps->memory);
    Py_XDECREF(steps->interrupt);
    for (int i = 0; i < RING; i++) {
        Py_XDECREF(steps->kept[i].call);
        Py_XDECREF(steps->kept[i].text);
    }
    PyMem_Free(steps->slots);
    PyMem_Free(steps->members);
    free_locations(steps);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *count_flag_bytes(PyObject *type, PyObject *args)
{
    (void)type;
    int size;
    if (!PyArg_ParseTuple(args, "i", &size))
        return NULL;
    return PyLong_FromLong((long)size * (RANK_BYTES + RING * TEXT_BYTES) + LINE);
}

static PyObject *set_slots(PyObject *self, PyObject *args)
{
    Steps *steps = as_steps(self);
    PyObject *addresses;
    unsigned long long even, odd;
    Py_ssize_t nbytes;
    if (steps == NULL || !PyArg_ParseTuple(args, "OKKn", &addresses, &even, &odd, &nbytes))
        return NULL;
    if (PySequence_Size(addresses) != 2 * (Py_ssize_t)steps->size) {
        PyErr_SetString(PyExc_ValueError, "Steps: two slots are needed for each rank");
        return NULL;
    }
    char **slots = PyMem_Calloc(2 * (size_t)steps->size, sizeof(char *));
    if (slots == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < 2 * (Py_ssize_t)steps->size; i++) {
        PyObject *address = PySequence_GetItem(addresses, i);
        slots[i] = address == NULL ? NULL : PyLong_AsVoidPtr(address);
        Py_XDECREF(address);
    }
    if (PyErr_Occurred()) {
        PyMem_Free(slots);
        return NULL;
    }
    PyMem_Free(steps->slots);
    steps->slots = slots;
    steps->results[0] = (char *)(uintptr_t)even;
    steps->results[1] = (char *)(uintptr_t)odd;
    steps->slot_bytes = (size_t)nbytes;
    Py_RETURN_NONE;
}

static PyObject *step(PyObject *self, PyObject *unused)
{
    (void)unused;
    Steps *steps = as_steps(self);
    return steps == NULL || sync_ranks(steps) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *step_signature(PyObject *self, PyObject *signature)
{
    unsigned long value = PyLong_AsUnsignedLong(signature);
    Steps *steps = as_steps(self);
    if (steps == NULL || (value == (unsigned long)-1 && PyErr_Occurred()))
        return NULL;
    steps->signature = (uint32_t)value;
    steps->first = steps->step;
    return sync_ranks(steps) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *catch_up_method(PyObject *self, PyObject *unused)
{
    (void)unused;
    Steps *steps = as_steps(self);
    return steps == NULL || catch_up(steps) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *step_failed(PyObject *self, PyObject *unused)
{
    (void)unused;
    Steps *steps = as_steps(self);
    return steps == NULL || sync_failed(steps) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *abandon(PyObject *self, PyObject *unused)
{
    (void)unused;
    Steps *steps = as_steps(self);
    if (steps == NULL)
        return NULL;
    abandon_operation(steps);
    Py_RETURN_NONE;
}

static PyObject *take_interrupt(PyObject *self, PyObject *unused)
{
    (void)unused;
    Steps *steps = (Steps *)self;
    PyObject *interrupt = steps->interrupt;
    steps->interrupt = NULL;
    return interrupt == NULL ? Py_NewRef(Py_None) : interrupt;
}

/* Return the ranks for which `is_wanted` is true. */
static PyObject *list_ranks(const Steps *steps, bool (*is_wanted)(const Steps *, int))
{
    PyObject *ranks = PyList_New(0);
    for (int rank = 0; ranks != NULL && rank < steps->size; rank++) {
        if (!is_wanted(steps, rank))
            continue;
        PyObject *number = PyLong_FromLong(rank);
        if (number == NULL || PyList_Append(ranks, number) < 0)
            Py_CLEAR(ranks);
        Py_XDECREF(number);
    }
    return ranks;
}

static bool is_unusable(const Steps *steps, int rank)
{
    return atomic_load_explicit(get_state(steps, rank), memory_order_acquire) != 0;
}

static PyObject *list_late_ranks(PyObject *self, PyObject *unused)
{
    (void)unused;
    Steps *steps = (Steps *)self;
    if (steps->is_waiting ? is_over(steps) : differ_ahead(steps))
        return PyList_New(0);
    if (steps->waiting >= 0)
        record_late_ranks(steps);
    return list_ranks(steps, is_late);
}

static PyObject *list_unusable_ranks(PyObject *self, PyObject *unused)
{
    (void)unused;
    return list_ranks((Steps *)self, is_unusable);
}

static PyObject *list_signatures(PyObject *self, PyObject *unused)
{
    (void)unused;
    Steps *steps = (Steps *)self;
    PyObject *signatures = PyList_New(0);
    for (int rank = 0; signatures != NULL && rank < steps->size; rank++) {
        PyObject *number = PyLong_FromUnsignedLong(get_signature(steps, rank, steps->different_step));
        if (number == NULL || PyList_Append(signatures, number) < 0)
            Py_CLEAR(signatures);
        Py_XDECREF(number);
    }
    return signatures;
}

/* Return the number and the description of a rank's call in the step in which the words differ, or None if the rank
 * waits for all others in this step. */
static PyObject *read_call(PyObject *self, PyObject *argument)
{
    const Steps *steps = (Steps *)self;
    const long rank = PyLong_AsLong(argument);
    if (rank < 0 || rank >= steps->size) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "Steps: there is no rank %ld", rank);
        return NULL;
    }
    const uint32_t step = steps->different_step;
    if (!has_described(steps, (int)rank, step))
        Py_RETURN_NONE;
    const char *text = get_text(steps, (int)rank, step);
    Py_ssize_t length;
    memcpy(&length, text, sizeof length);
    return Py_BuildValue("(Ly#)", (long long)*get_call_number(steps, (int)rank, step), text + sizeof length, length);
}

/* Return the first call, and its number, whose words this rank has not seen; None if there is none. */
static PyObject *find_unseen_call(PyObject *self, PyObject *unused)
{
    (void)unused;
    Steps *steps = as_steps(self);
    if (steps == NULL)
        return NULL;
    if (steps->unusable || look_ahead(steps) == 0)
        Py_RETURN_NONE;
    const Kept *kept = &steps->kept[(steps->seen + 1) % RING];
    return kept->call == NULL ? Py_NewRef(Py_None) : Py_BuildValue("(OK)", kept->call, kept->number);
}

static PyObject *post(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Steps *steps = as_steps(self);
    if (steps == NULL)
        return NULL;
    if (nargs > POSTED)
        return PyErr_Format(PyExc_ValueError, "Steps: at most %d numbers are posted in a step", POSTED);
    if (catch_up(steps) < 0)
        return NULL;
    int64_t *posted = get_posted(steps, steps->rank, get_parity(steps));
    for (Py_ssize_t i = 0; i < nargs; i++)
        posted[i] = PyLong_AsLongLong(args[i]);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *read_posted(PyObject *self, PyObject *argument)
{
    Steps *steps = (Steps *)self;
    long count = PyLong_AsLong(argument);
    if (count < 0 || count > POSTED) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "Steps: at most %d numbers are posted in a step", POSTED);
        return NULL;
    }
    PyObject *ranks = PyList_New(steps->size);
    for (int rank = 0; ranks != NULL && rank < steps->size; rank++) {
        const int64_t *posted = get_posted(steps, rank, 1 - get_parity(steps));
        PyObject *numbers = PyTuple_New(count);
        for (long i = 0; numbers != NULL && i < count; i++) {
            PyObject *number = PyLong_FromLongLong(posted[i]);
            if (number == NULL)
                Py_CLEAR(numbers);
            else
                PyTuple_SetItem(numbers, i, number);
        }
        if (numbers == NULL)
            Py_CLEAR(ranks);
        else
            PyList_SetItem(ranks, rank, numbers);
    }
    return ranks;
}

static PyObject *get_parity_attribute(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(get_parity((Steps *)self));
}

static PyMethodDef methods[] = {
    {"count_flag_bytes", count_flag_bytes, METH_VARARGS | METH_STATIC,
     "count_flag_bytes(size)\n--\n\nReturn the bytes of the memory for the flags of `size` ranks."},
    {"set_slots", set_slots, METH_VARARGS,
     "set_slots(addresses, even, odd, nbytes)\n--\n\nSet the addresses of the slots (those of even steps by rank, then"
     " of odd ones), of the results of even and odd steps, and the bytes of each. RING_BYTES follow each slot of odd"
     " steps."},
    {"step", step, METH_NOARGS,
     "step()\n--\n\nEnd a step of the running operation: what the ranks wrote before is visible to all of them."},
    {"step_signature", step_signature, METH_O,
     "step_signature(signature)\n--\n\nBegin an operation, and end its first step."},
    {"catch_up", catch_up_method, METH_NOARGS,
     "catch_up()\n--\n\nWait until all ranks have reached the last step of this rank, and compare their operations. All"
     " slots can be written afterwards."},
    {"step_failed", step_failed, METH_NOARGS,
     "step_failed()\n--\n\nEnd a step in which this rank has failed, and with it the operation on all ranks."},
    {"abandon", abandon, METH_NOARGS, "abandon()\n--\n\nEnd the synchronisation with the other ranks permanently."},
    {"take_interrupt", take_interrupt, METH_NOARGS,
     "take_interrupt()\n--\n\nReturn the exception that a signal handler has raised during the operation, or None. It"
     " is not raised any more."},
    {"sleep", sleep_until_flag, METH_O,
     "sleep(seconds)\n--\n\nSleep until one of the late ranks has ended the step, for less than a second at most."},
    {"list_late_ranks", list_late_ranks, METH_NOARGS,
     "list_late_ranks()\n--\n\nReturn the ranks that have not ended the step that this rank has."},
    {"list_unusable_ranks", list_unusable_ranks, METH_NOARGS,
     "list_unusable_ranks()\n--\n\nReturn the ranks that have abandoned an operation."},
    {"read_call", read_call, METH_O,
     "read_call(rank)\n--\n\nReturn the number and the description of a rank's call in the step in which the signatures"
     " have differed; None if the rank has waited for all others in this step, and publishes them itself."},
    {"find_unseen_call", find_unseen_call, METH_NOARGS,
     "find_unseen_call()\n--\n\nReturn the first call, and its number, that was not compared with those of all ranks,"
     " or None. No operation may be running."},
    {"list_signatures", list_signatures, METH_NOARGS,
     "list_signatures()\n--\n\nReturn the signatures of all ranks in the step in which they have differed."},
    {"post", (PyCFunction)(void (*)(void))post, METH_FASTCALL,
     "post(*values)\n--\n\nPublish up to 8 numbers, which the other ranks read by `read_posted` after the next step."},
    {"read_posted", read_posted, METH_O,
     "read_posted(count)\n--\n\nReturn the first `count` numbers that each rank posted in the step that has just"
     " ended."},
    {"add_segment", add_segment, METH_VARARGS,
     "add_segment(number, addresses, nbytes)\n--\n\nAdd memory that all ranks have mapped: the addresses of the ranks'"
     " parts, and the bytes of this rank's."},
    {"remove_segment", remove_segment, METH_O, "remove_segment(number)\n--\n\nForget a segment, if it is there."},
    {"find_segment", find_segment, METH_O,
     "find_segment(address)\n--\n\nReturn the number of the segment that contains an address, and the offset in this"
     " rank's part; (0, 0) if there is none."},
    {"set_processes", set_processes, METH_O,
     "set_processes(numbers)\n--\n\nSet the processes of the ranks, whose private memory can be read; 0 for threads of"
     " this process."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"rank", T_INT, offsetof(Steps, rank), READONLY, "Rank of this process on the node."},
    {"size", T_INT, offsetof(Steps, size), READONLY, "Number of ranks of the node."},
    {"has_own_core", T_BOOL, offsetof(Steps, has_own_core), READONLY,
     "True if no other rank of the node uses its core."},
    {"unreadable_rank", T_INT, offsetof(Steps, unreadable_rank), READONLY,
     "The rank that forbade others to read its memory in the last operation that would have read it; -1 if none did."},
    {"different_step", T_UINT, offsetof(Steps, different_step), READONLY,
     "Number of the last step in which the signatures have differed."},
    {"signature", T_UINT, offsetof(Steps, signature), 0, "Signature of the running operation, never 0."},
    {"unusable", T_BOOL, offsetof(Steps, unusable), READONLY, "True if this rank has abandoned an operation."},
    {"left", T_BOOL, offsetof(Steps, left), 0,
     "True if the running operation has ended by a failure, on all ranks."},
    {"keeps_interrupt", T_BOOL, offsetof(Steps, keeps_interrupt), 0,
     "True if exceptions of signal handlers are not raised, but left to take_interrupt."},
    {"different", T_BOOL, offsetof(Steps, different), READONLY,
     "True if it has ended because the ranks have begun different operations."},
    {"first", T_UINT, offsetof(Steps, first), 0, "Number of the step before the running operation."},
    {"last", T_UINT, offsetof(Steps, last), 0, "Number of the last step of the running operation."},
    {"streamed_writes", T_UINT, offsetof(Steps, streamed_writes), 0,
     "Number of large writes around the caches, before ordinary stores are tried again."},
    {"stored_writes", T_UINT, offsetof(Steps, stored_writes), 0,
     "Number of large writes by ordinary stores, before those around the caches are tried again."},
    {"slow_ticks", T_UINT, offsetof(Steps, slow_ticks), 0,
     "Ticks of the processor's counter for a cache line by ordinary stores when these were slow; 0: they never were."},
    {"threads", T_INT, offsetof(Steps, threads), 0,
     "Number of threads that may work on a large array, with the calling one."},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *get_number_attribute(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(((Steps *)self)->step);
}

static int set_number_attribute(PyObject *self, PyObject *value, void *unused)
{
    (void)unused;
    unsigned long number = value == NULL ? 0 : PyLong_AsUnsignedLong(value);
    if (value == NULL || (number == (unsigned long)-1 && PyErr_Occurred()))
        return -1;
    ((Steps *)self)->step = ((Steps *)self)->seen = (uint32_t)number;
    return 0;
}

static PyGetSetDef attributes[] = {
    {"number", get_number_attribute, set_number_attribute, "Number of the last step, modulo 2 to the power of 32.",
     NULL},
    {"parity", get_parity_attribute, NULL, "Parity of the slots to write to before the next step.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Steps(memory, rank, size, has_own_core, members=None)\n--\n\n"
                "The synchronisation of the ranks of a node."
                " `members` are these ranks as ranks of the job."},
    {Py_tp_init, init_steps},
    {Py_tp_dealloc, dealloc_steps},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, attributes},
    {0, NULL},
};

PyType_Spec steps_spec = {
    .name = "mpicoll._shm.Steps",
    .basicsize = sizeof(Steps),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
