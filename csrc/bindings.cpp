// The native contract as Python sees it; ckpt_engine/_C.pyi says what each function promises.

#include "arguments.h"
#include "copy.h"
#include "holes.h"
#include "paths.h"
#include "populate.h"
#include "writer.h"

namespace ckpt {
namespace {

using Object = py::handle;  // borrowed from the caller, so that a thread that ends in without_gil drops no reference

int thread_count(Object threads) { return static_cast<int>(number(threads, "threads", 1, kMaxThreads)); }

// A private copy of an array argument: nobody can change it between the check and the use.
template <class Item>
std::vector<Item> items(Object object, const std::string& name) {
    const Buffer buffer(object, Buffer::kRead);
    if (buffer.nbytes() % sizeof(Item) != 0)
        throw py::value_error(name + " does not hold whole items of " + std::to_string(sizeof(Item)) + " bytes");
    std::vector<Item> copied(buffer.nbytes() / sizeof(Item));
    if (!copied.empty()) std::memcpy(copied.data(), buffer.data(), buffer.nbytes());
    return copied;
}

struct Row {
    uint64_t address, offset, nbytes;
};

py::bytes copy(Object dst, Object table, Object threads, const std::string& kernel, bool crc, bool fresh) {
    const Buffer target(dst, Buffer::kWrite);
    const Kernel& chosen = kernel_named(kernel);
    const int count = thread_count(threads);
    std::vector<Range> ranges;
    for (const Row& row : items<Row>(table, "table")) {
        if (row.nbytes != 0 && (row.address == 0 || row.nbytes - 1 > UINTPTR_MAX - row.address))
            throw py::value_error("row " + std::to_string(ranges.size()) + " has no valid source address");
        ranges.push_back({reinterpret_cast<uint8_t*>(row.address), target.at(row.offset, row.nbytes), row.nbytes});
    }
    const auto crcs = without_gil([&] { return copy_ranges(ranges, count, chosen, crc, fresh); });
    return py::bytes(reinterpret_cast<const char*>(crcs.data()), crcs.size() * sizeof(uint32_t));
}

uint32_t crc32(Object data, Object crc, Object offset, Object nbytes, Object threads) {
    const Buffer buffer(data, Buffer::kRead);
    const Window window(buffer, offset, nbytes, -1);
    const auto start = static_cast<uint32_t>(number(crc, "crc", 0, UINT32_MAX));
    const int count = thread_count(threads);
    const Kernel& kernel = kernels().front();
    const auto crc_of = [&](size_t begin, size_t end) { return ~kernel.crc(window.data + begin, end - begin, ~0u); };
    return without_gil([&] { return crc_by_pieces(window.nbytes, start, count, crc_of); });
}

uint32_t crc32_combine(Object crcs, Object lengths) {
    const auto pieces = items<uint32_t>(crcs, "crcs");
    const auto sizes = items<uint64_t>(lengths, "lengths");
    if (pieces.size() != sizes.size()) throw py::value_error("crcs and lengths differ in number");
    return without_gil([&] {
        Shifts shifted;
        uint32_t whole = 0;
        for (size_t i = 0; i < pieces.size(); ++i) whole = shifted(whole, sizes[i]) ^ pieces[i];
        return whole;
    });
}

void scatter_u32(Object dst, Object positions, Object values) {
    const Buffer target(dst, Buffer::kWrite);
    const auto places = items<uint64_t>(positions, "positions");
    const auto numbers = items<uint32_t>(values, "values");
    if (places.size() != numbers.size()) throw py::value_error("positions and values differ in number");
    for (const uint64_t place : places) target.at(place, sizeof(uint32_t));
    for (size_t i = 0; i < places.size(); ++i) std::memcpy(target.data() + places[i], &numbers[i], sizeof(uint32_t));
}

uint64_t load_word(Object word, Object offset) {
    return load(Buffer(word, Buffer::kRead).word(size(offset, "offset")));
}

void store_word(Object word, Object offset, Object value) {
    store(Buffer(word, Buffer::kWrite).word(size(offset, "offset")), word_value(value));
}

bool exchange_word(Object word, Object offset, Object expected, Object desired) {
    const Buffer buffer(word, Buffer::kWrite);
    return compare_exchange(buffer.word(size(offset, "offset")), word_value(expected), word_value(desired));
}

std::string file_name(Object path) {
    PyObject* encoded = nullptr;
    if (!PyUnicode_FSConverter(path.ptr(), &encoded)) throw py::error_already_set();
    return py::reinterpret_steal<py::bytes>(encoded);
}

bool free_of_links(Object path) {
    const std::string name = file_name(path);
    return without_gil([&] { return is_free_of_links(name); });
}

bool write_from(Object path, Object source, Object offset, Object nbytes, bool direct, Object chunk_bytes, Object threads,
                Object mode, Object progress, Object progress_offset, Object limit) {
    const std::string name = file_name(path);
    const Buffer buffer(source, Buffer::kRead);
    const Window window(buffer, offset, nbytes);
    const size_t chunk = static_cast<size_t>(number(chunk_bytes, "chunk_bytes", kSector, 1 << 30));
    if (chunk % kSector != 0) throw py::value_error("chunk_bytes is not a multiple of 4096");
    WriteOptions options{direct, chunk, thread_count(threads), static_cast<unsigned>(number(mode, "mode", 0, 07777)),
                         nullptr, nullptr};
    std::optional<Buffer> counter, most;
    const size_t place = size(progress_offset, "progress_offset");
    if (!progress.is_none()) options.progress = counter.emplace(progress, Buffer::kWrite).word(place);
    if (!limit.is_none()) options.limit = most.emplace(limit, Buffer::kRead).word(0);
    return without_gil([&] { return write_file(name, window.data, window.nbytes, options); });
}

uint32_t read_into(Object path, Object dst, Object offset, Object nbytes, Object threads) {
    const std::string name = file_name(path);
    const Buffer target(dst, Buffer::kWrite);
    const Window window(target, offset, nbytes);
    const int readers = thread_count(threads);
    const auto crc = without_gil([&] { return read_file(name, window.data, window.nbytes, readers); });
    if (crc) return *crc;
    PyErr_Format(PyExc_EOFError, "%s holds fewer than %zu bytes", name.c_str(), window.nbytes);
    throw py::error_already_set();
}

void translate(std::exception_ptr error) {
    try {
        std::rethrow_exception(error);
    } catch (const std::filesystem::filesystem_error& failed) {
        errno = failed.code().value();
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, failed.path1().c_str());
    }
}
}  // namespace
}  // namespace ckpt

PYBIND11_MODULE(_C, m) {
    using namespace ckpt;
    using py::arg, py::kw_only;

    m.doc() = "The native part of ckpt_engine; _C.pyi beside it is the contract.";
    py::register_local_exception_translator(translate);

    m.def("cpu_kernels", [] {
        py::list names;
        for (const Kernel& kernel : kernels()) names.append(kernel.name);
        return names;
    });
    m.def("copy", copy, arg("dst"), arg("table"), kw_only(), arg("threads") = 1, arg("kernel") = "", arg("crc") = true,
          arg("fresh") = false);
    m.def("crc32", crc32, arg("data"), arg("crc") = 0, kw_only(), arg("offset") = 0, arg("nbytes") = -1,
          arg("threads") = 1);
    m.def("crc32_combine", crc32_combine, arg("crcs"), arg("lengths"));
    m.def("address_of", [](Object data) { return uintptr_t(Buffer(data, Buffer::kRead).data()); }, arg("data"));
    m.def("scatter_u32", scatter_u32, arg("dst"), arg("positions"), arg("values"));
    m.def("load", load_word, arg("word"), arg("offset"));
    m.def("store", store_word, arg("word"), arg("offset"), arg("value"));
    m.def("compare_exchange", exchange_word, arg("word"), arg("offset"), arg("expected"), arg("desired"));
    m.def("fence", fence);
    m.def("write_file", write_from, arg("path"), arg("source"), kw_only(), arg("offset"), arg("nbytes"),
          arg("direct") = true, arg("chunk_bytes") = 8 << 20, arg("threads") = 1, arg("mode") = 0666,
          arg("progress") = py::none(), arg("progress_offset") = 0, arg("limit") = py::none());
    m.def("read_file", read_into, arg("path"), arg("dst"), kw_only(), arg("offset"), arg("nbytes"), arg("threads") = 1);
    m.def("free_of_links", free_of_links, arg("path"));
    m.def("hole_marker", hole_marker, arg("bare"), arg("asked"), arg("order"), arg("mark"), arg("ask"));
    py::class_<Populate>(m, "Populate")
        .def(py::init<Object, Object, Object>(), arg("buffer"), kw_only(), arg("offset") = 0, arg("nbytes") = -1)
        .def("stop", &Populate::stop)
        .def("wait", &Populate::wait, arg("timeout_s"))
        .def("done_bytes", &Populate::done_bytes);
}
