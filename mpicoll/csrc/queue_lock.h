/* The lock of a communicator's operations, and their number. */

#ifndef MPICOLL_QUEUE_LOCK_H
#define MPICOLL_QUEUE_LOCK_H

#include <Python.h>
#include <stdbool.h>

typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    bool locked;
    unsigned long long number; /* of collectives begun */
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
    lock->locked = false;
    PyThread_release_lock(lock->lock);
}

extern PyType_Spec queue_lock_spec;

#endif
