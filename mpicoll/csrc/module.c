/* The extension module mpicoll._shm: collectives of the ranks of one node in C. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "arrays.h"
#include "background_messages.h"
#include "begun_calls.h"
#include "bound_call.h"
#include "calls.h"
#include "collectives.h"
#include "compression.h"
#include "connections.h"
#include "functions.h"
#include "kernels.h"
#include "line_messages.h"
#include "messages.h"
#include "mpi_library.h"
#include "native_calls.h"
#include "neighbours.h"
#include "pending_messages.h"
#include "queue_lock.h"
#include "records.h"
#include "sigterm.h"
#include "steps.h"
#include "streamed_program.h"
#include "window.h"

static PyMethodDef functions[] = {
    {"fold", (PyCFunction)(void (*)(void))shm_fold, METH_FASTCALL, shm_fold_doc},
    {"compress", (PyCFunction)(void (*)(void))shm_compress, METH_FASTCALL, shm_compress_doc},
    {"decompress", (PyCFunction)(void (*)(void))shm_decompress, METH_FASTCALL, shm_decompress_doc},
    {"begin_entry", begin_entry, METH_O, begin_entry_doc},
    {"end_entry", end_entry, METH_O, end_entry_doc},
    {"list_records", list_records, METH_O, list_records_doc},
    {"clear_records", clear_records, METH_NOARGS,
     "clear_records()\n--\n\nForget the operations that have ended."},
    {"place_records", place_records, METH_VARARGS, place_records_doc},
    {"name_job", name_job, METH_O, "name_job(name)\n--\n\nRecord the name of the job."},
    {"mark_left", mark_left, METH_NOARGS, "mark_left()\n--\n\nRecord that the process ends normally."},
    {"set_recording", set_recording, METH_O,
     "set_recording(flag)\n--\n\nLet `Calls.run` and `BoundCall.run` carry out calls and record them, or have them"
     " leave all calls to Python."},
    {"check_rules", check_rules, METH_O,
     "check_rules(function)\n--\n\nHave `Calls.run` leave calls to Python where `function()` returns a true value."},
    {"set_world", set_world, METH_O,
     "set_world(queue)\n--\n\nHave calls without a communicator carried out in `queue`; None: by Python."},
    {"set_communicator_type", set_communicator_type, METH_O,
     "set_communicator_type(type)\n--\n\nHave the calls of a communicator found by its attribute `_calls`."},
    {"set_numpy_layout", set_numpy_layout, METH_O,
     "set_numpy_layout(samples)\n--\n\nHave arrays of the type of `samples` read by their fields. Return False if the"
     " layout is not the known one."},
    {"set_numpy_interface", set_numpy_interface, METH_O,
     "set_numpy_interface(capsule)\n--\n\nHave arrays made by the functions in numpy's `_ARRAY_API`. Return False if"
     " this is of an unknown version, or the layout of arrays is unknown."},
    {"set_torch_access", set_torch_access, METH_O,
     "set_torch_access(type)\n--\n\nHave the memory of tensors found by the functions that `type` exports. Return False"
     " if it exports none."},
    {"set_mpi", set_mpi, METH_VARARGS, set_mpi_doc},
    {"list_pending_messages", list_pending_messages, METH_NOARGS, list_pending_messages_doc},
    {"test_pending_messages", test_pending_messages, METH_NOARGS,
     "test_pending_messages()\n--\n\nMake progress on all messages that were started and have not completed."},
    {"await_unattended_message", await_unattended_message, METH_NOARGS, await_unattended_message_doc},
    {"hand_over_begun_calls", hand_over_begun_calls, METH_NOARGS, hand_over_begun_calls_doc},
    {"set_progress", set_progress, METH_O, set_progress_doc},
    {"stop_progress", stop_progress, METH_NOARGS,
     "stop_progress()\n--\n\nHave `await_unattended_message` return False at once, now and later."},
    {"pass_values", (PyCFunction)(void (*)(void))pass_values, METH_FASTCALL, pass_values_doc},
    {"send_value", (PyCFunction)(void (*)(void))send_value, METH_FASTCALL, send_value_doc},
    {"limit_sigterm", (PyCFunction)(void (*)(void))limit_sigterm, METH_FASTCALL,
     "limit_sigterm(seconds, stack, output, text)\n--\n\nEnd this process by SIGTERM if Python does not cancel that"
     " within `seconds` of a SIGTERM, after `text`, and what can be read from the descriptor `stack`, were written to"
     " the descriptor `output`. To be called when Python has installed its handler."},
    {"cancel_sigterm_limit", cancel_sigterm_limit, METH_NOARGS,
     "cancel_sigterm_limit()\n--\n\nCancel the limit of `limit_sigterm`, because Python handles SIGTERM."},
    {NULL, NULL, 0, NULL},
};

/* As INTERFACE in mpicoll/extension.py, which describes it. */
enum { INTERFACE = 18 };

static int fill_module(PyObject *module)
{
    if (PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        return -1;
    PyType_Spec *specs[] = {
        &steps_spec,       &collective_spec, &queue_lock_spec,  &calls_spec,
        &bound_call_spec,  &function_spec,   &call_memory_spec, &native_call_spec, &message_call_spec,
        &pending_message_spec, &line_end_spec, &window_memory_spec, &neighbour_collective_spec, &begun_call_spec,
        &background_message_spec, &background_messages_spec, &connection_spec, &streamed_program_spec,
        &held_lock_spec};
    PyObject *collective = NULL; /* borrowed from the module */
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        PyObject *base = specs[i] == &neighbour_collective_spec ? collective : NULL;
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], base);
        int status = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
        if (status == 0 && specs[i] == &pending_message_spec)
            set_pending_message_type((PyTypeObject *)type);
        if (status == 0 && specs[i] == &line_end_spec)
            set_line_end_type((PyTypeObject *)type);
        if (status == 0 && specs[i] == &begun_call_spec)
            set_begun_call_type((PyTypeObject *)type);
        if (status == 0 && specs[i] == &background_message_spec)
            set_background_message_type((PyTypeObject *)type);
        if (status == 0 && specs[i] == &connection_spec)
            set_connection_type((PyTypeObject *)type);
        if (status == 0 && specs[i] == &held_lock_spec)
            set_held_lock_type((PyTypeObject *)type);
        if (specs[i] == &collective_spec)
            collective = type;
        Py_XDECREF(type);
        if (status < 0)
            return -1;
    }
    if (PyModule_AddIntConstant(module, "RING_BYTES", RING_BYTES) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "AREA_BYTES", sizeof(Area));
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, fill_module},
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

/* NOLINTNEXTLINE(misc-use-internal-linkage): Python looks it up */
PyMODINIT_FUNC PyInit__shm(void) { return PyModuleDef_Init(&module); }
