/* The public functions of blocking operations, and those that start messages: calls like earlier ones are carried out
 * without Python code, all others by the function in Python, which has the same parameters.
 */

#define PY_SSIZE_T_CLEAN
#include "functions.h"

#include <stdbool.h>
#include <stddef.h>
#include <structmember.h>

#include "calls.h"

/* Python 3.11, which does not change any more, has these too, but its headers don't show them for the limited API. */
#if defined(Py_LIMITED_API) && Py_LIMITED_API + 0 < 0x030C0000
typedef PyObject *(*vectorcallfunc)(PyObject *, PyObject *const *, size_t, PyObject *);
PyAPI_FUNC(PyObject *) PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
#endif
#define HAS_VECTORCALL (1ul << 11)
static const size_t OFFSET_FLAG = (size_t)1 << (8 * sizeof(size_t) - 1); /* of the number of positional arguments */

enum { MAX_PARAMETERS = 10 };

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *attributes, *weak_references;
    PyObject *function;
    PyObject *name;  /* of the operation */
    PyObject *given; /* the input, where no parameter is */
    PyObject *parameters[MAX_PARAMETERS], *defaults[MAX_PARAMETERS]; /* NULL: must be passed */
    int count, positional;
    int x, out, comm, timeout; /* indices of parameters; -1: there is none */
    int key[MAX_KEY], key_size; /* parameters after the name */
    bool begins; /* a collective, which is completed later */
} Function;

/* The queue of the world, if all threads have the same, and its calls. */
static PyObject *world_queue;
static Calls *world_calls;

static PyTypeObject *communicator_type;
static PyObject *calls_name;

PyObject *set_world(PyObject *module, PyObject *queue)
{
    (void)module;
    PyObject *calls = queue == Py_None ? NULL : PyObject_GetAttrString(queue, "calls");
    if (calls == NULL && PyErr_Occurred())
        return NULL;
    PyObject *old_queue = world_queue, *old_calls = (PyObject *)world_calls;
    world_queue = queue == Py_None ? NULL : Py_NewRef(queue);
    world_calls = (Calls *)calls;
    Py_XDECREF(old_queue);
    Py_XDECREF(old_calls);
    Py_RETURN_NONE;
}

PyObject *set_communicator_type(PyObject *module, PyObject *type)
{
    (void)module;
    if (calls_name == NULL && (calls_name = PyUnicode_InternFromString("_calls")) == NULL)
        return NULL;
    PyTypeObject *old = communicator_type;
    communicator_type = (PyTypeObject *)Py_NewRef(type);
    Py_XDECREF((PyObject *)old);
    Py_RETURN_NONE;
}

/* Return a new reference to the calls of a communicator; NULL, without an exception, if Python has to find them. */
static Calls *find_calls(PyObject *comm)
{
    if (comm == Py_None)
        return (Calls *)Py_XNewRef((PyObject *)world_calls);
    if (!PyObject_TypeCheck(comm, communicator_type))
        return NULL;
    PyObject *calls = PyObject_GetAttr(comm, calls_name);
    if (calls == NULL)
        PyErr_Clear();
    return (Calls *)calls;
}

/* Find the values of all parameters. Returns false if the arguments are invalid, or not in the usual form. */
static bool bind_arguments(
    const Function *one, PyObject *const *args, Py_ssize_t nargs, PyObject *names, PyObject **values)
{
    if (nargs > one->positional)
        return false;
    for (int i = 0; i < one->count; i++)
        values[i] = i < nargs ? args[i] : one->defaults[i];
    const Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < named; i++) {
        const PyObject *name = PyTuple_GetItem(names, i);
        int parameter = (int)nargs;
        /* Names in the source of a program are interned. */
        while (parameter < one->count && one->parameters[parameter] != name)
            parameter++;
        if (parameter == one->count)
            return false;
        values[parameter] = args[nargs + i];
    }
    for (int i = 0; i < one->count; i++) {
        if (values[i] == NULL)
            return false;
    }
    return true;
}

/* Carry out a call; returns as run_repeated does. */
static PyObject *repeat(const Function *one, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    PyObject *values[MAX_PARAMETERS], *key[MAX_KEY] = {one->name};
    if (!bind_arguments(one, args, nargs, names, values) || (one->timeout >= 0 && values[one->timeout] != Py_None))
        return NULL;
    for (int i = 0; i < one->key_size; i++)
        key[i + 1] = values[one->key[i]];
    Calls *calls = find_calls(values[one->comm]);
    if (calls == NULL || (PyObject *)calls == Py_None) {
        Py_XDECREF((PyObject *)calls);
        return NULL;
    }
    PyObject *(*carry_out)(Calls *, PyObject *, PyObject *, PyObject *const *, Py_ssize_t) =
        one->begins ? begin_repeated : run_repeated;
    PyObject *value = carry_out(calls, one->x < 0 ? one->given : values[one->x],
                                one->out < 0 ? Py_None : values[one->out], key, one->key_size + 1);
    if (value != NULL && one->x < 0 && !one->begins) {
        Py_DECREF(value);
        value = Py_NewRef(Py_None);
    }
    Py_DECREF((PyObject *)calls);
    return value;
}

static PyObject *call_function(PyObject *self, PyObject *const *args, size_t flagged, PyObject *names)
{
    const Function *one = (Function *)self;
    PyObject *value = repeat(one, args, (Py_ssize_t)(flagged & ~OFFSET_FLAG), names);
    if (value != NULL || PyErr_Occurred())
        return value;
    return PyObject_Vectorcall(one->function, args, flagged, names);
}

/* --- the Python type */

/* Return the index of a parameter, -1 if there is none of this name. */
static int find_parameter(const Function *one, PyObject *name)
{
    for (int i = 0; i < one->count; i++) {
        if (PyUnicode_Compare(one->parameters[i], name) == 0)
            return i;
    }
    return -1;
}

static int find_parameter_of(const Function *one, const char *name)
{
    PyObject *text = PyUnicode_FromString(name);
    int found = text == NULL ? -1 : find_parameter(one, text);
    Py_XDECREF(text);
    return found;
}

static int set_parameters(Function *one, PyObject *parameters, PyObject *defaults)
{
    const Py_ssize_t count = PyTuple_Size(parameters);
    if (count < 0 || count > MAX_PARAMETERS) {
        PyErr_SetString(PyExc_ValueError, "Function: too many parameters");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++, one->count++) {
        PyObject *name = Py_NewRef(PyTuple_GetItem(parameters, i));
        PyUnicode_InternInPlace(&name);
        one->parameters[i] = name;
        one->defaults[i] = Py_XNewRef(PyDict_GetItemWithError(defaults, name));
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

static int set_key(Function *one, PyObject *key)
{
    const Py_ssize_t size = PyTuple_Size(key);
    if (size < 0 || size >= MAX_KEY) {
        PyErr_SetString(PyExc_ValueError, "Function: the key is too long");
        return -1;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        int found = find_parameter(one, PyTuple_GetItem(key, i));
        if (found < 0) {
            PyErr_SetString(PyExc_ValueError, "Function: the key names no parameter");
            return -1;
        }
        one->key[one->key_size++] = found;
    }
    return 0;
}

static int init_function(PyObject *self, PyObject *args, PyObject *keywords)
{
    (void)keywords;
    Function *one = (Function *)self;
    PyObject *function, *parameters, *defaults, *name, *key, *given;
    int positional, begins;
    if (!PyArg_ParseTuple(args, "OO!iO!UO!Op", &function, &PyTuple_Type, &parameters, &positional, &PyDict_Type,
                          &defaults, &name, &PyTuple_Type, &key, &given, &begins))
        return -1;
    if (one->function != NULL) {
        PyErr_SetString(PyExc_ValueError, "Function: initialised twice");
        return -1;
    }
    one->function = Py_NewRef(function);
    one->given = Py_NewRef(given);
    one->begins = begins != 0;
    one->name = Py_NewRef(name);
    PyUnicode_InternInPlace(&one->name);
    one->positional = positional;
    if (set_parameters(one, parameters, defaults) < 0)
        return -1;
    one->x = find_parameter_of(one, "x");
    one->out = find_parameter_of(one, "out");
    one->comm = find_parameter_of(one, "comm");
    one->timeout = find_parameter_of(one, "timeout");
    if (set_key(one, key) < 0 || PyErr_Occurred())
        return -1;
    if (one->comm < 0 || positional < 0 || positional > one->count) {
        PyErr_SetString(PyExc_ValueError, "Function: invalid parameters");
        return -1;
    }
    one->call = call_function; /* which finds all of this */
    return 0;
}

static int traverse_function(PyObject *self, visitproc visit, void *arg)
{
    const Function *one = (Function *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(one->attributes);
    Py_VISIT(one->function);
    Py_VISIT(one->given);
    for (int i = 0; i < one->count; i++)
        Py_VISIT(one->defaults[i]);
    return 0;
}

static int clear_function(PyObject *self)
{
    Py_CLEAR(((Function *)self)->attributes);
    return 0;
}

static void dealloc_function(PyObject *self)
{
    Function *one = (Function *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (one->weak_references != NULL)
        PyObject_ClearWeakRefs(self);
    Py_XDECREF(one->attributes);
    Py_XDECREF(one->function);
    Py_XDECREF(one->name);
    Py_XDECREF(one->given);
    for (int i = 0; i < one->count; i++) {
        Py_XDECREF(one->parameters[i]);
        Py_XDECREF(one->defaults[i]);
    }
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* For calls of `__call__` itself: all others pass an array of arguments. */
static PyObject *call_with_tuple(PyObject *self, PyObject *args, PyObject *keywords)
{
    const Function *one = (Function *)self;
    if (one->call == NULL) {
        PyErr_SetString(PyExc_TypeError, "Function: not initialised");
        return NULL;
    }
    return PyObject_Call(one->function, args, keywords);
}

static PyObject *show(PyObject *self) { return PyObject_Repr(((Function *)self)->function); }

/* As a function in a class, of which an instance has methods. */
static PyObject *bind_method(PyObject *self, PyObject *instance, PyObject *type)
{
    (void)type;
    if (instance == NULL || instance == Py_None)
        return Py_NewRef(self);
    PyObject *types = PyImport_ImportModule("types");
    PyObject *method = types == NULL ? NULL : PyObject_CallMethod(types, "MethodType", "OO", self, instance);
    Py_XDECREF(types);
    return method;
}

/* Pickled, and copied, by its name. */
static PyObject *reduce(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyObject_GetAttrString(self, "__qualname__");
}

static PyMethodDef methods[] = {
    {"__reduce__", reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(Function, attributes), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Function, weak_references), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Function, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Function(function, parameters, positional, defaults, name, key, given, begins)\n--\n\nA public"
                " function, which calls `function` for all calls that are not like an earlier one. `key` has the"
                " parameters that are part of the key of a call, besides its name. If `begins` is true, it begins the"
                " call, and returns its request."},
    {Py_tp_init, init_function},
    {Py_tp_dealloc, dealloc_function},
    {Py_tp_traverse, traverse_function},
    {Py_tp_clear, clear_function},
    {Py_tp_call, call_with_tuple},
    {Py_tp_repr, show},
    {Py_tp_descr_get, bind_method},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, attributes},
    {0, NULL},
};

PyType_Spec function_spec = {
    .name = "mpicoll._shm.Function",
    .basicsize = sizeof(Function),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | HAS_VECTORCALL,
    .slots = slots,
};
