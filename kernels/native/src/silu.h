// The activation of gated layers.
#pragma once

#include "exp2.h"
#include "vec.h"

namespace rootlace {

// x / (1 + e^-x), as precisely as T can show.
template <class T>
inline Vec silu(Vec x) {
  if constexpr (sizeof(T) == 4) return x / (1.0f + exp(-x));
  Vec y;
  for (int i = 0; i < LANES; i += NATIVE) {
    Native part;
    std::memcpy(&part, reinterpret_cast<const float*>(&x) + i, sizeof part);
    Native power = part * -1.44269504f;
    power = power < 126.0f ? power : Isa::splat(126.0f);  // its reciprocal is a normal number
    part = part * Isa::reciprocal(1.0f + exp2<4>(power));
    std::memcpy(reinterpret_cast<float*>(&y) + i, &part, sizeof part);
  }
  return y;
}

}  // namespace rootlace
