// Key block in the form that attention's products read.
#pragma once

#include <cstddef>

#include "attention_plan.h"
#include "division.h"
#include "vec.h"

namespace rootlace {

constexpr int PANELS = KEY_BLOCK / LANES;  // of a key block

// Addresses of a key block's panels, for one key head. Panels behind the last one with keys repeat
// it.
template <class T>
struct KeyPanels {
  const T* keys[PANELS];
  const T* values[PANELS];
};

// Hands out parts of one piece of memory, each 64-byte aligned; without memory it only counts.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class U>
  U* take(size_t count) {
    size_t at = used_;
    used_ += (count * sizeof(U) + 63) / 64 * 64;
    return memory_ ? reinterpret_cast<U*>(memory_ + at) : nullptr;
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

}  // namespace rootlace
