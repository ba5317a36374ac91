/* Functions of the MPI library that mpi4py has loaded. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include "mpi_library.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

MpiLibrary mpi;

HandleValue to_handle(unsigned long long value)
{
    return mpi.handle_bytes == (int)sizeof(int) ? (HandleValue)(intptr_t)(int32_t)value : (HandleValue)value;
}

/* Set `function`, a pointer to a function, to what the linker has bound mpi4py's calls of this name to: a function that
 * the whole process sees, such as that of a profiler, or else one of a library that mpi4py's module depends on. */
static bool find(void *module, const char *name, void *function)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    if (found == NULL && module != NULL)
        found = dlsym(module, name);
    /* ISO C has no conversion between pointers to data and to functions. */
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

const char set_mpi_doc[] =
    "set_mpi(file, handle_bytes, status_bytes, source_offset, tag_offset, error_offset, byte)\n--\n\nHave messages"
    " carried out by the MPI library that mpi4py's module, `file`, has loaded. Handles have `handle_bytes`; a status"
    " has `status_bytes`, and its fields of source, tag and error these offsets; `byte` is the handle of MPI_BYTE."
    " Return False if that is not possible.";

PyObject *set_mpi(PyObject *module, PyObject *args)
{
    (void)module;
    const char *file;
    unsigned long long byte;
    MpiLibrary found = {0};
    if (!PyArg_ParseTuple(args, "siiiiiK", &file, &found.handle_bytes, &found.status_bytes, &found.source_offset,
                          &found.tag_offset, &found.error_offset, &byte))
        return NULL;
    const int last = found.status_bytes - (int)sizeof(int);
    if ((found.handle_bytes != (int)sizeof(int) && found.handle_bytes != (int)sizeof(void *)) ||
        found.status_bytes > MAX_STATUS_BYTES || found.source_offset < 0 || found.source_offset > last ||
        found.tag_offset < 0 || found.tag_offset > last || found.error_offset < 0 || found.error_offset > last)
        Py_RETURN_FALSE;
    /* It is never closed: the module stays loaded. */
    void *loaded = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
    const bool complete = find(loaded, "MPI_Isend", &found.isend) && find(loaded, "MPI_Irecv", &found.irecv) &&
                          find(loaded, "MPI_Issend", &found.issend) &&
                          find(loaded, "MPI_Iprobe", &found.iprobe) &&
                          find(loaded, "MPI_Improbe", &found.improbe) && find(loaded, "MPI_Mprobe", &found.mprobe) &&
                          find(loaded, "MPI_Imrecv", &found.imrecv) && find(loaded, "MPI_Test", &found.test) &&
                          find(loaded, "MPI_Testsome", &found.testsome) && find(loaded, "MPI_Wait", &found.wait) &&
                          find(loaded, "MPI_Cancel", &found.cancel) &&
                          find(loaded, "MPI_Request_free", &found.request_free) &&
                          find(loaded, "MPI_Test_cancelled", &found.test_cancelled) &&
                          find(loaded, "MPI_Get_elements_x", &found.get_elements);
    if (!complete)
        Py_RETURN_FALSE;
    mpi = found;
    mpi.byte = to_handle(byte);
    Py_RETURN_TRUE;
}
