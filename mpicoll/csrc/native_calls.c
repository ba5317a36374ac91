/* Collectives of the MPI library, called through mpi4py on the memory of repeated calls.
 *
 * The arguments of mpi4py's method are made once. They refer to two buffers, which have the memory of the running call:
 * the lock of the queue is held meanwhile, so there is one at a time.
 */

#define PY_SSIZE_T_CLEAN
#include "native_calls.h"

#include <string.h>

#include "copies.h"

enum { UNLOCKED_BYTES = 64 << 10 /* from here on, a copy takes longer than to release the interpreter lock */ };

/* --- the memory of an array */

static int get_buffer(PyObject *self, Py_buffer *view, int flags)
{
    const CallMemory *one = (CallMemory *)self;
    if (one->data == NULL) {
        view->obj = NULL;
        PyErr_SetString(PyExc_BufferError, "CallMemory: no call runs");
        return -1;
    }
    return PyBuffer_FillInfo(view, self, one->data, (Py_ssize_t)one->nbytes, 0, flags);
}

static void dealloc_memory(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot memory_slots[] = {
    {Py_tp_doc, "CallMemory()\n--\n\nThe memory of an array of the running call, as a buffer."},
    {Py_tp_dealloc, dealloc_memory},
    {Py_bf_getbuffer, get_buffer},
    {0, NULL},
};

PyType_Spec call_memory_spec = {
    .name = "mpicoll._shm.CallMemory",
    .basicsize = sizeof(CallMemory),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = memory_slots,
};

static bool is_call_memory(PyObject *one)
{
    return PyType_GetSlot(Py_TYPE(one), Py_bf_getbuffer) == (void *)get_buffer;
}

static void set_memory(CallMemory *memory, const char *data, size_t nbytes)
{
    if (memory != NULL) {
        memory->data = (char *)data;
        memory->nbytes = nbytes;
    }
}

/* --- the call */

bool is_local(const NativeCall *one) { return one->function == NULL; }

void copy_locally(const NativeCall *one, const Operands *operands)
{
    if (!one->copies || operands->target_bytes == 0 || operands->source == operands->target)
        return;
    if (operands->target_bytes < UNLOCKED_BYTES) {
        copy(operands->target, operands->source, operands->target_bytes);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    copy(operands->target, operands->source, operands->target_bytes);
    Py_END_ALLOW_THREADS
}

int call_mpi(const NativeCall *one, const Operands *operands)
{
    const bool in_place = one->in_place != NULL && operands->source == operands->target;
    set_memory(one->source, operands->source, operands->source_bytes);
    set_memory(one->target, operands->target, operands->target_bytes);
    PyObject *value = PyObject_Call(one->function, in_place ? one->in_place : one->arguments, NULL);
    set_memory(one->source, NULL, 0);
    set_memory(one->target, NULL, 0);
    if (value == NULL)
        return -1;
    Py_DECREF(value);
    if (one->fill != NULL)
        fill(operands->target, operands->target_bytes, PyBytes_AsString(one->fill), (size_t)PyBytes_Size(one->fill));
    if (one->copies && operands->source != operands->target)
        copy(operands->target, operands->source, operands->target_bytes);
    return 0;
}

/* --- the Python type */

static int init_native_call(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    NativeCall *one = (NativeCall *)self;
    PyObject *function, *arguments, *in_place, *source, *target, *element;
    int copies;
    if (!PyArg_ParseTuple(args, "OO!OOOOp", &function, &PyTuple_Type, &arguments, &in_place, &source, &target,
                          &element, &copies))
        return -1;
    if (one->arguments != NULL || (in_place != Py_None && !PyTuple_Check(in_place)) ||
        (source != Py_None && !is_call_memory(source)) || (target != Py_None && !is_call_memory(target)) ||
        (element != Py_None && (!PyBytes_Check(element) || PyBytes_Size(element) == 0)) ||
        (function == Py_None && (element != Py_None || source != Py_None || target != Py_None)) ||
        (function != Py_None && (element != Py_None || copies) && target == Py_None) ||
        (function != Py_None && copies && source == Py_None)) {
        PyErr_SetString(PyExc_ValueError, "NativeCall: invalid arguments, or initialised twice");
        return -1;
    }
    one->function = function == Py_None ? NULL : Py_NewRef(function);
    one->arguments = Py_NewRef(arguments);
    one->in_place = in_place == Py_None ? NULL : Py_NewRef(in_place);
    one->source = source == Py_None ? NULL : (CallMemory *)Py_NewRef(source);
    one->target = target == Py_None ? NULL : (CallMemory *)Py_NewRef(target);
    one->fill = element == Py_None ? NULL : Py_NewRef(element);
    one->copies = copies != 0;
    return 0;
}

bool is_native_call(PyObject *one)
{
    return PyType_GetSlot(Py_TYPE(one), Py_tp_init) == (void *)init_native_call;
}

static int traverse_native_call(PyObject *self, visitproc visit, void *arg)
{
    const NativeCall *one = (NativeCall *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(one->function);
    Py_VISIT(one->arguments);
    Py_VISIT(one->in_place);
    return 0;
}

static void dealloc_native_call(PyObject *self)
{
    NativeCall *one = (NativeCall *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(one->function);
    Py_XDECREF(one->arguments);
    Py_XDECREF(one->in_place);
    Py_XDECREF((PyObject *)one->source);
    Py_XDECREF((PyObject *)one->target);
    Py_XDECREF(one->fill);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_doc, "NativeCall(function, arguments, in_place, source, target, fill, copies)\n--\n\nA call of"
                " `function(*arguments)`, or `function(*in_place)` where input and output are the same memory, for"
                " Calls.add. The arguments refer to the memory by `source` and `target`, each a CallMemory. Afterwards"
                " the output is set to copies of the bytes `fill`, or, if `copies` is true, to the input. Each is None"
                " where there is none. `function` is None on a communicator of one rank: then no MPI library is"
                " called."},
    {Py_tp_init, init_native_call},
    {Py_tp_dealloc, dealloc_native_call},
    {Py_tp_traverse, traverse_native_call},
    {0, NULL},
};

PyType_Spec native_call_spec = {
    .name = "mpicoll._shm.NativeCall",
    .basicsize = sizeof(NativeCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
