/* A limit on the time in which SIGTERM has an effect, for a process whose interpreter lock a thread does not release.
 *
 * Then no Python code runs, neither the handler of SIGTERM nor the watchdog. The signal handler of this file is called
 * before that of Python. It starts a timer, which sends SIGTERM once more: if Python has not cancelled the limit by
 * then, the process ends by the default action of SIGTERM.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "sigterm.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_TEXT = 256,
    MAX_STACK = 16 << 10,
    WRITING = 1 /* seconds: no process may read stderr */
};

typedef enum { IDLE, RUNNING, ENDING, CANCELLED } State;

static struct {
    volatile sig_atomic_t state; /* a State */
    int timer;                   /* the kernel's number of it; a child has none */
    pid_t owner;
    double seconds, deadline;
    int stack, output; /* descriptors: where to read the stack from, where to write it */
    char text[MAX_TEXT];
    size_t length;
    struct sigaction next; /* Python's handler */
} limit;

static double read_time(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Functions of the C library for timers are in another library before glibc 2.34. */
static void start_timer(double seconds)
{
    struct itimerspec when = {.it_value.tv_sec = (time_t)seconds};
    when.it_value.tv_nsec = (long)(1e9 * (seconds - (double)when.it_value.tv_sec));
    syscall(SYS_timer_settime, limit.timer, 0, &when, NULL);
}

/* Write the whole text, or as much of it as is possible. */
static void write_all(const char *text, size_t length)
{
    while (length > 0) {
        ssize_t written = write(limit.output, text, length);
        if (written <= 0 && errno != EINTR)
            return;
        if (written > 0) {
            text += written;
            length -= (size_t)written;
        }
    }
}

static void end_process(void)
{
    struct sigaction action = {.sa_handler = SIG_DFL};
    sigset_t mask;
    sigaction(SIGTERM, &action, NULL);
    sigemptyset(&mask);
    sigaddset(&mask, SIGTERM);
    pthread_sigmask(SIG_UNBLOCK, &mask, NULL);
    (void)raise(SIGTERM);
    /* Another thread may have installed a handler again. */
    _exit(128 + SIGTERM);
}

static void write_stack(void)
{
    static char stack[MAX_STACK];
    write_all(limit.text, limit.length);
    ssize_t length = read(limit.stack, stack, sizeof stack); /* it does not block */
    if (length > 0)
        write_all(stack, (size_t)length);
}

/* Functions that are safe in a signal handler only. */
static void handle_sigterm(int number, siginfo_t *information, void *context)
{
    int error = errno;
    const bool is_owner = getpid() == limit.owner; /* not a child */
    if (is_owner && (limit.state == ENDING || (limit.state == RUNNING && read_time() >= limit.deadline))) {
        if (limit.state == RUNNING) {
            limit.state = ENDING;
            start_timer(WRITING);
            write_stack();
        }
        end_process();
    } else if (is_owner && limit.state == IDLE) {
        limit.deadline = read_time() + limit.seconds;
        limit.state = RUNNING;
        start_timer(limit.seconds + 0.01);
    }
    if (limit.next.sa_flags & SA_SIGINFO)
        limit.next.sa_sigaction(number, information, context);
    else if (limit.next.sa_handler != SIG_DFL && limit.next.sa_handler != SIG_IGN)
        limit.next.sa_handler(number);
    errno = error;
}

/* Returns true if the timer exists. */
static bool create_timer(void)
{
    if (limit.owner == getpid())
        return true;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGTERM};
    if (syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &limit.timer) != 0)
        return false;
    limit.owner = getpid();
    limit.state = IDLE;
    return true;
}

PyObject *limit_sigterm(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    (void)module;
    if (count != 4) {
        PyErr_Format(PyExc_TypeError, "limit_sigterm: 4 arguments expected, got %zd", count);
        return NULL;
    }
    double seconds = PyFloat_AsDouble(arguments[0]);
    long stack = PyLong_AsLong(arguments[1]), output = PyLong_AsLong(arguments[2]);
    Py_ssize_t length = 0;
    const char *text = PyErr_Occurred() ? NULL : PyUnicode_AsUTF8AndSize(arguments[3], &length);
    if (text == NULL)
        return NULL;
    struct sigaction action;
    if (!create_timer() || sigaction(SIGTERM, NULL, &action) != 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    if ((action.sa_flags & SA_SIGINFO) && action.sa_sigaction == handle_sigterm)
        Py_RETURN_NONE;
    limit.next = action;
    limit.seconds = seconds;
    limit.stack = (int)stack;
    limit.output = (int)output;
    limit.length = (size_t)length < sizeof limit.text ? (size_t)length : sizeof limit.text;
    memcpy(limit.text, text, limit.length);
    action.sa_sigaction = handle_sigterm;
    /* Not blocked meanwhile, so that the timer ends the process also while it writes. */
    action.sa_flags |= SA_SIGINFO | SA_NODEFER;
    if (sigaction(SIGTERM, &action, NULL) != 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

PyObject *cancel_sigterm_limit(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (limit.owner == getpid()) {
        limit.state = CANCELLED;
        start_timer(0.0);
    }
    Py_RETURN_NONE;
}
