// What pickle asks about every object of a state: does it leave a hole? Thousands of questions, so not in Python.
#pragma once

#include "arguments.h"

namespace ckpt {

// What a marker needs; the tuple behind its function holds the references.
enum { kBare, kAsked, kOrder, kMark, kAsk };

inline bool is_among(PyObject* classes, PyObject* cls) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(classes); ++i)
        if (PyTuple_GET_ITEM(classes, i) == cls) return true;
    return false;
}

inline PyObject* mark_hole(PyObject* fields, PyObject* object) {
    const auto cls = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (is_among(PyTuple_GET_ITEM(fields, kBare), cls)) {
        const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
        if (!attributes) return nullptr;
        if (PyDict_GET_SIZE(attributes.ptr()) != 0) Py_RETURN_NONE;
        if (PyList_Append(PyTuple_GET_ITEM(fields, kOrder), object) != 0) return nullptr;
        return py::handle(PyTuple_GET_ITEM(fields, kMark)).inc_ref().ptr();
    }
    if (is_among(PyTuple_GET_ITEM(fields, kAsked), cls)) return PyObject_CallOneArg(PyTuple_GET_ITEM(fields, kAsk), object);
    Py_RETURN_NONE;
}

// A function of one object: see hole_marker in _C.pyi.
inline py::object hole_marker(py::tuple bare, py::tuple asked, py::list order, py::int_ mark, py::function ask) {
    static PyMethodDef method{"mark_hole", mark_hole, METH_O, nullptr};
    const py::tuple fields = py::make_tuple(bare, asked, order, mark, ask);
    return py::reinterpret_steal<py::object>(PyCFunction_New(&method, fields.ptr()));
}
}  // namespace ckpt
