// Division of whole numbers.
#pragma once

#include <cstdint>

namespace rootlace {

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Returns the start of part `part` of `total` things, cut into `parts` parts of about the same size.
inline int cut(int total, int part, int parts) {
  return static_cast<int>(static_cast<int64_t>(total) * part / parts);
}

}  // namespace rootlace
