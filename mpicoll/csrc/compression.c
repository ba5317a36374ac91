/* Compression of float32 arrays for messages; mpicoll/buffers/compression.py describes the forms. */

#define PY_SSIZE_T_CLEAN
#include "compression.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

/* As in mpicoll/buffers/compression.py. */
#define BLOCK 256
#define SMALLEST 0x1p-100F
#define LARGEST_CODE 127.0F
#define LARGEST_SCALE 0x1.020406p+121F

/* 3/2 of 2**23: among such numbers each bit pattern is one larger than that of the number that is 1 smaller. */
#define UNITS 12582912.0F
#define UNITS_BITS 0x4B400000

#define INLINE static inline __attribute__((always_inline))

typedef void (*Pack)(
    const char *values, char *message, size_t blocks, size_t index, char *error, char *result, size_t count);
typedef void (*Unpack)(const char *message, size_t blocks, size_t index, char *result, size_t count, int add);

#define LEVEL(name) base_##name
#include "compression_kernels.h"
#undef LEVEL

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define LEVEL(name) avx2_##name
#include "compression_kernels.h"
#undef LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define CHOOSE(name) (has_avx2() ? avx2_##name : base_##name)
#else
#define CHOOSE(name) base_##name
#endif

/* A way to compress: bytes for each element and each block, and its functions. */
typedef struct {
    const char *name;
    size_t element_bytes, block_bytes;
    Pack pack;
    Unpack unpack;
} Method;

static int find_method(PyObject *name, Method *method)
{
    const Method methods[] = {
        {"bf16", sizeof(uint16_t), 0, CHOOSE(pack_bf16), CHOOSE(unpack_bf16)},
        {"int8", sizeof(int8_t), sizeof(float), CHOOSE(pack_int8), CHOOSE(unpack_int8)}};
    const char *text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    if (text == NULL && PyErr_Occurred())
        return -1;
    for (size_t i = 0; text != NULL && i < sizeof methods / sizeof *methods; i++) {
        if (strcmp(methods[i].name, text) == 0) {
            *method = methods[i];
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "there is no compression %R", name);
    return -1;
}

static size_t count_blocks(size_t count) { return (count + BLOCK - 1) / BLOCK; }

static size_t get_block_size(size_t count, size_t index)
{
    const size_t left = count - index * BLOCK;
    return left < BLOCK ? left : BLOCK;
}

enum { VALUES, MESSAGE, ERROR, RESULT, ARRAYS };

typedef struct {
    Py_buffer views[ARRAYS];
    int held[ARRAYS];
} Arrays;

static int hold(Arrays *arrays, int which, PyObject *array, int writable)
{
    if (array == Py_None)
        return 0;
    if (PyObject_GetBuffer(array, &arrays->views[which], writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return -1;
    arrays->held[which] = 1;
    return 0;
}

static void release(Arrays *arrays)
{
    for (int i = 0; i < ARRAYS; i++)
        if (arrays->held[i])
            PyBuffer_Release(&arrays->views[i]);
}

/* Return the number of elements; -1 with an exception if the sizes do not fit each other. */
static Py_ssize_t check_sizes(const Arrays *arrays, const Method *method, int elements)
{
    const size_t bytes = (size_t)arrays->views[elements].len, count = bytes / sizeof(float);
    const size_t needed = count * method->element_bytes + count_blocks(count) * method->block_bytes;
    int fits = bytes % sizeof(float) == 0 && (size_t)arrays->views[MESSAGE].len == needed;
    for (int i = ERROR; i < ARRAYS; i++)
        fits = fits && (!arrays->held[i] || (size_t)arrays->views[i].len == bytes);
    if (fits)
        return (Py_ssize_t)count;
    PyErr_Format(
        PyExc_ValueError, "%zu bytes of float32 make a message of %zu bytes, got %zd; all arrays have one length",
        bytes, needed, arrays->views[MESSAGE].len);
    return -1;
}

/* Above this number of elements other threads may run meanwhile. */
#define KEEP_GIL 8192

const char shm_compress_doc[] =
    "compress(name, values, message, error, result, /)\n--\n\n"
    "Write the compressed float32 array `values` to `message`. If `error` is not None, it is added to the values, and\n"
    "what the message leaves out is stored there; if `result` is not None, it gets what the message stands for.";

PyObject *shm_compress(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Method method;
    if (nargs != 1 + ARRAYS)
        return PyErr_Format(PyExc_TypeError, "compress takes 5 arguments, got %zd", nargs);
    if (find_method(args[0], &method) < 0)
        return NULL;
    Arrays arrays = {.held = {0}};
    Py_ssize_t count = -1;
    if (hold(&arrays, VALUES, args[1], 0) == 0 && hold(&arrays, MESSAGE, args[2], 1) == 0 &&
        hold(&arrays, ERROR, args[3], 1) == 0 && hold(&arrays, RESULT, args[4], 1) == 0)
        count = check_sizes(&arrays, &method, VALUES);
    if (count >= 0) {
        const size_t blocks = count_blocks((size_t)count);
        const char *values = arrays.views[VALUES].buf;
        char *message = arrays.views[MESSAGE].buf;
        char *error = arrays.held[ERROR] ? arrays.views[ERROR].buf : NULL;
        char *result = arrays.held[RESULT] ? arrays.views[RESULT].buf : NULL;
        PyThreadState *state = count > KEEP_GIL ? PyEval_SaveThread() : NULL;
        for (size_t i = 0; i < blocks; i++) {
            const size_t at = i * BLOCK * sizeof(float);
            method.pack(
                values + at, message, blocks, i, error == NULL ? NULL : error + at, result == NULL ? NULL : result + at,
                get_block_size((size_t)count, i));
        }
        if (state != NULL)
            PyEval_RestoreThread(state);
    }
    release(&arrays);
    return count < 0 ? NULL : Py_NewRef(Py_None);
}

const char shm_decompress_doc[] =
    "decompress(name, message, result, add, /)\n--\n\n"
    "Write what `message` stands for to the float32 array `result`, or add it to that.";

PyObject *shm_decompress(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    Method method;
    if (nargs != 4)
        return PyErr_Format(PyExc_TypeError, "decompress takes 4 arguments, got %zd", nargs);
    if (find_method(args[0], &method) < 0)
        return NULL;
    const int add = PyObject_IsTrue(args[3]);
    if (add < 0)
        return NULL;
    Arrays arrays = {.held = {0}};
    Py_ssize_t count = -1;
    if (hold(&arrays, MESSAGE, args[1], 0) == 0 && hold(&arrays, RESULT, args[2], 1) == 0)
        count = check_sizes(&arrays, &method, RESULT);
    if (count >= 0) {
        const size_t blocks = count_blocks((size_t)count);
        const char *message = arrays.views[MESSAGE].buf;
        char *result = arrays.views[RESULT].buf;
        PyThreadState *state = count > KEEP_GIL ? PyEval_SaveThread() : NULL;
        for (size_t i = 0; i < blocks; i++) {
            const size_t size = get_block_size((size_t)count, i);
            method.unpack(message, blocks, i, result + i * BLOCK * sizeof(float), size, add);
        }
        if (state != NULL)
            PyEval_RestoreThread(state);
    }
    release(&arrays);
    return count < 0 ? NULL : Py_NewRef(Py_None);
}
