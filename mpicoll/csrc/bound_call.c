/* Calls that are bound to their arrays, for plans. */

#define PY_SSIZE_T_CLEAN
#include "bound_call.h"

#include "calls.h"
#include "records.h"

typedef struct {
    PyObject_HEAD
    Calls *calls;
    unsigned int generation; /* of `calls`, when the call was bound */
    PyObject *carrier;       /* a Collective or a NativeCall */
    PyObject *call;
    Py_buffer from, to;
} BoundCall;

static int init_bound_call(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    BoundCall *one = (BoundCall *)self;
    PyObject *calls, *carrier, *call, *source, *target;
    if (!PyArg_ParseTuple(args, "OOOOO", &calls, &carrier, &call, &source, &target))
        return -1;
    if (one->calls != NULL || !PyObject_HasAttrString(calls, "enabled")) {
        PyErr_SetString(PyExc_ValueError, "BoundCall: invalid arguments, or initialised twice");
        return -1;
    }
    if ((source != Py_None && PyObject_GetBuffer(source, &one->from, PyBUF_SIMPLE) < 0) ||
        (target != Py_None && PyObject_GetBuffer(target, &one->to, PyBUF_WRITABLE) < 0))
        return -1;
    one->calls = (Calls *)Py_NewRef(calls);
    one->generation = one->calls->generation;
    one->carrier = Py_NewRef(carrier);
    one->call = Py_NewRef(call);
    set_call(one->calls, carrier, call);
    return 0;
}

static PyObject *run_bound_call(PyObject *self, PyObject *unused)
{
    (void)unused;
    const BoundCall *one = (BoundCall *)self;
    if (one->calls == NULL || one->generation != one->calls->generation)
        Py_RETURN_FALSE;
    const Operands operands = {one->from.buf, (size_t)one->from.len, one->to.buf, (size_t)one->to.len};
    int status = run_in_order(one->calls, one->carrier, one->call, &operands);
    return status < 0 ? NULL : PyBool_FromLong(status);
}

static int traverse_bound_call(PyObject *self, visitproc visit, void *arg)
{
    const BoundCall *one = (BoundCall *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)one->calls);
    Py_VISIT(one->carrier);
    Py_VISIT(one->call);
    Py_VISIT(one->from.obj);
    Py_VISIT(one->to.obj);
    return 0;
}

static void dealloc_bound_call(PyObject *self)
{
    BoundCall *one = (BoundCall *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    PyBuffer_Release(&one->from);
    PyBuffer_Release(&one->to);
    Py_XDECREF((PyObject *)one->calls);
    Py_XDECREF(one->carrier);
    Py_XDECREF(one->call);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef bound_call_methods[] = {
    {"run", run_bound_call, METH_NOARGS,
     "run()\n--\n\nCarry out the call, and return True; False if it can't be carried out at once."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot bound_call_slots[] = {
    {Py_tp_doc, "BoundCall(calls, carrier, call, source, target)\n--\n\nA repeated call on the same arrays; None"
                " where there is none."},
    {Py_tp_init, init_bound_call},
    {Py_tp_dealloc, dealloc_bound_call},
    {Py_tp_traverse, traverse_bound_call},
    {Py_tp_methods, bound_call_methods},
    {0, NULL},
};

PyType_Spec bound_call_spec = {
    .name = "mpicoll._shm.BoundCall",
    .basicsize = sizeof(BoundCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = bound_call_slots,
};
