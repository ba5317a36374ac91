/* The lock of a communicator's operations, their number, and the call of the extension that holds it. C can't acquire
 * threading.Lock without a call.
 */

#define PY_SSIZE_T_CLEAN
#include "queue_lock.h"

#include <stddef.h>
#include <structmember.h>

static PyObject *make_lock(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    if (!PyArg_ParseTuple(args, ""))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    QueueLock *lock = (QueueLock *)allocate(type, 0);
    if (lock == NULL)
        return NULL;
    lock->wake = PyThread_allocate_lock();
    if (lock->wake == NULL) {
        Py_DECREF((PyObject *)lock);
        return PyErr_NoMemory();
    }
    PyThread_acquire_lock(lock->wake, NOWAIT_LOCK);
    return (PyObject *)lock;
}

static void dealloc_lock(PyObject *self)
{
    QueueLock *lock = (QueueLock *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (lock->wake != NULL) {
        if (!lock->called)
            PyThread_release_lock(lock->wake);
        PyThread_free_lock(lock->wake);
    }
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Returns -1 with the exception of a signal handler. */
static int wait_for_lock(QueueLock *lock)
{
    while (!try_to_lock(lock)) {
        PyLockStatus status;
        lock->waiters++;
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(lock->wake, -1, 1);
        Py_END_ALLOW_THREADS
        lock->waiters--;
        if (status == PY_LOCK_ACQUIRED)
            lock->called = false;
        else if (PyErr_CheckSignals() < 0)
            return -1;
    }
    return 0;
}

static PyObject *acquire(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"blocking", NULL};
    int blocking = 1;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|p", names, &blocking))
        return NULL;
    QueueLock *lock = (QueueLock *)self;
    if (!blocking)
        return PyBool_FromLong(try_to_lock(lock));
    return wait_for_lock(lock) < 0 ? NULL : Py_NewRef(Py_True);
}

static PyObject *enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    return wait_for_lock((QueueLock *)self) < 0 ? NULL : Py_NewRef(Py_True);
}

static PyObject *release_lock(PyObject *self, PyObject *unused)
{
    (void)unused;
    QueueLock *lock = (QueueLock *)self;
    if (!lock->locked) {
        PyErr_SetString(PyExc_RuntimeError, "release of an unlocked lock");
        return NULL;
    }
    unlock(lock);
    Py_RETURN_NONE;
}

static PyObject *is_locked(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(((QueueLock *)self)->locked);
}

static PyMethodDef methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))acquire, METH_VARARGS | METH_KEYWORDS,
     "acquire(blocking=True)\n--\n\nAcquire the lock, and return True; without `blocking`, False if it is held."},
    {"release", release_lock, METH_NOARGS, "release()\n--\n\nRelease the lock."},
    {"locked", is_locked, METH_NOARGS, "locked()\n--\n\nReturn True if the lock is held."},
    {"__enter__", enter, METH_NOARGS, NULL},
    {"__exit__", release_lock, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"number", T_ULONGLONG, offsetof(QueueLock, number), 0, "Number of collectives begun."},
    {"call", T_OBJECT, offsetof(QueueLock, call), READONLY, "The blocking call that holds the lock in the extension."},
    {"thread", T_ULONG, offsetof(QueueLock, thread), READONLY, "The thread of this call; 0 if there is none."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "QueueLock()\n--\n\nThe lock of a communicator's operations, and their number."},
    {Py_tp_new, make_lock},
    {Py_tp_dealloc, dealloc_lock},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec queue_lock_spec = {
    .name = "mpicoll._shm.QueueLock",
    .basicsize = sizeof(QueueLock),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
