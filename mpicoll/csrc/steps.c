/* The synchronisation of the ranks of a node by flags in memory that they share.
 *
 * Each rank has two words, for steps of even and odd number: the number of the step in the upper half, and the
 * signature of the operation that the rank carries out in the lower half. A rank ends a step by storing its word, then
 * waits until the words of all other ranks have the same number. No rank is more than one step ahead of another one, so
 * a word of a step is replaced only after all ranks have seen it, and all of them draw the same conclusion from the
 * words:
 *
 * - all are equal: the operation goes on;
 * - the signature of a rank is 0: the rank has failed in this operation, which ends with this step on all ranks;
 * - other signatures differ: the ranks have begun different operations, which end with this step on all ranks.
 *
 * So the ranks remain synchronised in each case. A rank that stops waiting for the others, because they are late or
 * dead, abandons the operation: it can't be synchronised any more, which it states in a word of its own.
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

#include "direct.h"
#include "records.h"

/* Signature of the step in which ranks that have begun different operations exchange descriptions of them. */
static const uint32_t DESCRIBING = 0xD15C0FFEu;

enum {
    LINE = 128,              /* processors fetch pairs of cache lines */
    RANK_BYTES = 4 * LINE,   /* flags and small slots of both parities, the state, posted numbers of both parities */
    SMALL_AT = 16,           /* in the cache line of a flag */
    STATE_AT = 2 * LINE,
    SLEEPERS_AT = STATE_AT + 8, /* of both parities, in a line that is seldom written: a look there takes no transfer */
    POSTED_AT = 3 * LINE,
    SPINS = 100,             /* polls without releasing the GIL, which takes about as long */
    SHARED_SPINS = 4,        /* the same where ranks share cores: most often one that has yet to run is waited for */
    YIELDS = 64,             /* yields before the wait goes on in Python, which looks for failures */
    POLLS_PER_YIELD = 16     /* where each rank has a core, which other programs may use too */
};

_Static_assert(POSTED * 8 * 2 <= RANK_BYTES - POSTED_AT, "posted numbers of both parities");
_Static_assert(SMALL_AT + SMALL_SLOT_BYTES <= 64, "a flag and its small slot in one cache line");

typedef _Atomic uint64_t Word;

static inline char *get_block(const Steps *steps, int rank) { return steps->flags + (size_t)rank * RANK_BYTES; }

static inline Word *get_flag(const Steps *steps, int rank, uint32_t step)
{
    return (Word *)(void *)(get_block(steps, rank) + (size_t)(step & 1) * LINE);
}

/* Whether ranks sleep until a rank has stored this flag. */
static inline _Atomic uint32_t *get_sleepers(const Steps *steps, int rank, uint32_t step)
{
    return (_Atomic uint32_t *)(void *)(get_block(steps, rank) + SLEEPERS_AT) + (step & 1);
}

char *get_small_slot(const Steps *steps, int parity, int rank)
{
    /* What is written to a slot ends with a step of the other parity. */
    return get_block(steps, rank) + (size_t)(1 - parity) * LINE + SMALL_AT;
}

static inline Word *get_state(const Steps *steps, int rank)
{
    return (Word *)(void *)(get_block(steps, rank) + STATE_AT);
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

/* The words of the other ranks in the current step, as far as they have been seen. Each is read once after its rank has
 * stored it: that rank goes on, and soon writes to this memory again. */
typedef struct {
    int next; /* rank, before which all have been seen */
    uint64_t own, difference;
} Words;

/* Look at the words that have not been seen yet, and return true if there are no more of them. */
static inline bool see_words(const Steps *steps, Words *words)
{
    for (; words->next < steps->size; words->next++) {
        if (words->next == steps->rank)
            continue;
        uint64_t word = atomic_load_explicit(get_flag(steps, words->next, steps->step), memory_order_acquire);
        if ((uint32_t)(word >> 32) != steps->step)
            return false;
        words->difference |= word ^ words->own;
    }
    return true;
}

static inline bool has_reached(const Steps *steps, int rank)
{
    uint64_t word = atomic_load_explicit(get_flag(steps, rank, steps->step), memory_order_acquire);
    return (uint32_t)(word >> 32) == steps->step;
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

/* Store this rank's flag of the current step. */
static inline void store_flag(const Steps *steps, uint32_t signature)
{
    Word *flag = get_flag(steps, steps->rank, steps->step);
    _Atomic uint32_t *sleepers = get_sleepers(steps, steps->rank, steps->step);
    atomic_store_explicit(flag, (uint64_t)steps->step << 32 | signature, memory_order_release);
    /* Without a fence, the store may become visible only after this. Then the ranks sleep on, but not for long. */
    if (__builtin_expect(atomic_load_explicit(sleepers, memory_order_relaxed) != 0, 0))
        wake_sleepers(flag, sleepers);
}

/* Sleep until a rank that has not reached the step stores its flag, for at most `seconds`, or until a signal. */
static PyObject *sleep_until_flag(PyObject *self, PyObject *argument)
{
    const Steps *steps = (Steps *)self;
    const double seconds = PyFloat_AsDouble(argument);
    if (PyErr_Occurred())
        return NULL;
    int rank = 0;
    while (rank < steps->size && has_reached(steps, rank))
        rank++;
    if (rank == steps->size || !(seconds > 0 && seconds < 1))
        Py_RETURN_NONE;
    const struct timespec limit = {.tv_nsec = (long)(1e9 * seconds)};
    Word *flag = get_flag(steps, rank, steps->step);
    atomic_store_explicit(get_sleepers(steps, rank, steps->step), 1, memory_order_seq_cst);
    const uint32_t number = (uint32_t)(atomic_load_explicit(flag, memory_order_seq_cst) >> 32);
    if (number == steps->step)
        Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS
    wait_for_change(flag, number, &limit);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Poll until all words have been seen, without the GIL. Returns false if some have not. */
static bool poll_words(const Steps *steps, Words *words)
{
    const int polls = steps->has_own_core ? POLLS_PER_YIELD : 1;
    for (int yields = 0; yields < YIELDS; yields++) {
        for (int poll = 0; poll < polls; poll++) {
            if (see_words(steps, words))
                return true;
            relax();
        }
        sched_yield();
    }
    return see_words(steps, words);
}

/* Call a method in Python. Returns -1 with its exception. The GIL is held. */
static int call_python(Steps *steps, const char *name)
{
    PyObject *none = NULL;
    if (steps->running == NULL || steps->running->publish(steps->running) == 0)
        none = PyObject_CallMethod((PyObject *)steps, name, NULL);
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
    if (interrupt == NULL)
        return 0;
    steps->interrupt = NULL;
    PyErr_SetObject((PyObject *)Py_TYPE(interrupt), interrupt);
    Py_DECREF(interrupt);
    return -1;
}

static void abandon_operation(Steps *steps)
{
    steps->unusable = true;
    /* Ranks that reach this step later must see that this rank has left it. */
    store_flag(steps, 0);
    /* They must not have seen another word when this rank changes the arrays that they read. */
    atomic_thread_fence(memory_order_seq_cst);
    atomic_store_explicit(get_state(steps, steps->rank), 1, memory_order_release);
}

/* Record the ranks that this rank waits for; none, if it does not wait any more. */
static void record_late_ranks(const Steps *steps)
{
    int late[SHOWN_RANKS], count = 0;
    for (int rank = 0; rank < steps->size; rank++) {
        if (has_reached(steps, rank))
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

/* Wait for the ranks whose words have not been seen. Returns -1 if the wait has failed. */
static int wait_for_words(Steps *steps, Words *words)
{
    for (int spin = steps->has_own_core ? SPINS : SHARED_SPINS; spin > 0; spin--) {
        relax();
        if (see_words(steps, words))
            return 0;
    }
    bool held = steps->released == NULL;
    release_gil(steps);
    int status = 0;
    if (!poll_words(steps, words)) {
        acquire_gil(steps);
        status = wait_in_python(steps);
        see_words(steps, words);
        if (!held)
            release_gil(steps);
    } else if (held) {
        acquire_gil(steps);
    }
    return status;
}

/* End a step. Returns 1 if the words of the ranks differ, 0 if they are equal, -1 if the wait has failed. */
static int sync_words(Steps *steps, uint32_t signature)
{
    /* What this rank has read from arrays of other ranks, it has read before it looks at their words again. */
    atomic_thread_fence(memory_order_acquire);
    uint32_t step = ++steps->step;
    Words words = {.own = (uint64_t)step << 32 | signature};
    store_flag(steps, signature);
    if (!see_words(steps, &words) && wait_for_words(steps, &words) < 0)
        return -1;
    return words.difference != 0;
}

/* Return true if the ranks have begun different operations, whether or not some have failed. */
static bool have_begun_different_operations(const Steps *steps)
{
    uint32_t seen = 0;
    for (int rank = 0; rank < steps->size; rank++) {
        uint32_t signature =
            (uint32_t)atomic_load_explicit(get_flag(steps, rank, steps->step), memory_order_acquire);
        if (signature != 0 && seen != 0 && signature != seen)
            return true;
        seen = signature != 0 ? signature : seen;
    }
    return false;
}

/* End the operation, on all ranks alike. Returns 0 if this rank has failed itself, otherwise -1 with the error. */
static int conclude(Steps *steps, uint32_t signature)
{
    steps->left = true;
    steps->different = have_begun_different_operations(steps);
    if (steps->different) {
        /* A second exception of a signal handler replaces the description: the other ranks wait for this one. */
        for (int i = 0; i < 2 && call_python(steps, "publish_description") < 0; i++) {
            if (!defer_exception(steps))
                PyErr_Clear();
        }
        if (sync_words(steps, DESCRIBING) < 0)
            return -1;
    }
    return signature == 0 ? 0 : call_python(steps, "raise_difference");
}

static int sync_signature(Steps *steps, uint32_t signature)
{
    int status = steps->unusable ? 1 : sync_words(steps, signature);
    if (status == 0 && signature != 0) {
        /* Ranks that disagree about the number of steps disagree at the step that only some of them have. */
        steps->signature = signature + 1 ? signature + 1 : 1;
        return 0;
    }
    bool held = steps->released == NULL;
    acquire_gil(steps);
    if (steps->unusable && status > 0)
        status = call_python(steps, "raise_unusable");
    else if (status >= 0)
        status = conclude(steps, signature);
    if (status < 0)
        raise_interrupt(steps);
    if (!held)
        release_gil(steps);
    return status;
}

int sync_ranks(Steps *steps) { return sync_signature(steps, steps->signature); }

int sync_failed(Steps *steps) { return sync_signature(steps, 0); }

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
    int has_own_core;
    if (!PyArg_ParseTuple(
            args, "Oiip|O!", &memory, &steps->rank, &steps->size, &has_own_core, &PyTuple_Type, &members))
        return -1;
    steps->has_own_core = has_own_core != 0;
    if (steps->flags != NULL || steps->size < 1 || steps->rank < 0 || steps->rank >= steps->size) {
        PyErr_SetString(PyExc_ValueError, "Steps: invalid rank or size, or initialised twice");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &steps->memory, PyBUF_WRITABLE) < 0)
        return -1;
    size_t shift = -(uintptr_t)steps->memory.buf & (LINE - 1);
    if ((size_t)steps->memory.len < shift + (size_t)steps->size * RANK_BYTES) {
        PyBuffer_Release(&steps->memory);
        PyErr_Format(PyExc_ValueError, "Steps: %zd bytes are too few for %d ranks", steps->memory.len, steps->size);
        return -1;
    }
    steps->flags = (char *)steps->memory.buf + shift;
    steps->signature = 1;
    steps->unreadable_rank = steps->waiting = -1;
    return members == NULL ? 0 : set_members(steps, members);
}

static void dealloc_steps(PyObject *self)
{
    Steps *steps = (Steps *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (steps->flags != NULL)
        PyBuffer_Release(&steps->memory);
    Py_XDECREF(steps->interrupt);
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
    return PyLong_FromLong((long)size * RANK_BYTES + LINE);
}

static PyObject *set_slots(PyObject *self, PyObject *args)
{
    Steps *steps = (Steps *)self;
    PyObject *addresses;
    unsigned long long even, odd;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "OKKn", &addresses, &even, &odd, &nbytes))
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
    return sync_ranks((Steps *)self) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *step_signature(PyObject *self, PyObject *signature)
{
    unsigned long value = PyLong_AsUnsignedLong(signature);
    if (value == (unsigned long)-1 && PyErr_Occurred())
        return NULL;
    Steps *steps = (Steps *)self;
    steps->signature = (uint32_t)value;
    steps->first = steps->step;
    return sync_ranks(steps) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *step_failed(PyObject *self, PyObject *unused)
{
    (void)unused;
    return sync_failed((Steps *)self) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *abandon(PyObject *self, PyObject *unused)
{
    (void)unused;
    abandon_operation((Steps *)self);
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

static bool is_late(const Steps *steps, int rank) { return !has_reached(steps, rank); }

static bool is_unusable(const Steps *steps, int rank)
{
    return atomic_load_explicit(get_state(steps, rank), memory_order_acquire) != 0;
}

static PyObject *list_late_ranks(PyObject *self, PyObject *unused)
{
    (void)unused;
    if (((Steps *)self)->waiting >= 0)
        record_late_ranks((Steps *)self);
    return list_ranks((Steps *)self, is_late);
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
        uint64_t word = atomic_load_explicit(get_flag(steps, rank, steps->step), memory_order_acquire);
        PyObject *number = PyLong_FromUnsignedLong((uint32_t)word);
        if (number == NULL || PyList_Append(signatures, number) < 0)
            Py_CLEAR(signatures);
        Py_XDECREF(number);
    }
    return signatures;
}

static PyObject *post(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Steps *steps = (Steps *)self;
    if (nargs > POSTED)
        return PyErr_Format(PyExc_ValueError, "Steps: at most %d numbers are posted in a step", POSTED);
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
     " of odd ones), of the results of even and odd steps, and the bytes of each."},
    {"step", step, METH_NOARGS,
     "step()\n--\n\nEnd a step of the running operation: what the ranks wrote before is visible to all of them."},
    {"step_signature", step_signature, METH_O,
     "step_signature(signature)\n--\n\nBegin an operation, and end its first step."},
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
    {"list_signatures", list_signatures, METH_NOARGS,
     "list_signatures()\n--\n\nReturn the signatures of all ranks in the step that has just ended."},
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
    {"unreadable_rank", T_INT, offsetof(Steps, unreadable_rank), READONLY,
     "The rank that forbade others to read its memory in the last operation that would have read it; -1 if none did."},
    {"number", T_UINT, offsetof(Steps, step), 0, "Number of the last step, modulo 2 to the power of 32."},
    {"signature", T_UINT, offsetof(Steps, signature), 0, "Signature of the running operation, never 0."},
    {"unusable", T_BOOL, offsetof(Steps, unusable), READONLY, "True if this rank has abandoned an operation."},
    {"left", T_BOOL, offsetof(Steps, left), 0,
     "True if the running operation has ended by a failure, on all ranks."},
    {"different", T_BOOL, offsetof(Steps, different), READONLY,
     "True if it has ended because the ranks have begun different operations."},
    {"first", T_UINT, offsetof(Steps, first), 0, "Number of the step before the running operation."},
    {"last", T_UINT, offsetof(Steps, last), 0, "Number of the last step of the running operation."},
    {"streamed_writes", T_UINT, offsetof(Steps, streamed_writes), 0,
     "Number of large writes around the caches, before ordinary stores are tried again."},
    {"threads", T_INT, offsetof(Steps, threads), 0,
     "Number of threads that may work on a large array, with the calling one."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef attributes[] = {
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
