/* The memory of numpy arrays and torch tensors, found without Python code.
 *
 * Extensions that use numpy's headers read the fields of an array directly, so their layout is part of numpy's binary
 * interface; here it is compared with what the buffer protocol says before it is used. Tensors are read by the
 * functions of DLPack that torch exports; where it exports none, all tensors are left to Python.
 */

#define PY_SSIZE_T_CLEAN
#include "arrays.h"

#include <string.h>

/* --- numpy */

typedef struct {
    PyObject_HEAD
    char *data;
    int ndim;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;
} NumpyArray;

enum { C_CONTIGUOUS = 0x1, ALIGNED = 0x100, WRITEABLE = 0x400 };
static const unsigned int WARN_ON_WRITE = 0x80000000u;

static PyTypeObject *numpy_type;

static bool find_numpy_memory(PyObject *array, bool writable, Memory *memory)
{
    const NumpyArray *one = (const NumpyArray *)(const void *)array;
    const unsigned int needed = C_CONTIGUOUS | ALIGNED | (writable ? WRITEABLE : 0), flags = (unsigned int)one->flags;
    if ((flags & needed) != needed || (writable && (flags & WARN_ON_WRITE)) || one->ndim > DIMENSIONS)
        return false;
    *memory = (Memory){one->data, (uintptr_t)one->dtype, one->ndim, one->shape};
    return true;
}

/* Return 1 if the fields of an array are what its attributes say, 0 if not, -1 with an exception. */
static int has_known_layout(PyObject *array)
{
    const NumpyArray *one = (const NumpyArray *)(const void *)array;
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_STRIDES) < 0)
        return -1;
    /* In this order: other fields are read only where those before are as expected. */
    bool equal = one->data == view.buf && one->ndim == view.ndim;
    for (int i = 0; equal && i < view.ndim; i++)
        equal = one->shape[i] == view.shape[i] && one->strides[i] == view.strides[i];
    bool readonly = view.readonly != 0;
    PyBuffer_Release(&view);
    PyObject *dtype = PyObject_GetAttrString(array, "dtype");
    PyObject *flags = dtype == NULL ? NULL : PyObject_GetAttrString(array, "flags");
    PyObject *number = flags == NULL ? NULL : PyObject_GetAttrString(flags, "num");
    long value = number == NULL ? -1 : PyLong_AsLong(number);
    equal = equal && one->dtype == dtype && one->flags == value && readonly == !(one->flags & WRITEABLE);
    Py_XDECREF(dtype);
    Py_XDECREF(flags);
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : equal;
}

PyObject *set_numpy_layout(PyObject *module, PyObject *samples)
{
    (void)module;
    if (numpy_type != NULL)
        Py_RETURN_TRUE;
    PyTypeObject *type = NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(samples); i++) {
        PyObject *sample = PyTuple_GetItem(samples, i);
        int known = has_known_layout(sample);
        if (known < 0)
            return NULL;
        if (!known)
            Py_RETURN_FALSE;
        type = Py_TYPE(sample);
    }
    if (PyErr_Occurred())
        return NULL;
    numpy_type = (PyTypeObject *)Py_XNewRef((PyObject *)type);
    Py_RETURN_TRUE;
}

/* Entries of the table of numpy's C interface, which keep their numbers. */
enum { GET_VERSION = 0, ARRAY_TYPE = 2, NEW_FROM_DTYPE = 94 };
static const unsigned int VERSION_1 = 0x01000009, VERSION_2 = 0x02000000;

typedef unsigned int (*GetVersion)(void);
typedef PyObject *(*NewFromDtype)(PyTypeObject *type, PyObject *dtype, int ndim, const Py_ssize_t *shape,
                                  const Py_ssize_t *strides, void *data, int flags, PyObject *like);

static NewFromDtype new_from_dtype;

PyObject *set_numpy_interface(PyObject *module, PyObject *capsule)
{
    (void)module;
    void **table = PyCapsule_GetPointer(capsule, NULL);
    if (table == NULL)
        return NULL;
    const unsigned int version = ((GetVersion)table[GET_VERSION])();
    if ((version != VERSION_1 && version != VERSION_2) || numpy_type == NULL || table[ARRAY_TYPE] != numpy_type)
        Py_RETURN_FALSE;
    new_from_dtype = (NewFromDtype)table[NEW_FROM_DTYPE];
    Py_RETURN_TRUE;
}

bool can_make(PyObject *like) { return new_from_dtype != NULL && Py_TYPE(like) == numpy_type; }

PyObject *make_array(PyObject *dtype, int ndim, const Py_ssize_t *shape)
{
    /* It takes over the reference. */
    return new_from_dtype(numpy_type, Py_NewRef(dtype), ndim, shape, NULL, NULL, 0, NULL);
}

/* --- torch, by DLPack */

typedef struct {
    void *data;
    struct {
        int32_t type, number;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t offset;
} DlTensor;

typedef struct {
    struct {
        struct {
            uint32_t major, minor;
        } version;
        void *previous;
    } header;
    void (*others[3])(void);
    int (*find_tensor)(void *object, DlTensor *tensor);
    void (*stream)(void);
} DlExchange;

enum { DLPACK_VERSION = 1, ON_CPU = 1, COMPLEX = 5 };

static PyTypeObject *torch_type;
static PyObject *is_neg;
static int (*find_tensor)(void *object, DlTensor *tensor);

static bool is_contiguous(const DlTensor *tensor)
{
    int64_t stride = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != stride)
            return false;
        stride *= tensor->shape[i];
    }
    return stride > 0;
}

/* Return true if the method of a tensor returns False. */
static bool is_false(PyObject *method, PyObject *tensor)
{
    PyObject *value = PyObject_CallFunctionObjArgs(method, tensor, NULL);
    if (value == NULL)
        PyErr_Clear();
    Py_XDECREF(value);
    return value == Py_False;
}

static bool find_torch_memory(PyObject *array, Memory *memory)
{
    DlTensor tensor = {0};
    if (find_tensor(array, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    if (tensor.device.type != ON_CPU || tensor.ndim > DIMENSIONS || tensor.data == NULL || !is_contiguous(&tensor))
        return false;
    /* The memory of a tensor that is negated or conjugated lazily doesn't hold its values. */
    if (tensor.dtype.code == COMPLEX || !is_false(is_neg, array))
        return false;
    uintptr_t dtype = (uintptr_t)tensor.dtype.lanes << 16 | (uintptr_t)tensor.dtype.bits << 8 | tensor.dtype.code;
    *memory = (Memory){
        (char *)tensor.data + tensor.offset, dtype << 1 | 1, tensor.ndim, (const Py_ssize_t *)(void *)tensor.shape};
    return true;
}

PyObject *set_torch_access(PyObject *module, PyObject *type)
{
    (void)module;
    if (sizeof(Py_ssize_t) != sizeof(int64_t))
        Py_RETURN_FALSE;
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    if (capsule == NULL) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    const DlExchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule); /* what it points to stays */
    if (exchange == NULL)
        return NULL;
    if (exchange->header.version.major != DLPACK_VERSION || exchange->find_tensor == NULL)
        Py_RETURN_FALSE;
    if (torch_type != NULL)
        Py_RETURN_TRUE;
    is_neg = PyObject_GetAttrString(type, "is_neg");
    if (is_neg == NULL)
        return NULL;
    find_tensor = exchange->find_tensor;
    torch_type = (PyTypeObject *)Py_NewRef(type);
    Py_RETURN_TRUE;
}

bool find_memory(PyObject *array, bool writable, Memory *memory)
{
    const PyTypeObject *type = Py_TYPE(array);
    if (type == numpy_type)
        return find_numpy_memory(array, writable, memory);
    return type == torch_type && find_torch_memory(array, memory);
}
