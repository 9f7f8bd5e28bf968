// Operations on 64-bit words that other processes see: the state machine of a slot lives in such words.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ckpt {

static_assert(__atomic_always_lock_free(sizeof(uint64_t), nullptr), "words in shared memory need lock-free atomics");

inline uint64_t load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void store(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline void add(uint64_t* word, uint64_t amount) { __atomic_fetch_add(word, amount, __ATOMIC_ACQ_REL); }

inline bool compare_exchange(uint64_t* word, uint64_t expected, uint64_t desired) {
    return __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

// Orders everything before it against everything after it, non-temporal stores included.
inline void fence() {
#if defined(__x86_64__)
    _mm_mfence();
#endif
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
}  // namespace ckpt
