/* Threads of this process that share the work on large arrays.
 *
 * There is one pool for all communicators. A caller that finds it in use by another one works alone. Each worker has a
 * word, by which shares are handed over:
 *
 *     IDLE -> ASLEEP         the worker has polled for a while
 *     IDLE, ASLEEP -> READY  the caller has a share for it
 *     READY -> RUNNING       the worker has begun
 *     READY -> IDLE          the caller works on the share itself, because the worker has not begun
 *     RUNNING -> AWAITED     the caller sleeps until the worker has ended
 *     RUNNING, AWAITED -> IDLE
 *
 * So a worker that gets no core causes no delay, as long as it has not begun.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "workers.h"

#include "collectives.h"

#ifdef __linux__

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    MIN_SHARE = SHARED_BYTES / 2,
    POLLS = 1000,              /* before a thread sleeps: about as long as two pieces of a collective are apart */
    AWAIT_NANOSECONDS = 10000000
};

typedef enum { IDLE, ASLEEP, READY, RUNNING, AWAITED } State;

typedef struct {
    _Alignas(2 * CACHE_LINE) _Atomic uint32_t state;
    int share;
    ShareFunction function;
    const void *task;
    size_t begin, end;
    pthread_t thread;
} Worker;

static struct {
    atomic_bool in_use;
    bool handles_fork;
    int started;
    cpu_set_t cores; /* of the caller before, to which the workers are bound too */
    Worker workers[MAX_THREADS - 1];
} pool;

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wait_while(_Atomic uint32_t *state, uint32_t value, const struct timespec *limit)
{
    syscall(SYS_futex, state, FUTEX_WAIT_PRIVATE, value, limit, NULL, 0);
}

static void wake(_Atomic uint32_t *state) { syscall(SYS_futex, state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

/* Replace `from` by `to`. Returns false if the word was another one. */
static bool change(_Atomic uint32_t *state, uint32_t from, uint32_t to)
{
    return atomic_compare_exchange_strong_explicit(state, &from, to, memory_order_acq_rel, memory_order_acquire);
}

/* --- workers */

static void wait_for_share(Worker *worker)
{
    for (int polls = 0;;) {
        const uint32_t state = atomic_load_explicit(&worker->state, memory_order_relaxed);
        if (state == READY) {
            if (change(&worker->state, READY, RUNNING))
                return;
        } else if (state == ASLEEP) {
            wait_while(&worker->state, ASLEEP, NULL);
            polls = 0;
        } else if (++polls < POLLS) {
            relax();
        } else {
            change(&worker->state, IDLE, ASLEEP);
        }
    }
}

static void *run_worker(void *argument)
{
    Worker *worker = argument;
    prctl(PR_SET_NAME, "mpicoll-worker", 0, 0, 0);
    for (;;) {
        wait_for_share(worker);
        worker->function(worker->task, worker->share, worker->begin, worker->end);
        if (atomic_exchange_explicit(&worker->state, IDLE, memory_order_acq_rel) == AWAITED)
            wake(&worker->state);
    }
    return NULL;
}

/* A child has none of the threads. */
static void forget_workers(void)
{
    pool.started = 0;
    for (int i = 0; i < MAX_THREADS - 1; i++)
        atomic_store_explicit(&pool.workers[i].state, IDLE, memory_order_relaxed);
    atomic_store_explicit(&pool.in_use, false, memory_order_relaxed);
}

/* Start workers if there are fewer than `count`. Returns how many of these there are: fewer where the system refuses.
 * Nothing ends them but the end of the process, for which nothing waits. */
static int start_workers(int count)
{
    if (pool.started < count && !pool.handles_fork)
        pool.handles_fork = pthread_atfork(NULL, NULL, forget_workers) == 0;
    if (pool.started < count && pool.handles_fork) {
        pthread_attr_t attributes;
        sigset_t signals, before;
        /* Signals are handled by the program's own threads, except for those of errors in the worker itself. */
        sigfillset(&signals);
        sigdelset(&signals, SIGSEGV);
        sigdelset(&signals, SIGBUS);
        sigdelset(&signals, SIGILL);
        sigdelset(&signals, SIGFPE);
        pthread_sigmask(SIG_SETMASK, &signals, &before);
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        for (Worker *next = pool.workers + pool.started;
             pool.started < count && pthread_create(&next->thread, &attributes, run_worker, next) == 0; next++)
            pool.started++;
        pthread_attr_destroy(&attributes);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    return pool.started < count ? pool.started : count;
}

/* Bind the workers to the cores of the caller, which the program may have bound to others since they were started. */
static void bind_workers(void)
{
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) != 0 || CPU_EQUAL(&cores, &pool.cores))
        return;
    for (int i = 0; i < pool.started; i++)
        pthread_setaffinity_np(pool.workers[i].thread, sizeof cores, &cores);
    pool.cores = cores;
}

/* --- callers */

static void hand_over(Worker *worker)
{
    if (atomic_exchange_explicit(&worker->state, READY, memory_order_acq_rel) == ASLEEP)
        wake(&worker->state);
}

/* Wait until a worker that has begun has ended. */
static void wait_for_worker(Worker *worker)
{
    const struct timespec limit = {.tv_nsec = AWAIT_NANOSECONDS};
    for (int polls = 0;;) {
        const uint32_t state = atomic_load_explicit(&worker->state, memory_order_acquire);
        if (state != RUNNING && state != AWAITED)
            return;
        if (state == AWAITED)
            wait_while(&worker->state, AWAITED, &limit);
        else if (++polls < POLLS)
            relax();
        else
            change(&worker->state, RUNNING, AWAITED);
    }
}

int run_shares(int threads, ShareFunction function, const void *task, size_t nbytes)
{
    int shares = threads < MAX_THREADS ? threads : MAX_THREADS;
    if (nbytes / MIN_SHARE < (size_t)shares)
        shares = (int)(nbytes / MIN_SHARE);
    if (shares < 2 || atomic_exchange_explicit(&pool.in_use, true, memory_order_acquire)) {
        function(task, 0, 0, nbytes);
        return 1;
    }
    shares = 1 + start_workers(shares - 1);
    bind_workers();
    for (int share = 1; share < shares; share++) {
        Worker *worker = &pool.workers[share - 1];
        worker->share = share;
        worker->function = function;
        worker->task = task;
        worker->begin = get_share_offset(nbytes, share, shares);
        worker->end = get_share_offset(nbytes, share + 1, shares);
        hand_over(worker);
    }
    int working = shares;
    function(task, 0, 0, get_share_offset(nbytes, 1, shares));
    for (int share = 1; share < shares; share++) {
        Worker *worker = &pool.workers[share - 1];
        if (change(&worker->state, READY, IDLE)) {
            function(task, share, worker->begin, worker->end);
            working--;
        }
    }
    for (int share = 1; share < shares; share++)
        wait_for_worker(&pool.workers[share - 1]);
    atomic_store_explicit(&pool.in_use, false, memory_order_release);
    return working;
}

#else

int run_shares(int threads, ShareFunction function, const void *task, size_t nbytes)
{
    (void)threads;
    function(task, 0, 0, nbytes);
    return 1;
}

#endif
