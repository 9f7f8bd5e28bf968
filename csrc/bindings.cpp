// The native contract as Python sees it; ckpt_engine/_C.pyi says what each function promises.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "arguments.h"
#include "atomics.h"
#include "copy.h"
#include "crc32.h"
#include "populate.h"
#include "pool.h"
#include "writer.h"

namespace ckpt {
namespace {

using Object = py::object;

int thread_count(const Object& threads) { return static_cast<int>(number(threads, "threads", 1, kMaxThreads)); }

// Where [offset, offset + nbytes) lies; nbytes -1 means to the end.
struct Window {
    Window(const Buffer& buffer, const Object& offset_arg, const Object& nbytes_arg) {
        const size_t offset = size(offset_arg, "offset");
        data = buffer.at(offset, 0);
        const int64_t asked = number(nbytes_arg, "nbytes", -1);
        nbytes = asked < 0 ? buffer.nbytes() - offset : static_cast<size_t>(asked);
        buffer.at(offset, nbytes);
    }
    uint8_t* data;
    size_t nbytes;
};

// A private copy of an array argument: nobody can change it between the check and the use.
template <class Item>
std::vector<Item> items(const Object& object, const char* name) {
    const Buffer buffer(object, Buffer::kRead);
    if (buffer.nbytes() % sizeof(Item) != 0)
        throw py::value_error(std::string(name) + " is not a whole number of items of " + std::to_string(sizeof(Item)) + " bytes");
    std::vector<Item> copied(buffer.nbytes() / sizeof(Item));
    if (!copied.empty()) std::memcpy(copied.data(), buffer.data(), buffer.nbytes());
    return copied;
}

struct Row {
    uint64_t address, offset, nbytes;
};

std::vector<Range> checked_ranges(const std::vector<Row>& rows, const Buffer& dst) {
    std::vector<Range> ranges;
    ranges.reserve(rows.size());
    for (const Row& row : rows) {
        uint8_t* to = dst.at(row.offset, row.nbytes);
        if (row.nbytes != 0 && (row.address == 0 || row.nbytes - 1 > UINTPTR_MAX - row.address))
            throw py::value_error("row " + std::to_string(ranges.size()) + " has no valid source address");
        ranges.push_back({reinterpret_cast<const uint8_t*>(row.address), to, row.nbytes});
    }
    return ranges;
}

std::vector<std::string> cpu_kernels() {
    std::vector<std::string> names;
    for (const Kernel& kernel : kernels()) names.push_back(kernel.name);
    return names;
}

py::bytes copy(const Object& dst, const Object& table, const Object& threads, const std::string& kernel, bool crc) {
    const Buffer target(dst, Buffer::kWrite);
    const Kernel& chosen = kernel_named(kernel);
    const int count = thread_count(threads);
    const std::vector<Range> ranges = checked_ranges(items<Row>(table, "table"), target);
    std::vector<uint32_t> crcs;
    without_gil([&] { crcs = copy_ranges(ranges, count, chosen, crc); });
    return py::bytes(reinterpret_cast<const char*>(crcs.data()), crcs.size() * sizeof(uint32_t));
}

uint32_t crc32_of(const Object& data, const Object& crc, const Object& offset, const Object& nbytes, const Object& threads) {
    const Buffer buffer(data, Buffer::kRead);
    const Window window(buffer, offset, nbytes);
    const auto start = static_cast<uint32_t>(number(crc, "crc", 0, UINT32_MAX));
    const int count = thread_count(threads);
    uint32_t result = 0;
    without_gil([&] { result = crc32(window.data, window.nbytes, start, count); });
    return result;
}

uint32_t crc32_combine(const Object& crcs, const Object& lengths) {
    const auto pieces = items<uint32_t>(crcs, "crcs");
    const auto sizes = items<uint64_t>(lengths, "lengths");
    if (pieces.size() != sizes.size()) throw py::value_error("crcs and lengths differ in number");
    uint32_t whole = 0;
    without_gil([&] {
        for (size_t i = 0; i < pieces.size(); ++i) whole = combine(whole, pieces[i], sizes[i]);
    });
    return whole;
}

uintptr_t address_of(const Object& data) { return reinterpret_cast<uintptr_t>(Buffer(data, Buffer::kRead).data()); }

void scatter_u32(const Object& dst, const Object& positions, const Object& values) {
    const Buffer target(dst, Buffer::kWrite);
    const auto places = items<uint64_t>(positions, "positions");
    const auto numbers = items<uint32_t>(values, "values");
    if (places.size() != numbers.size()) throw py::value_error("positions and values differ in number");
    for (const uint64_t place : places) target.at(place, sizeof(uint32_t));
    without_gil([&] {
        for (size_t i = 0; i < places.size(); ++i) std::memcpy(target.data() + places[i], &numbers[i], sizeof(uint32_t));
    });
}

uint64_t load(const Object& word, const Object& offset) {
    return load_acquire(Buffer(word, Buffer::kRead).word(size(offset, "offset")));
}

void store(const Object& word, const Object& offset, const Object& value) {
    store_release(Buffer(word, Buffer::kWrite).word(size(offset, "offset")), word_value(value));
}

bool exchange(const Object& word, const Object& offset, const Object& expected, const Object& desired) {
    const Buffer buffer(word, Buffer::kWrite);
    return compare_exchange(buffer.word(size(offset, "offset")), word_value(expected), word_value(desired));
}

// Keeps the errno and the path of a failed call in the OSError.
[[noreturn]] void raise_os_error(const SystemError& error, const Object& path) {
    errno = error.code;
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path.ptr());
    throw py::error_already_set();
}

std::string file_system_path(const Object& path) {
    PyObject* encoded = nullptr;
    if (!PyUnicode_FSConverter(path.ptr(), &encoded)) throw py::error_already_set();
    return py::reinterpret_steal<py::bytes>(encoded);
}

bool write_file_from(const Object& path, const Object& source, const Object& offset, const Object& nbytes, bool direct,
                     const Object& chunk_bytes, const Object& mode, const Object& progress, const Object& progress_offset) {
    const std::string name = file_system_path(path);
    const Buffer buffer(source, Buffer::kRead);
    const size_t count = size(nbytes, "nbytes");
    const uint8_t* data = buffer.at(size(offset, "offset"), count);
    WriteOptions options;
    options.direct = direct;
    options.chunk_bytes = static_cast<size_t>(number(chunk_bytes, "chunk_bytes", 4096, 1 << 30));
    if (options.chunk_bytes % 4096 != 0) throw py::value_error("chunk_bytes is not a multiple of 4096");
    options.mode = static_cast<unsigned>(number(mode, "mode", 0, 07777));
    std::optional<Buffer> counter;
    const size_t counter_offset = size(progress_offset, "progress_offset");
    if (!progress.is_none()) options.progress = counter.emplace(progress, Buffer::kWrite).word(counter_offset);
    bool was_direct = false;
    try {
        without_gil([&] { was_direct = write_file(name, data, count, options); });
    } catch (const SystemError& error) {
        raise_os_error(error, path);
    }
    return was_direct;
}

uint32_t read_file_into(const Object& path, const Object& dst, const Object& offset, const Object& nbytes, const Object& threads) {
    const std::string name = file_system_path(path);
    const Buffer target(dst, Buffer::kWrite);
    const size_t count = size(nbytes, "nbytes");
    uint8_t* data = target.at(size(offset, "offset"), count);
    const int readers = thread_count(threads);
    uint32_t crc = 0;
    try {
        without_gil([&] { crc = read_file(name, data, count, readers); });
    } catch (const SystemError& error) {
        raise_os_error(error, path);
    } catch (const ShortFile& error) {
        PyErr_SetString(PyExc_EOFError, error.what());
        throw py::error_already_set();
    }
    return crc;
}

// Holds the buffer for the thread that touches it.
class PopulateBuffer {
  public:
    PopulateBuffer(const Object& buffer, const Object& offset, const Object& nbytes)
        : buffer_(buffer, Buffer::kWrite), window_(buffer_, offset, nbytes), populate_(window_.data, window_.nbytes) {}

    ~PopulateBuffer() { stop(); }

    void stop() {
        without_gil([&] { populate_.stop(); });
        buffer_.release();
    }

    // In slices, so that a signal handler that raises (Ctrl-C) is heard.
    bool wait(double timeout_s) {
        using Clock = std::chrono::steady_clock;
        if (!(timeout_s >= 0)) throw py::value_error("timeout_s must be 0 or more");
        const auto start = Clock::now();
        for (;;) {
            const double left = timeout_s - std::chrono::duration<double>(Clock::now() - start).count();
            bool ended = false;
            without_gil([&] { ended = populate_.wait_for(std::clamp(left, 0.0, 0.5)); });
            if (ended || left <= 0) return ended;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        }
    }

    size_t done_bytes() const { return populate_.done_bytes(); }

  private:
    Buffer buffer_;
    Window window_;
    Populate populate_;
};

}  // namespace
}  // namespace ckpt

PYBIND11_MODULE(_C, m) {
    using namespace ckpt;
    using py::arg;
    using py::kw_only;

    m.doc() = "Native parts of ckpt_engine; ckpt_engine/_C.pyi is the contract.";
    m.def("cpu_kernels", cpu_kernels);
    m.def("copy", copy, arg("dst"), arg("table"), kw_only(), arg("threads") = 1, arg("kernel") = "", arg("crc") = true);
    m.def("crc32", crc32_of, arg("data"), arg("crc") = 0, kw_only(), arg("offset") = 0, arg("nbytes") = -1, arg("threads") = 1);
    m.def("crc32_combine", crc32_combine, arg("crcs"), arg("lengths"));
    m.def("address_of", address_of, arg("data"));
    m.def("scatter_u32", scatter_u32, arg("dst"), arg("positions"), arg("values"));
    m.def("load", load, arg("word"), arg("offset"));
    m.def("store", store, arg("word"), arg("offset"), arg("value"));
    m.def("compare_exchange", exchange, arg("word"), arg("offset"), arg("expected"), arg("desired"));
    m.def("fence", full_fence);
    m.def("write_file", write_file_from, arg("path"), arg("source"), kw_only(), arg("offset"), arg("nbytes"),
          arg("direct") = true, arg("chunk_bytes") = 8 << 20, arg("mode") = 0666, arg("progress") = py::none(),
          arg("progress_offset") = 0);
    m.def("read_file", read_file_into, arg("path"), arg("dst"), kw_only(), arg("offset"), arg("nbytes"), arg("threads") = 1);

    py::class_<PopulateBuffer>(m, "Populate")
        .def(py::init<const Object&, const Object&, const Object&>(), arg("buffer"), kw_only(), arg("offset") = 0, arg("nbytes") = -1)
        .def("stop", &PopulateBuffer::stop)
        .def("wait", &PopulateBuffer::wait, arg("timeout_s"))
        .def("done_bytes", &PopulateBuffer::done_bytes);
}
