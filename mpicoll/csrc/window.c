/* Windows of the ranks of a node: memory of each rank that all of them read and write.
 *
 * A lock lies before the memory of each rank. Its word has the number of ranks that hold the lock shared, a bit for the
 * one that holds it exclusively, a bit for the one that combines elements, and how many ranks wait for each of these. A
 * rank takes the lock by one compare-and-swap of the word (acquire) and returns it by one subtraction (release): both
 * are read-modify-writes, so who takes the lock has seen all that earlier holders have written.
 *
 * A rank that has to wait takes a ticket, and publishes it in a place of its own. It gets the lock when no rank with an
 * earlier ticket waits for what excludes it, so steady calls of other ranks never keep a rank from the lock. Only the
 * word decides who holds the lock: the tickets are looked at, in any order of stores, for the sake of fairness. A rank
 * that gives up removes its ticket.
 *
 * The functions of accesses carry out calls like earlier ones, whose descriptions for the flight recorder are known,
 * and return False (None where a result is returned) before they have done anything if Python has to: in all other
 * cases, for all errors, and for all waits. The lock `turn` is held meanwhile, so threads of this rank take turns.
 */

#define PY_SSIZE_T_CLEAN
#include "window.h"

#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "arrays.h"
#include "calls.h"
#include "clock.h"
#include "copies.h"
#include "kernels.h"
#include "queue_lock.h"
#include "records.h"

enum {
    LINE = 64,
    SPINS = 100,
    MAX_RANKS = 32767, /* of the numbers in the word */
    MAX_OPS = 12,
    UNLOCKED_BYTES = 64 << 10 /* from here on, a copy takes longer than to release the interpreter lock */
};

/* --- locks */

/* Parts of the word of a lock. */
static const uint64_t ONE_SHARED = 1, SHARED = 0xFFFF, EXCLUSIVE = 1u << 16, COMBINING = 1u << 17;
static const uint64_t ONE_WAITS_SHARED = (uint64_t)1 << 18;
static const uint64_t ONE_WAITS_EXCLUSIVE = (uint64_t)1 << 33, WAIT_EXCLUSIVE = (uint64_t)MAX_RANKS << 33;
static const uint64_t ONE_WAITS_COMBINING = (uint64_t)1 << 48, WAIT_COMBINING = (uint64_t)MAX_RANKS << 48;

/* What a rank takes a lock for. TO_COMBINE needs the lock, shared or exclusive; TO_ACCUMULATE is both at once. */
typedef enum { TO_SHARE, TO_EXCLUDE, TO_COMBINE, TO_ACCUMULATE } Purpose;

typedef struct {
    _Alignas(LINE) _Atomic uint64_t ticket; /* times 4, and the purpose; 0: the rank does not wait */
    _Atomic uint32_t wanted;                /* what the rank holds, or is about to take; for error messages */
} Waiter;

typedef struct {
    _Alignas(LINE) _Atomic uint64_t word;
    _Alignas(LINE) _Atomic uint64_t tickets; /* drawn */
    Waiter waiters[];
} WindowLock;

/* Return the word with the lock taken; 0 if that is excluded by its holders or, unless the rank has waited for its
 * turn, by those that wait. */
static uint64_t take(uint64_t word, Purpose purpose, bool is_next)
{
    switch (purpose) {
    case TO_SHARE:
        return word & (EXCLUSIVE | (is_next ? 0 : WAIT_EXCLUSIVE)) ? 0 : word + ONE_SHARED;
    case TO_EXCLUDE:
        return is_next ? (word & (SHARED | EXCLUSIVE) ? 0 : word | EXCLUSIVE) : (word ? 0 : EXCLUSIVE);
    case TO_COMBINE:
        return word & (COMBINING | (is_next ? 0 : WAIT_COMBINING)) ? 0 : word | COMBINING;
    default:
        return word & (EXCLUSIVE | WAIT_EXCLUSIVE | COMBINING | WAIT_COMBINING) ? 0 : (word + ONE_SHARED) | COMBINING;
    }
}

static bool try_to_take(WindowLock *lock, int rank, Purpose purpose, bool is_next, uint64_t besides)
{
    _Atomic uint32_t *wanted = &lock->waiters[rank].wanted;
    const uint32_t before = atomic_load_explicit(wanted, memory_order_relaxed);
    atomic_store_explicit(wanted, before + 1, memory_order_relaxed);
    uint64_t word = atomic_load_explicit(&lock->word, memory_order_relaxed), taken;
    while ((taken = take(word, purpose, is_next)) != 0) {
        if (atomic_compare_exchange_weak_explicit(
                &lock->word, &word, taken - besides, memory_order_acquire, memory_order_relaxed))
            return true;
    }
    atomic_store_explicit(wanted, before, memory_order_relaxed);
    return false;
}

static void return_lock(WindowLock *lock, int rank, uint64_t part)
{
    atomic_fetch_sub_explicit(&lock->word, part, memory_order_release);
    _Atomic uint32_t *wanted = &lock->waiters[rank].wanted;
    atomic_store_explicit(wanted, atomic_load_explicit(wanted, memory_order_relaxed) - 1, memory_order_relaxed);
}

/* The part of the word for the lock of the program, which this rank holds. */
static uint64_t get_held_part(WindowLock *lock)
{
    return atomic_load_explicit(&lock->word, memory_order_relaxed) & EXCLUSIVE ? EXCLUSIVE : ONE_SHARED;
}

static uint64_t get_waiting_part(Purpose purpose)
{
    return purpose == TO_SHARE ? ONE_WAITS_SHARED : purpose == TO_EXCLUDE ? ONE_WAITS_EXCLUSIVE : ONE_WAITS_COMBINING;
}

/* Whether a rank that waits for `other` goes first, if it came first. */
static bool excludes(Purpose other, Purpose purpose)
{
    if (purpose == TO_COMBINE || other == TO_COMBINE)
        return purpose == other;
    return purpose == TO_EXCLUDE || other == TO_EXCLUDE;
}

static bool is_next(WindowLock *lock, int size, uint64_t ticket)
{
    for (int rank = 0; rank < size; rank++) {
        const uint64_t other = atomic_load_explicit(&lock->waiters[rank].ticket, memory_order_relaxed);
        if (other != 0 && other < ticket && excludes((Purpose)(other & 3), (Purpose)(ticket & 3)))
            return false;
    }
    return true;
}

static void remove_ticket(WindowLock *lock, int rank)
{
    atomic_store_explicit(&lock->waiters[rank].ticket, 0, memory_order_relaxed);
}

/* Take a lock, or wait for it from now on; called again until it returns true. */
static bool take_in_turn(WindowLock *lock, int rank, int size, Purpose purpose)
{
    uint64_t ticket = atomic_load_explicit(&lock->waiters[rank].ticket, memory_order_relaxed);
    const uint64_t waiting = get_waiting_part(purpose);
    if (ticket == 0) {
        if (try_to_take(lock, rank, purpose, false, 0))
            return true;
        atomic_fetch_add_explicit(&lock->word, waiting, memory_order_relaxed);
        ticket = (atomic_fetch_add_explicit(&lock->tickets, 1, memory_order_relaxed) + 1) * 4 + (uint64_t)purpose;
        atomic_store_explicit(&lock->waiters[rank].ticket, ticket, memory_order_relaxed);
    }
    if (!is_next(lock, size, ticket) || !try_to_take(lock, rank, purpose, true, waiting))
        return false;
    remove_ticket(lock, rank);
    return true;
}

static void stop_waiting(WindowLock *lock, int rank)
{
    const uint64_t ticket = atomic_load_explicit(&lock->waiters[rank].ticket, memory_order_relaxed);
    if (ticket == 0)
        return;
    remove_ticket(lock, rank);
    atomic_fetch_sub_explicit(&lock->word, get_waiting_part((Purpose)(ticket & 3)), memory_order_relaxed);
}

/* --- the memory */

typedef enum { PUT, GET, ACCUMULATE, GET_ACCUMULATE, LOCK, LOCK_SHARED, UNLOCK, OPERATIONS } Operation;

/* A call on the memory of a rank, for the flight recorder. */
typedef struct {
    PyObject *call; /* NULL: Python has carried out none */
    Summary summary;
} Known;

typedef struct {
    Py_buffer view;
    WindowLock *lock;
    char *data;
    size_t count; /* of elements */
    PyObject *shape;
    Known known[OPERATIONS];
} Target;

typedef struct {
    PyObject_HEAD
    int rank, size;
    Target *targets;
    PyObject *held; /* a set of the ranks whose lock the program holds */
    Calls *calls;   /* NULL: bind was not called */
    unsigned int generation;
    QueueLock *turn;
    uintptr_t dtype;
    PyObject *prototype; /* the dtype of the window, which must exist as long as its address is compared */
    size_t itemsize;
    bool makes_arrays;
    bool takes_integers, takes_floats; /* Python's are elements of the window's dtype, as numpy converts them */
    int op_count;
    struct {
        PyObject *name;
        ReduceKernel kernel; /* NULL: replace */
    } ops[MAX_OPS];
} WindowMemory;

/* An access that may be carried out here. */
typedef struct {
    Target *target;
    const Known *known;
    bool is_held; /* the lock, by the program */
    char *there;
    size_t count, nbytes;
} WindowAccess;

static size_t get_lock_bytes(int size) { return sizeof(WindowLock) + (size_t)size * sizeof(Waiter); }

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Return the rank that an argument is; -1, without an exception, if it is none. */
static int read_rank(const WindowMemory *one, PyObject *argument)
{
    const long rank = PyLong_CheckExact(argument) ? PyLong_AsLong(argument) : -1;
    if (rank >= 0 && rank < one->size)
        return (int)rank;
    PyErr_Clear();
    return -1;
}

/* Find the rank of a call. Returns false if Python has to carry it out. No other code may run from here to `enter`:
 * torch lets other threads run while it is asked about a tensor, so the memory of arrays is found before. */
static bool begin_access(WindowMemory *one, Operation operation, PyObject *rank, WindowAccess *access)
{
    const Calls *calls = one->calls;
    if (!recording || calls == NULL || !calls->enabled || calls->group == NULL ||
        one->generation != calls->generation || one->turn->locked)
        return false;
    const int found = read_rank(one, rank);
    if (found < 0 || one->targets[found].known[operation].call == NULL)
        return false;
    access->target = &one->targets[found];
    access->known = &access->target->known[operation];
    access->is_held = false;
    if (PySet_Size(one->held) > 0) {
        const int held = PySet_Contains(one->held, rank);
        PyErr_Clear();
        access->is_held = held != 0;
    }
    return true;
}

/* Set where `count` elements lie. Returns false if the offset is invalid, or they are `memory` of this process. */
static bool place_access(
    const WindowMemory *one, WindowAccess *access, PyObject *offset, size_t count, const char *memory)
{
    const Target *target = access->target;
    const long long begin = PyLong_CheckExact(offset) ? PyLong_AsLongLong(offset) : -1;
    if (begin < 0 || (unsigned long long)begin > target->count || count > target->count - (size_t)begin) {
        PyErr_Clear();
        return false;
    }
    access->count = count;
    access->nbytes = count * one->itemsize;
    access->there = target->data + (size_t)begin * one->itemsize;
    const uintptr_t here = (uintptr_t)memory, there = (uintptr_t)target->data;
    return here + access->nbytes <= there || there + target->count * one->itemsize <= here;
}

static size_t count_elements(const Memory *memory)
{
    size_t count = 1;
    for (int i = 0; i < memory->ndim; i++)
        count *= (size_t)memory->shape[i];
    return count;
}

/* A number of the window's dtype. */
typedef union {
    int64_t integer;
    double real;
} Number;

/* Find the memory of an output of the window's dtype. */
static bool find_output(const WindowMemory *one, PyObject *array, Memory *memory)
{
    return find_memory(array, true, memory) && memory->dtype == one->dtype;
}

/* Find the memory of an input of the window's dtype; of one of Python's numbers, that is `number`. */
static bool find_input(const WindowMemory *one, PyObject *x, Memory *memory, Number *number)
{
    if (find_memory(x, false, memory))
        return memory->dtype == one->dtype;
    if (one->takes_integers && PyLong_CheckExact(x))
        number->integer = PyLong_AsLongLong(x);
    else if (one->takes_floats && PyFloat_CheckExact(x))
        number->real = PyFloat_AsDouble(x);
    else
        return false;
    *memory = (Memory){.data = (char *)number};
    if (!PyErr_Occurred())
        return true;
    PyErr_Clear(); /* it is too large */
    return false;
}

/* Begin what `access` describes: take the lock for `purpose`, if at once possible, and begin the record. Returns its
 * number, or -1 if Python has to carry out the call. */
static int enter(WindowMemory *one, const WindowAccess *access, Purpose purpose, References *old)
{
    if (access->is_held && purpose == TO_ACCUMULATE)
        purpose = TO_COMBINE;
    if (!access->is_held || purpose == TO_COMBINE) {
        int spins = 0;
        while (!try_to_take(access->target->lock, one->rank, purpose, false, 0)) {
            if (++spins == SPINS)
                return -1;
            relax();
        }
    }
    try_to_lock(one->turn);
    References own = {.group = Py_NewRef(one->calls->group), .call = Py_NewRef(access->known->call),
                      .thread = PyThread_get_thread_ident()};
    return begin_record(read_clock(), 0, &access->known->summary, &own, old);
}

/* End the record, and return the lock if `part` is not 0. References that are dropped may run other code. */
static void leave(WindowMemory *one, const WindowAccess *access, int record, uint64_t part, References *old)
{
    if (part != 0)
        return_lock(access->target->lock, one->rank, part);
    end_record(record, read_clock(), RECORD_DONE);
    unlock(one->turn);
    drop_references(old);
}

static bool move(WindowMemory *one, const WindowAccess *access, char *to, const char *from)
{
    References old;
    const int record = enter(one, access, TO_SHARE, &old);
    if (record < 0)
        return false;
    if (access->nbytes < UNLOCKED_BYTES) {
        copy(to, from, access->nbytes);
    } else {
        Py_BEGIN_ALLOW_THREADS
        copy(to, from, access->nbytes);
        Py_END_ALLOW_THREADS
    }
    leave(one, access, record, access->is_held ? 0 : ONE_SHARED, &old);
    return true;
}

static void combine(const WindowAccess *access, const char *from, char *before, ReduceKernel kernel)
{
    if (before != NULL)
        copy(before, access->there, access->nbytes);
    if (kernel == NULL)
        copy(access->there, from, access->nbytes);
    else
        kernel(access->there, (const void *const[]){access->there, from}, 2, access->count);
}

static bool accumulate(
    WindowMemory *one, const WindowAccess *access, const char *from, char *before, ReduceKernel kernel)
{
    References old;
    const int record = enter(one, access, TO_ACCUMULATE, &old);
    if (record < 0)
        return false;
    if (access->nbytes < UNLOCKED_BYTES) {
        if (access->nbytes > 0)
            combine(access, from, before, kernel);
    } else {
        Py_BEGIN_ALLOW_THREADS
        combine(access, from, before, kernel);
        Py_END_ALLOW_THREADS
    }
    leave(one, access, record, COMBINING + (access->is_held ? 0 : ONE_SHARED), &old);
    return true;
}

/* --- methods: accesses */

static bool check_count(Py_ssize_t given, Py_ssize_t expected)
{
    if (given != expected)
        PyErr_Format(PyExc_TypeError, "WindowMemory: %zd arguments are needed, not %zd", expected, given);
    return given == expected;
}

static PyObject *put(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    WindowMemory *one = (WindowMemory *)self;
    WindowAccess access;
    Memory x;
    Number number;
    if (!check_count(nargs, 3))
        return NULL;
    return PyBool_FromLong(find_input(one, args[0], &x, &number) && begin_access(one, PUT, args[1], &access) &&
                           place_access(one, &access, args[2], count_elements(&x), x.data) &&
                           move(one, &access, access.there, x.data));
}

/* Return a new array of the shape that a tuple is, or an int; NULL, without an exception, if Python has to make it. */
static PyObject *make_of_shape(const WindowMemory *one, const Target *target, PyObject *shape)
{
    PyObject *extents = shape == Py_None ? target->shape : shape;
    Py_ssize_t lengths[DIMENSIONS], ndim = PyTuple_CheckExact(extents) ? PyTuple_Size(extents) : 1;
    size_t count = 1;
    if (!one->makes_arrays || ndim > DIMENSIONS)
        return NULL;
    for (Py_ssize_t i = 0; i < ndim; i++) {
        PyObject *extent = PyTuple_CheckExact(extents) ? PyTuple_GetItem(extents, i) : extents;
        lengths[i] = PyLong_CheckExact(extent) ? PyLong_AsSsize_t(extent) : -1;
        /* No more than there are: what is not in the array of the rank is an error. */
        if (lengths[i] < 0 || (lengths[i] > 0 && count > target->count / (size_t)lengths[i])) {
            PyErr_Clear();
            return NULL;
        }
        count *= (size_t)lengths[i];
    }
    return make_array(one->prototype, (int)ndim, lengths);
}

static PyObject *get(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    WindowMemory *one = (WindowMemory *)self;
    WindowAccess access;
    Memory out;
    if (!check_count(nargs, 4))
        return NULL;
    const bool makes = args[3] == Py_None; /* an array, whose shape is that of the memory there unless one is given */
    if (makes ? !begin_access(one, GET, args[0], &access) : args[2] != Py_None)
        Py_RETURN_NONE;
    PyObject *value = makes ? make_of_shape(one, access.target, args[2]) : Py_NewRef(args[3]);
    if (value == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    if (find_output(one, value, &out) && begin_access(one, GET, args[0], &access) &&
        place_access(one, &access, args[1], count_elements(&out), out.data) &&
        move(one, &access, out.data, access.there))
        return value;
    Py_DECREF(value);
    Py_RETURN_NONE;
}

/* Find the kernel of an op. Returns false if the op is not known. */
static bool find_op(const WindowMemory *one, PyObject *name, ReduceKernel *kernel)
{
    for (int i = 0; i < one->op_count; i++) {
        if (name == one->ops[i].name ||
            (PyUnicode_CheckExact(name) && PyUnicode_Compare(name, one->ops[i].name) == 0)) {
            *kernel = one->ops[i].kernel;
            return true;
        }
    }
    return false;
}

/* Find all that x.accumulate(x, rank, op, offset) needs. Returns false if Python has to carry it out. */
static bool find_accumulate(WindowMemory *one, Operation operation, PyObject *const *args, WindowAccess *access,
                            Memory *x, Number *number, ReduceKernel *kernel)
{
    return find_op(one, args[2], kernel) && find_input(one, args[0], x, number) &&
           begin_access(one, operation, args[1], access) &&
           place_access(one, access, args[3], count_elements(x), x->data);
}

static PyObject *accumulate_method(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    WindowMemory *one = (WindowMemory *)self;
    WindowAccess access;
    Memory x;
    Number number;
    ReduceKernel kernel;
    if (!check_count(nargs, 4))
        return NULL;
    return PyBool_FromLong(find_accumulate(one, ACCUMULATE, args, &access, &x, &number, &kernel) &&
                           accumulate(one, &access, x.data, NULL, kernel));
}

static PyObject *get_accumulate(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    WindowMemory *one = (WindowMemory *)self;
    WindowAccess access;
    Memory x, before;
    Number number;
    ReduceKernel kernel;
    if (!check_count(nargs, 4))
        return NULL;
    if (!one->makes_arrays || !find_accumulate(one, GET_ACCUMULATE, args, &access, &x, &number, &kernel))
        Py_RETURN_NONE;
    PyObject *value = make_array(one->prototype, x.ndim, x.shape);
    if (value == NULL)
        return NULL;
    if (find_output(one, value, &before) && accumulate(one, &access, x.data, before.data, kernel))
        return value;
    Py_DECREF(value);
    Py_RETURN_NONE;
}

/* --- methods: locks */

/* Acquire the lock of a rank for the program. Returns 1, 0 if Python has to, -1 with an exception. */
static int acquire_for_program(WindowMemory *one, PyObject *rank, bool exclusive)
{
    WindowAccess access;
    References old;
    if (!begin_access(one, exclusive ? LOCK : LOCK_SHARED, rank, &access) || access.is_held)
        return 0;
    const int record = enter(one, &access, exclusive ? TO_EXCLUDE : TO_SHARE, &old);
    if (record < 0)
        return 0;
    const int status = PySet_Add(one->held, rank);
    leave(one, &access, record, status == 0 ? 0 : exclusive ? EXCLUSIVE : ONE_SHARED, &old);
    return status < 0 ? -1 : 1;
}

/* Release the lock of a rank that the program holds. Returns false if Python has to. */
static bool release_for_program(WindowMemory *one, PyObject *rank)
{
    WindowAccess access;
    References old;
    if (!begin_access(one, UNLOCK, rank, &access) || !access.is_held || PySet_Discard(one->held, rank) < 1)
        return false;
    const int record = enter(one, &access, TO_SHARE, &old); /* which takes nothing: the lock is held */
    leave(one, &access, record, get_held_part(access.target->lock), &old);
    return true;
}

/* The lock of the memory of a rank, which the program holds in a `with` block. */
typedef struct {
    PyObject_HEAD
    WindowMemory *memory;
    PyObject *window, *rank;
    bool exclusive;
} HeldLock;

static PyTypeObject *held_lock_type;

static PyObject *hold(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!check_count(nargs, 3))
        return NULL;
    const int exclusive = PyObject_IsTrue(args[2]);
    allocfunc allocate = (allocfunc)PyType_GetSlot(held_lock_type, Py_tp_alloc);
    HeldLock *lock = exclusive < 0 ? NULL : (HeldLock *)allocate(held_lock_type, 0);
    if (lock == NULL)
        return NULL;
    lock->memory = (WindowMemory *)Py_NewRef(self);
    lock->window = Py_NewRef(args[0]);
    lock->rank = Py_NewRef(args[1]);
    lock->exclusive = exclusive != 0;
    return (PyObject *)lock;
}

static PyObject *enter_held_lock(PyObject *self, PyObject *unused)
{
    (void)unused;
    HeldLock *lock = (HeldLock *)self;
    const int status = acquire_for_program(lock->memory, lock->rank, lock->exclusive);
    if (status < 0)
        return NULL;
    if (status == 0) {
        /* The rank as an int of Python, whatever the program has passed. */
        PyObject *rank =
            PyObject_CallMethod(lock->window, "_acquire", "OO", lock->rank, lock->exclusive ? Py_True : Py_False);
        if (rank == NULL)
            return NULL;
        PyObject *old = lock->rank;
        lock->rank = rank;
        Py_DECREF(old);
    }
    return Py_NewRef(lock->window);
}

static PyObject *exit_held_lock(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)args;
    (void)nargs;
    HeldLock *lock = (HeldLock *)self;
    if (release_for_program(lock->memory, lock->rank))
        Py_RETURN_NONE;
    return PyErr_Occurred() ? NULL : PyObject_CallMethod(lock->window, "_release", "O", lock->rank);
}

static int traverse_held_lock(PyObject *self, visitproc visit, void *arg)
{
    const HeldLock *lock = (HeldLock *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)lock->memory);
    Py_VISIT(lock->window);
    Py_VISIT(lock->rank);
    return 0;
}

static void dealloc_held_lock(PyObject *self)
{
    HeldLock *lock = (HeldLock *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_DECREF((PyObject *)lock->memory);
    Py_DECREF(lock->window);
    Py_DECREF(lock->rank);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef held_lock_methods[] = {
    {"__enter__", enter_held_lock, METH_NOARGS, "__enter__()\n--\n\nAcquire the lock, and return the window."},
    {"__exit__", (PyCFunction)(void (*)(void))exit_held_lock, METH_FASTCALL,
     "__exit__(*error)\n--\n\nRelease the lock."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot held_lock_slots[] = {
    {Py_tp_doc, "The lock of the memory of a rank, which the program holds in a ``with`` block."},
    {Py_tp_dealloc, dealloc_held_lock},
    {Py_tp_traverse, traverse_held_lock},
    {Py_tp_methods, held_lock_methods},
    {0, NULL},
};

PyType_Spec held_lock_spec = {
    .name = "mpicoll._shm.HeldLock",
    .basicsize = sizeof(HeldLock),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = held_lock_slots,
};

void set_held_lock_type(PyTypeObject *type) { held_lock_type = (PyTypeObject *)Py_NewRef((PyObject *)type); }

/* Return the lock of a rank; NULL with an exception if there is no such rank. */
static WindowLock *get_lock(const WindowMemory *one, PyObject *rank)
{
    const int found = read_rank(one, rank);
    if (found < 0) {
        PyErr_SetString(PyExc_ValueError, "WindowMemory: there is no such rank");
        return NULL;
    }
    return one->targets[found].lock;
}

static PyObject *take_method(PyObject *self, PyObject *args)
{
    const WindowMemory *one = (WindowMemory *)self;
    PyObject *rank;
    int combines, exclusive;
    if (!PyArg_ParseTuple(args, "Opp", &rank, &combines, &exclusive))
        return NULL;
    WindowLock *lock = get_lock(one, rank);
    if (lock == NULL)
        return NULL;
    const Purpose purpose = combines ? TO_COMBINE : exclusive ? TO_EXCLUDE : TO_SHARE;
    return PyBool_FromLong(take_in_turn(lock, one->rank, one->size, purpose));
}

static PyObject *give_up(PyObject *self, PyObject *rank)
{
    const WindowMemory *one = (WindowMemory *)self;
    WindowLock *lock = get_lock(one, rank);
    if (lock == NULL)
        return NULL;
    stop_waiting(lock, one->rank);
    Py_RETURN_NONE;
}

static PyObject *release_method(PyObject *self, PyObject *args)
{
    const WindowMemory *one = (WindowMemory *)self;
    PyObject *rank;
    int combines;
    if (!PyArg_ParseTuple(args, "Op", &rank, &combines))
        return NULL;
    WindowLock *lock = get_lock(one, rank);
    if (lock == NULL)
        return NULL;
    return_lock(lock, one->rank, combines ? COMBINING : get_held_part(lock));
    Py_RETURN_NONE;
}

static PyObject *list_holders(PyObject *self, PyObject *argument)
{
    const WindowMemory *one = (WindowMemory *)self;
    WindowLock *lock = get_lock(one, argument);
    PyObject *ranks = lock == NULL ? NULL : PyList_New(0);
    for (int rank = 0; ranks != NULL && rank < one->size; rank++) {
        const Waiter *waiter = &lock->waiters[rank];
        if (rank == one->rank || (atomic_load_explicit(&waiter->wanted, memory_order_relaxed) == 0 &&
                                  atomic_load_explicit(&waiter->ticket, memory_order_relaxed) == 0))
            continue;
        PyObject *number = PyLong_FromLong(rank);
        if (number == NULL || PyList_Append(ranks, number) < 0)
            Py_CLEAR(ranks);
        Py_XDECREF(number);
    }
    return ranks;
}

/* --- the Python type */

static int set_targets(WindowMemory *one, PyObject *memories)
{
    one->targets = PyMem_Calloc((size_t)one->size, sizeof *one->targets);
    if (one->targets == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const size_t lock_bytes = get_lock_bytes(one->size);
    for (int rank = 0; rank < one->size; rank++) {
        PyObject *memory = PySequence_GetItem(memories, rank);
        Target *target = &one->targets[rank];
        const int status = memory == NULL ? -1 : PyObject_GetBuffer(memory, &target->view, PyBUF_WRITABLE);
        Py_XDECREF(memory);
        if (status < 0)
            return -1;
        if ((size_t)target->view.len < lock_bytes || (uintptr_t)target->view.buf % LINE != 0) {
            PyErr_SetString(PyExc_ValueError, "WindowMemory: memory for the locks is missing, or not aligned");
            return -1;
        }
        target->lock = target->view.buf;
        target->data = (char *)target->view.buf + lock_bytes;
    }
    return 0;
}

static int init_window_memory(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    WindowMemory *one = (WindowMemory *)self;
    PyObject *memories, *held;
    int rank;
    if (!PyArg_ParseTuple(args, "OiO!", &memories, &rank, &PySet_Type, &held))
        return -1;
    const Py_ssize_t size = PySequence_Size(memories);
    if (one->targets != NULL || size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "WindowMemory: invalid arguments, or initialised twice");
        return -1;
    }
    one->rank = rank;
    one->size = (int)size;
    one->held = Py_NewRef(held);
    return set_targets(one, memories);
}

static PyObject *count_lock_bytes(PyObject *type, PyObject *argument)
{
    (void)type;
    const long size = PyLong_AsLong(argument);
    if (size < 1 || size > MAX_RANKS) {
        if (!PyErr_Occurred())
            PyErr_Format(
                PyExc_ValueError, "WindowMemory: there are windows of 1 to %d ranks, not %ld", MAX_RANKS, size);
        return NULL;
    }
    return PyLong_FromSize_t(get_lock_bytes((int)size));
}

/* Set what the elements are like. Returns -1 with an exception. */
static int describe_dtype(WindowMemory *one, PyObject *local)
{
    PyObject *itemsize = PyObject_GetAttrString(local, "itemsize");
    one->itemsize = itemsize == NULL ? 0 : PyLong_AsSize_t(itemsize);
    Py_XDECREF(itemsize);
    PyObject *dtype = PyErr_Occurred() ? NULL : PyObject_GetAttrString(local, "dtype");
    PyObject *name = dtype == NULL ? NULL : PyObject_Str(dtype);
    if (name == NULL) {
        Py_XDECREF(dtype);
        return -1;
    }
    one->prototype = dtype;
    one->makes_arrays = can_make(local);
    one->takes_integers = PyUnicode_CompareWithASCIIString(name, "int64") == 0;
    one->takes_floats = PyUnicode_CompareWithASCIIString(name, "float64") == 0;
    Py_DECREF(name);
    return 0;
}

static PyObject *bind(PyObject *self, PyObject *args)
{
    WindowMemory *one = (WindowMemory *)self;
    PyObject *calls, *turn, *local, *shapes;
    if (!PyArg_ParseTuple(args, "OOOO!", &calls, &turn, &local, &PyList_Type, &shapes))
        return NULL;
    Memory memory;
    if (one->calls != NULL || one->targets == NULL || PyList_Size(shapes) != one->size ||
        !PyObject_HasAttrString(calls, "enabled") || !PyObject_HasAttrString(turn, "number")) {
        PyErr_SetString(PyExc_ValueError, "WindowMemory: invalid arguments, or bound twice");
        return NULL;
    }
    if (!find_memory(local, true, &memory)) /* then all calls are left to Python */
        Py_RETURN_NONE;
    if (describe_dtype(one, local) < 0)
        return NULL;
    for (int rank = 0; rank < one->size; rank++) {
        Target *target = &one->targets[rank];
        target->shape = Py_NewRef(PyList_GetItem(shapes, rank));
        target->count = 1;
        for (Py_ssize_t i = 0; i < PyTuple_Size(target->shape); i++)
            target->count *= PyLong_AsSize_t(PyTuple_GetItem(target->shape, i));
        if (!PyErr_Occurred() &&
            target->count * one->itemsize > (size_t)target->view.len - get_lock_bytes(one->size))
            PyErr_SetString(PyExc_ValueError, "WindowMemory: the memory is smaller than the array");
        if (PyErr_Occurred())
            return NULL;
    }
    one->dtype = memory.dtype;
    one->turn = (QueueLock *)Py_NewRef(turn);
    one->calls = (Calls *)Py_NewRef(calls);
    Py_RETURN_NONE;
}

static PyObject *unbind(PyObject *self, PyObject *unused)
{
    (void)unused;
    WindowMemory *one = (WindowMemory *)self;
    PyObject *calls = (PyObject *)one->calls;
    one->calls = NULL;
    Py_XDECREF(calls);
    Py_RETURN_NONE;
}

/* Have later calls carried out here. */
static PyObject *add(PyObject *self, PyObject *args)
{
    WindowMemory *one = (WindowMemory *)self;
    int operation;
    PyObject *rank, *call;
    if (!PyArg_ParseTuple(args, "iOO", &operation, &rank, &call))
        return NULL;
    const int found = read_rank(one, rank);
    if (operation < 0 || operation >= OPERATIONS || found < 0) {
        PyErr_SetString(PyExc_ValueError, "WindowMemory: there is no such operation, or no such rank");
        return NULL;
    }
    if (one->calls == NULL || one->calls->group == NULL)
        Py_RETURN_NONE;
    Known *known = &one->targets[found].known[operation];
    one->generation = one->calls->generation;
    if (known->call == NULL) {
        summarize_call(one->calls->group, call, false, &known->summary);
        known->call = Py_NewRef(call);
    }
    Py_RETURN_NONE;
}

static PyObject *add_op(PyObject *self, PyObject *args)
{
    WindowMemory *one = (WindowMemory *)self;
    PyObject *name;
    const char *op, *dtype;
    ReduceKernel kernel = NULL;
    if (!PyArg_ParseTuple(args, "Uzz", &name, &op, &dtype))
        return NULL;
    if (one->op_count == MAX_OPS || find_op(one, name, &kernel))
        Py_RETURN_NONE;
    if (op != NULL && dtype != NULL && (kernel = find_kernel(op, dtype)) == NULL)
        Py_RETURN_NONE;
    PyObject *interned = Py_NewRef(name);
    PyUnicode_InternInPlace(&interned);
    one->ops[one->op_count].name = interned;
    one->ops[one->op_count++].kernel = kernel;
    Py_RETURN_NONE;
}

static int traverse_window_memory(PyObject *self, visitproc visit, void *arg)
{
    const WindowMemory *one = (WindowMemory *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)one->calls);
    Py_VISIT(one->held);
    for (int rank = 0; one->targets != NULL && rank < one->size; rank++) {
        Py_VISIT(one->targets[rank].view.obj);
        for (int i = 0; i < OPERATIONS; i++)
            Py_VISIT(one->targets[rank].known[i].call);
    }
    return 0;
}

static void dealloc_window_memory(PyObject *self)
{
    WindowMemory *one = (WindowMemory *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    for (int rank = 0; one->targets != NULL && rank < one->size; rank++) {
        Target *target = &one->targets[rank];
        PyBuffer_Release(&target->view);
        Py_XDECREF(target->shape);
        for (int i = 0; i < OPERATIONS; i++)
            Py_XDECREF(target->known[i].call);
    }
    PyMem_Free(one->targets);
    for (int i = 0; i < one->op_count; i++)
        Py_DECREF(one->ops[i].name);
    Py_XDECREF(one->held);
    Py_XDECREF(one->prototype);
    Py_XDECREF((PyObject *)one->turn);
    Py_XDECREF((PyObject *)one->calls);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"count_lock_bytes", count_lock_bytes, METH_O | METH_STATIC,
     "count_lock_bytes(size)\n--\n\nReturn the bytes before the memory of each of `size` ranks, zeros at first."},
    {"bind", bind, METH_VARARGS,
     "bind(calls, turn, local, shapes)\n--\n\nHave calls on arrays like `local`, this rank's, carried out here. `calls`"
     " are those of the communicator, and `turn` the QueueLock of the window; `shapes` is a list of tuples."},
    {"add", add, METH_VARARGS,
     "add(operation, rank, call)\n--\n\nHave later calls like one that Python has carried out, on the memory of `rank`,"
     " carried out here. `operation` is 0 to 6 for put, get, accumulate, get_accumulate, lock, a shared lock, unlock."},
    {"add_op", add_op, METH_VARARGS,
     "add_op(name, op, dtype)\n--\n\nHave accumulating calls with the op `name` carried out here, if there is a kernel"
     " for `op` and `dtype`; None replaces the elements."},
    {"put", (PyCFunction)(void (*)(void))put, METH_FASTCALL,
     "put(x, rank, offset)\n--\n\nCarry out Window.put, and return True; False if Python has to."},
    {"get", (PyCFunction)(void (*)(void))get, METH_FASTCALL,
     "get(rank, offset, shape, out)\n--\n\nCarry out Window.get, and return its result; None if Python has to."},
    {"accumulate", (PyCFunction)(void (*)(void))accumulate_method, METH_FASTCALL,
     "accumulate(x, rank, op, offset)\n--\n\nCarry out Window.accumulate, and return True; False if Python has to."},
    {"get_accumulate", (PyCFunction)(void (*)(void))get_accumulate, METH_FASTCALL,
     "get_accumulate(x, rank, op, offset)\n--\n\nCarry out Window.get_accumulate, and return its result; None if Python"
     " has to."},
    {"hold", (PyCFunction)(void (*)(void))hold, METH_FASTCALL,
     "hold(window, rank, exclusive)\n--\n\nReturn the HeldLock of a rank. It calls the methods `_acquire` and"
     " `_release` of the window where Python has to acquire and release the lock."},
    {"unbind", unbind, METH_NOARGS, "unbind()\n--\n\nLeave all calls to Python, since the window is freed."},
    {"take", take_method, METH_VARARGS,
     "take(rank, combines, exclusive)\n--\n\nTake the lock of a rank, or with `combines` the right to combine elements"
     " while the lock is held, and return True; False if others have it: then this rank waits in their queue until the"
     " method, called again, returns True, or until `give_up`."},
    {"give_up", give_up, METH_O, "give_up(rank)\n--\n\nLeave the queue for the lock of a rank, if this rank is in it."},
    {"release", release_method, METH_VARARGS,
     "release(rank, combines)\n--\n\nReturn what `take` has taken."},
    {"list_holders", list_holders, METH_O,
     "list_holders(rank)\n--\n\nReturn the other ranks that hold the lock of a rank, or wait for it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "WindowMemory(memories, rank, held)\n--\n\nThe memory of the ranks of a window, each behind its lock."
                " `held` is the set of the ranks whose lock the program holds."},
    {Py_tp_init, init_window_memory},
    {Py_tp_dealloc, dealloc_window_memory},
    {Py_tp_traverse, traverse_window_memory},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec window_memory_spec = {
    .name = "mpicoll._shm.WindowMemory",
    .basicsize = sizeof(WindowMemory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
