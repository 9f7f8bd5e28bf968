// Touching the pages of a mapping in the background, so that the first fill costs no page faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ckpt {

class PopulateState;

// Touches pages in a thread of its own from construction on, until done or told to stop. Bytes are never
// changed, also not while others write them. Failures end it quietly. REQUIRES: the memory stays mapped until
// stop() or wait() returned true.
class Populate {
  public:
    Populate(uint8_t* data, size_t nbytes);
    Populate(const Populate&) = delete;

    void stop();                   // idempotent; on return the thread touches nothing any more
    bool wait_for(double seconds);  // whether the thread ended within that time
    size_t done_bytes() const;

  private:
    std::shared_ptr<PopulateState> state_;
};

}  // namespace ckpt
