// The headers below the bindings in a process without an interpreter: copies, sums, files and threads, all at once.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "writer.h"

namespace {

void check(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "natively: %s\n", what);
    std::exit(1);
}

std::vector<uint8_t> noise(size_t nbytes) {
    std::vector<uint8_t> bytes(nbytes);
    uint32_t state = 1;
    for (auto& byte : bytes) byte = static_cast<uint8_t>((state = state * 1664525 + 1013904223) >> 24);
    return bytes;
}

uint32_t crc_of(const uint8_t* data, size_t nbytes) { return ~ckpt::crc_tables(data, nbytes, ~0u); }

// Ranges of odd lengths into a buffer that ends where the last of them does.
void copies(const std::vector<uint8_t>& source) {
    for (const ckpt::Kernel& kernel : ckpt::kernels())
        for (const size_t large : {size_t{1}, size_t{16447}, size_t{16448}, size_t{50001}, source.size()}) {
            const size_t lengths[] = {0, 3, large, 63};
            std::vector<uint8_t> target(large + 66);
            std::vector<ckpt::Range> ranges;
            size_t offset = 0;
            for (const size_t length : lengths) {
                ranges.push_back({source.data(), target.data() + offset, length});
                offset += length;
            }
            const auto crcs = ckpt::copy_ranges(ranges, 3, kernel, true, false);
            for (size_t i = 0; i < ranges.size(); ++i) {
                check(std::memcmp(ranges[i].dst, source.data(), lengths[i]) == 0, "bytes differ");
                check(crcs[i] == crc_of(source.data(), lengths[i]), "a sum differs");
            }
        }
}

// Another thread looks at the progress for as long as the file is written, as a saver's server does.
void files(const std::string& path, const std::vector<uint8_t>& source) {
    uint64_t progress = 0;
    std::atomic<bool> written{false};
    std::thread watcher([&] {
        for (uint64_t last = 0, now; !written; last = now) check((now = ckpt::load(&progress)) >= last, "going back");
    });
    ckpt::write_file(path, source.data(), source.size(), {true, 64 << 10, 3, 0600, &progress, nullptr});
    written = true;
    watcher.join();
    check(progress == source.size(), "progress is not the size");
    std::vector<uint8_t> back(source.size());
    const auto crc = ckpt::read_file(path, back.data(), back.size(), 3);
    check(crc && *crc == crc_of(source.data(), source.size()) && back == source, "the file differs");
    check(!ckpt::read_file(path, back.data(), back.size() + 1, 1), "a short file is no end");  // reads none of it
    try {
        ckpt::write_file(path, source.data(), 1, {false, 4096, 1, 0600, nullptr, nullptr});
        check(false, "an existing file was opened");
    } catch (const std::filesystem::filesystem_error&) {
    }
    check(::unlink(path.c_str()) == 0, "unlink");
}

void words() {
    uint64_t word = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
        threads.emplace_back([&] {
            for (int n = 0; n < 5000; ++n)
                for (uint64_t seen = ckpt::load(&word); !ckpt::compare_exchange(&word, seen, seen + 1);)
                    seen = ckpt::load(&word);
        });
    for (auto& thread : threads) thread.join();
    check(word == 15000, "a count was lost");
}
}  // namespace

int main(int, char** arguments) {
    const auto source = noise((5 << 20) + 77);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
        threads.emplace_back([&, i] {
            copies(source);
            files(std::string(arguments[1]) + "/file-" + std::to_string(i), source);
        });
    words();
    for (auto& thread : threads) thread.join();
    std::puts("copies, files and words of three threads");
}
