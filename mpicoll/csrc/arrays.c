/* The memory of numpy arrays and torch tensors, found without Python code.
 *
 * Extensions that use numpy's headers read the fields of an array directly, so their layout is part of numpy's binary
 * interface; here it is compared with what the buffer protocol says before it is used. Tensors are read by the
 * functions of DLPack that torch exports; where it exports none, all tensors are left to Python.
 */

#define PY_SSIZE_T_CLEAN
#include "arrays.h"

#include <string.h>
#include <sys/auxv.h>

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

static bool find_numpy_memory(PyObject *array, bool writable, bool strided, Memory *memory)
{
    const NumpyArray *one = (const NumpyArray *)(const void *)array;
    const unsigned int needed = (strided ? 0 : C_CONTIGUOUS) | ALIGNED | (writable ? WRITEABLE : 0);
    const unsigned int flags = (unsigned int)one->flags;
    const Py_ssize_t *strides = flags & C_CONTIGUOUS ? NULL : one->strides;
    if ((flags & needed) != needed || (writable && (flags & WARN_ON_WRITE)) || one->ndim > DIMENSIONS)
        return false;
    *memory = (Memory){one->data, (uintptr_t)one->dtype, one->ndim, one->shape, strides, 1};
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

enum {
    DLPACK_VERSION = 1,
    ON_CPU = 1,
    COMPLEX = 5
};

static PyTypeObject *torch_type;
static PyObject *is_neg;
static int (*find_tensor)(void *object, DlTensor *tensor);

/* Addresses below are offsets in a storage that was freed. Tensors that lie there nevertheless are left to Python. */
static uintptr_t least_address;

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

static bool find_torch_memory(PyObject *array, bool strided, Memory *memory)
{
    DlTensor tensor = {0};
    if (find_tensor(array, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    if (tensor.device.type != ON_CPU || tensor.ndim > DIMENSIONS || (uintptr_t)tensor.data < least_address)
        return false;
    const bool contiguous = is_contiguous(&tensor);
    if (!strided && !contiguous)
        return false;
    /* The memory of a tensor that is negated or conjugated lazily doesn't hold its values. */
    if (tensor.dtype.code == COMPLEX || !is_false(is_neg, array))
        return false;
    uintptr_t dtype = (uintptr_t)tensor.dtype.lanes << 16 | (uintptr_t)tensor.dtype.bits << 8 | tensor.dtype.code;
    *memory = (Memory){
        (char *)tensor.data + tensor.offset, dtype << 1 | 1, tensor.ndim, (const Py_ssize_t *)(void *)tensor.shape,
        contiguous ? NULL : (const Py_ssize_t *)(void *)tensor.strides, tensor.dtype.bits / 8};
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
    /* Programs that can't be moved lie low, and the heap follows them. The others, and all else, lie above 4 GiB. */
    const uintptr_t program = getauxval(AT_PHDR), high = (uintptr_t)1 << 32;
    least_address = program < high ? program : high;
    find_tensor = exchange->find_tensor;
    torch_type = (PyTypeObject *)Py_NewRef(type);
    Py_RETURN_TRUE;
}

static bool find_any_memory(PyObject *array, bool writable, bool strided, Memory *memory)
{
    const PyTypeObject *type = Py_TYPE(array);
    if (type == numpy_type)
        return find_numpy_memory(array, writable, strided, memory);
    return type == torch_type && find_torch_memory(array, strided, memory);
}

bool find_memory(PyObject *array, bool writable, Memory *memory)
{
    return find_any_memory(array, writable, false, memory);
}

/* --- elements that are not contiguous */

bool find_strided_memory(PyObject *array, bool writable, Memory *memory)
{
    if (!find_any_memory(array, writable, true, memory))
        return false;
    for (int i = 0; memory->strides != NULL && i < memory->ndim; i++) {
        /* Without elements, or with several at one address. */
        if (memory->shape[i] == 0 || (memory->shape[i] > 1 && memory->strides[i] == 0))
            return false;
    }
    return true;
}

ElementLayout copy_layout(const Memory *memory)
{
    ElementLayout layout = {.data = memory->data, .ndim = memory->ndim};
    for (int i = 0; i < memory->ndim; i++) {
        layout.shape[i] = memory->shape[i];
        layout.strides[i] = memory->strides[i] * memory->unit;
    }
    return layout;
}

size_t find_extent(const ElementLayout *layout, size_t itemsize, const char **begin)
{
    size_t nbytes = itemsize;
    *begin = layout->data;
    for (int i = 0; i < layout->ndim; i++) {
        const Py_ssize_t extent = (layout->shape[i] - 1) * layout->strides[i];
        *begin += extent < 0 ? extent : 0;
        nbytes += (size_t)(extent < 0 ? -extent : extent);
    }
    return nbytes;
}

/* Copy one row: the size of an element is a constant in each of the loops. */
#define COPY_ROW(size)                                                                                                 \
    case size:                                                                                                         \
        for (Py_ssize_t i = 0; i < count; i++, strided += stride, packed += (size))                                    \
            memcpy(packs ? packed : strided, packs ? strided : packed, size);                                          \
        break;

static inline __attribute__((always_inline)) void copy_row(
    char *strided, Py_ssize_t stride, char *packed, Py_ssize_t count, size_t itemsize, bool packs)
{
    switch (itemsize) {
        COPY_ROW(1)
        COPY_ROW(2)
        COPY_ROW(4)
        COPY_ROW(8)
        COPY_ROW(16)
    default:
        for (Py_ssize_t i = 0; i < count; i++, strided += stride, packed += itemsize)
            memcpy(packs ? packed : strided, packs ? strided : packed, itemsize);
    }
}

static inline __attribute__((always_inline)) void copy_elements(
    const ElementLayout *layout, size_t itemsize, char *packed, bool packs)
{
    const int last = layout->ndim - 1;
    const Py_ssize_t count = layout->shape[last];
    Py_ssize_t indices[DIMENSIONS] = {0};
    char *row = layout->data;
    for (int axis = last; axis >= 0; packed += (size_t)count * itemsize) {
        copy_row(row, layout->strides[last], packed, count, itemsize, packs);
        for (axis = last - 1; axis >= 0; axis--) {
            row += layout->strides[axis];
            if (++indices[axis] < layout->shape[axis])
                break;
            row -= layout->shape[axis] * layout->strides[axis];
            indices[axis] = 0;
        }
    }
}

void pack_elements(const ElementLayout *layout, size_t itemsize, char *to)
{
    copy_elements(layout, itemsize, to, true);
}

void unpack_elements(const ElementLayout *layout, size_t itemsize, const char *from)
{
    copy_elements(layout, itemsize, (char *)(uintptr_t)from, false);
}
