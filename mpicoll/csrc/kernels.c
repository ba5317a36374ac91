/* Reductions of arrays in host memory: every operation and dtype, in the order of the operands. */

#define PY_SSIZE_T_CLEAN
#include "kernels.h"

#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef enum { SUM, PROD, AVG, MIN, MAX, BAND, BOR, BXOR, LAND, LOR, LXOR, OPS } OpName;
typedef enum { BASE, AVX2, AVX512, LEVELS } Level;
typedef enum {
    BOOL, INT8, UINT8, INT16, UINT16, INT32, UINT32, INT64, UINT64,
    FLOAT16, BFLOAT16, FLOAT32, FLOAT64, COMPLEX64, COMPLEX128, DTYPES
} DTypeName;

static const char *const op_names[OPS] = {"sum", "prod", "avg",  "min", "max", "band",
                                          "bor", "bxor", "land", "lor", "lxor"};
static const char *const dtype_names[DTYPES] = {
    "bool",   "int8",    "uint8",    "int16",   "uint16",  "int32",     "uint32",    "int64",
    "uint64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"};

static const char *const level_names[LEVELS] = {"base", "avx2", "avx512"};

/* Each with the signed integer of its size. */
#define EACH_UNSIGNED(X) X(uint8_t, int8_t) X(uint16_t, int16_t) X(uint32_t, int32_t) X(uint64_t, int64_t)
#define EACH_SIGNED(X) X(int8_t, int8_t) X(int16_t, int16_t) X(int32_t, int32_t) X(int64_t, int64_t)
#define EACH_INTEGER(X) EACH_UNSIGNED(X) EACH_SIGNED(X)
#define EACH_FLOAT(X) X(float, int32_t) X(double, int64_t)
#define EACH_NUMBER(X) EACH_INTEGER(X) EACH_FLOAT(X)

#define INLINE static inline __attribute__((always_inline, unused))

enum { WORD_BYTES = 8, AHEAD_BYTES = 2048 };

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words have their first byte in their lowest bits");

/* Read a word of which `bytes` bytes exist, without one byte more; the others are 0. */
static __attribute__((noinline)) uint64_t read_part_of_word(const char *from, size_t bytes)
{
    uint64_t word = 0;
    unsigned int shift = 0;
    if (bytes & 4) {
        uint32_t part;
        memcpy(&part, from, 4);
        word = part, from += 4, shift = 32;
    }
    if (bytes & 2) {
        uint16_t part;
        memcpy(&part, from, 2);
        word |= (uint64_t)part << shift, from += 2, shift += 16;
    }
    if (bytes & 1)
        word |= (uint64_t)(unsigned char)*from << shift;
    return word;
}

INLINE uint64_t read_word(const char *from, size_t bytes)
{
    uint64_t word;
    if (bytes < WORD_BYTES)
        return read_part_of_word(from, bytes);
    memcpy(&word, from, WORD_BYTES);
    return word;
}

static __attribute__((noinline)) void write_part_of_word(char *to, uint64_t word, size_t bytes)
{
    if (bytes & 4) {
        const uint32_t part = (uint32_t)word;
        memcpy(to, &part, 4);
        word >>= 32, to += 4;
    }
    if (bytes & 2) {
        const uint16_t part = (uint16_t)word;
        memcpy(to, &part, 2);
        word >>= 16, to += 2;
    }
    if (bytes & 1)
        *to = (char)word;
}

INLINE void write_word(char *to, uint64_t word, size_t bytes)
{
    if (bytes < WORD_BYTES)
        write_part_of_word(to, word, bytes);
    else
        memcpy(to, &word, WORD_BYTES);
}

static __attribute__((unused)) int is_among(const void *out, const void *const *parts, int nparts)
{
    for (int part = 0; part < nparts; part++)
        if (parts[part] == out)
            return 1;
    return 0;
}

#define LEVEL(name) base_##name
#define VECTOR_BYTES 16UL
#include "kernels_vectors.h"
#include "kernels_table.h"
#undef LEVEL
#undef VECTOR_BYTES

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define LEVEL(name) avx2_##name
#define VECTOR_BYTES 32UL
#include "kernels_vectors.h"
#include "kernels_table.h"
#undef LEVEL
#undef VECTOR_BYTES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

/* Only halves, for which there is more to do than to wait for memory, and the sums that are large most often: where the
 * operands lie in the second cache, or in that of another core, they take a fifth to a third less time. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw")
#endif
#define LEVEL(name) avx512_##name
#define VECTOR_BYTES 64UL
#include "kernels_vectors.h"
HALF_KERNELS(float16)
EACH_FLOAT(SUM_KERNELS)
#undef LEVEL
#undef VECTOR_BYTES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define COLUMN_HALF(half)                                                                                              \
    {[SUM] = avx512_reduce_sum_##half, [PROD] = avx512_reduce_prod_##half, [AVG] = avx512_reduce_avg_##half,           \
     [MIN] = avx512_reduce_min_##half, [MAX] = avx512_reduce_max_##half}
#define COLUMN_SUMS(type) {[SUM] = avx512_reduce_sum_##type, [AVG] = avx512_reduce_avg_##type}
#define COLUMN_STREAMS(type) {[SUM] = avx512_reduce_sum_##type##_stream, [AVG] = avx512_reduce_avg_##type##_stream}

/* NULL: there is none. */
static const ReduceKernel avx512_table[DTYPES][OPS] = {[FLOAT16] = COLUMN_HALF(float16),
                                                       [BFLOAT16] = COLUMN_HALF(bfloat16),
                                                       [FLOAT32] = COLUMN_SUMS(float),
                                                       [FLOAT64] = COLUMN_SUMS(double)};
static const ReduceKernel avx512_streams[DTYPES][OPS] = {[FLOAT16] = COLUMN_STREAMS(float16),
                                                         [BFLOAT16] = COLUMN_STREAMS(bfloat16),
                                                         [FLOAT32] = COLUMN_STREAMS(float),
                                                         [FLOAT64] = COLUMN_STREAMS(double)};

/* The registers that the operating system saves: XCR0. */
static uint64_t saved_registers(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* By cpuid instead of __builtin_cpu_supports, which not every compiler's runtime has. */
static Level find_level(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX) || !(c & bit_F16C))
        return BASE;
    uint64_t saved = saved_registers();
    if ((saved & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2))
        return BASE;
    unsigned needed = bit_AVX512F | bit_AVX512BW;
    return (saved & 0xE6) == 0xE6 && (b & needed) == needed ? AVX512 : AVX2;
}

static ReduceKernel choose(OpName op, DTypeName dtype, Level level)
{
    if (level == AVX512 && avx512_table[dtype][op] != NULL)
        return avx512_table[dtype][op];
    return level == BASE ? base_table[op][dtype] : avx2_table[op][dtype];
}

static ReduceKernel choose_streaming(OpName op, DTypeName dtype, Level level)
{
    if (level == AVX512 && avx512_streams[dtype][op] != NULL)
        return avx512_streams[dtype][op];
    return level == BASE || avx2_streams[op][dtype] == NULL ? choose(op, dtype, level) : avx2_streams[op][dtype];
}
#else
static Level find_level(void) { return BASE; }

static ReduceKernel choose(OpName op, DTypeName dtype, Level level)
{
    (void)level;
    return base_table[op][dtype];
}

static ReduceKernel choose_streaming(OpName op, DTypeName dtype, Level level) { return choose(op, dtype, level); }
#endif

static Level best_level(void)
{
    static _Atomic int known = -1; /* every thread finds the same */
    int level = atomic_load_explicit(&known, memory_order_relaxed);
    if (level < 0) {
        level = (int)find_level();
        atomic_store_explicit(&known, level, memory_order_relaxed);
    }
    return (Level)level;
}

int has_avx2(void) { return best_level() >= AVX2; }

static int find_name(const char *name, const char *const *names, int count)
{
    for (int i = 0; i < count; i++)
        if (strcmp(name, names[i]) == 0)
            return i;
    return -1;
}

static ReduceKernel find(const char *op, const char *dtype, Level level, int streaming)
{
    /* Operands of premul_sum have been multiplied before. */
    int row = find_name(strcmp(op, "premul_sum") == 0 ? "sum" : op, op_names, OPS);
    int column = find_name(dtype, dtype_names, DTYPES);
    if (row < 0 || column < 0)
        return NULL;
    return (streaming ? choose_streaming : choose)((OpName)row, (DTypeName)column, level);
}

ReduceKernel find_kernel(const char *op, const char *dtype) { return find(op, dtype, best_level(), 0); }

ReduceKernel find_streaming_kernel(const char *op, const char *dtype) { return find(op, dtype, best_level(), 1); }

static size_t dtype_size(const char *dtype)
{
    static const size_t sizes[DTYPES] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16};
    return sizes[find_name(dtype, dtype_names, DTYPES)];
}

/* --- For Python --- */

/* Above this number of bytes other threads may run meanwhile; below, handing the GIL over costs more than the work. */
#define KEEP_GIL 32768

/* From this number of bytes the caches will have lost the result before it is read. */
#define STREAM (8 << 20)

const char shm_fold_doc[] =
    "fold(op, dtype, parts, out, instructions=None, /)\n--\n\n"
    "Write the combination of the contiguous arrays `parts`, in their order, to `out`, which may be the memory of\n"
    "parts but must not overlap them otherwise. Raises ValueError for names, sizes and memory that can't be served.\n\n"
    "`instructions` (base, avx2 or avx512) is for tests; by default it is the best set that the processor has.";

static int check_parts(const Py_buffer *views, Py_ssize_t nparts, const char *dtype)
{
    const Py_buffer *out = &views[nparts];
    const char *from = out->buf;
    for (Py_ssize_t i = 0; i < nparts; i++) {
        const char *part = views[i].buf;
        if (views[i].len != out->len) {
            PyErr_Format(PyExc_ValueError, "fold: parts[%zd] has %zd bytes and out has %zd", i, views[i].len, out->len);
            return -1;
        }
        if (part != from && part < from + out->len && from < part + out->len) {
            PyErr_Format(PyExc_ValueError, "fold: out begins within parts[%zd], or that within out", i);
            return -1;
        }
    }
    if (out->len % (Py_ssize_t)dtype_size(dtype)) {
        PyErr_Format(PyExc_ValueError, "fold: %zd bytes are no whole number of elements of %s", out->len, dtype);
        return -1;
    }
    return 0;
}

PyObject *shm_fold(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    const char *names[3] = {"", "", NULL}; /* op, dtype, instructions */
    if (nargs != 4 && nargs != 5)
        return PyErr_Format(PyExc_TypeError, "fold takes 4 or 5 arguments, got %zd", nargs);
    for (int i = 0; i < (nargs == 5 && args[4] != Py_None ? 3 : 2); i++) {
        PyObject *name = args[i == 2 ? 4 : i];
        if (!PyUnicode_Check(name))
            return PyErr_Format(PyExc_TypeError, "fold: op, dtype and instructions are names, got %R", name);
        if ((names[i] = PyUnicode_AsUTF8AndSize(name, NULL)) == NULL)
            return NULL;
    }
    const char *op = names[0], *dtype = names[1];
    int level = names[2] == NULL ? (int)best_level() : find_name(names[2], level_names, LEVELS);
    if (level < 0 || level > (int)best_level())
        return PyErr_Format(PyExc_ValueError, "fold: this processor has no instructions %s", names[2]);
    if (find(op, dtype, (Level)level, 0) == NULL)
        return PyErr_Format(PyExc_ValueError, "fold: there is no reduction %s of %s", op, dtype);
    PyObject *parts = PySequence_Tuple(args[2]);
    if (parts == NULL)
        return NULL;

    Py_ssize_t nparts = PyTuple_Size(parts), held = 0;
    PyObject *result = NULL;
    Py_buffer *views = NULL;
    if (nparts == 0 || nparts > INT_MAX / 2) {
        PyErr_Format(PyExc_ValueError, "fold: parts must be at least one array, got %zd", nparts);
        goto done;
    }
    views = PyMem_Malloc((size_t)(nparts + 1) * (sizeof(Py_buffer) + sizeof(void *)));
    if (views == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; held < nparts; held++)
        if (PyObject_GetBuffer(PyTuple_GetItem(parts, held), &views[held], PyBUF_SIMPLE) < 0)
            goto done;
    if (PyObject_GetBuffer(args[3], &views[nparts], PyBUF_WRITABLE) < 0) {
        if (PyErr_ExceptionMatches(PyExc_BufferError))
            PyErr_SetString(PyExc_ValueError, "fold: out must be contiguous memory that can be written");
        goto done;
    }
    held++;
    if (check_parts(views, nparts, dtype) < 0)
        goto done;

    const void **from = (const void **)(views + nparts + 1);
    for (Py_ssize_t i = 0; i < nparts; i++)
        from[i] = views[i].buf;
    size_t bytes = (size_t)views[nparts].len;
    ReduceKernel kernel = find(op, dtype, (Level)level, bytes >= STREAM);
    PyThreadState *state = bytes > KEEP_GIL ? PyEval_SaveThread() : NULL;
    kernel(views[nparts].buf, from, (int)nparts, bytes / dtype_size(dtype));
    if (state != NULL)
        PyEval_RestoreThread(state);
    result = Py_NewRef(Py_None);

done:
    while (held > 0)
        PyBuffer_Release(&views[--held]);
    PyMem_Free(views);
    Py_DECREF(parts);
    return result;
}
