// Guard against C++ exceptions: a status tells Python, which asks `rl_error` for the reason.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>

#include "api.h"

namespace rootlace {

// Message of this thread's last failed call.
inline thread_local char error_words[256];

inline int32_t failure(RlStatus status, const char* words) noexcept {
  std::snprintf(error_words, sizeof error_words, "%s", words);
  return status;
}

// Calls f; an exception becomes the status.
template <class Function>
int32_t guarded(Function&& f) noexcept {
  try {
    f();
    return RL_DONE;
  } catch (const std::bad_alloc&) {
    return failure(RL_NO_MEMORY, "the native kernels got no memory");
  } catch (const std::exception& error) {
    return failure(RL_FAILED, error.what());
  } catch (...) {
    return failure(RL_FAILED, "an unknown C++ exception");
  }
}

}  // namespace rootlace
