// Memory that is kept between steps.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

namespace rootlace {

// Memory that grows and stays. Each size is its own mapping of the system. With malloc, larger and
// larger steps would leave holes, each too small for the next step, that nothing else fills.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  ~Buffer() { release(); }

  // Returns memory aligned to a page; growth loses the earlier contents.
  char* take(size_t bytes) {
    if (size_ < bytes) {
      release();
      const size_t size = (bytes + 4095) / 4096 * 4096;
      void* found =
          mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (found == MAP_FAILED) throw std::bad_alloc();
      memory_ = static_cast<char*>(found);
      size_ = size;
    }
    return memory_;
  }

 private:
  void release() {
    if (memory_) munmap(memory_, size_);
    memory_ = nullptr;
    size_ = 0;
  }

  char* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace rootlace
