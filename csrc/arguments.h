// What Python hands over, checked: buffers and numbers; and the way out of the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

namespace ckpt {

namespace py = pybind11;

// A buffer, exported (so neither resized nor closed) for as long as this object lives.
class Buffer {
  public:
    enum Access { kRead = PyBUF_SIMPLE, kWrite = PyBUF_WRITABLE };

    Buffer(py::handle object, Access access) {
        if (PyObject_GetBuffer(object.ptr(), &view_, access) != 0) throw py::error_already_set();
    }
    ~Buffer() { release(); }
    Buffer(const Buffer&) = delete;

    // A thread that the interpreter ends while it waits for the GIL unwinds without it and must leave Python alone.
    void release() {
        if (PyGILState_Check()) PyBuffer_Release(&view_);
    }

    uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
    size_t nbytes() const { return static_cast<size_t>(view_.len); }

    // Address of [offset, offset + count). Throws ValueError unless it lies within.
    uint8_t* at(size_t offset, size_t count) const {
        if (offset > nbytes() || count > nbytes() - offset)
            throw py::value_error("bytes " + std::to_string(offset) + "+" + std::to_string(count) +
                                  " lie outside the buffer of " + std::to_string(nbytes()));
        return data() + offset;
    }

    // Address of the 64-bit word at `offset`.
    uint64_t* word(size_t offset) const {
        uint8_t* address = at(offset, sizeof(uint64_t));
        if (reinterpret_cast<uintptr_t>(address) % sizeof(uint64_t) != 0)
            throw py::value_error("the word at offset " + std::to_string(offset) + " is not aligned to 8 bytes");
        return reinterpret_cast<uint64_t*>(address);
    }

  private:
    Py_buffer view_{};
};

// A whole number from `low` to `high`. Throws ValueError outside, OverflowError beyond 64 bits, TypeError.
inline int64_t number(py::handle object, const std::string& name, int64_t low, int64_t high = INT64_MAX) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
    if (overflow != 0) PyErr_SetString(PyExc_OverflowError, (name + " does not fit 64 bits").c_str());
    if (PyErr_Occurred()) throw py::error_already_set();
    if (value < low || value > high)
        throw py::value_error(name + " is " + std::to_string(value) + ", not " + std::to_string(low) +
                              (high == INT64_MAX ? " or more" : " to " + std::to_string(high)));
    return value;
}

inline size_t size(py::handle object, const char* name) { return static_cast<size_t>(number(object, name, 0)); }

// Where the bytes [offset, offset + nbytes) of a buffer lie; nbytes may be -1, all from `offset` on, if `lowest` is.
struct Window {
    Window(const Buffer& buffer, py::handle offset_arg, py::handle nbytes_arg, int lowest = 0) {
        const size_t offset = size(offset_arg, "offset");
        const int64_t asked = number(nbytes_arg, "nbytes", lowest);
        data = buffer.at(offset, asked < 0 ? 0 : static_cast<size_t>(asked));
        nbytes = asked < 0 ? buffer.nbytes() - offset : static_cast<size_t>(asked);
    }
    uint8_t* data;
    size_t nbytes;
};

// The value of a 64-bit word. Throws OverflowError, TypeError.
inline uint64_t word_value(py::handle object) {
    const auto integer = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
    const uint64_t value = integer ? PyLong_AsUnsignedLongLong(integer.ptr()) : 0;
    if (PyErr_Occurred()) throw py::error_already_set();
    return value;
}

// The result of `work`, run without the GIL. Not a guard object: the interpreter may end a thread that asks for the GIL
// back, and that must not happen in a destructor.
template <class Work>
auto without_gil(Work&& work) {
    std::optional<decltype(work())> result;
    std::exception_ptr error;
    PyThreadState* thread = PyEval_SaveThread();
    try {
        result = work();
    } catch (...) {
        error = std::current_exception();
    }
    PyEval_RestoreThread(thread);
    if (error) std::rethrow_exception(error);
    return std::move(*result);
}
}  // namespace ckpt
