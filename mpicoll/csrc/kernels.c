/* Reductions of arrays in host memory: every operation and dtype, in the order of the operands. */

#define PY_SSIZE_T_CLEAN
#include "kernels.h"

#include <string.h>

static void sum_float32(void *out, const void *const *parts, int nparts, size_t count)
{
    float *to = out;
    for (size_t i = 0; i < count; i++) {
        float total = ((const float *)parts[0])[i];
        for (int part = 1; part < nparts; part++)
            total += ((const float *)parts[part])[i];
        to[i] = total;
    }
}

ReduceKernel find_kernel(const char *op, const char *dtype)
{
    return strcmp(op, "sum") == 0 && strcmp(dtype, "float32") == 0 ? sum_float32 : NULL;
}

const char shm_fold_doc[] = "fold(op, dtype, parts, out)\n--\n\nReduce the arrays `parts` to `out`.";

PyObject *shm_fold(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    (void)args;
    (void)nargs;
    PyErr_SetString(PyExc_NotImplementedError, "fold");
    return NULL;
}
