// Memory that is kept between steps.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace rootlace {

// Memory that grows and stays.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* take(size_t bytes) {
    if (size_ < bytes) {
      std::free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = static_cast<char*>(std::aligned_alloc(64, size_));
      if (!memory_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return memory_;
  }

 private:
  char* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace rootlace
