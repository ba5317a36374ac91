/* The lock of a communicator's operations, their number, and the call of the extension that holds it. */

#ifndef MPICOLL_QUEUE_LOCK_H
#define MPICOLL_QUEUE_LOCK_H

#include <Python.h>
#include <stdbool.h>

typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    bool locked;
    unsigned long long number; /* of collectives begun */
    PyObject *call;            /* that holds the lock in C, borrowed; NULL: there is none */
    unsigned long thread;      /* of this call */
} QueueLock;

/* Acquire the lock if it is free. The GIL is held. */
static inline bool try_to_lock(QueueLock *lock)
{
    if (lock->locked || !PyThread_acquire_lock(lock->lock, NOWAIT_LOCK))
        return false;
    lock->locked = true;
    return true;
}

static inline void unlock(QueueLock *lock)
{
    lock->call = NULL;
    lock->thread = 0;
    lock->locked = false;
    PyThread_release_lock(lock->lock);
}

extern PyType_Spec queue_lock_spec;

#endif
