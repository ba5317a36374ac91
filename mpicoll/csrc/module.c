/* The extension module mpicoll._shm: collectives of the ranks of one node in C. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

static PyMethodDef functions[] = {
    {"fold", (PyCFunction)(void (*)(void))shm_fold, METH_FASTCALL, shm_fold_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mpicoll._shm",
    .m_doc = "Collectives of the ranks of one node, in C.",
    .m_size = 0,
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__shm(void) { return PyModuleDef_Init(&module); }
