// Time of each part of a step.
#pragma once

#include <chrono>
#include <cstdint>

#include "api.h"

namespace rootlace {

// Measures how long a thread spends in each part of a step.
class Clock {
 public:
  explicit Clock(int64_t* nanos) : nanos_(nanos), last_(nanos ? now() : 0) {}

  void mark(RlPart part) {
    if (!nanos_) return;
    int64_t time = now();
    nanos_[part] += time - last_;
    last_ = time;
  }

 private:
  static int64_t now() {
    auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  }

  int64_t* nanos_;
  int64_t last_;
};

}  // namespace rootlace
