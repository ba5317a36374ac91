/* The lock of a communicator's operations, their number, and the call of the extension that holds it. */

#ifndef MPICOLL_QUEUE_LOCK_H
#define MPICOLL_QUEUE_LOCK_H

#include <Python.h>
#include <stdbool.h>

typedef struct {
    PyObject_HEAD
    bool locked;             /* changes while the GIL is held, which so is all that a free lock needs */
    bool called;             /* a thread that waits has been woken */
    unsigned int waiters;
    PyThread_type_lock wake; /* on which threads wait; held unless one has been woken */
    unsigned long long number; /* of collectives begun */
    PyObject *call;            /* that holds the lock in C, borrowed; NULL: there is none */
    unsigned long thread;      /* of this call */
} QueueLock;

/* Acquire the lock if it is free. The GIL is held. */
static inline bool try_to_lock(QueueLock *lock)
{
    if (lock->locked)
        return false;
    lock->locked = true;
    return true;
}

/* Release the lock. The GIL is held. */
static inline void unlock(QueueLock *lock)
{
    lock->call = NULL;
    lock->thread = 0;
    lock->locked = false;
    if (lock->waiters > 0 && !lock->called) {
        lock->called = true;
        PyThread_release_lock(lock->wake);
    }
}

extern PyType_Spec queue_lock_spec;

#endif
